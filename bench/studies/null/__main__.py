"""Run the study: `python -m bench.studies.null` (`--help` lists the options)."""

import sys

from bench.studies.null.study import main

sys.exit(main())
