"""Coarse figures, which are drawn faster."""

from __future__ import annotations

import pytest

from surgery.report.figures import canvas


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "DPI", 30)
