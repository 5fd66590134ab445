"""The Python block of the README runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.conftest import RECIPE, ROOT, SMALL

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    assert 'load_recipe("quickstart")' in code
    code = code.replace('load_recipe("quickstart")', f"load_recipe({str(RECIPE)!r}, {list(SMALL)!r})")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert (tmp_path / "hybrid" / "model.safetensors").is_file()
    assert len(code.strip().splitlines()) <= 16
