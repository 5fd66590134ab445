"""Run the study: `python -m bench.studies.formats` (`--help` lists the options)."""

import sys

from bench.studies.formats.study import main

sys.exit(main())
