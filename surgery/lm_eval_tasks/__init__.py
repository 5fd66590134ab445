"""The probes as tasks of lm-eval, with their prompts: `lm_eval --include_path $(python -m surgery.lm_eval_tasks)`.

Nothing in the folder imports this package, so a copy of it works anywhere. `surgery/evaluate/lm_eval_files.py` writes
the prompts and the tasks.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
