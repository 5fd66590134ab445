"""A small training that the tests here share: a hybrid of two layers whose second one has a spliced head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Train
from surgery.train.training import train_model
from surgery.types import Graft, Plan
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer, prompts

SHAPE: dict[str, Any] = {"vocab_size": 1024, "layers": 2}
FAST = {"warmup": 0, "lr": 1e-2, "new_heads_lr": 1e-2}
KV = {"task": "kv_retrieval", "rows": 2, "pairs": (2, 2), "weights": {"answer": 1.0}}


def hybrid() -> PreTrainedModel:
    return pico_hybrid([pico_site(1)], **SHAPE)


def plan(head: int = 2, **shape: Any) -> Plan:
    config = pico_base(**SHAPE, **shape).config
    graft = Graft(family_of(config).mixers(config)[1], (head,), "add", "ssm", ("segment_end",))
    return Plan("base", geometry_of(config), (graft,), 0)


def fit(
    model: PreTrainedModel, section: Train | dict[str, Any], made: Plan | None = None, **more: Any
) -> list[dict[str, float]]:
    return train_model(model, pico_tokenizer(), section, made or plan(), **more)


def fit_until(last: int, *given: Any, **more: Any) -> None:
    """Train, and stop after a step as a killed process does."""

    def stop(step: int, _: Any) -> None:
        if step == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(*given, on_step=stop, **more)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(prompts((6, 6)).input_ids % 64, use_cache=False).logits
    return out


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.equal(before[name])}


def without_time(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in history]
