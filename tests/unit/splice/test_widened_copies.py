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
from tests.support.battery import (
    assert_cache_is_as_large_as_said,
    base,
    logits,
    plan_of,
    spliced,
)
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


def queries_and_keys(model: Any) -> list[tuple[Any, ...]]:
    """Queries, keys and values of each branch, recorded in a forward pass."""
    seen: list[tuple[Any, ...]] = []
    for branch in branches(model):

        def spy(*arguments: Any, project: Any = branch.project) -> Any:
            seen.append(project(*arguments))
            return seen[-1]

        branch.project = spy
    logits(model, tokens())
    return seen


class TestFirstStep:
    @every_spliced
    @every_mode
    def test_it_is_the_hybrid_with_copies_alone(self, name: str, mode: str) -> None:
        ids = tokens(2, 19)
        torch.testing.assert_close(logits(widened(name, mode), ids), logits(spliced(base(name), mode), ids))
        if mode == "add":
            assert torch.equal(logits(widened(name), ids), logits(base(name), ids))

    @every_spliced
    def test_copies_come_first_and_new_queries_are_zero(self, name: str) -> None:
        narrow, wide = (queries_and_keys(model) for model in (spliced(base(name)), widened(name)))
        for (query, key, value), (wide_query, wide_key, wide_value) in zip(narrow, wide, strict=True):
            copied = query.shape[-1]
            assert wide_query.shape[-1] == wide_key.shape[-1] == WIDTH > copied
            torch.testing.assert_close(wide_query[..., :copied], query)
            torch.testing.assert_close(wide_key[..., :copied], key)
            torch.testing.assert_close(wide_value, value)
            assert not wide_query[..., copied:].any()
            assert wide_key[..., copied:].flatten(0, -2).std(0).min() > 0  # of every new channel, over tokens

    @every_spliced
    def test_new_queries_have_gradients(self, name: str) -> None:
        model = widened(name, "replace").train()
        model(input_ids=tokens(), use_cache=False).logits.pow(2).sum().backward()
        for branch in branches(model):
            weight = branch.qk_proj.weight if branch.reads_streams else branch.qkv_proj.weight
            query, key = branch.new_channels(weight.grad)
            assert query.flatten(0, 1).abs().amax(-1).min() > 0
            assert not key.any()  # from the second step on

    @every_spliced
    def test_new_channels_depend_on_the_seed_and_the_layer(self, name: str) -> None:
        torch.manual_seed(1)
        one = branches(widened(name))
        torch.manual_seed(2)
        again, other = branches(widened(name)), branches(widened(name, seed=4))
        drawn: list[list[float]] = []
        for first, second, third in zip(one, again, other, strict=True):
            weights = [b.qk_proj.weight if b.reads_streams else b.qkv_proj.weight for b in (first, second, third)]
            assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
            key = first.new_channels(weights[0])[1]
            assert float(key.detach().std()) == pytest.approx(key.shape[-1] ** -0.5, rel=0.4)
            drawn.append(key.flatten()[:9].tolist())
        assert drawn[0] != drawn[1], "layers differ"


class TestAsAModel:
    @every_spliced
    def test_cache_and_generation_agree_with_the_forward(self, name: str) -> None:
        model, ids = trained(name), tokens(2, 12)
        with torch.no_grad():
            first = model(input_ids=ids[:, :9], use_cache=True)
            second = model(input_ids=ids[:, 9:], use_cache=True, cache=first.cache)
        torch.testing.assert_close(second.logits, logits(model, ids)[:, 9:], atol=1e-4, rtol=1e-5)
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert torch.equal(text[:, 12:], logits(model, text)[:, 11:-1].argmax(-1))

    @every_spliced
    def test_saved_and_loaded(self, name: str, tmp_path: Path) -> None:
        model = trained(name)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(logits(again, tokens()), logits(model, tokens()))
        assert again.config.splice == model.config.splice
        assert plan_of_hybrid(again.config, "pico").grafts == plan_of(base(name)).grafts

    @every_spliced
    def test_sizes(self, name: str) -> None:
        assert_cache_is_as_large_as_said(trained(name))

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


def test_bfloat16() -> None:
    model = copy.deepcopy(base("mamba2")).to(torch.bfloat16)
    hybrid = splice_model(model, plan_of(model), Splice(min_width=WIDTH))
    assert torch.equal(logits(hybrid, tokens()), logits(model, tokens()))


def test_only_copies_of_ssm_heads_have_the_default_width() -> None:
    teacher = {"init": "teacher", "teacher": {"model": "a/b"}}
    for section in ({"init": "random"}, teacher, {"form": "block"}, {"form": "pair"}):
        parsed = Splice.model_validate(section)
        assert parsed.min_width is None
        assert Splice.model_validate(parsed.model_dump(mode="json")) == parsed
    assert Splice().min_width == 64 and Splice(min_width=None).min_width is None
    random = splice_field(plan_of(base("mamba2"), init="random"), base("mamba2").config)
    assert {site["qk_width"] for site in random} == {Splice().random_width}


@each(
    ("section", "words"),
    [
        ({"init": "random", "min_width": 32}, "`init: random` does not use `min_width`: set `random_width` instead"),
        ({"init": "teacher", "teacher": {"model": "a/b"}, "min_width": 32}, "`init: teacher` does not use `min_width`"),
        ({"min_width": 0}, "min_width"),
        ({"min_width": 8.5}, "min_width"),
        ({"min_width": True}, "min_width"),
    ],
)
def test_wrong_values(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Splice.model_validate(section)
