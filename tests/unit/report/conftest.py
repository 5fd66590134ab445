"""Figures are drawn here, also in a process in which the tests of tests/integration write one pixel instead."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

_SAVEFIG = Figure.savefig


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the method that tests/integration/conftest.py replaces."""
    monkeypatch.setattr(Figure, "savefig", _SAVEFIG)
