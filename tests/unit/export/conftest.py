"""A load in this process stands in for the clean one, and runs no shipped code; tests/integration/test_export.py has
the real one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from surgery.export import transformers_folder
from tests.support.exports import in_this_process


@pytest.fixture(scope="module", autouse=True)
def no_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_folder, "reload", in_this_process)
        yield


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy to change, of the export that the module has."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))
