"""Data sets that `datasets` converts are cached where the test writes."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
