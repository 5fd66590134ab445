"""Copies with new channels (`splice.min_width`): they leave the copies' attention as it is at the first step."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from surgery.hybrid.modeling_hybrid import SplicedAttention
from surgery.models.spliced import plan_of_hybrid
from surgery.recipe import Splice
from surgery.splice.graft import splice_model
from surgery.splice.plan import splice_field
from surgery.types import Plan
from tests.support.battery import base, logits, plan_of, spliced
from tests.support.cases import each
from tests.support.pico import SPLICED_FAMILIES, randomise, tokens

every_spliced = each("name", SPLICED_FAMILIES)
every_mode = each("mode", ["add", "replace"])

WIDTH = 11  # odd, and wider than the state (4 or 8)


def widened(name: str, mode: Any = "add", seed: int = 3, width: int | None = WIDTH, **base_config: Any) -> Any:
    """The hybrid at step 0."""
    plan = plan_of(base(name, **base_config), mode)
    plan = Plan(plan.base, plan.geometry, plan.grafts, seed)
    return splice_model(base(name, **base_config), plan, Splice(mode=mode, min_width=width))


@cache
def trained(name: str) -> Any:
    """A widened hybrid as training could leave it."""
    model = randomise(widened(name).requires_grad_(False), 7)
    model.get_input_embeddings().weight.mul_(0.1)
    return model


def branches(model: Any) -> list[SplicedAttention]:
    return [m for m in model.modules() if isinstance(m, SplicedAttention)]


class TestFirstStep:
    @every_spliced
    @every_mode
    def test_it_is_the_hybrid_with_copies_alone(self, name: str, mode: str) -> None:
        ids = tokens(2, 19)
        torch.testing.assert_close(logits(widened(name, mode), ids), logits(spliced(base(name), mode), ids))
        if mode == "add":
            assert torch.equal(logits(widened(name), ids), logits(base(name), ids))

    @every_spliced
    def test_new_queries_have_gradients(self, name: str) -> None:
        model = widened(name, "replace").train()
        model(input_ids=tokens(), use_cache=False).logits.pow(2).sum().backward()
        for branch in branches(model):
            weight = branch.qk_proj.weight if branch.reads_streams else branch.qkv_proj.weight
            query, key = branch.new_channels(weight.grad)
            assert query.flatten(0, 1).abs().amax(-1).min() > 0
            assert not key.any()  # from the second step on


class TestAsAModel:
    @every_spliced
    def test_saved_and_loaded(self, name: str, tmp_path: Path) -> None:
        model = trained(name)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(logits(again, tokens()), logits(model, tokens()))
        assert again.config.splice == model.config.splice
        assert plan_of_hybrid(again.config, "pico").grafts == plan_of(base(name)).grafts

    @every_spliced
    def test_wrong_widths_are_refused(self, name: str) -> None:
        config = trained(name).config
        for value in (0, "8", WIDTH + 1):
            splice = copy.deepcopy(config.splice)
            splice[1]["copied_width"] = value
            with pytest.raises(ValueError, match=r"^splice\[1\]\.copied_width: .*\. It needs "):
                type(config).from_dict({**config.to_dict(), "splice": splice})


@every_spliced
def test_the_config_names_the_copied_channels_only_where_there_are_new_ones(name: str) -> None:
    model, plan = base(name), plan_of(base(name))
    plain = splice_field(plan, model.config, Splice(min_width=None))
    state = plain[0]["qk_width"]
    for width in (1, state):
        assert splice_field(plan, model.config, Splice(min_width=width)) == plain
    wide = splice_field(plan, model.config, Splice(min_width=state + 1))
    assert wide == [{**site, "qk_width": state + 1, "copied_width": state} for site in plain]
