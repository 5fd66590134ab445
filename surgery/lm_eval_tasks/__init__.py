"""Tasks for lm-eval with the probes' prompts: `lm_eval --include_path $(python -m surgery.lm_eval_tasks)`.

The task files do not import this package, so a copy of the folder works anywhere. `surgery/evaluate/lm_eval_files.py`
writes the prompts and the task files.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
