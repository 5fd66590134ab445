"""The locating methods of this package. Recipes are validated with them, without torch: each imports what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surgery.recipe.methods import Column, register_method

if TYPE_CHECKING:
    from surgery.data.ranking import ChoiceScores
    from surgery.locate.methods import LocateBatch

    Scores = dict[str, list[ChoiceScores]]


@register_method("ablation", [Column("ablation", "removed at every token", effect="loss")], ranks=True)
def ablation(batch: LocateBatch) -> Scores:
    """Ablate each head at the tokens of `locate.where`."""
    from surgery.locate.ablation import Ablation
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
    from surgery.locate.ablation import fill_values
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
    from surgery.locate.ablation import Ablation
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
    from surgery.locate.ablation_sweep import Variant, change_at_query
    from surgery.types import READS

    scores: Scores = {}
    for position in READS:
        variants = [Variant(oracle=tuple((head, position) for head in item)) for item in batch.items]
        scores[position] = change_at_query(batch.run, variants)
    return scores
