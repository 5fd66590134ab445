"""Run the study: `python -m bench.studies.stability` (`--help` lists the options)."""

import sys

from bench.studies.stability.study import main

sys.exit(main())
