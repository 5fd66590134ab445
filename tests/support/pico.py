"""Old path of `surgery.testing.pico`."""

import sys

from surgery.testing import pico

sys.modules[__name__] = pico
