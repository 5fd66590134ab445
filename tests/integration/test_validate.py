"""`surgery validate`: base, heads and data are checked without weights, and what cannot be checked is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import BASE, RECIPE, ROOT, surgery
from tests.support.errors import assert_refused

HYBRID = ROOT / "checkpoints" / "quickstart" / "export"
LINE = {"prompt": "fox:12\nowl:34\nWhere is the owl?\n", "answer": "34"}


def test_a_good_recipe_is_printed_and_nothing_else(tmp_path: Path) -> None:
    done = surgery("validate", str(RECIPE), "train.steps=37", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert yaml.safe_load(done.stdout)["train"]["steps"] == 37
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("splice.select=list", "splice.heads=[L9H9]"), ("L9H9",)),
        (("splice.num_heads=33",), ("splice.num_heads", "33", "only 32 heads")),
        (("base.model=./nowhere",), ("base.model", "nowhere")),
        (("base.model=./empty",), ("base.model", "no weights")),
        (("export.chat_template=nowhere.jinja",), ("export.chat_template", "nowhere.jinja")),
    ],
)
def test_faults_of_base_heads_and_prompts(given: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BASE / name, tmp_path / "empty" / name)
    assert_refused(surgery("validate", str(RECIPE), *given, cwd=tmp_path), *words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, ("rows.jsonl", "No such file")),
        ([LINE, {"prompt": "Who?\n"}], ("rows.jsonl:2", "answer")),
        ([LINE], ("rows.jsonl", "no row is", "holdout")),
    ],
)
def test_faults_of_the_data(rows: list[dict] | None, words: tuple[str, ...], tmp_path: Path) -> None:
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"base.model={HYBRID}", "train.sources.0.data.path=rows.jsonl")
    assert_refused(surgery("validate", "finetune", *given, cwd=tmp_path), *words)


@pytest.mark.parametrize(
    ("teacher", "objective", "words"),
    [
        ("pico-english", "distil", ("its tokenizer differs", "Set a teacher with the base's tokenizer")),
        ("pico-mamba2", "attention_kl", ("mamba2", "attention")),
    ],
)
def test_teachers_of_no_use(teacher: str, objective: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """They are refused before anything is located, by the run as by `validate`."""
    given = (f"train.teacher.model={ROOT / 'checkpoints' / teacher}", f"train.sources.0.weights.{objective}=1.0")
    for command in ("validate", "run"):
        done = surgery(command, str(RECIPE), *given, cwd=tmp_path)
        assert_refused(done, "train.teacher.model", *words)
        assert list(tmp_path.iterdir()) == []
    transformer = f"train.teacher.model={ROOT / 'checkpoints' / 'pico-transformer'}"
    assert surgery("validate", str(RECIPE), transformer, given[1], cwd=tmp_path).returncode == 0


def test_what_is_on_the_hub_is_not_checked_and_not_requested(tmp_path: Path) -> None:
    done = surgery("validate", "mamba2-130m", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.startswith("not checked: tokens of data and prompts (tokenizer ")
    done = surgery("validate", "mamba2-130m", "base.model=owner/name", cwd=tmp_path)
    assert done.returncode == 0 and "not checked: base, heads and tokens (base.model owner/name" in done.stderr
    shapes = surgery("validate", "mamba2-130m", "splice.num_heads=9999", cwd=tmp_path)
    assert_refused(shapes, "splice.num_heads", "9999")


def test_changes_of_an_analysis(tmp_path: Path) -> None:
    done = surgery("validate", "pico-reproduce", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert_refused(
        surgery("validate", "pico-reproduce", "changes=[{name: x, disable: [L77H0]}]", cwd=tmp_path), "L77H0"
    )
