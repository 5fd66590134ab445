"""The battery, second half: every family that takes a splice is spliced, trains, decodes and is exported.

Every hybrid has three spliced heads in two layers: copies of SSM heads, random ones, or a Transformer's.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import surgery.hybrid.modeling_hybrid as branch_module
from surgery.export import transformers_folder
from surgery.export.folder import export_model
from surgery.export.reload import RELOAD, SAMPLE
from surgery.hybrid.modeling_hybrid import SplicedAttention
from surgery.models.hooks import record
from surgery.models.loading import load_model
from surgery.models.lookup import geometry_of, mixer_of, structure_of
from surgery.models.runtime import requires_grad
from surgery.recipe import Base, Optimizer, Splice, Train
from surgery.splice.graft import splice_model, step_zero_gap
from surgery.train.optimizer import adamw, mark_trainable, spliced_parameters
from surgery.train.targets import Targets
from surgery.train.trainer import StageTrainer
from tests.support.battery import (
    assert_cache_is_as_large_as_said,
    base,
    columns,
    every_spliced,
    logits,
    mixers,
    plan_of,
    shared,
    spliced,
    trained,
)
from tests.support.pico import SPLICED_FAMILIES, pad, pico_family, pico_tokenizer, prompts, randomise, tokens
from tests.support.processes import alone

KV = {"task": "kv_retrieval", "rows": 1, "pairs": (2, 2), "weights": {"answer": 1.0, "attention": 1.0}}
INITS = ("ssm", "random", "teacher")
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}  # logits of these models are up to 30


@every_spliced
def test_a_splice_adds_to_the_base_or_silences_its_heads(name: str) -> None:
    """`add` is the base bit for bit. `replace` silences those heads and no other. The base itself is not edited."""
    model, batch = base(name), prompts((9, 14, 12))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for init in INITS:
        hybrid = spliced(model, "add", init)
        for mask in (batch.attention_mask, None):
            found, expected = (logits(m, batch.input_ids, mask) for m in (hybrid, model))
            assert torch.equal(found, expected) and found.isfinite().all(), init
        for branch in (m for m in hybrid.modules() if isinstance(m, SplicedAttention)):
            nn.init.normal_(branch.o_proj.weight)
        assert (logits(hybrid, batch.input_ids) - found).abs().max() > 0.05, init
        if init != init_of(name):
            continue

        plan, hybrid = plan_of(model, "replace", init), spliced(model, "replace", init)
        for graft in plan.grafts:
            ours, theirs = (structure_of(graft.site).out_proj(mixer_of(m, graft.site)) for m in (hybrid, model))
            for head, own in columns(graft.site):
                if head in graft.heads:
                    assert not ours.weight[:, own].any() and theirs.weight[:, own].any(), (init, head)
                else:
                    assert torch.equal(ours.weight[:, own], theirs.weight[:, own]), (init, head)
        site, silenced = plan.grafts[0].site, plan.grafts[0].heads
        with record(hybrid, [site]) as ours, record(model, [site]) as theirs:
            logits(hybrid, tokens())
            logits(model, tokens())
        for head, own in columns(site):
            found, expected = (t.heads[site.name][..., own] for t in (ours, theirs))
            assert not found.any() if head in silenced else torch.equal(found, expected), (init, head)

    copying = splice_model(model, plan_of(model), Splice(min_width=None, output="copy"))
    step_zero_gap(model, copying, plan_of(model), batch.input_ids, batch.attention_mask)
    copies = copying.state_dict()
    added, replacing = (spliced(model, mode).state_dict() for mode in ("add", "replace"))
    for key, weight in copies.items():
        copied = key.endswith("attention.o_proj.weight")
        assert torch.equal(weight, (replacing if copied else added)[key]) and weight.any() >= copied, key

    for mode in ("add", "replace"):
        plan, hybrid = plan_of(model, mode), spliced(model, mode)
        silenced = {f"{g.site.path}.out_proj.weight" for g in plan.grafts} if mode == "replace" else set()
        copies = hybrid.state_dict()
        assert {k for k, v in before.items() if not torch.equal(copies[k], v)} == silenced
        assert not {v.data_ptr() for v in copies.values()} & {v.data_ptr() for v in model.state_dict().values()}
        assert shared(hybrid) == shared(model) and (name not in ("zamba2", "llamba") or shared(model))
        assert not silenced & {weight for group in shared(model) for weight in group}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert geometry_of(trained(name).config) == geometry_of(model.config) and mixers(trained(name)) == mixers(model)


@every_spliced
def test_training_changes_what_the_recipe_names(name: str, tmp_path: Path) -> None:
    """New heads alone, or all but the columns of heads that were silenced."""
    model, plan = copy.deepcopy(trained(name, "replace")).train(), plan_of(base(name), "replace")
    parameters = mark_trainable(model, Train.model_validate({"sources": [KV], "trainable": "all"}))
    optimizer = adamw(model, parameters, Optimizer(weight_decay=0.1, lr=1e-2))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
        optimizer.step()
    for graft in plan.grafts:
        before, after = (structure_of(graft.site).out_proj(mixer_of(m, graft.site)).weight
                         for m in (trained(name, "replace"), model))  # fmt: skip
        for head, own in columns(graft.site):
            moved = (after - before)[:, own]
            assert not after[:, own].any() if head in graft.heads else moved.abs().min() > 0, head

    plain = pico_family(name, vocab_size=1024)
    plan = plan_of(plain)
    hybrid = randomise(spliced(plain), 7)
    kept = {k: v.clone() for k, v in hybrid.state_dict().items()}
    for trainable in ("reads", "new_heads"):
        source = {**KV, "weights": {"attention": 1.0}} if trainable == "reads" else KV
        rates = {"warmup": 0, "weight_decay": 0.0 if trainable == "reads" else 0.1}
        given = {"steps": 2, "trainable": trainable, "sources": [source], "optimizer": rates}
        targets = Targets(grafts=plan.grafts)
        StageTrainer(hybrid, pico_tokenizer(), Train(**given), 0, Accelerator(cpu=True), targets).run()
        changed = {k for k, v in hybrid.state_dict().items() if not torch.equal(v, kept[k])}
        expected = {k for k in kept if any(f"{g.site.path}.attention." in k for g in plan.grafts)}
        if trainable == "reads":
            expected = {k for k in expected if not any(part in k for part in (".o_proj.", ".gate_proj.", ".v_proj."))}
        assert changed == expected and changed
    assert len(changed) == len(spliced_parameters(hybrid))


@every_spliced
def test_rows_are_those_that_attention_mixes_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax of the queries and keys that reach attention, causal and without padding."""
    model, batch = copy.deepcopy(trained(name, "add", init_of(name))), prompts((9, 14, 12))
    model.config._attn_implementation = "eager"
    eager, seen = branch_module.eager_attention_forward, []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed, weights = eager(module, query, key, value, *args, **kwargs)
        if isinstance(module, SplicedAttention):
            seen.append((query @ key.transpose(2, 3), weights))
        return mixed, weights

    monkeypatch.setattr(branch_module, "eager_attention_forward", spy)
    queries = torch.tensor([[6, 13, -1], [0, 5, 13], [2, 9, 13]])
    with torch.no_grad(), requires_grad(True, model):
        given = {"attention_mask": batch.attention_mask, "use_cache": False, "splice_queries": queries}
        output = model(input_ids=batch.input_ids, **given)
    assert torch.equal(output.logits, logits(model, batch.input_ids, batch.attention_mask))
    real = batch.attention_mask.bool()
    for rows, (scores, weights) in zip(output.splice_attentions, seen[:2], strict=True):
        visible = torch.ones(14, 14).tril().bool() & real[:, None]
        expected = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        for b, q in ((b, q) for b in range(3) for q in range(3)):
            t = int(queries[b, q])
            if t < 0 or not real[b, t]:
                assert t >= 0 or not rows[b, :, q].any()
                continue
            torch.testing.assert_close(rows[b, :, q], expected[b, :, t], atol=1e-5, rtol=0)
            torch.testing.assert_close(rows[b, :, q], weights[b, :, t], atol=1e-5, rtol=0)


def init_of(name: str) -> str:
    """One for each family, by turns."""
    return INITS[SPLICED_FAMILIES.index(name) % 3]


def decoded(model: Any, ids: Tensor, borders: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """(B,T,V) from cached forward passes over the pieces between the borders."""
    kept, found, start = None, [], 0
    for end in (*borders, ids.shape[1]):
        seen = None if mask is None else mask[:, :end]
        with torch.no_grad(), requires_grad(True, model):
            given = {"attention_mask": seen, "cache": kept, "use_cache": True}
            output = model(input_ids=ids[:, start:end], **given)
        kept, start = output.cache, end
        found.append(output.logits)
    return torch.cat(found, 1)


def generate(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """The new tokens."""
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=mask, **settings)[:, ids.shape[1] :]


@every_spliced
def test_cached_is_the_full_forward(name: str) -> None:
    """Token by token, and in several tokens after a cache; and the cache is as large as said."""
    ids = tokens(2, 13)
    for init in INITS:
        model = trained(name, "add", init)
        for borders in (tuple(range(1, 13)), (9,)) if init == init_of(name) else ((2, 3, 10),):
            torch.testing.assert_close(decoded(model, ids, borders), logits(model, ids), **CLOSE)
        assert_cache_is_as_large_as_said(model)


@every_spliced
def test_left_padded_is_unpadded(name: str) -> None:
    """In one forward, in pieces, and generated."""
    model, rows = trained(name, "add", init_of(name)), [tokens(1, n, seed=n)[0] for n in (9, 14, 6)]
    ids, mask = pad(rows, "left")  # a row of padding alone in the first piece, some in the second
    whole, pieces = logits(model, ids, mask), decoded(model, ids, (4, 10, 11, 12), mask)
    assert whole.isfinite().all()
    for b, row in enumerate(rows):
        alone = logits(model, row[None])[0]
        torch.testing.assert_close(whole[b, -len(row) :], alone, **CLOSE)
        torch.testing.assert_close(pieces[b, -len(row) :], alone, **CLOSE)

    rows = [tokens(1, n, seed=n)[0] for n in (5, 11)]
    ids, mask = pad(rows, "left")
    together = generate(model, ids, mask)
    for b, row in enumerate(rows):
        alone = generate(model, row[None], torch.ones(1, len(row), dtype=torch.long))
        assert torch.equal(together[b], alone[0])
        longer = torch.cat([row, alone[0]])[None]  # and both are the argmax of a plain forward
        assert torch.equal(logits(model, longer)[0, len(row) - 1 : -1].argmax(-1), alone[0])


# Runs the library's own check on several folders, in one process that cannot import the library.
RELOADS = """
import sys
script, sample, *triples = sys.argv[1:]
while triples:
    sys.argv, triples = ["-c", *triples[:3], sample, "", "auto"], triples[3:]
    exec(script)
"""


def exported(name: str) -> Any:
    """A replacing hybrid."""
    return trained(name, "replace", init_of(name))


@pytest.fixture(scope="module")
def exports(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """By family that is tested: an exported folder, and its outputs where `surgery` is not installed."""
    there, ids = tmp_path_factory.mktemp("exports"), tokens(2, 24)
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [name for name in SPLICED_FAMILIES if any(values.get("name") == name for values in parameters)]
    save_file({"ids": ids}, there / "ids")
    arguments: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_folder, "compare_with_model", lambda *_: {})
        for name in names:
            export_model(exported(name), pico_tokenizer(), there / name, card="A card.")
            arguments += [str(there / name), str(there / "ids"), str(there / f"{name}.found")]
    alone(RELOADS, RELOAD, SAMPLE, *arguments, cwd=there, HF_MODULES_CACHE=str(there / "modules"))
    return {name: (there / name, load_file(there / f"{name}.found")) for name in names}


@every_spliced
def test_an_export_is_the_same_with_and_without_this_library(name: str, exports: Any) -> None:
    folder, found = exports[name]
    model, ids = exported(name), tokens(2, 24)
    assert torch.equal(found["auto.logits"], logits(model, ids))
    end = pico_tokenizer().eos_token_id
    text = model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=end)
    assert torch.equal(found["auto.text"], text) and text.shape[1] > 24
    loaded = load_model(Base(model=str(folder))).requires_grad_(False)
    assert loaded.config.splice == model.config.splice and shared(loaded) == shared(model)
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    assert torch.equal(decoded(loaded, tokens(), (9,)), decoded(model, tokens(), (9,)))
