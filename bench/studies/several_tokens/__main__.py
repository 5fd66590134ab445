"""Run the study: `python -m bench.studies.several_tokens` (`--help` lists the options)."""

import sys

from bench.studies.several_tokens.study import main

sys.exit(main())
