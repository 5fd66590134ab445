"""Run the study: `python -m bench.studies.qlora` (`--help` lists the options)."""

import sys

from bench.studies.qlora.study import main

sys.exit(main())
