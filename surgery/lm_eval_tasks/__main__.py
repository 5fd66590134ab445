"""Print the folder of the tasks."""

import sys

from surgery.lm_eval_tasks import FOLDER

sys.stdout.write(f"{FOLDER}\n")
