"""Score what each head reads: columns of the method `hidden_attention`.

    PYTHONPATH=. surgery locate quickstart plugins=[bench.plugins.hidden_attention] \\
        locate.methods=[query,patching,sharpen,hidden_attention]

The rows are those of `surgery.locate.hidden_attention`: row t of a head holds shares, the weight of every past token in
what token t reads, which sum to 1. Gather and Aggregate heads are defined in arXiv 2504.18574. In Python also for heads
that were spliced in:

    structural_scores(hybrid, tokenizer, documents, specs, branch=True)

These scores describe where a head looks, not its effect: a head may read sharply and write nothing. Roles come from
ablation.
Shape legend: B prompts, T tokens, H heads, K segments, N documents; `...` are leading dimensions of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.offsets import tokenized
from surgery.errors import PlanError, ProbeError
from surgery.hybrid.configuration_hybrid import is_whole, splice_sites
from surgery.locate.hidden_attention import Shares, normalised, numpy_of, observe_patterns
from surgery.locate.methods import Column, LocateBatch, register_method
from surgery.probes.documents import Document
from surgery.probes.kv_retrieval import HEADER
from surgery.types import HeadId, MixerSpec

Span = tuple[int, int]  # [start, stop) in tokens


class Rows(Protocol):
    """The matrices of one forward pass."""

    def shares(self, spec: MixerSpec, heads: Sequence[int], constant: bool = False) -> Tensor:
        """(B,H,T,T) shares; with `constant`, those of queries and keys that are held constant."""


@dataclass(frozen=True)
class BranchRows:
    """Rows of the attention that was spliced in.

    Attributes:
        weights: by `MixerSpec.name`, the spliced heads of the layer and their weights (B,h,T,T).
    """

    weights: dict[str, tuple[list[int], Tensor]]

    def shares(self, spec: MixerSpec, heads: Sequence[int], constant: bool = False) -> Tensor:
        spliced, weights_BHTT = self.weights[spec.name]
        weights_BHTT = weights_BHTT[:, [spliced.index(head) for head in heads]]
        return normalised(torch.ones_like(weights_BHTT).tril()) if constant else weights_BHTT


@torch.no_grad()
def observe(model: PreTrainedModel, batch: EncodedBatch, specs: Sequence[MixerSpec], branch: bool) -> Rows:
    """Run prompts of one length. With `branch`, observe the spliced heads of a hybrid instead of its mixers.

    Raises:
        PlanError: no mixers, or nothing is spliced.
    """
    if not specs:
        raise PlanError("heads", "none", "Pass at least one head.")
    if not branch:
        return observe_patterns(model, batch, specs)
    sites = splice_sites(getattr(model.config, "splice", None))
    if not sites:
        raise PlanError("model", model.config.model_type, "The model has no spliced heads. Set branch=False.")
    input_ids = batch.input_ids.to(model.device)
    B, T = input_ids.shape
    every = torch.arange(T, device=input_ids.device).expand(B, T)
    rows = model(input_ids, use_cache=False, logits_to_keep=1, splice_queries=every).splice_attentions
    weights = {}
    for layer, weights_BHTT in zip(sorted(sites), rows, strict=True):
        whole = is_whole(sites[layer])
        heads = list(range(weights_BHTT.shape[1])) if whole else list(sites[layer]["heads"])
        weights[f"L{layer}{'A' if whole else 'H'}"] = (heads, weights_BHTT)
    return BranchRows(weights)


def segment_spans(document: Document, tokenizer: PreTrainedTokenizerBase) -> tuple[Span, ...]:
    """Find the tokens of every `key:value` line of a KV-retrieval document, as `encode` splits it.

    Returns:
        (start, stop) token indices of each line.

    Raises:
        ProbeError: the document is of another task.
    """
    question = document.questions[-1] if document.questions else None
    count = len(question.choices) if question else 0
    spans, start = [], len(HEADER)
    for line in document.text[start:].split("\n")[:count]:
        spans.append((start, start + len(line) + 1))
        start += len(line) + 1
    if not document.text.startswith(HEADER) or question is None or question.segment not in spans:
        raise ProbeError("documents", document.task, "Structural scores need documents of kv_retrieval.")
    (tokens,) = tokenized(tokenizer, [document.text])
    first, last = np.asarray(tokens.starts), np.asarray(tokens.ends)
    # Tokens that overlap the line. As in `encode`, several tokens may share one character.
    touches = [np.flatnonzero((first < stop) & (last > start)) for start, stop in spans]
    return tuple((int(touching[0]), int(touching[-1]) + 1) for touching in touches)


def structural_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    specs: Sequence[MixerSpec],
    branch: bool = False,
) -> dict[HeadId, dict[str, Shares]]:
    """Score the shape of every head's attention pattern. Prompts run one by one, up to the query of the last question.

    Args:
        documents: KV-retrieval prompts.
        specs: mixers whose heads are scored.
        branch: score the spliced attention heads instead of the mixers.

    Returns:
        For each head and column, (N,): one score per document.

    Raises:
        ProbeError: no documents, or of another task than kv_retrieval.
    """
    if not documents:
        raise ProbeError("documents", 0, "Pass at least one document.")
    scores: dict[HeadId, dict[str, list[float]]] = {}
    for document in documents:
        batch = encode([document], tokenizer, until_answer=True)
        segments, gold = segment_spans(document, tokenizer), document.questions[-1].gold
        rows = observe(model, batch, specs, branch)
        ends = [stop - 1 for _, stop in segments]
        for spec in specs:
            heads = rows.weights.get(spec.name, ([],))[0] if isinstance(rows, BranchRows) else range(spec.num_heads)
            if not heads:
                continue
            matrix_HTT, constant_HTT = rows.shares(spec, heads)[0], rows.shares(spec, heads, constant=True)[0]
            row_HT = numpy_of(matrix_HTT[:, -1])
            columns = {
                "gather_score": gather_score(numpy_of(matrix_HTT[:, ends]), numpy_of(constant_HTT[:, ends]), segments),
                "aggregate_score": aggregate_score(row_HT, segments, gold),
                "segment_share": np.asarray(sum(row_HT[:, start:stop].sum(-1) for start, stop in segments)),
                "entropy": entropy(row_HT),
                "effective_tokens": effective_tokens(row_HT),
                "sharpness": sharpness(row_HT),
            }
            for i, head in enumerate(heads):
                of_head = scores.setdefault(HeadId(spec.layer, head, spec.letter), {name: [] for name in columns})
                for name, values_H in columns.items():
                    of_head[name].append(float(values_H[i]))
    return {head: {name: np.asarray(v) for name, v in of_head.items()} for head, of_head in scores.items()}


def aggregate_score(row: Shares, segments: Sequence[Span], gold: int) -> Shares:
    """Score how strongly the query reads the gold segment compared with the other segments.

    The score is `(m - 1/K) / (1 - 1/K)`, with m the gold segment's fraction of the share of all K segments. It is 1 if
    only the gold segment is read, and 0 if all segments are read equally or none is read.

    Args:
        row: (...,T) rows of the query.
        segments: spans in tokens.
        gold: index of the gold segment.

    Returns:
        (...) one score for each row.

    Raises:
        ProbeError: fewer than two segments.
    """
    K = len(segments)
    if K < 2:
        raise ProbeError("segments", K, "Pass at least two segments.")
    share_K = np.stack([row[..., start:stop].sum(-1) for start, stop in segments], axis=-1)
    total = share_K.sum(-1)
    part = np.divide(share_K[..., gold], total, out=np.full_like(total, 1 / K), where=total > 0)
    return np.asarray((part - 1 / K) / (1 - 1 / K))


def gather_score(ends: Shares, constant: Shares, segments: Sequence[Span]) -> Shares:
    """Score how strongly the last token of each segment reads its own segment, without the effect of the decay.

    Args:
        ends: (...,K,T) rows of the segments' last tokens.
        constant: the same rows computed with C.B held constant. They contain the decay alone, which also keeps a row on
            its own segment, and are subtracted.

    Returns:
        (...) the mean over segments.
    """

    def on_own_segment(rows: Shares) -> Shares:
        return np.stack([rows[..., k, start:stop].sum(-1) for k, (start, stop) in enumerate(segments)], axis=-1)

    return np.asarray((on_own_segment(ends) - on_own_segment(constant)).mean(-1))


def effective_tokens(row: Shares) -> Shares:
    """(...) number of tokens over which each row (...,T) is spread, 1 to T: exp of its entropy."""
    logs = np.log(np.where(row > 0, row, 1.0))
    return np.asarray(np.exp(-(row * logs).sum(-1)))


def entropy(row: Shares) -> Shares:
    """(...) entropy of rows (...,T), divided by that of a uniform row over T tokens: 0 to 1."""
    T = row.shape[-1]
    return np.asarray(np.log(effective_tokens(row)) / np.log(T)) if T > 1 else np.zeros(row.shape[:-1])


def sharpness(row: Shares) -> Shares:
    """(...) largest difference between neighbouring tokens of rows (...,T), 0 to 1.

    A decay changes smoothly along the prompt. Reading one token but not the next needs a sharp transition.
    """
    return np.asarray(np.abs(np.diff(row, axis=-1)).max(-1, initial=0.0))


@register_method(
    "hidden_attention",
    [
        Column("gather_score", "share of segment ends on their own segment, beyond the decay", unit="share"),
        Column("aggregate_score", "the gold segment among all that the query reads", unit="share"),
        Column("segment_share", "share of all segments in the query's row", unit="share"),
        Column("entropy", "entropy of the query's row, 1 where it is uniform", unit="share"),
        Column("effective_tokens", "exp of the entropy of the query's row", unit="tokens"),
        Column("sharpness", "largest step between neighbouring tokens of the query's row", unit="share"),
    ],
    passes=1,
    needs_text=True,
)
def hidden_attention(batch: LocateBatch) -> dict[str, Any]:
    """Score the shape of each head's attention pattern. Needs generated dictionaries (`locate.task: kv_retrieval`)."""
    run, documents = batch.run, batch.documents or ()
    scores = list(structural_scores(run.model, batch.tokenizer, documents, run.specs).values())
    return {name: np.stack([columns[name] for columns in scores]) for name in scores[0]}
