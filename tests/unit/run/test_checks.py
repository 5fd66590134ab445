"""What is refused before anything is written or measured: by a run, by its dry run, and by `surgery validate`."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from surgery.errors import ModelError, PlanError, RecipeError, SurgeryError
from surgery.recipe import Recipe, check_recipe
from surgery.run import evaluate_stage, locate_stages, train_stages, without_weights
from surgery.run.dry_run import dry_run
from surgery.run.pipeline import run_pipeline
from surgery.run.without_weights import check_installed, check_without_weights
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site, pico_tokenizer

TOKENS = len(pico_tokenizer())
WEIGHT = "backbone.layers.1.mixer.in_proj.weight"
KV = {"task": "kv_retrieval", "rows": 2, "pairs": [2, 2]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models by name: complete, with a broken weight, or with too few embeddings."""
    root = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"vocab_size": TOKENS, "layers": 2}
    found = {
        "base": pico_base(**shape),
        "hybrid": pico_hybrid([pico_site(1)], **shape),
        "broken": pico_base(**shape),
        "small": pico_base(vocab_size=61, layers=2),
        "teacher": pico_family("llama", vocab_size=TOKENS),
        "bare": pico_family("llama", vocab_size=TOKENS),
    }
    found["broken"].get_parameter(WEIGHT).data[2, 3] = torch.nan
    found["teacher"].get_parameter("model.layers.0.self_attn.q_proj.weight").data[0, 1] = torch.inf
    for name, model in found.items():
        model.save_pretrained(root / name)
        if name != "bare":
            pico_tokenizer().save_pretrained(root / name)
    return root


def recipe(models: Path, base: str = "base", tokenizer: str | None = None, **given: Any) -> Recipe:
    train = {"steps": 2, "sources": [{**KV, "weights": {"answer": 1.0}}]}
    model = {"model": str(models / base), "tokenizer": tokenizer}
    return check_recipe({"name": "first", "base": model, "train": train, **given}, Recipe)


def test_models_that_cannot_be_used(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and tokenizers of every model that the run will load."""
    work = ((locate_stages, "locate_heads"), (train_stages, "train_model"), (evaluate_stage, "evaluate_model"))
    for module, name in work:
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a stage began"))
    source = {**KV, "weights": {"answer": 1.0, "distil": 1.0}}
    teacher = {"model": str(models / "teacher")}
    too_large = f"base.tokenizer: its largest token id is {TOKENS - 1}, but"
    for base, given, words in (
        ("broken", {}, f"broken: {WEIGHT} holds NaN"),
        ("hybrid", {"splice": None, "control": {"model": str(models / "broken")}}, f"broken: {WEIGHT} holds NaN"),
        ("base", {"splice": {"init": "teacher", "teacher": teacher}}, "q_proj.weight holds NaN or infinity"),
        ("base", {"train": {"sources": [source], "teacher": teacher}}, "q_proj.weight holds NaN or infinity"),
        ("base", {"train": {"sources": [source], "teacher": {"model": str(models / "bare")}}}, "has no tokenizer"),
        ("small", {}, f"{too_large} the model has 61 embeddings. "),
        ("hybrid", {"splice": None, "control": {"model": str(models / "small")}}, "small has 61 embeddings. "),
    ):
        with pytest.raises(ModelError) as error:
            run_pipeline(recipe(models, base, **given), tmp_path / "first")
        assert words in str(error.value), (base, given)
        assert not (tmp_path / "first").exists()


def test_recipes_that_do_not_fit_their_models(models: Path, tmp_path: Path) -> None:
    """The stand-in for heads that are not located would be cut to the heads that there are."""
    records = {"task": "records", "weights": {"distil": 1.0}}
    control = {"splice": None, "control": {"model": str(models / "hybrid")}}
    nothing, no_hybrid = "There is no such folder", r"base\.model: .*Nothing is spliced into this model\. Use a hybrid"
    for base, given, kind, words in (
        ("base", {"splice": None}, PlanError, no_hybrid),
        ("hybrid", {}, PlanError, "The model is a hybrid already"),
        ("base", {"splice": {"num_heads": 9}}, PlanError, r"splice\.num_heads: 9\. The model has only 8 heads"),
        ("base", {"splice": {"select": "list", "heads": ["L7H0"]}}, PlanError, r"splice\.heads: L7H0"),
        ("base", {"splice": {"state_size": 999}}, PlanError, r"splice\.state_size: 999"),
        ("base", {"locate": {"methods": ["patching"]}}, RecipeError, r"locate\.methods.*Only `surgery locate`"),
        ("hybrid", control, PlanError, r"control\.model.*this is a hybrid"),
        ("base", {"train": {"teacher": {"model": "./nothing"}, "sources": [records]}}, ModelError,
         rf"train\.teacher\.model.*{nothing}"),
        ("base", {"splice": {"init": "teacher", "teacher": {"model": "./nothing"}}}, ModelError,
         rf"splice\.teacher\.model.*{nothing}"),
        ("base", {"train": {"trainable": "lora", "lora": {"targets": ["in_porj"]}}}, RecipeError,
         r"train\.lora\.targets: in_porj\. No linear layer has .* Use one of in_proj"),
        ("base", {"tokenizer": str(models / "nothing")}, ModelError, rf"base\.tokenizer: .*nothing.* {nothing}"),
    ):  # fmt: skip
        for check in (lambda made: check_without_weights(made), lambda made: dry_run(made, tmp_path / "first")):
            with pytest.raises(kind, match=words):
                check(recipe(models, base, **given))


def test_what_is_on_the_hub_is_listed(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a model whose config is here, whatever revision the recipe names. Its tokenizer need not be."""
    assert any("owner/none" in line for line in check_without_weights(recipe(models, tokenizer="owner/none")))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small").symlink_to(models / "base")
    for base in ({"model": "owner/small", "revision": "v1"}, {"model": "owner/small@v1"}):
        made = check_recipe({"name": "first", "base": base, "train": {"sources": [{**KV, "weights": {"answer": 1}}]}})
        (listed,) = check_without_weights(made, tmp_path / "first.yaml")
        assert listed.startswith("tokens of data and prompts (tokenizer owner/small")
    shutil.copytree(models / "base", tmp_path / "cached", ignore=shutil.ignore_patterns("*token*"))
    cached = tmp_path / "cached" / "config.json"
    monkeypatch.setattr(
        without_weights, "try_to_load_from_cache", lambda _, name, **__: {cached.name: str(cached)}.get(name)
    )
    weights, tokens = check_without_weights(made)
    assert weights.startswith("weight files of owner/small") and tokens == listed


def test_packages_of_a_run_are_not_those_of_its_dry_run(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run may be for another machine."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("surgery.train.quantization.version", missing)
    monkeypatch.setattr("surgery.train.tracking.find_spec", lambda name: None)
    for train, words in (
        ({"trainable": "lora", "lora": {"quantization": "nf4"}}, r"lora\.quantization: nf4.*pip install bitsandbytes"),
        ({"trackers": ["wandb"]}, r"train\.trackers: wandb.*pip install wandb"),
    ):
        made = recipe(models, train=train)
        for check in (check_installed, lambda made: run_pipeline(made, tmp_path / "first")):
            with pytest.raises(SurgeryError, match=words):
                check(made)
    quantized = recipe(models, train={"trainable": "lora", "lora": {"quantization": "nf4"}})
    monkeypatch.setattr("surgery.run.dry_run._timed", lambda *_: [0.1])
    assert dry_run(quantized, tmp_path / "first")["trainable_parameters"] > 0
