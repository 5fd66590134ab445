"""Every fast path of the run equals its naive one: same margins, on padded prompts, on a base and on a hybrid."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.data.ranking import ChoiceScores, choice_scores
from surgery.errors import ModelError
from surgery.locate.ablation import Ablation, fill_values, token_mask
from surgery.locate.ablation_sweep import Variant, ablate, change_at_query, contribution, oracle_values
from surgery.locate.batches import counterfactuals
from surgery.locate.clean_run import CleanRun, run_clean
from surgery.locate.methods import METHODS, LocateBatch
from surgery.models.hooks import record
from surgery.models.lookup import mixer_of, structure_of
from surgery.models.torch_scans import torch_scans
from surgery.recipe import Locate
from surgery.types import READS, HeadId, MixerSpec
from tests.support.cases import each as each_case
from tests.support.oracles import assert_same, naive_ablate, naive_change_at_query
from tests.support.pico import (
    HEAD_DIM,
    HEADS,
    pico_base,
    pico_family,
    pico_hybrid,
    pico_site,
    pico_tokenizer,
    prompts,
    random_site,
)

MODELS = {
    "base": lambda: pico_base(n_groups=2),
    "hybrid": lambda: pico_hybrid([pico_site(0, [1, 3]), random_site(2, [0], "replace")]),
}
BATCHES = {"padded": (9, 14, 12), "level": (11, 11)}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
every_batch = each_case("lengths", BATCHES.values(), ids=BATCHES.keys())
SINGLE = [Variant(ablate=(HeadId(layer, h),)) for layer in range(3) for h in range(HEADS)]
SINGLE += [Variant(oracle=((HeadId(layer, h), r),)) for layer in range(3) for h in range(HEADS) for r in READS]
COMBINED = [
    Variant(),
    Variant(ablate=(HeadId(0, 1), HeadId(0, 2), HeadId(2, 3))),
    Variant(oracle=((HeadId(0, 0), "segment_end"), (HeadId(2, 3), "answer_token"))),
    Variant(oracle=((HeadId(1, 0), "segment_end"), (HeadId(1, 3), "answer_token"))),
    Variant(ablate=(HeadId(0, 0), HeadId(1, 1)), oracle=((HeadId(2, 1), "answer_token"),)),
    Variant(ablate=(HeadId(2, 0),), oracle=((HeadId(0, 2), "segment_end"), (HeadId(1, 2), "segment_end"))),
]


def run_of(make: Any, lengths: tuple[int, ...] = BATCHES["padded"]) -> CleanRun:
    return run_clean(make(), prompts(lengths))


def each(spec: MixerSpec) -> list[list[HeadId]]:
    """Every head of a mixer by itself."""
    return [[head] for head in spec.heads]


def moved(run: CleanRun, scores: list[ChoiceScores]) -> list[float]:
    """How far each of these is from the clean margins."""
    return [float((s.margin - run.scores.margin).abs().max()) for s in scores]


WHERE = ("everywhere", "context", "segment", "segment_end", "answer_token", "query")
SETS = [
    [HeadId(0, 1)],
    [HeadId(2, 0), HeadId(0, 2)],  # from the lower one on, whatever their order
    [HeadId(1, h) for h in range(HEADS)],
    [HeadId(layer, h) for layer in range(3) for h in range(HEADS)],
]


@every_model
@each_case(
    "where, fill",
    [*((where, "zero") for where in WHERE), *itertools.product(("everywhere", "segment"), ("mean", "resample"))],
)
def test_sets_of_heads_equal_naive(where: Any, fill: Any, make: Any) -> None:
    """Several heads, whole layers, heads of several layers, at chosen tokens, with each thing in their place."""
    run, ablation = run_of(make), Ablation(where, fill)
    fast = ablate(run, SETS, ablation)
    assert_same(fast, naive_ablate(run, SETS, ablation))
    assert max(moved(run, fast)) > 1e-3


@each_case("where", ["everywhere", "context"])
@each_case("name", ["zamba2", "falcon_h1"])
def test_heads_of_both_mixers_of_a_block_are_ablated_together(name: str, where: Any) -> None:
    """In Zamba2 the attention runs before the SSM of its block, and acts through the SSM's input alone."""
    with torch_scans(model := pico_family(name)):
        run = run_clean(model, prompts())
        shared = [(a, b) for a, b in itertools.combinations(run.specs, 2) if a.layer == b.layer]
        sets = [[a.heads[1], b.heads[1]] for a, b in shared] + [[a.heads[0], b.heads[2]] for a, b in shared]
        assert len(sets) > 2
        fast = ablate(run, [*sets, *each(run.specs[0])], Ablation(where))
        assert_same(fast, naive_ablate(run, [*sets, *each(run.specs[0])], Ablation(where)))


@every_model
@each_case("fill", ["zero", "mean", "resample"])
def test_fills_at_the_query_are_those_of_whole_passes(fill: Any, make: Any) -> None:
    run = run_of(make)
    for clean in (run, run_clean(run.model, run.batch, stepwise=True)):
        batch = LocateBatch(clean, SETS, Locate(fill=fill), pico_tokenizer(), None)
        assert_same(METHODS["query"].measure(batch)["query"], ablate(run, SETS, Ablation("query", fill)))


@every_model
@every_batch
def test_patching_is_the_output_on_other_prompts(lengths: tuple[int, ...], make: Any) -> None:
    """Against whole passes, of the prompts and of the counterfactual ones, with hooks of this test's own."""
    run = run_of(make, lengths)
    (other,) = counterfactuals([run.batch]) or ()
    for clean in (run, run_clean(run.model, run.batch, stepwise=True)):
        batch = LocateBatch(clean, SETS, Locate(), pico_tokenizer(), None, other)
        fast = METHODS["patching"].measure(batch)["patching"]
        for heads, scores in zip(SETS, fast, strict=True):
            assert_same([scores], [choice_scores(_patched(run, other, heads), run.batch)])
        assert all(distance > 1e-4 for distance in moved(run, fast))


def _patched(run: CleanRun, other: Tensor, heads: Any) -> Tensor:
    """(B,V) logits at the query, with the outputs of heads there that they have on other prompts."""
    out_proj = {h.layer: run.model.backbone.layers[h.layer].mixer.out_proj for h in heads}
    outputs: dict[int, Tensor] = {}

    def store(layer: int) -> Any:
        return lambda _, args: outputs.update({layer: args[0][:, -1]})

    def put(layer: int) -> Any:
        def hook(_: Any, args: tuple) -> tuple:
            u = args[0].clone()
            for columns in (slice(h.head * HEAD_DIM, (h.head + 1) * HEAD_DIM) for h in heads if h.layer == layer):
                u[:, -1, columns] = outputs[layer][:, columns]
            return (u,)

        return hook

    for hook, ids in ((store, other), (put, run.batch.input_ids)):
        handles = [module.register_forward_pre_hook(hook(layer)) for layer, module in out_proj.items()]
        with torch.no_grad():
            logits: Tensor = run.model(ids, attention_mask=run.prompt.mask, use_cache=False).logits[:, -1]
        for handle in handles:
            handle.remove()
    return logits


@every_model
@every_batch
def test_one_pass_and_a_step_equal_two_passes(lengths: tuple[int, ...], make: Any) -> None:
    """The clean query as a decode step."""
    whole = run_of(make, lengths)
    step = run_clean(whole.model, whole.batch, stepwise=True)
    assert step.passes == whole.passes / 2
    assert_same([step.scores], [whole.scores])
    assert_same(change_at_query(step, SINGLE + COMBINED), change_at_query(whole, SINGLE + COMBINED))
    with pytest.raises(ModelError, match="without `decode_step`"):
        ablate(step, SETS)


@each_case(("start", "end", "selected"), [(0, 2, [0, 1, 2]), (2, 4, [2, 3, 4]), (-1, -1, []), (-1, 4, [])])
def test_a_segment_may_begin_at_the_first_token_or_be_missing(start: int, end: int, selected: list[int]) -> None:
    batch = prompts(BATCHES["padded"])
    batch.segment_start[0, -1], batch.segment_end[0, -1] = start, end
    assert token_mask(batch, "segment")[0].nonzero()[:, 0].tolist() == selected


def test_the_tokens_that_are_meant() -> None:
    batch = prompts(BATCHES["padded"])
    everywhere, context, query = (token_mask(batch, w) for w in ("everywhere", "context", "query"))
    assert everywhere.all() and torch.equal(context, ~query) and query.nonzero()[:, 1].eq(batch.query[:, -1]).all()
    for name in ("segment_end", "answer_token"):
        assert torch.equal(token_mask(batch, name).nonzero()[:, 1], getattr(batch, name)[:, -1])
    for b, row in enumerate(token_mask(batch, "segment")):
        start, end = int(batch.segment_start[b, -1]), int(batch.segment_end[b, -1])
        assert row.nonzero()[:, 0].tolist() == list(range(start, end + 1))


def test_16_bit_models_subtract_in_32() -> None:
    """The contribution is summed in fp32 and the stream rounded once: exactly, whatever the width of the weights."""
    model = pico_base().to(torch.bfloat16)
    run = run_clean(model, prompts((11, 11)))
    spec, head = run.specs[1], 2
    own = contribution(model, run.prompt, spec, [head], "zero")
    columns = structure_of(spec).weight_slices(spec, head).out
    weight = structure_of(spec).out_proj(mixer_of(model, spec)).weight.double()[:, columns]
    exact = run.prompt.activations.heads[spec.name].double()[..., columns] @ weight.T
    assert own.dtype == torch.float32
    assert float((own.double() - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_baselines_are_of_the_same_distance_from_the_query_and_of_real_tokens() -> None:
    batch = prompts((4, 6, 5))
    T = batch.input_ids.shape[1]
    u = torch.arange(3.0)[:, None, None] * 100 + torch.arange(float(T))[:, None]
    real = batch.attention_mask.bool()
    mean, other = fill_values(u, batch, "mean"), fill_values(u, batch, "resample")
    assert fill_values(u, batch, "zero") is None
    for t in range(T):
        there = [b for b in range(3) if real[b, t]]
        assert float(mean[0, t, 0]) == pytest.approx(sum(100 * b + t for b in there) / len(there))
        for b in range(3):
            following = [c % 3 for c in range(b + 1, b + 3) if real[c % 3, t]] or [b]
            assert float(other[b, t, 0]) == 100 * following[0] + t


@every_model
def test_at_query_equals_naive(make: Any) -> None:
    run = run_of(make)
    fast = change_at_query(run, SINGLE + COMBINED)
    assert_same(fast, naive_change_at_query(run, SINGLE + COMBINED))
    fills = {spec.name: torch.randn(len(run.batch), spec.num_heads * spec.head_dim) for spec in run.specs[1:]}
    filled = change_at_query(run, SINGLE + COMBINED, fills=fills)
    assert_same(filled, naive_change_at_query(run, SINGLE + COMBINED, fills))
    assert not torch.equal(filled[HEADS].margin, fast[HEADS].margin), "the first head of the second mixer"
    assert moved(run, fast)[len(SINGLE)] < 1e-4, "no change at all"
    assert sum(distance > 1e-3 for distance in moved(run, fast)) >= len(SINGLE + COMBINED) - 4


@every_model
def test_chunks_change_nothing(make: Any) -> None:
    """One variant at a time, or an uneven last group."""
    run = run_of(make)
    for memory in (1, 300_000):
        for spec in run.specs:
            assert_same(ablate(run, each(spec), memory=memory), ablate(run, each(spec)))
        assert_same(change_at_query(run, COMBINED, memory), change_at_query(run, COMBINED))


@every_model
@each_case("reads", READS)
def test_perfect_value_is_the_gold_tokens_at_the_usual_size(reads: Any, make: Any) -> None:
    """Parallel to the gold token's own value; as long as what the head mixes in at the query, in root mean square."""
    run = run_of(make)
    for spec in run.specs:
        perfect = oracle_values(run, spec, reads)
        mixed = torch.stack([_mixed(run, spec, b) for b in range(3)])
        torch.testing.assert_close(perfect.norm(dim=-1), mixed.pow(2).sum(-1).mean(0).sqrt().expand(3, -1))
        streams = structure_of(spec).streams(
            mixer_of(run.model, spec), spec, run.prompt.activations.projected[spec.name]
        )
        for b in range(3):
            x = streams.x[b, getattr(run.batch, reads)[b, -1]]
            cosine = torch.nn.functional.cosine_similarity(perfect[b], x, dim=-1)
            torch.testing.assert_close(cosine, torch.ones(HEADS))


def _mixed(run: CleanRun, spec: MixerSpec, b: int) -> Tensor:
    """(H,P) what each head mixes in at the query of prompt b, from the hidden attention of the prompt alone."""
    ids = run.batch.input_ids[b][run.batch.attention_mask[b].bool()][None]
    structure, mixer = structure_of(spec), mixer_of(run.model, spec)
    with torch.no_grad(), record(run.model, [spec]) as trace:
        run.model(ids, use_cache=False)
        streams = structure.streams(mixer, spec, trace.projected[spec.name])
        return torch.einsum("hs,shp->hp", structure.hidden_attention(mixer, spec, streams)[0, :, -1], streams.x[0])


def test_of_several_questions_the_last_one_is_scored() -> None:
    """Its gold positions are read, and its segment is ablated."""
    one = prompts((11, 11))
    names = ("query", "target", "choice_ids", "gold", "segment_start", "segment_end", "answer_token")
    both = {name: torch.cat([getattr(one, name).flip(0), getattr(one, name)], 1) for name in names}
    two = replace(one, choice_rest=None, **both)
    runs = [run_clean(pico_base(), batch) for batch in (one, two)]
    assert (two.segment_end[:, 0] != two.segment_end[:, 1]).all() and (two.gold[:, 0] != two.gold[:, 1]).all()
    for reads in READS:
        expected, found = (oracle_values(run, run.specs[1], reads) for run in runs)
        torch.testing.assert_close(found, expected)
    assert_same(*(change_at_query(run, SINGLE) for run in runs))
    assert_same(*(ablate(run, SETS, Ablation("segment")) for run in runs))
