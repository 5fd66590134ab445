"""The README is true: its code runs, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.house import readme
from tests.integration.conftest import RECIPE, ROOT, SMALL, surgery

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


def test_the_commands_exist(tmp_path: Path) -> None:
    text = surgery("--help", cwd=tmp_path).stdout
    for command in set(re.findall(r"^surgery (\w+)", README, re.M)):
        assert command in text, command
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake (\w+)", README)):
        assert f"\n{target}:" in makefile, target


def test_the_readme_is_short() -> None:
    counts = readme(README)
    assert counts["words"] <= 1000 and counts["numbers"] <= 60


def test_limits_come_before_how_to_use_it() -> None:
    headings = re.findall(r"^## (.+)$", README, re.M)
    assert headings.index("Status and limits") < headings.index("Your own model") < headings.index("Python")
