"""Run the study: `python -m bench.studies.site_selection` (`--help` lists the options)."""

import sys

from bench.studies.site_selection.study import main

sys.exit(main())
