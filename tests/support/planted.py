"""Old path of `surgery.testing.planted`."""

import sys

from surgery.testing import planted

sys.modules[__name__] = planted
