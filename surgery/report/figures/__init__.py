"""Figures of a run.

Each function takes plain values, writes `NAME.png`, `NAME.svg` and the numbers as `NAME.csv` into a folder, and returns
the three paths. Equal values give equal bytes.
"""

from surgery.report.figures.attention import attention_map
from surgery.report.figures.by_value import results_by_value
from surgery.report.figures.costs import costs_by_length
from surgery.report.figures.curves import accuracy_by_pairs, training_curve
from surgery.report.figures.heatmaps import head_maps
from surgery.report.figures.own_data import held_out_accuracy
from surgery.report.figures.tasks import tasks_by_arm, tasks_by_site

__all__ = [
    "accuracy_by_pairs", "attention_map", "costs_by_length", "head_maps", "held_out_accuracy", "results_by_value",
    "tasks_by_arm", "tasks_by_site", "training_curve",
]  # fmt: skip
