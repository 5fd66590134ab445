"""The pictures of a run. Owns: their list. Must never know: models, torch, how a number was measured.

Each function takes plain values, writes `STEM.png`, `STEM.svg` and the numbers, `STEM.csv`, into a folder and returns
the three paths. Same values, same bytes. What cannot be drawn is refused with a SurgeryError (a ValueError).
"""

from surgery.report.figures.attention import attention_map
from surgery.report.figures.costs import costs_by_length
from surgery.report.figures.curves import accuracy_by_pairs, training_curve
from surgery.report.figures.heatmaps import head_maps
from surgery.report.figures.tasks import tasks_by_arm, tasks_by_site

__all__ = [
    "accuracy_by_pairs", "attention_map", "costs_by_length", "head_maps", "tasks_by_arm", "tasks_by_site",
    "training_curve",
]  # fmt: skip
