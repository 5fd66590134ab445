"""Code from outside this package adds one of each: a test runs the example of every section of docs/EXTENDING.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import BASE, ROOT

HEADINGS = (
    "A probe",
    "An objective",
    "A locating method",
    "A model family",
    "An attention branch",
    "An export format",
)


def block(heading: str, language: str = "python") -> str:
    """The only code block of `language` in a section of docs/EXTENDING.md, without its fences.

    Args:
        heading: the section's title, such as `A probe`.
        language: what stands behind the opening fence.
    """
    return block_in((ROOT / "docs" / "EXTENDING.md").read_text(encoding="utf-8"), heading, language)


def block_in(text: str, heading: str, language: str) -> str:
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.S | re.M))
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", sections[heading], re.S | re.M)
    assert len(blocks) == 1, f"the section '{heading}' has {len(blocks)} blocks of {language}, not one"
    return blocks[0]


def test_the_sections_stand_in_their_order() -> None:
    text = (ROOT / "docs" / "EXTENDING.md").read_text(encoding="utf-8")
    assert [heading for heading in re.findall(r"^## (.+)$", text, re.M) if heading in HEADINGS] == list(HEADINGS)


def test_a_block_is_the_one_under_its_heading() -> None:
    text = "# T\n\n## One\n```python\na = 1\n```\n```yaml\nb: 2\n```\n\n## Two\n```python\nc = 3\n```\n"
    assert block_in(text, "One", "python") == "a = 1\n"
    assert block_in(text, "One", "yaml") == "b: 2\n"
    assert block_in(text, "Two", "python") == "c = 3\n"
    with pytest.raises(AssertionError, match="'Two' has 0 blocks of yaml"):
        block_in(text, "Two", "yaml")


def test_a_probe_from_outside(tmp_path: Path) -> None:
    """A recipe trains on it and evaluates it; its label is in the report, and lm-eval's files are written."""
    code = block("A probe")
    assert len(code.splitlines()) <= 40
    (tmp_path / "reversal.py").write_text(code)
    recipe = {
        "name": "outside",
        "base": {"model": str(BASE)},
        "locate": {"pairs": 16, "examples": 16, "methods": ["query", "sharpen"]},
        **yaml.safe_load(block("A probe", "yaml")),
    }
    recipe["train"] |= {"steps": 2, "no_splice": False}
    recipe["evaluate"] |= {"pairs": [4], "examples": 4}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]

    run(sys.executable, "-m", "surgery", "run", "recipe.yaml")
    results = json.loads((tmp_path / "runs" / "outside" / "results.json").read_text())
    for arm in ("base", "hybrid"):
        assert results["arms"][arm]["reversal"]["5"]["n"] == 4
        assert "per_token" in results["arms"][arm]["reversal"]["3"]
    assert "reversal/5" in results["comparisons"]["hybrid"]["base"]
    report = (tmp_path / "runs" / "outside" / "report.html").read_text()
    assert "reversed copying, 5" in report and "KV-retrieval, 4 pairs" in report

    run("bash", "-c", block("A probe", "bash").replace("python", sys.executable, 1))
    group = yaml.safe_load((tmp_path / "tasks" / "surgery_retrieval.yaml").read_text())
    assert {"surgery_reversal_4_generated", "surgery_reversal_16_generated", "surgery_copying_8_generated"} <= set(
        group["task"]
    )
    row = json.loads((tmp_path / "tasks" / "reversal_4.jsonl").read_text().splitlines()[0])
    words = row["prompt"].split("\n")[1].split(" ")
    assert len(words) == 4 and row["answers"] == [" ".join(reversed(words))]


def test_an_installed_plugin_is_in_the_schema(tmp_path: Path) -> None:
    """An entry point of the group `surgery.plugins` is loaded without a recipe that names it."""
    (tmp_path / "reversal.py").write_text(block("A probe"))
    installed = tmp_path / "reversal-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: reversal\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[surgery.plugins]\nreversal = reversal\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "surgery", "schema"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"reversal"' in done.stdout
