"""Run the study: `python -m bench.studies.teacher` (`--help` lists the options)."""

import sys

from bench.studies.teacher.study import main

sys.exit(main())
