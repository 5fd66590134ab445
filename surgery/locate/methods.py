"""Which measurement fills which column, batch by batch. Owns: the columns and what each method runs.

Must never know: files, selection. An item is a single head, or all heads of a mixer; the rivals estimate heads alone.
Shape legend: B prompts, C items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import ProbeError
from surgery.interventions.ablation import Removal
from surgery.locate.ablation_sweep import READS, Sweep, Variant
from surgery.locate.baselines import attribution, integrated_gradients, layer_divergence, retrieval_score
from surgery.locate.hidden_attention import STRUCTURAL, structural_scores
from surgery.locate.scores import Array, Record, plain, spread
from surgery.models.lookup import family_of
from surgery.probes.documents import Document
from surgery.recipe import Locate
from surgery.scoring.ranking import ChoiceScores
from surgery.types import HeadId, MixerSpec

# Margin in logits that the model loses, or gains, when ...
COLUMNS = {
    "ablation": "the head is removed at every token",
    "query": "the head is removed at the query token alone",
    "context": "the head is removed at every token but the query",
    "segment_end": "the head reads the end of the gold segment perfectly, at the query",
    "answer_token": "the head reads the gold value perfectly, at the query",
}
REMOVALS = {"ablation", "query", "context", "sharpen"}  # the methods that change single heads and fill these
# In units of their own.
ESTIMATES = {
    "attribution": "margin that removing the head costs, to first order",
    "integrated_gradients": "the same, by integrated gradients of its layer",
    "layer_divergence": "KL of the answer's distribution when the head's whole layer is removed",
    "retrieval_score": "how often the head looks at the token to be copied most",
    **{name: f"hidden attention: {name.replace('_', ' ')}" for name in STRUCTURAL},
}
Item = tuple[HeadId, ...]


def _from_every_mixer(sweep: Sweep) -> float:
    return sum(1 - spec.layer / sweep.model.config.num_hidden_layers for spec in sweep.specs)


# What the estimates of one prompt cost in forward passes; a backward pass is taken for two.
_PASSES: dict[str, Callable[[Sweep], float]] = {
    "attribution": lambda sweep: 3.0,
    "integrated_gradients": lambda sweep: 15 * _from_every_mixer(sweep),
    "layer_divergence": lambda sweep: 1 + _from_every_mixer(sweep),
    "retrieval_score": lambda sweep: 1.0,
    "hidden_attention": lambda sweep: 1.0,
}
Run = Callable[[Sweep, list[Item]], list[ChoiceScores]]


def items_of(specs: Sequence[MixerSpec], layers: bool) -> list[Item]:
    """Every head by itself, then, if asked for, every mixer as a whole."""
    heads: list[Item] = [(head,) for spec in specs for head in spec.heads]
    return heads + ([spec.heads for spec in specs] if layers else [])


def columns_of(section: Locate) -> dict[str, Run]:
    """The columns of a recipe's methods, and what measures each."""
    runs: dict[str, Run] = {}
    for method in section.methods:
        if method == "ablation":
            runs["ablation"] = partial(_without, Removal(section.where, section.fill))
        elif method == "context":
            runs["context"] = partial(_without, Removal("context", section.fill))
        elif method == "query" and section.fill == "zero":
            runs["query"] = _ablated_at_query
        elif method == "query":
            runs["query"] = partial(_without, Removal("query", section.fill))
        elif method == "sharpen":
            runs |= {reads: partial(_sharpened, reads) for reads in READS}
    return runs


def _without(removal: Removal, sweep: Sweep, items: list[Item]) -> list[ChoiceScores]:
    return sweep.without(items, removal)


def _ablated_at_query(sweep: Sweep, items: list[Item]) -> list[ChoiceScores]:
    return sweep.at_query([Variant(ablate=item) for item in items])


def _sharpened(reads: str, sweep: Sweep, items: list[Item]) -> list[ChoiceScores]:
    return sweep.at_query([Variant(sharpen=tuple((head, reads) for head in item)) for item in items])  # type: ignore[misc]


def measure(
    sweep: Sweep,
    index: int,
    items: Sequence[Item],
    alive: Sequence[int],
    section: Locate,
    documents: Sequence[Document] | None,
    tokenizer: PreTrainedTokenizerBase,
    tick: Callable[[], None],
) -> Record:
    """One batch: every column for the items that are alive, NaN for the others.

    Args:
        documents: that the batch was made of; what the methods read that need text.
    """
    record = Record(index, plain(sweep.clean))
    own = [items[i] for i in alive]
    for column, run in columns_of(section).items():
        record.columns[column] = spread([plain(s) for s in run(sweep, own)], alive, len(items))
        tick()
    for method in section.methods:
        for column, values_HB in _estimates(method, sweep, documents, tokenizer).items():
            heads = len(values_HB)
            record.estimates[column] = np.full((len(items), values_HB.shape[1]), np.nan)
            record.estimates[column][:heads] = values_HB
        if method not in REMOVALS:
            sweep.passes += _PASSES[method](sweep) * len(sweep.batch)
            tick()
    return record


def _estimates(
    method: str, sweep: Sweep, documents: Sequence[Document] | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Array]:
    """Column -> (heads,B)."""
    if method in ("attribution", "integrated_gradients"):
        found = attribution(sweep) if method == "attribution" else integrated_gradients(sweep)
        return {method: found.double().numpy()}
    if method == "layer_divergence":
        counts = torch.tensor([spec.num_heads for spec in sweep.specs])
        return {method: layer_divergence(sweep).repeat_interleave(counts, 0).double().numpy()}
    if method not in ("retrieval_score", "hidden_attention"):
        return {}
    if documents is None:
        raise ProbeError("locate.methods", method, "It reads the prompts' text; batches alone do not hold it.")
    if method == "retrieval_score":
        return {method: _retrieval_scores(sweep.model, tokenizer, documents)}
    found = structural_scores(sweep.model, tokenizer, documents, sweep.specs)
    heads = [head for spec in sweep.specs for head in spec.heads]
    return {name: np.stack([found[head][name] for head in heads]) for name in STRUCTURAL}


def _retrieval_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]
) -> Array:
    """(heads,B), of SSM heads by their hidden attention."""
    heads = sum(spec.num_heads for spec in family_of(model.config).mixers(model.config))
    scores = []
    for document in documents:
        try:
            scores.append(retrieval_score(model, tokenizer, [document], hidden=True))
        except ProbeError:  # nothing of this answer stands in its segment, as the tokenizer cuts them
            scores.append(torch.full((heads,), torch.nan))
    return torch.stack(scores, 1).double().numpy()
