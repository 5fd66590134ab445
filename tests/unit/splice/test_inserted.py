"""Inserted attention blocks and pairs (`splice.form`): the base at first, and a Nemotron-H of transformers itself."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, NemotronHForCausalLM

from surgery.errors import ModelError, PlanError
from surgery.models.alterations import heads_off
from surgery.models.inserted import InsertedForCausalLM, as_inserted, inserted_entries, new_modules
from surgery.models.lookup import family_of
from surgery.models.sizes import sizes_of
from surgery.models.spliced import plan_of_hybrid
from surgery.models.torch_scans import torch_scans
from surgery.recipe import Splice, Train
from surgery.splice.graft import splice_model, step_zero_gap
from surgery.splice.insertion import insert_layers
from surgery.splice.plan import check_not_spliced, make_plan
from surgery.train.optimizer import mark_trainable
from surgery.train.packing import separate_documents
from surgery.train.training import train_model
from surgery.types import HeadSet, Plan, plan_from_json, to_json
from tests.support import four_bits
from tests.support.battery import assert_cache_is_as_large_as_said, logits
from tests.support.cases import each
from tests.support.pico import pad, pico_base, pico_family, pico_tokenizer, prompts, randomise, tokens
from tests.unit.splice.test_plan import chosen

# side: a pair with side channels, copies: with `init: ssm` too
every_form = each("form", ["block", "pair", "side", "copies"])
SIDE = 8
HEADS = ("L1H2", "L2H0", "L2H1")  # one head in layer 1, two in layer 2


def located(model: Any, *names: str) -> HeadSet:
    return chosen(*(names or HEADS), reads="answer_token", config=model.config)


def section(form: Any, **more: Any) -> Splice:
    if form == "block":
        return Splice(form=form, head_dim=16, **more)
    if form == "copies":
        return Splice(form="pair", init="ssm", head_dim=16, side_channels=4 * SIDE, **more)
    return Splice(form="pair", head_dim=16, side_channels=SIDE if form == "side" else 0, **more)


def planned(model: Any, form: Any, *names: str, **more: Any) -> Plan:
    return make_plan(located(model, *names), model.config, section(form, **more), seed=3)


@cache
def base(**config: Any) -> Any:
    return pico_base(**config).requires_grad_(False)


def inserted(form: Any, *names: str, before: int | None = None, **config: Any) -> Any:
    """The hybrid at step 0."""
    plan = planned(base(**config), form, *names, before=before)
    return splice_model(base(**config), plan, section(form, before=before))


@cache
def trained(form: Any) -> Any:
    """A hybrid as training could leave it."""
    model = randomise(inserted(form).requires_grad_(False), 7)
    model.get_input_embeddings().weight.mul_(0.1)
    return model


class TestStepZero:
    @every_form
    @each("config", [{}, {"n_groups": 2}, {"use_bias": True, "use_conv_bias": False}, {"tie_word_embeddings": True}])
    def test_logits_are_the_bases(self, form: str, config: dict[str, Any]) -> None:
        hybrid = inserted(form, **config)
        of_hybrid, of_base = (logits(model, tokens(2, 40)) for model in (hybrid, base(**config)))
        # Side channels change the rounding of norms.
        allowed = 2e-6 * float(of_base.abs().max()) if form in ("side", "copies") else 0.0
        assert torch.allclose(of_hybrid, of_base, rtol=0, atol=allowed)
        ids, mask = pad([tokens(1, 9)[0], tokens(1, 21)[0]], "left")
        gap = step_zero_gap(base(**config), hybrid, planned(base(**config), form), ids, mask)
        assert gap.max_logit <= max(1e-6, allowed) and gap.same_top == 1

    def test_small_steps_of_dt_stay_small(self) -> None:
        """Nemotron-H's own limit of dt in prefill, 0.001, is another model."""
        slow = copy.deepcopy(base())
        for block in slow.backbone.layers:
            block.mixer.dt_bias.fill_(-9)  # dt of about 1e-4
        hybrid = splice_model(slow, planned(slow, "block"), section("block"))
        ids = tokens(2, 40)
        assert torch.equal(logits(hybrid, ids), logits(slow, ids))
        for block in hybrid.model.layers:
            if block.block_type == "linear_attention":
                block.mixer.time_step_limit = (1e-3, float("inf"))
        assert not torch.allclose(logits(hybrid, ids), logits(slow, ids), atol=1e-4)

    @every_form
    def test_new_layers_are_where_the_plan_puts_them(self, form: str) -> None:
        new = ["full_attention"] if form == "block" else ["linear_attention", "full_attention"]
        ssm = "linear_attention"
        assert inserted(form).config.layers_block_type == [ssm, *new, ssm, *new, ssm]
        assert inserted(form, before=0).config.layers_block_type == [*new, *new, ssm, ssm, ssm]

    @every_form
    def test_base_and_hybrid_share_no_memory(self, form: str) -> None:
        hybrid = inserted(form, tie_word_embeddings=True)
        owned = [p.data_ptr() for p in hybrid.parameters()]
        assert len(set(owned)) == len(owned), "lm_head is a tensor of its own"
        assert not set(owned) & {p.data_ptr() for p in base(tie_word_embeddings=True).parameters()}
        assert not hybrid.training

    @every_form
    def test_the_same_plan_gives_the_same_weights_and_another_seed_others(self, form: str) -> None:
        one, same = inserted(form).state_dict(), inserted(form).state_dict()
        plan = planned(base(), form)
        other = insert_layers(base(), Plan(plan.base, plan.geometry, plan.grafts, 4), section(form)).state_dict()
        assert all(torch.equal(one[name], same[name]) for name in one)
        changed = {name for name in one if not torch.equal(one[name], other[name])}
        assert {name.split(".mixer.")[-1] for name in changed} >= {"q_proj.weight", "k_proj.weight", "v_proj.weight"}


def test_a_delay_line_holds_the_tokens_before_and_its_scan_adds_nothing() -> None:
    mixer = inserted("pair", before=0).model.layers[0].mixer
    seen: dict[str, Tensor] = {}
    mixer.in_proj.register_forward_hook(lambda _, __, output: seen.update(projected=output))
    mixer.norm.register_forward_pre_hook(lambda _, inputs: seen.update(scan=inputs[0]))
    with torch.no_grad():
        mixer(torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(0)))
    x, inner = seen["projected"][..., 64:128], 64  # after z
    for channel in range(inner):
        lag = 1 + channel % 3
        late = torch.nn.functional.pad(x[:, :-lag, channel], (lag, 0))
        assert torch.allclose(seen["scan"][..., channel], torch.nn.functional.silu(late), atol=1e-6), channel


class TestSideChannels:
    @torch.no_grad()
    @each(
        ("config", "side"),
        [({}, 64), ({"n_groups": 2}, 64), ({"use_bias": True}, 64), ({"state_size": 16}, 32), ({"state_size": 64}, 64)],
        ids=["plain", "groups", "bias", "projected", "no-room"],
    )
    def test_they_hold_keys_and_queries_of_the_layer_that_follows(self, config: dict[str, Any], side: int) -> None:
        """B and C of the head's group, in proportion, which the block's keys and queries read."""
        model, splice = base(**config), Splice(form="pair", init="ssm", head_dim=16, side_channels=side)
        hybrid = splice_model(model, make_plan(located(model, "L1H3"), model.config, splice, 3), splice)
        block, followed = hybrid.model.layers[2:4]
        inner, N, groups = 64, hybrid.config.ssm_state_size, hybrid.config.n_groups
        q, k = (getattr(block.mixer, name).weight[:, 32:] for name in ("q_proj", "k_proj"))
        if N == 64:  # the layer has 64 channels
            assert q.abs().sum(1).gt(1e-3).all() and k.abs().sum(1).gt(1e-3).all(), "random"
            return
        kept = min(N, side // 4)
        assert torch.equal(k[:kept, :kept], torch.eye(kept)) and torch.equal(q[:kept, kept : 2 * kept], torch.eye(kept))
        seen: list[Tensor] = []
        block.norm.register_forward_hook(lambda _, __, output: seen.append(output[..., -side:]))
        followed.mixer.in_proj.register_forward_hook(lambda _, __, output: seen.append(output[..., inner:-4].mT))
        hybrid(tokens(2, 30), use_cache=False)
        read, xBC = seen
        held = F.silu(followed.mixer.conv1d(xBC)[..., :30]).mT[..., inner:]
        B, C = (held[..., (i * groups + groups - 1) * N :][..., :N] for i in (0, 1))  # L1H3 is in the last group
        if kept == N:
            for copied, source in ((read[..., :N], B), (read[..., N : 2 * N], C)):
                assert torch.allclose(F.cosine_similarity(copied, source, dim=-1).abs(), torch.ones(2, 30), atol=1e-3)
        else:  # both are projected alike, and nearly keep their products
            rows = hybrid.model.layers[1].mixer.out_proj.weight[32:]
            of_B, of_C = F.normalize(rows[:kept, :N]), F.normalize(rows[kept : 2 * kept, N : 2 * N])
            assert torch.allclose(of_B, of_C, atol=1e-6)
            assert torch.allclose(of_B @ of_B.T, torch.eye(kept), atol=1e-6)

    @each("form", ["side", "copies"])
    @each("trainable", ["all", "new_heads"])
    def test_training_keeps_a_gather_layer_out_of_the_bases_channels(
        self, trainable: str, form: str, tmp_path: Path
    ) -> None:
        shape, training = TestTraining.SHAPE, TestTraining()
        before, model, _ = training.fitted(form, trainable=trainable, steps=3)
        side = model.config.side_channels
        for number, (old, block) in enumerate(zip(before.model.layers, model.model.layers, strict=True)):
            rows = (getattr(block.mixer, "out_proj", None) or block.mixer.o_proj).weight
            if number in (1, 4):
                # There are two pairs: the lower half belongs to the first one.
                own = slice(-side, -side // 2) if number == 1 else slice(-side // 2, None)
                assert rows[own].any() and not torch.equal(rows[own], old.mixer.out_proj.weight[own])
                rows = rows.clone()
                rows[own] = 0
                assert not rows.any()
            elif form == "copies":
                assert not rows[-side:].any(), "their noise would be read 2048 times as large"
            if form == "copies" and number in (1, 4):
                assert torch.equal(block.mixer.norm.weight, old.mixer.norm.weight), "it keeps the side channels small"
        assert form == "side" or not model.model.embeddings.weight[:, -side:].any()
        model.save_pretrained(tmp_path)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path)
        ids = tokens(2, 30)
        assert torch.allclose(logits(stock, ids), logits(model, ids), atol=1e-6)
        assert not torch.allclose(logits(stock, ids), logits(base(**shape), ids), atol=1e-3)

    @torch.no_grad()
    @each("form", ["side", "copies"])
    def test_a_pair_does_not_read_what_another_one_writes(self, form: str) -> None:
        hybrid, queries = copy.deepcopy(inserted(form)), torch.tensor([[29], [20]])

        def attention_of_the_upper_block() -> Tensor:
            return hybrid(tokens(2, 30), splice_queries=queries).splice_attentions[1]

        lower, upper = (entry["channels"] for entry in hybrid.config.inserted)
        assert lower[1] == upper[0] and upper[1] == hybrid.config.hidden_size
        written = hybrid.model.layers[1].mixer.out_proj.weight
        if form == "side":  # a Gather layer of random weights writes nothing at first
            written[slice(*lower)] = 1e-3
        with_it = attention_of_the_upper_block()
        written.zero_()
        # The norms average over all channels.
        assert torch.allclose(attention_of_the_upper_block(), with_it, atol=1e-3)
        hybrid.model.layers[4].mixer.out_proj.weight.add_(1e-3)
        assert not torch.allclose(attention_of_the_upper_block(), with_it, atol=1e-3)


class TestStock:
    """Saved, it is transformers' own class."""

    @every_form
    def test_what_is_saved_names_no_class_of_ours(self, form: str, tmp_path: Path) -> None:
        model = trained(form)
        model.save_pretrained(tmp_path)
        assert type(model) is InsertedForCausalLM, "saving leaves the model as it is"
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["architectures"] == ["NemotronHForCausalLM"] and "auto_map" not in config
        assert not list(tmp_path.glob("*.py"))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded) is NemotronHForCausalLM
        assert torch.equal(logits(loaded, tokens(2, 30)), logits(model, tokens(2, 30)))
        assert type(as_inserted(loaded)) is InsertedForCausalLM

    @every_form
    def test_the_cache_is_as_large_as_said(self, form: str) -> None:
        assert_cache_is_as_large_as_said(trained(form))
        model = trained(form)
        counted = sum(p.numel() for block in new_modules(model).values() for p in block.parameters())
        assert sizes_of(model).new_parameters == counted > 0

    @every_form
    def test_attention_off_is_a_zero_output(self, form: str) -> None:
        model, ids = trained(form), tokens(2, 15)
        off = copy.deepcopy(model)
        for block in new_modules(off).values():
            if block.block_type == "full_attention":
                block.mixer.o_proj.weight.zero_()
        with heads_off(model):
            disabled = logits(model, ids)
        assert torch.equal(disabled, logits(off, ids)) and not torch.equal(disabled, logits(model, ids))


class TestRows:
    @every_form
    def test_they_are_the_weights_of_the_blocks(self, form: str) -> None:
        model, batch = copy.deepcopy(trained(form)), prompts()
        model.set_attn_implementation("eager")
        call = {"attention_mask": batch.attention_mask, "use_cache": False}
        output = model(batch.input_ids, splice_queries=batch.query, **call)
        whole = model(batch.input_ids, output_attentions=True, **call).attentions
        assert [rows.shape[1] for rows in output.splice_attentions] == [1, 2], "a head that fills a block up has none"
        for rows, weights in zip(output.splice_attentions, whole, strict=True):
            assert torch.allclose(rows[:, :, 0], weights[:, : rows.shape[1], -1], atol=1e-6)
        assert torch.equal(output.logits, model(batch.input_ids, **call).logits)

    def test_checkpointing_changes_no_gradient(self) -> None:
        batch, gradients = prompts(), []
        for checkpointing in (False, True):
            model = copy.deepcopy(trained("pair")).requires_grad_(True).train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            call = {"attention_mask": batch.attention_mask, "use_cache": False}
            rows = model(batch.input_ids, splice_queries=batch.query, **call).splice_attentions
            sum(r[..., 3].sum() for r in rows).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        plain, recomputed = gradients
        assert plain.keys() == recomputed.keys() and "model.layers.2.mixer.q_proj.weight" in plain
        assert all(torch.allclose(plain[name], recomputed[name], atol=1e-7) for name in plain)

    def test_they_stay_inside_a_document(self) -> None:
        model, ids = copy.deepcopy(trained("block")), tokens(1, 12)
        documents = (torch.arange(12) >= 5).int()[None]
        with torch_scans(model), separate_documents(model, documents), torch.no_grad():
            output = model(ids, use_cache=False, splice_queries=torch.tensor([[9]]))
        for rows in output.splice_attentions:
            assert not rows[..., :5].any() and torch.allclose(rows[..., 5:10].sum(-1), torch.ones(1, rows.shape[1], 1))


class TestTraining:
    SHAPE = {"vocab_size": 1024}
    KV = {"task": "kv_retrieval", "rows": 2, "pairs": (2, 2), "weights": {"answer": 1.0, "attention": 1.0}}
    KEEP = {"task": "sentence", "rows": 2, "weights": {"base_kl": 1.0}}

    def fitted(self, form: str = "pair", **more: Any) -> tuple[Any, Any, list[dict[str, float]]]:
        plan = planned(base(**self.SHAPE), form)
        model = splice_model(base(**self.SHAPE), plan, section(form)).requires_grad_(True)
        before = copy.deepcopy(model)
        recipe = {"steps": 2, "sources": [self.KV, self.KEEP], "optimizer": {"warmup": 0}, **more}
        frozen = copy.deepcopy(base(**self.SHAPE))
        history = train_model(model, pico_tokenizer(), Train.model_validate(recipe), plan, frozen)
        return before, model, history

    @each("quantization", [None, "nf4"])
    def test_adapters_train_beside_the_inserted_layers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
    ) -> None:
        """Inserted layers train in full and get no adapters. PEFT loads both; it refuses `out_proj` of Nemotron-H."""
        four_bits.install(monkeypatch)
        shape = self.SHAPE | {"hidden_size": 64, "expand": 1}
        plan = planned(base(**shape), "pair")
        model, fresh = (splice_model(base(**shape), plan, section("pair")) for _ in range(2))
        seen: dict[str, set[str]] = {}

        def record(step: int, entry: dict[str, float]) -> None:
            seen["trained"] = {name for name, p in model.named_parameters() if p.requires_grad}

        recipe = {
            "steps": 2,
            "sources": [self.KV],
            "trainable": "lora",
            "lora": {"rank": 2, "targets": ["in_proj"], "quantization": quantization},
        }
        train_model(model, pico_tokenizer(), Train.model_validate(recipe), plan, outputs=tmp_path, on_step=record)
        new = ("model.layers.1.", "model.layers.2.", "model.layers.4.", "model.layers.5.")
        assert all((".lora_" in name) != name.startswith(new) for name in seen["trained"])
        loaded = PeftModel.from_pretrained(fresh, str(tmp_path / "adapters"))
        with torch.no_grad():
            found, wanted = (m(input_ids=tokens(1, 12), use_cache=False).logits for m in (loaded, model))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

    def test_new_heads_are_the_inserted_layers(self) -> None:
        before, model, _ = self.fitted(trainable="new_heads")
        new = ("model.layers.1.", "model.layers.2.", "model.layers.4.", "model.layers.5.")
        for (name, old), weight in zip(before.named_parameters(), model.parameters(), strict=True):
            assert name.startswith(new) or torch.equal(old, weight), name
        stage = Train.model_validate({"trainable": "new_heads", "sources": [self.KEEP]})
        assert {id(p) for p in mark_trainable(model, stage)} == {
            id(p) for name, p in model.named_parameters() if name.startswith(new)
        }

    @every_form
    def test_reads_train_queries_and_keys_and_what_a_gather_layer_writes_beside_the_base(self, form: str) -> None:
        sources = [{**self.KV, "weights": {"attention": 1.0}}]
        before, model, _ = self.fitted(form, trainable="reads", sources=sources)
        pairs = zip(before.named_parameters(), model.parameters(), strict=True)
        changed = {name for (name, old), weight in pairs if not torch.equal(old, weight)}
        entries = model.config.inserted
        parts = ("norm", "mixer.q_proj", "mixer.k_proj")
        queries_and_keys = {f"model.layers.{entry['layers'][-1]}.{part}.weight" for entry in entries for part in parts}
        gathers = tuple(f"model.layers.{entry['layers'][0]}." for entry in entries if "channels" in entry)
        assert queries_and_keys <= changed
        assert all(name.startswith(gathers) for name in changed - queries_and_keys)
        assert {
            f"{gather}mixer.{part}.weight" for gather in gathers for part in ("in_proj", "conv1d", "out_proj")
        } <= changed


class TestPlan:
    @every_form
    def test_it_is_in_the_config_and_survives_json(self, form: str) -> None:
        plan = planned(base(), form)
        assert plan_from_json(json.loads(json.dumps(to_json(plan)))) == plan
        recovered = plan_of_hybrid(inserted(form).config, plan.base)
        assert (recovered.geometry, recovered.grafts) == (plan.geometry, plan.grafts)
        assert [graft.how for graft in plan.grafts] == [
            f"{section(form).form} before layer {layer}" for layer in (1, 2)
        ]
        with pytest.raises(PlanError, match="hybrid already"):
            check_not_spliced(inserted(form).config)

    WRONG: dict[str, list[Any]] = {
        "channels": [[31, 40], [32, 48], [32, 32], [32, 41], [32], [32, "40"], [True, 40], "32-40", None],
        "side_channels": [-1, 40, 1000, "8", True, None],
        "layers": [[0], [1, 2], "1", []], "before": [2, None], "form": ["head", []], "init": ["teacher", "ssm"],
        "heads": [[], [-1]], "reads": [[]], "surplus": [1],
    }  # fmt: skip

    @each(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
    def test_a_wrong_field_is_refused(self, key: str, value: Any) -> None:
        config = copy.deepcopy(inserted("side" if "channels" in key else "block").config)
        assert len(inserted_entries(config)) == 2
        if key == "side_channels":
            config.side_channels = value
        else:
            config.inserted[0][key] = value
        with pytest.raises(ModelError, match=r"inserted|channels"):
            plan_of_hybrid(config, "x")

    def test_a_field_in_the_config_of_another_class_is_refused(self) -> None:
        config = copy.deepcopy(base().config)
        config.inserted = inserted("block").config.inserted
        with pytest.raises(ModelError, match="inserted"):
            plan_of_hybrid(config, "x")


class TestRefused:
    def test_another_family(self) -> None:
        model = pico_family("bamba")
        sites = family_of(model.config).sites(model.config)
        heads = located(model, f"L{sites[0].layer}H0")
        with pytest.raises(PlanError, match="mamba2 or nemotron_h only"):
            make_plan(heads, model.config, section("block"))

    def test_plans_that_are_not_whole(self) -> None:
        plan = planned(base(), "block")
        first, second = plan.grafts
        into_heads = make_plan(located(base()), base().config, Splice()).grafts[0]
        for model, grafts, words in (
            (base(), (into_heads, second), "for every graft"),
            (base(), (second, first), "Order the grafts"),
            (base(n_groups=2), (first, second), "another model"),
        ):
            with pytest.raises(PlanError, match=words):
                splice_model(model, Plan(plan.base, plan.geometry, grafts, 0), section("block"))
