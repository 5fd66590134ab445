"""Run the study: `python -m bench.studies.lengths` (`--help` lists the options)."""

import sys

from bench.studies.lengths.study import main

sys.exit(main())
