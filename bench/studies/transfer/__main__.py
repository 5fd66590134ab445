"""Run the study: `python -m bench.studies.transfer` (`--help` lists the options)."""

import sys

from bench.studies.transfer.study import main

sys.exit(main())
