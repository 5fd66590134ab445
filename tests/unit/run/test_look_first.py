"""What a run refuses before it writes or measures anything: numbers and tokenizers of every model that it will load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surgery.errors import ModelError
from surgery.recipe import Recipe
from surgery.run import evaluate_stage, locate_stage, train_stages
from surgery.run.pipeline import run_pipeline
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site, pico_tokenizer

TOKENS = len(pico_tokenizer())
WEIGHT = "backbone.layers.1.mixer.in_proj.weight"
KV = {"task": "kv_retrieval", "rows": 2, "pairs": [2, 2]}


def folder(path: Path, spliced: bool = False, broken: bool = False, vocab_size: int = TOKENS) -> str:
    shape: dict[str, Any] = {"vocab_size": vocab_size, "layers": 2}
    model = pico_hybrid([pico_site(1)], **shape) if spliced else pico_base(**shape)
    if broken:
        model.get_parameter(WEIGHT).data[2, 3] = torch.nan
    model.save_pretrained(path)
    pico_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (locate_stage, "locate_heads"),
        (train_stages, "train_model"),
        (evaluate_stage, "evaluate_model"),
    ):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a stage began"))


def recipe(base: str, **given: Any) -> Recipe:
    train = {"steps": 2, "sources": [{**KV, "weights": {"answer": 1.0}}]}
    return Recipe.model_validate({"name": "first", "base": {"model": base}, "train": train, **given})


def refused(made: Recipe, runs: Path) -> str:
    with pytest.raises(ModelError) as error:
        run_pipeline(made, runs / "first")
    assert not (runs / "first").exists()
    return str(error.value)


def test_a_base(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", broken=True)
    assert f"{base}: {WEIGHT} holds NaN" in refused(recipe(base), tmp_path / "runs")


def test_a_control(tmp_path: Path) -> None:
    hybrid, control = folder(tmp_path / "hybrid", spliced=True), folder(tmp_path / "control", broken=True)
    said = refused(recipe(hybrid, splice=None, control={"model": control}), tmp_path / "runs")
    assert f"{control}: {WEIGHT} holds NaN" in said


@pytest.mark.parametrize("where", ["train", "splice"])
def test_a_teacher(tmp_path: Path, where: str) -> None:
    base, path = folder(tmp_path / "base"), tmp_path / "teacher"
    model = pico_family("llama", vocab_size=TOKENS)
    name, weight = next((name, p) for name, p in model.named_parameters() if name.endswith("q_proj.weight"))
    weight.data[0, 1] = torch.inf
    model.save_pretrained(path)
    pico_tokenizer().save_pretrained(path)
    given: dict[str, Any] = {"splice": {"init": "teacher", "teacher": {"model": str(path)}}}
    if where == "train":
        source = {**KV, "weights": {"answer": 1.0, "distil": 1.0}}
        given = {"train": {"steps": 2, "sources": [source], "teacher": {"model": str(path)}}}
    assert f"{path}: {name} holds NaN or infinity" in refused(recipe(base, **given), tmp_path / "runs")


def test_a_tokenizer_that_is_larger_than_the_vocabulary(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", vocab_size=61)
    said = refused(recipe(base), tmp_path / "runs")
    assert said.startswith(f"base.tokenizer: its largest token id is {TOKENS - 1}, but the model has 61 embeddings. ")


def test_a_tokenizer_that_is_larger_than_the_control_s_vocabulary(tmp_path: Path) -> None:
    hybrid, control = folder(tmp_path / "hybrid", spliced=True), folder(tmp_path / "control", vocab_size=61)
    said = refused(recipe(hybrid, splice=None, control={"model": control}), tmp_path / "runs")
    assert said.startswith(f"base.tokenizer: its largest token id is {TOKENS - 1}, but {control} has 61 embeddings. ")
