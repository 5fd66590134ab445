"""Locating methods: functions that score every head on one batch of prompts.

A recipe is validated with this module and without torch, so each function imports the modules that it needs.

Shape legend: B prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.recipe.methods import METHODS, Column, Method, register_method

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from surgery.locate.clean_run import CleanRun
    from surgery.probes.documents import Document
    from surgery.recipe import Locate, Splice
    from surgery.scoring.ranking import ChoiceScores
    from surgery.types import HeadId, ScoredHead

__all__ = ["METHODS", "Candidates", "Column", "LocateBatch", "Method", "TrainedScores", "register_method"]

Scores = dict[str, "list[ChoiceScores]"]


@dataclass(frozen=True)
class LocateBatch:
    """Input of a locating method: one batch of prompts.

    Attributes:
        run: the clean model on the prompts, with its activations and caches.
        items: sets of heads to change together: single heads and, with `locate.layers`, all heads of a mixer. Heads
            that a search has dropped are not included.
        section: the recipe's section `locate`.
        tokenizer: the model's.
        documents: text of the prompts; None if encoded batches were passed to `locate_heads`.
        counterfactual: (B,T) tokens of the prompts with another answer in the place of their own; None if a prompt has
            no place of its answer, or no other answer was found (`surgery.locate.batches.counterfactuals`).
    """

    run: CleanRun
    items: Sequence[tuple[HeadId, ...]]
    section: Locate
    tokenizer: PreTrainedTokenizerBase
    documents: Sequence[Document] | None
    counterfactual: Tensor | None = None


@dataclass(frozen=True)
class Candidates:
    """Input of a locating method that trains.

    Attributes:
        model: the base. It must not be changed.
        heads: the heads to train, the best oracle read first, each with the position that it reads.
        section, splice: sections of the recipe.
        seed: the recipe's seed.
        held_out: number of held-out prompts to score on, as many as the other methods measure.
        tick: called after each training step.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    heads: tuple[ScoredHead, ...]
    section: Locate
    splice: Splice
    seed: int
    held_out: int
    tick: Callable[[], None]


@dataclass(frozen=True)
class TrainedScores:
    """Result of a locating method that trains.

    Attributes:
        columns: by column and head, (held-out prompts,) scores. Heads that were not tried are missing.
        passes: work in full forward passes of one prompt.
        steps: training steps of all candidates together.
        chosen: heads in the order in which they were chosen, if the method chooses several together. By default the
            ranking decides.
    """

    columns: Mapping[str, Mapping[HeadId, NDArray[Any]]]
    passes: float
    steps: int
    chosen: tuple[ScoredHead, ...] = ()


@register_method("ablation", [Column("ablation", "removed at every token", effect="loss")], ranks=True)
def ablation(batch: LocateBatch) -> Scores:
    """Ablate each head at the tokens of `locate.where`."""
    from surgery.interventions.ablation import Ablation
    from surgery.locate.ablation_sweep import ablate

    return {"ablation": ablate(batch.run, batch.items, Ablation(batch.section.where, batch.section.fill))}


@register_method(
    "query",
    [Column("query", "removed at the query token alone", effect="loss")],
    ranks="aggregate",
    decode_step=True,
    gloss="ablation at the query",
)
def query(batch: LocateBatch) -> Scores:
    """Ablate each head at the query, where Aggregate heads act."""
    from surgery.interventions.ablation import fill_values
    from surgery.locate.ablation_sweep import Variant, change_at_query

    run, fills = batch.run, {}
    for name, u_BTI in run.query.activations.heads.items():
        values = fill_values(u_BTI[:, -1:], run.query.batch, batch.section.fill)
        if values is not None:
            fills[name] = values[:, 0]
    variants = [Variant(ablate=tuple(item)) for item in batch.items]
    return {"query": change_at_query(run, variants, fills=fills)}


@register_method("context", [Column("context", "removed at every token but the query", effect="loss")], ranks="gather")
def context(batch: LocateBatch) -> Scores:
    """Ablate each head before the query, where Gather heads act."""
    from surgery.interventions.ablation import Ablation
    from surgery.locate.ablation_sweep import ablate

    return {"context": ablate(batch.run, batch.items, Ablation("context", batch.section.fill))}


@register_method(
    "patching",
    [Column("patching", "replaced at the query by its output for another answer", effect="loss")],
    ranks=True,
    decode_step=True,
    gloss="activation patching",
)
def patching(batch: LocateBatch) -> Scores:
    """Activation patching: give each head, at the query, its output on the prompt with another answer in it.

    A head that writes the answer at the query then writes the other one. A head that only needs the question has the
    same output in both prompts, and loses nothing.
    """
    from surgery.locate.ablation_sweep import Variant, change_at_query, outputs_at_query

    assert batch.counterfactual is not None, "locate_heads refuses such prompts"
    fills = outputs_at_query(batch.run, batch.counterfactual)
    variants = [Variant(ablate=tuple(item)) for item in batch.items]
    return {"patching": change_at_query(batch.run, variants, fills=fills)}


@register_method(
    "sharpen",
    [
        Column("segment_end", "reading the end of the gold segment alone, at the query", effect="gain"),
        Column("answer_token", "reading the gold value alone, at the query", effect="gain"),
    ],
    ranks=True,
    greedy=True,
    decode_step=True,
    gloss="oracle read",
)
def sharpen(batch: LocateBatch) -> Scores:
    """Oracle read: let each head attend to exactly one token at the query."""
    from surgery.locate.ablation_sweep import READS, Variant, change_at_query

    scores: Scores = {}
    for position in READS:
        variants = [Variant(oracle=tuple((head, position) for head in item)) for item in batch.items]
        scores[position] = change_at_query(batch.run, variants)
    return scores
