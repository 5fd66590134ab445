"""Tasks for lm-eval with the probes' prompts: `lm_eval --include_path $(python -m surgery.lm_eval_tasks)`.

`surgery/evaluate/lm_eval_files.py` writes them into the folder `tasks`, with copies of the other files here. They do
not import this package, so a copy of the folder works anywhere.
"""
