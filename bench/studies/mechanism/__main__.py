"""Run the study: `python -m bench.studies.mechanism` (`--help` lists the options)."""

import sys

from bench.studies.mechanism.study import main

sys.exit(main())
