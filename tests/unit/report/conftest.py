"""Coarse figures, which are drawn faster, also in a process in which tests/integration writes one pixel instead."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from surgery.report.figures import canvas

_SAVEFIG = Figure.savefig


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "DPI", 30)
    monkeypatch.setattr(Figure, "savefig", _SAVEFIG)
