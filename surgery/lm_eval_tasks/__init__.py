"""The probes as tasks of lm-eval, with their prompts: `lm_eval --include_path $(python -m surgery.lm_eval_tasks)`.

Owns: where they are. The folder is read by lm-eval alone; nothing in it imports this package, so that it works where it
is copied to. `surgery/evaluate/lm_eval_files.py` writes the prompts and the tasks.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
