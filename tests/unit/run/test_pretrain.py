"""What a small Transformer starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import LlamaForCausalLM, MambaForCausalLM

from surgery.errors import RecipeError, RunError
from surgery.files.atomic import read_json
from surgery.recipe import PretrainRecipe, TinyMamba, TinyTransformer, check_recipe
from surgery.recipe.inputs import inputs_of
from surgery.run.pretrain import base_card, build_model, pretrain
from tests.support.pico import pico_tokenizer

SHAPE = {"kind": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
T = 16


def attention_HTT(layer: int, **more: object) -> Tensor:
    model = build_model(TinyTransformer.model_validate({**SHAPE, **more}), pico_tokenizer(), 0)
    assert isinstance(model, LlamaForCausalLM)
    model.set_attn_implementation("eager")
    ids = torch.randint(300, 900, (1, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids, output_attentions=True).attentions[layer][0]


def test_the_first_heads_look_as_far_back_as_is_said() -> None:
    rows_HTT = attention_HTT(0, looks_back=(1, 3))
    for head, offset in enumerate((1, 3)):
        assert (rows_HTT[head, offset:].argmax(-1) == torch.arange(T - offset)).all()
        assert rows_HTT[head].diagonal(-offset).min() > 0.6


def test_other_heads_and_layers_begin_as_always() -> None:
    untouched = [attention_HTT(0, looks_back=(1, 3))[2:], attention_HTT(1, looks_back=(1, 3))]
    for rows_HTT in [*untouched, attention_HTT(0)]:
        assert rows_HTT[:, -1].max() < 0.5


def test_a_plateau_is_refused() -> None:
    train = {"sources": [{"task": "sentence", "rows": 1, "weights": {"lm": 1.0}}], "optimizer": {"schedule": "wsd"}}
    with pytest.raises(RecipeError, match=r"Set `train\.plateau` to null"):
        check_recipe({"name": "t", "model": SHAPE, "train": {**train, "plateau": {}}}, PretrainRecipe)


@pytest.mark.parametrize(
    ("section", "given", "words"),
    [
        ("train", {"trainable": "lora"}, "Pretraining trains all weights"),
        ("train", {"trainable": "new_heads"}, "Pretraining trains all weights"),
        ("train", {"trackers": ["wandb"]}, "`train.trackers`"),
        ("train", {"check_every": 2}, "`train.check_every`"),
        ("evaluate", {"efficiency": {}}, "`evaluate.efficiency`"),
        ("evaluate", {"read_twice": True}, "`evaluate.read_twice`"),
    ],
)
def test_what_pretraining_would_ignore_is_refused(section: str, given: dict[str, Any], words: str) -> None:
    train = {"sources": [{"task": "sentence", "rows": 1, "weights": {"lm": 1.0}}]}
    data: dict[str, Any] = {"name": "t", "model": SHAPE, "train": train, "evaluate": {}}
    data[section] = {**data[section], **given}
    with pytest.raises(RecipeError, match=words):
        check_recipe(data, PretrainRecipe)


def test_an_unknown_kind_of_model_is_refused() -> None:
    train = {"sources": [{"task": "sentence", "rows": 1, "weights": {"lm": 1.0}}]}
    with pytest.raises(RecipeError, match=r"`kind` must be one of 'mamba2', 'mamba', 'llama'$"):
        check_recipe({"name": "t", "model": {"kind": "rwkv"}, "train": train}, PretrainRecipe)


def test_a_refused_training_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RecipeError("train.teacher.model", "x", "Its tokenizer differs.")

    monkeypatch.setattr("surgery.run.pretrain.train_model", refuse)
    shape = {"hidden_size": 32, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 300}
    train = {"sources": [{"task": "sentence", "rows": 1, "weights": {"lm": 1.0}}]}
    recipe = check_recipe({"name": "t", "model": shape, "train": train}, PretrainRecipe)
    with pytest.raises(RecipeError, match="tokenizer differs"):
        pretrain(recipe, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_more_numbers_than_heads_are_refused() -> None:
    train = {"sources": [{"task": "copying", "rows": 1, "weights": {"answer": 1.0}}]}
    with pytest.raises(RecipeError, match="looks_back"):
        check_recipe({"name": "t", "model": {**SHAPE, "looks_back": [1] * 5}, "train": train}, PretrainRecipe)


def test_the_card_has_every_task_of_the_evaluation_and_of_training() -> None:
    sources = [
        {"task": task, "rows": 1, "weights": {"answer": 1.0}}
        for task in ("key_echo", "records", "records", "closed_book")
    ]
    given = {"name": "far", "model": {**SHAPE, "vocab_size": 1024}, "train": {"sources": sources}}
    recipe = check_recipe(given, PretrainRecipe)
    scores = {
        str(step): {"records": {"4": {"accuracy": step / 100}}, "kv_far": {"8": {"accuracy": 0.5}}, "perplexity": 2.5}
        for step in (100, 20)
    }
    model = build_model(recipe.model, pico_tokenizer(), 0)
    card = base_card(recipe, scores, [{"seconds": 60.0}], model)
    assert "generated text: key echo, records in prose, closed-book facts." in card
    assert [line for line in card.splitlines() if line.startswith("|")] == [
        "| step | records in prose, 4 records | kv far, 8 | perplexity, held-out |",
        "|---|---|---|---|",
        "| 20 | 0.200 | 0.500 | 2.500 |",
        "| 100 | 1.000 | 0.500 | 2.500 |",
    ]


def test_a_mamba1_has_the_shape_and_the_range_of_dt() -> None:
    shape = TinyMamba.model_validate(
        {
            "kind": "mamba",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 4,
            "time_step": [0.01, 0.2],
            "decay": [0.1, 0.8],
        }
    )
    model = build_model(shape, pico_tokenizer(), 0)
    assert isinstance(model, MambaForCausalLM)
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.state_size) == (64, 2, 4)
    for block in model.backbone.layers:
        dt = softplus(block.mixer.dt_proj.bias)
        assert dt.min() >= 0.01 and dt.max() <= 0.2 + 1e-4


def test_a_missing_text_of_the_tokenizer_is_refused(tmp_path: Path) -> None:
    train = {"sources": [{"task": "copying", "rows": 1, "weights": {"answer": 1.0}}]}
    given = {"name": "t", "model": SHAPE, "train": train, "tokenizer_text": str(tmp_path / "no.txt")}
    with pytest.raises(RunError, match="tokenizer_text"):
        pretrain(check_recipe(given, PretrainRecipe), tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_the_text_of_the_tokenizer_is_an_input_that_is_never_removed() -> None:
    sources = [{"data": {"path": "text.jsonl", "columns": {"text": "text"}}, "rows": 1, "weights": {"lm": 1.0}}]
    given = {"name": "t", "model": SHAPE, "train": {"sources": sources}, "tokenizer_text": "text.txt"}
    inputs = inputs_of(check_recipe(given, PretrainRecipe))
    assert inputs == {"tokenizer_text": "text.txt", "train.sources.0.data.path": "text.jsonl"}


def test_what_is_resumed_is_the_same_training(tmp_path: Path) -> None:
    """Weights begin by the model's section. Scores of other tasks do not get into the card."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "state_size": 4, "vocab_size": 1024}
    train = {"steps": 3, "save_every": 1, "sources": [{"task": "sentence", "rows": 1, "weights": {"lm": 1.0}}]}
    given: dict[str, Any] = {"name": "tiny", "train": {**train, "control": False}}
    given["evaluate"] = {"tasks": ["perplexity"], "sentences": 2}

    def recipe(**more: Any) -> PretrainRecipe:
        return check_recipe({**given, "model": {**shape, **more.pop("model", {})}, **more}, PretrainRecipe)

    def stop(step: int, *_: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt

    for stranger in ("step_1", ".git"):
        (tmp_path / stranger / "base.steps" / stranger).mkdir(parents=True)
        with pytest.raises(RunError, match=r"base\.steps is no folder of pretraining checkpoints"):
            pretrain(recipe(), tmp_path / stranger / "base")
        assert (tmp_path / stranger / "base.steps" / stranger).is_dir()
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe(), tmp_path / "base", stop)
    for changed in ({"model": {"decay": [5, 9]}}, {"seed": 1}):
        with pytest.raises(RunError, match=r"base\.steps has checkpoints of another model, tokenizer or data"):
            pretrain(recipe(**changed), tmp_path / "base")
    seen: list[int] = []
    closed = {"tasks": ["closed_book"], "examples": 2}
    pretrain(recipe(evaluate=closed), tmp_path / "base", lambda step, *_: seen.append(step))
    assert seen == [3]
    assert list(read_json(tmp_path / "base" / "scores.json")) == ["3"]
    assert not (tmp_path / "base.steps").exists()


def test_the_card_of_a_base_with_data_names_the_file() -> None:
    sources = [{"data": {"path": "text.jsonl"}, "rows": 1, "weights": {"lm": 1.0}}]
    recipe = check_recipe({"name": "t", "model": SHAPE, "train": {"sources": sources}}, PretrainRecipe)
    card = base_card(
        recipe, {"1": {"perplexity": 2.5}}, [{"seconds": 60.0}], build_model(recipe.model, pico_tokenizer(), 0)
    )
    assert "trained from scratch on documents of text.jsonl." in card
