"""What a small base starts from, what resumes, and what its card says."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from surgery.errors import RecipeError, RunError
from surgery.files.atomic import read_json
from surgery.recipe import PretrainRecipe, TinyTransformer, check_recipe
from surgery.recipe.inputs import inputs_of
from surgery.run.pretrain import base_card, build_model, pretrain
from tests.support.pico import pico_tokenizer

SHAPE = {"kind": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
SOURCE = {"task": "sentence", "rows": 1, "weights": {"lm": 1.0}}
T = 16


def recipe(**given: Any) -> PretrainRecipe:
    data = {"name": "t", "model": SHAPE, "train": {"sources": [SOURCE]}, **given}
    return check_recipe(data, PretrainRecipe)


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is trained already."""
    monkeypatch.setattr("surgery.run.pretrain.build_tokenizer", lambda *_: pico_tokenizer())


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
    for others_HTT in (rows_HTT[2:], attention_HTT(1, looks_back=(1, 3)), attention_HTT(0)):
        assert others_HTT[:, -1].max() < 0.5


def test_what_pretraining_would_ignore_is_refused() -> None:
    for given, words in (
        ({"train": {"trainable": "lora"}}, "Pretraining trains all weights"),
        ({"train": {"trainable": "new_heads"}}, "Pretraining trains all weights"),
        ({"train": {"trackers": ["wandb"]}}, "`train.trackers`"),
        ({"train": {"check_every": 2}}, "`train.check_every`"),
        (
            {"train": {"sources": [{"data": {"path": "x.jsonl", "holdout": 0.1}, "weights": {"lm": 1.0}}]}},
            "`data.holdout`",
        ),
        ({"evaluate": {"efficiency": {}}}, "`evaluate.efficiency`"),
        ({"evaluate": {"read_twice": True}}, "`evaluate.read_twice`"),
        ({"evaluate": {"lm_eval": {"tasks": ["piqa"]}}}, "`evaluate.lm_eval`"),
        ({"model": {"kind": "rwkv"}}, r"`kind` must be one of 'mamba2', 'llama'$"),
        ({"model": {**SHAPE, "looks_back": [1] * 5}}, "looks_back"),
    ):
        more = {"train": {"sources": [SOURCE], **given["train"]}} if "train" in given else {}
        with pytest.raises(RecipeError, match=words):
            recipe(**{**given, **more})


def test_a_refused_training_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RecipeError("train.teacher.model", "x", "Its tokenizer differs.")

    monkeypatch.setattr("surgery.run.pretrain.train_model", refuse)
    with pytest.raises(RecipeError, match="tokenizer differs"):
        pretrain(recipe(), tmp_path / "new")
    with pytest.raises(RunError, match="tokenizer_text"):
        pretrain(recipe(tokenizer_text=str(tmp_path / "no.txt")), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_the_card_names_what_was_trained_on_and_every_task() -> None:
    tasks = ("key_echo", "records", "records", "closed_book")
    sources = [{"task": task, "rows": 1, "weights": {"answer": 1.0}} for task in tasks]
    sources.append({"data": {"path": "/private/text.jsonl"}, "rows": 1, "weights": {"lm": 1.0}})
    made = recipe(model={**SHAPE, "vocab_size": 1024}, train={"sources": sources}, tokenizer_text="/private/text.txt")
    scores = {"records": {"4": {"accuracy": 0.2}}, "kv_far": {"8": {"accuracy": 0.5}}, "perplexity": 2.5}
    card = base_card(made, scores, [{"seconds": 60.0}], build_model(made.model, pico_tokenizer(), 0))
    assert "generated text: key echo, records in prose, closed-book facts; documents of text.jsonl." in card
    assert "tokenizer_text: text.txt" in card and "/private" not in card
    assert [line for line in card.splitlines() if line.startswith("|")] == [
        "| task | score |",
        "|---|---|",
        "| records in prose, 4 records | 0.200 |",
        "| kv far, 8 | 0.500 |",
        "| perplexity, held-out | 2.500 |",
    ]


def test_the_text_of_the_tokenizer_is_an_input_that_is_never_removed() -> None:
    source = {"data": {"path": "text.jsonl", "columns": {"text": "text"}}, "rows": 1, "weights": {"lm": 1.0}}
    inputs = inputs_of(recipe(train={"sources": [source]}, tokenizer_text="text.txt"))
    assert inputs == {"tokenizer_text": "text.txt", "train.sources.0.data.path": "text.jsonl"}


def test_what_is_resumed_is_the_same_training(tmp_path: Path) -> None:
    """Weights begin by the model's section. The evaluation may change."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "state_size": 4, "vocab_size": 1024}
    train = {"steps": 3, "save_every": 1, "sources": [SOURCE], "control": False}

    def made(**more: Any) -> PretrainRecipe:
        evaluate = {"tasks": ["perplexity"], "sentences": 2}
        return recipe(**{"model": shape, "train": train, "evaluate": evaluate, **more})

    def stop(step: int, *_: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt

    for stranger in ("step_1", ".git"):
        (tmp_path / stranger / "base.steps" / stranger).mkdir(parents=True)
        with pytest.raises(RunError, match=r"base\.steps is no folder of pretraining checkpoints"):
            pretrain(made(), tmp_path / stranger / "base")
        assert (tmp_path / stranger / "base.steps" / stranger).is_dir()
    with pytest.raises(KeyboardInterrupt):
        pretrain(made(), tmp_path / "base", Mock(progress=stop))
    for changed in ({"model": {**shape, "decay": [5, 9]}}, {"seed": 1}):
        with pytest.raises(RunError, match=r"base\.steps has checkpoints of another model, tokenizer or data"):
            pretrain(made(**changed), tmp_path / "base")
    reporter = Mock()
    closed = {"tasks": ["closed_book"], "examples": 2}
    pretrain(made(evaluate=closed), tmp_path / "base", reporter)
    assert [made.args[0] for made in reporter.progress.mock_calls] == [3]
    assert "closed_book" in read_json(tmp_path / "base" / "scores.json")
    assert not (tmp_path / "base.steps").exists()
