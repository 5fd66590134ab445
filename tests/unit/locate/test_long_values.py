"""Heads changed where it takes several tokens to tell the choices apart: as one whole pass for each choice says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.data.encoding import encode
from surgery.interventions.ablation import Removal
from surgery.interventions.hooks import hooked, record
from surgery.interventions.oracle_read import PerfectRead, intervene
from surgery.locate.ablation_sweep import Sweep, Variant
from surgery.locate.locating import locate_heads
from surgery.models.lookup import mixer_of, structure_of
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Locate, Splice
from surgery.scoring.ranking import answer_choices
from surgery.types import HeadId
from tests.support.long_choices import Change, digit_tokenizer, long_prompts, margins, unpadded, whole_passes
from tests.support.pico import FAMILY_NAMES, pico_base, pico_family, pico_hybrid, pico_site, random_site

MODELS = {name: partial(pico_family, name) for name in FAMILY_NAMES}
MODELS["hybrid"] = lambda: pico_hybrid([pico_site(0, [1, 3]), random_site(2, [0], "replace")])
every_model = pytest.mark.parametrize("name", MODELS)


@cache
def sweep_of(name: str, most: int = 3, memory: int = 2**29) -> Sweep:
    return Sweep(MODELS[name](), long_prompts(most), memory)


def sets_of(sweep: Sweep) -> list[list[HeadId]]:
    """A head of the lowest mixer, one of the highest, a whole mixer, and heads of several mixers."""
    low, middle, high = (sweep.specs[i] for i in (0, len(sweep.specs) // 2, -1))
    return [[low.heads[1]], [high.heads[0]], list(middle.heads), [high.heads[1], low.heads[0]]]


def variants_of(sweep: Sweep) -> list[Variant]:
    low, high = sweep.specs[0], sweep.specs[-1]
    return [
        Variant(ablate=(low.heads[0],)),
        Variant(ablate=(high.heads[1],)),
        Variant(sharpen=((low.heads[1], "segment_end"), (high.heads[0], "answer_token"))),
        Variant(ablate=(low.heads[0],), sharpen=((high.heads[0], "answer_token"),)),
    ]


def removed(sweep: Sweep, heads: list[HeadId], where: str) -> Change:
    """Zeroes the heads' inputs of `out_proj` in a whole pass; everywhere means at the choices' tokens too."""

    @contextmanager
    def change(b: int, length: int) -> Iterator[None]:
        places = {"everywhere": slice(None), "context": slice(0, length - 1), "query": slice(length - 1, length)}

        def zero(columns: Any, args: tuple) -> tuple:
            u = args[0].clone()
            u[:, places[where], columns] = 0
            return (u, *args[1:])

        with hooked(sweep.model, sweep.specs) as hooks:
            for head in heads:
                spec = sweep.by_name[head.mixer]
                structure = structure_of(spec)
                out_proj, columns = (
                    structure.out_proj(mixer_of(sweep.model, spec)),
                    structure.weight_slices(spec, head.head),
                )
                hooks.before(spec.layer, str(head), out_proj, partial(zero, columns.out))
            yield

    return change


def changed_at_query(sweep: Sweep, variant: Variant) -> Change:
    """What the changed mixers put out at the query, from the prompt alone, put there in a whole pass."""
    ablate, sharpen = sweep._masks([variant])

    @contextmanager
    def change(b: int, length: int) -> Iterator[None]:
        read = {name: PerfectRead(r.heads, r.value[:, b : b + 1]) for name, r in sharpen.items()}
        with intervene(sweep.model, sweep.specs, ablate, read), record(sweep.model, sweep.specs) as trace:
            sweep.model(unpadded(sweep.batch, b)[None], use_cache=False)

        def put(spec: Any, args: tuple) -> tuple:
            u = args[0].clone()
            u[:, length - 1] = trace.heads[spec.name][:, -1]
            return (u, *args[1:])

        with hooked(sweep.model, sweep.specs) as hooks:
            for spec in sweep.specs:
                if spec.name in ablate or spec.name in sharpen:
                    out_proj = structure_of(spec).out_proj(mixer_of(sweep.model, spec))
                    hooks.before(spec.layer, spec.name, out_proj, partial(put, spec))
            yield

    return change


def assert_margins(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def check_moved(sweep: Sweep, scores: list[Any]) -> None:
    """That the check can fail: most of the changes matter."""
    apart = [float((s.margin - sweep.clean.margin).abs().max()) for s in scores]
    assert sum(x > 1e-3 for x in apart) >= len(apart) - 1, apart


@every_model
@pytest.mark.parametrize("most", [2, 3])
def test_clean_is_one_whole_pass_for_each_choice(most: int, name: str) -> None:
    sweep = sweep_of(name, most)
    assert_margins(sweep.clean.margin, margins(whole_passes(sweep.model, sweep.batch), sweep.batch))


@every_model
@pytest.mark.parametrize("index", range(4))
def test_removal_goes_on_at_the_tokens_of_the_choices(index: int, name: str) -> None:
    sweep = sweep_of(name)
    heads = sets_of(sweep)[index]
    found = sweep.without([heads])[0].margin
    assert_margins(
        found, margins(whole_passes(sweep.model, sweep.batch, removed(sweep, heads, "everywhere")), sweep.batch)
    )


@every_model
@pytest.mark.parametrize("where", ["context", "query"])
def test_removal_in_the_prompt_leaves_its_states_behind(where: Any, name: str) -> None:
    sweep = sweep_of(name)
    heads = sets_of(sweep)[3]
    found = sweep.without([heads], Removal(where))[0].margin
    assert_margins(found, margins(whole_passes(sweep.model, sweep.batch, removed(sweep, heads, where)), sweep.batch))


@every_model
@pytest.mark.parametrize("index", range(4))
def test_a_change_at_the_query_leaves_its_states_behind(index: int, name: str) -> None:
    sweep = sweep_of(name)
    variant = variants_of(sweep)[index]
    found = sweep.at_query([variant])[0].margin
    assert_margins(
        found, margins(whole_passes(sweep.model, sweep.batch, changed_at_query(sweep, variant)), sweep.batch)
    )


@every_model
@pytest.mark.parametrize("fill", ["zero", "mean", "resample"])
def test_folded_equals_all_blocks_one_variant_at_a_time(fill: Any, name: str) -> None:
    sweep = sweep_of(name)
    sets, variants = sets_of(sweep), variants_of(sweep)
    for where in ("everywhere", "context"):
        fast, naive = (sweep.without(sets, Removal(where, fill), naive=n) for n in (False, True))
        assert_margins(torch.stack([s.margin for s in fast]), torch.stack([s.margin for s in naive]))
        if where == "everywhere":
            check_moved(sweep, fast)
    if fill == "zero":
        fast, naive = (sweep.at_query(variants, naive=n) for n in (False, True))
        assert_margins(torch.stack([s.margin for s in fast]), torch.stack([s.margin for s in naive]))
        check_moved(sweep, fast)


@pytest.mark.parametrize("name", ["mamba2", "zamba2"])
def test_chunks_change_nothing(name: str) -> None:
    whole, parts = sweep_of(name), sweep_of(name, memory=1)
    sets, variants = sets_of(whole), variants_of(whole)
    for one, other in (
        (whole.without(sets), parts.without(sets)),
        (whole.at_query(variants), parts.at_query(variants)),
    ):
        assert_margins(torch.stack([s.margin for s in one]), torch.stack([s.margin for s in other]))


def test_one_token_is_scored_as_before_whatever_stands_behind_it() -> None:
    """Choices of one token in a wider batch: the difference of their logits."""
    batch = long_prompts()
    single = replace(batch, choice_rest=None)[1:2]  # a prompt whose choices have one token each
    model = MODELS["mamba2"]()
    assert (batch.choice_rest[1] < 0).all()
    assert_margins(Sweep(model, batch).clean.margin[1:2], Sweep(model, single).clean.margin)


def test_locate_with_a_tokenizer_that_cuts_numbers_into_digits() -> None:
    """The clean model as `evaluate` scores it, and every head's loss as whole passes without it say."""
    model, n = pico_base(vocab_size=1024, layers=2), 3
    section = Locate(pairs=8, examples=n, batch_size=2, methods=("ablation", "sharpen"))
    found = locate_heads(model, digit_tokenizer(), section, Splice(select="ablation"), any_accuracy=True)
    documents = [kv_document(rng_of("locate", 0, i), 8, split="eval") for i in range(n)]
    clean = answer_choices(model, digit_tokenizer(), documents, 3)
    assert found.clean["accuracy"].value == float(clean.correct.float().mean())
    assert found.clean["margin"].value == pytest.approx(float(clean.margin.mean()), abs=1e-4)
    batch = encode(documents, digit_tokenizer(), "left", until_answer=True)
    assert batch.choice_rest.shape[-1] == 1
    sweep = Sweep(model, batch)
    for scored in found.heads[::3]:
        without = margins(whole_passes(model, batch, removed(sweep, [scored.head], "everywhere")), batch)
        lost = float((clean.margin - without).mean())
        assert scored.scores["ablation"].value == pytest.approx(lost, abs=1e-4) and abs(lost) > 1e-3
