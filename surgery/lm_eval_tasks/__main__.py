"""Print the folder of the tasks."""

import sys

from surgery.evaluate.lm_eval_files import tasks_folder

sys.stdout.write(f"{tasks_folder()}\n")
