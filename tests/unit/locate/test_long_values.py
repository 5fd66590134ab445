"""Heads changed where it takes several tokens to tell the choices apart: as one whole pass for each choice says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.data.encoding import encode
from surgery.data.ranking import answer_choices
from surgery.locate.ablation import Ablation, fill_values
from surgery.locate.ablation_sweep import Variant, ablate, change_at_query, changes_by_mixer
from surgery.locate.clean_run import CleanRun, run_clean
from surgery.locate.locating import locate_heads
from surgery.models.hooks import hooked, record
from surgery.models.lookup import mixer_of, structure_of
from surgery.models.oracle_read import OracleRead, intervene
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Locate, Splice
from surgery.types import HeadId
from tests.support.long_choices import Change, digit_tokenizer, long_prompts, margins, unpadded, whole_passes
from tests.support.pico import FAMILY_NAMES, pico_base, pico_family, pico_hybrid, pico_site, random_site

MODELS = {name: partial(pico_family, name) for name in FAMILY_NAMES}
MODELS["hybrid"] = lambda: pico_hybrid([pico_site(0, [1, 3]), random_site(2, [0], "replace")])
every_model = pytest.mark.parametrize("name", MODELS)


@cache
def run_of(name: str, most: int = 3) -> CleanRun:
    return run_clean(MODELS[name](), long_prompts(most))


def sets_of(run: CleanRun) -> list[list[HeadId]]:
    """A head of the lowest mixer, one of the highest, a whole mixer, and heads of several mixers."""
    low, middle, high = (run.specs[i] for i in (0, len(run.specs) // 2, -1))
    return [[low.heads[1]], [high.heads[0]], list(middle.heads), [high.heads[1], low.heads[0]]]


def variants_of(run: CleanRun) -> list[Variant]:
    low, high = run.specs[0], run.specs[-1]
    return [
        Variant(ablate=(low.heads[0],)),
        Variant(ablate=(high.heads[1],)),
        Variant(oracle=((low.heads[1], "segment_end"), (high.heads[0], "answer_token"))),
        Variant(ablate=(low.heads[0],), oracle=((high.heads[0], "answer_token"),)),
    ]


def removed(run: CleanRun, heads: list[HeadId], where: str) -> Change:
    """Zeroes the heads' inputs of `out_proj` in a whole pass; everywhere means at the choices' tokens too."""

    @contextmanager
    def change(b: int, length: int) -> Iterator[None]:
        places = {"everywhere": slice(None), "context": slice(0, length - 1), "query": slice(length - 1, length)}

        def zero(columns: Any, args: tuple) -> tuple:
            u = args[0].clone()
            u[:, places[where], columns] = 0
            return (u, *args[1:])

        with hooked(run.model, run.specs) as hooks:
            for head in heads:
                spec = next(spec for spec in run.specs if spec.name == head.mixer)
                structure = structure_of(spec)
                out_proj, columns = (
                    structure.out_proj(mixer_of(run.model, spec)),
                    structure.weight_slices(spec, head.head),
                )
                hooks.before(spec.layer, str(head), out_proj, partial(zero, columns.out))
            yield

    return change


def changed_at_query(run: CleanRun, variant: Variant) -> Change:
    """What the changed mixers put out at the query, from the prompt alone, put there in a whole pass."""
    masks, reads = changes_by_mixer(run, [variant])

    @contextmanager
    def change(b: int, length: int) -> Iterator[None]:
        read = {name: OracleRead(r.heads, r.value[:, b : b + 1]) for name, r in reads.items()}
        with intervene(run.model, run.specs, masks, read), record(run.model, run.specs) as trace:
            run.model(unpadded(run.batch, b)[None], use_cache=False)

        def put(spec: Any, args: tuple) -> tuple:
            u = args[0].clone()
            u[:, length - 1] = trace.heads[spec.name][:, -1]
            return (u, *args[1:])

        with hooked(run.model, run.specs) as hooks:
            for spec in run.specs:
                if spec.name in masks or spec.name in reads:
                    out_proj = structure_of(spec).out_proj(mixer_of(run.model, spec))
                    hooks.before(spec.layer, spec.name, out_proj, partial(put, spec))
            yield

    return change


def assert_margins(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@every_model
def test_a_removal_goes_on_at_the_tokens_of_the_choices(name: str) -> None:
    """And one in the prompt alone, or no removal, leaves the states behind that it produced."""
    run = run_of(name)
    assert_margins(run.scores.margin, margins(whole_passes(run.model, run.batch), run.batch))
    several = sets_of(run)[3]
    cases = [*((heads, "everywhere") for heads in sets_of(run)), (several, "context"), (several, "query")]
    moved = []
    for heads, where in cases:
        found = ablate(run, [heads], Ablation(where))[0].margin
        assert_margins(found, margins(whole_passes(run.model, run.batch, removed(run, heads, where)), run.batch))
        moved.append(float((found - run.scores.margin).abs().max()))
    assert sum(distance > 1e-4 for distance in moved) >= len(cases) - 2, moved


@every_model
def test_a_change_at_the_query_leaves_its_states_behind(name: str) -> None:
    run = run_of(name)
    for variant in variants_of(run):
        found = change_at_query(run, [variant])[0].margin
        assert_margins(found, margins(whole_passes(run.model, run.batch, changed_at_query(run, variant)), run.batch))


def test_paths_are_resampled_from_those_of_the_next_prompt() -> None:
    """The next path in the batch is mostly another choice of the same prompt."""
    run = run_of("mamba2")
    owner = run.paths.owner
    assert owner.tolist() == [0, 0, 2, 2, 3, 3, 3]
    for step in run.steps:
        rows = torch.arange(7.0)[:, None, None]
        taken = fill_values(rows, step.batch, "resample", step.owner)[:, 0, 0].long()
        assert owner[taken].tolist() == [2, 2, 3, 3, 0, 0, 0] and step.batch.attention_mask[taken].all()


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
    run = run_clean(model, batch)
    for scored in found.heads[::3]:
        without = margins(whole_passes(model, batch, removed(run, [scored.head], "everywhere")), batch)
        lost = float((clean.margin - without).mean())
        assert scored.scores["ablation"].value == pytest.approx(lost, abs=1e-4) and abs(lost) > 1e-3
