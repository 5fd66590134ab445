"""Run the study: `python -m bench.studies.head_choice` (`--help` lists the options)."""

import sys

from bench.studies.head_choice.study import main

sys.exit(main())
