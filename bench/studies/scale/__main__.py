"""Run the study: `python -m bench.studies.scale` (`--help` lists the options)."""

import sys

from bench.studies.scale.study import main

sys.exit(main())
