"""Attention blocks and pairs in a Nemotron-H that has MLPs, experts and attention with shared keys of its own."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Mamba2Config, NemotronHForCausalLM

from surgery.errors import ModelError, PlanError, RecipeError
from surgery.export.formats import GGUFFormat, NemotronHFormat
from surgery.models.inserted import as_inserted, inserted_entries
from surgery.models.spliced import plan_of_hybrid
from surgery.recipe import Splice, Train
from surgery.splice.graft import splice_model
from surgery.splice.insertion import check_inserts
from surgery.splice.plan import make_plan
from surgery.train.training import train_model
from surgery.types import Plan
from tests.support.battery import logits
from tests.support.cases import each
from tests.support.pico import pico_family, pico_tokenizer, randomise, tokens
from tests.unit.splice.test_plan import chosen

SSM, ATTENTION = "linear_attention", "full_attention"
SIDE = 32
HEADS = ("L0H1", "L3H2", "L3H0", "L3H1")  # one head in layer 0, three in layer 3, whose attention has two keys
OWN = [0, 2, 1]  # attention heads of the second block: one for each key first
every_form = each("form", ["block", "pair", "copies"])


def section(form: str, **more: Any) -> Splice:
    if form == "block":
        return Splice(form="block", **more)
    return Splice(form="pair", init="ssm" if form == "copies" else "random", side_channels=SIDE, **more)


@cache
def base(**config: Any) -> Any:
    return pico_family("nemotron_h", **{k: list(v) if isinstance(v, tuple) else v for k, v in config.items()})


def planned(model: Any, splice: Splice, *names: str) -> Plan:
    heads = chosen(*(names or HEADS), reads="answer_token", config=model.config)
    return make_plan(heads, model.config, splice, seed=3)


def inserted(form: str, *names: str, **config: Any) -> Any:
    """The hybrid at step 0."""
    model = base(**config)
    return splice_model(model, planned(model, section(form), *names), section(form))


def filled_up(model: Any) -> list[tuple[Tensor, slice]]:
    """Rows or columns of the heads that are not the blocks' own, each with the weight that has them."""
    found = []
    for entry in inserted_entries(model.config):
        mixer = model.model.layers[entry["layers"][-1]].mixer
        for head in sorted(set(range(4)) - set(OWN[: len(entry["heads"])])):
            channels = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
            found += [(mixer.q_proj.weight, channels), (mixer.o_proj.weight.T, channels)]
    return found


@cache
@torch.no_grad()
def trained(form: str) -> Any:
    """A hybrid as another library's training could leave it: heads that fill a block up are not zero."""
    model = randomise(inserted(form).requires_grad_(False), 7)
    model.get_input_embeddings().weight.mul_(0.1)
    return model


class TestStepZero:
    @every_form
    @each(
        "config",
        [
            {},
            {"moe_latent_size": 12},
            {"mlp_bias": True, "use_bias": True},
            {"n_groups": 1, "use_conv_bias": False},
            {"num_nextn_predict_layers": 1},
            {"layers_block_type": (SSM, "mlp", SSM, SSM)},
        ],
    )
    def test_logits_are_the_bases(self, form: str, config: dict[str, Any]) -> None:
        of_hybrid, of_base = (logits(model, tokens(2, 40)) for model in (inserted(form, **config), base(**config)))
        allowed = 0.0 if form == "block" else 3e-6 * float(of_base.abs().max())  # side channels: rounding of norms
        assert torch.allclose(of_hybrid, of_base, rtol=0, atol=allowed)

    def test_new_layers_are_where_the_plan_puts_them(self) -> None:
        assert inserted("block").config.layers_block_type == [
            *(ATTENTION, SSM), "mlp", ATTENTION, *(ATTENTION, SSM), "moe"
        ]  # fmt: skip
        assert inserted("pair").config.layers_block_type == [
            *(SSM, ATTENTION, SSM), "mlp", ATTENTION, *(SSM, ATTENTION, SSM), "moe"
        ]  # fmt: skip

    def test_a_base_without_attention_gets_blocks_of_any_size(self) -> None:
        kinds, splice = (SSM, "mlp", SSM), section("block", head_dim=24)
        model = base(layers_block_type=kinds)
        config = splice_model(model, planned(model, splice, "L0H1", "L2H0", "L2H1"), splice).config
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 2, 24)

    def test_heads_that_share_a_key_read_what_it_holds(self) -> None:
        """`init: ssm`: a query is the C of the group whose B its key is."""
        model = inserted("copies")
        mixer = model.model.layers[inserted_entries(model.config)[1]["layers"][-1]].mixer
        queries, keys = (
            getattr(mixer, name).weight.unflatten(0, (-1, mixer.head_dim)) for name in ("q_proj", "k_proj")
        )
        for slot in OWN:
            query, key = (weight[:, 32:].abs().argmax(-1) for weight in (queries[slot], keys[slot // 2]))
            copied = (queries[slot, :, 32:].abs().amax(-1) == 1) & (keys[slot // 2, :, 32:].abs().amax(-1) == 1)
            assert copied.sum() >= 4
            assert torch.equal(query[copied], key[copied] + copied.sum()), "channels of queries follow those of keys"


@every_form
def test_it_is_saved_as_transformers_own_class(form: str, tmp_path: Path) -> None:
    model = trained(form)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["NemotronHForCausalLM"] and config["inserted_into"] == "nemotron_h"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is NemotronHForCausalLM
    expected = logits(loaded, tokens(2, 30))
    assert torch.equal(logits(model, tokens(2, 30)), expected)
    with torch.enable_grad():  # what training stops are gradients alone
        assert torch.equal(model(tokens(2, 30), use_cache=False).logits, expected)


def test_training_leaves_heads_that_fill_a_block_up_at_zero() -> None:
    """They share keys and values with heads that train. So does a copy of the model, and one that was loaded."""
    shape = {"vocab_size": 1024}
    keep = {"task": "sentence", "rows": 2, "weights": {"base_kl": 1.0}}
    read = {"task": "kv_retrieval", "rows": 2, "pairs": (2, 2), "weights": {"answer": 1.0, "attention": 1.0}}
    plan, started = planned(base(**shape), section("copies")), inserted("copies", **shape)
    loaded = NemotronHForCausalLM(copy.deepcopy(started.config)).eval()
    loaded.load_state_dict(started.state_dict())
    for model in (copy.deepcopy(started), as_inserted(loaded)):
        train = Train.model_validate({"steps": 3, "sources": [read, keep], "optimizer": {"warmup": 0}})
        history = train_model(model, pico_tokenizer(), train, plan, base(**shape))
        assert history[0]["attention"] > 0.5 and history[-1]["base_kl"] > 0
        assert not any(weight[channels].any() for weight, channels in filled_up(model))
        own = model.model.layers[inserted_entries(model.config)[1]["layers"][-1]].mixer.o_proj.weight
        assert all(own[:, head * 8 : (head + 1) * 8].any() for head in OWN)


class TestRefused:
    def test_more_heads_than_the_bases_attention_has(self) -> None:
        model, splice = base(mamba_num_heads=8, mamba_head_dim=8), section("block")
        names = tuple(f"L0H{head}" for head in range(5))
        with pytest.raises(PlanError, match=r"splice\.num_heads: 5 heads in layer 0.*, 4\. Choose fewer"):
            planned(model, splice, *names)
        listed = section("block", select="list", heads=names)
        with pytest.raises(PlanError, match=r"splice\.heads: 5 heads in layer 0"):
            check_inserts(model.config, listed)
        config = copy.deepcopy(splice_model(model, planned(model, splice, *names[:4]), splice).config)
        config.num_attention_heads = 3
        with pytest.raises(ModelError, match="inserted"):
            inserted_entries(config)

    def test_copies_of_a_layer_that_is_no_ssm(self) -> None:
        with pytest.raises(PlanError, match=r"splice\.before: 1\. init: ssm copies .* SSM layer: 0, 3\."):
            planned(base(), section("copies", before=1))
        assert [graft.before for graft in planned(base(), section("pair", before=1)).grafts] == [1, 1]

    def test_rows_that_the_product_of_experts_does_not_take(self) -> None:
        with pytest.raises(PlanError, match=r"splice\.side_channels: 34.* hidden_size \(32\).* Set 40"):
            planned(base(), Splice(form="pair", side_channels=34))
        odd = Splice(form="pair", side_channels=34)
        for config in ({"moe_latent_size": 16}, {"layers_block_type": (SSM, "mlp")}):
            model = base(**config)
            hybrid = splice_model(model, planned(model, odd, "L0H0"), odd)
            assert torch.isfinite(logits(hybrid, tokens(1, 5))).all()

    @each("value", ["mamba2", "bamba", None, 3])
    def test_an_unknown_type_of_base(self, value: Any) -> None:
        config = copy.deepcopy(inserted("block").config)
        config.inserted_into = value
        with pytest.raises(ModelError, match="inserted_into"):
            plan_of_hybrid(config, "x")

    def test_what_llama_cpp_does_not_compute(self) -> None:
        with pytest.raises(RecipeError, match="both MLPs and experts"):
            GGUFFormat().check_base(base().config)
        with pytest.raises(RecipeError, match="mlp_bias"):
            GGUFFormat().check_base(base(layers_block_type=(SSM, "moe"), mlp_bias=True).config)
        for config in (base(layers_block_type=(SSM,), mamba_hidden_act="gelu").config, Mamba2Config(hidden_act="gelu")):
            with pytest.raises(RecipeError, match="activation gelu"):
                GGUFFormat().check_base(config)
        for config in (base(layers_block_type=(SSM,), use_bias=True).config, Mamba2Config(use_bias=True)):
            with pytest.raises(RecipeError, match="use_bias"):
                GGUFFormat().check_base(config)
        GGUFFormat().check_base(Mamba2Config())
        for kind in ("mlp", "moe"):
            GGUFFormat().check_base(base(layers_block_type=(SSM, kind)).config)
            with pytest.raises(RecipeError, match="mlp_hidden_act: silu"):
                GGUFFormat().check_base(base(layers_block_type=(SSM, kind), mlp_hidden_act="silu").config)
        NemotronHFormat().check_base(base().config)
