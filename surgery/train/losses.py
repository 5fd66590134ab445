"""What training asks for. Owns: the formula of each objective. Must never know: optimizers, data, files.

Every loss is a sum over its terms (tokens, or questions) divided by `count`, by default the number that the batch has:
the loss is then their mean. A batch that is only a part, of several processes or of several micro-batches, is given the
number of terms of the whole, and its parts add up to the mean over the whole:

    sum over processes of loss(count=whole / processes) / processes == loss of the whole

With a `count`, a part that has no term itself gives a zero that still depends on the model's output.

Shape legend: B documents, T tokens, V vocabulary, Q questions, H spliced heads of a layer, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from surgery.data.encoding import EncodedBatch
from surgery.recipe import Distil
from surgery.train.divergence import TopK, divergence, grouped
from surgery.types import Reads


def counts(batch: EncodedBatch, names: Iterable[str]) -> dict[str, int]:
    """How many terms each of these objectives has in a batch.

    Answer tokens for `answer`, tokens with another of their document before them for `text`, questions with gold
    positions for `attention`, questions for `reading`, tokens for `keep`, `distil`, `mixing` and `hidden`.
    """
    real = batch.attention_mask.bool()
    terms = {
        "answer": _answer_tokens,
        "text": lambda batch: batch.same_document,
        "attention": _asked,
        "reading": lambda batch: batch.query >= 0,
    }
    return {name: int(terms[name](batch).sum() if name in terms else real.sum()) for name in names}


def _answer_tokens(batch: EncodedBatch) -> Tensor:
    return batch.answers[:, 1:] & batch.same_document


def _asked(batch: EncodedBatch) -> Tensor:
    """(B,Q) bool: the question has gold positions."""
    return (batch.segment_end >= 0) & (batch.answer_token >= 0)


def _next_token_loss(logits_BTV: Tensor, batch: EncodedBatch, asked_BT: Tensor, count: float | None) -> Tensor:
    """-log p(token t + 1 | tokens up to t) where `asked_BT` (B,T-1) is True."""
    document, place = asked_BT.nonzero(as_tuple=True)
    targets_M1 = batch.input_ids[document, place + 1][:, None]
    logits_NV, rows_M = logits_BTV.flatten(0, 1), document * logits_BTV.shape[1] + place
    if 2 * len(rows_M) < len(logits_NV):  # then only these are kept for the backward pass
        events_M2 = grouped(logits_NV.index_select(0, rows_M), targets_M1)
    else:
        events_M2 = grouped(logits_NV, targets_M1, rows_M)
    losses_M = events_M2.logsumexp(-1) - events_M2[:, 0]  # of two events: the token, and any other
    return losses_M.sum() / (len(rows_M) if count is None else count)


def answer_loss(logits_BTV: Tensor, batch: EncodedBatch, count: float | None = None) -> Tensor:
    """Retrieval cross-entropy: -log p of every answer token, and of nothing else.

    Raises:
        ValueError: no document of the batch has an answer, and no count says that others have.
    """
    asked = _answer_tokens(batch)
    if count is None and not bool(asked.any()):
        raise ValueError("answer: no document has an answer; give this source weight 0.")
    return _next_token_loss(logits_BTV, batch, asked, count)


def text_loss(logits_BTV: Tensor, batch: EncodedBatch, count: float | None = None) -> Tensor:
    """Language modelling: -log p of every token but a document's first."""
    return _next_token_loss(logits_BTV, batch, batch.same_document, count)


def divergence_loss(
    logits_BTV: Tensor, target: Tensor | TopK, batch: EncodedBatch, settings: Distil, count: float | None = None
) -> Tensor:
    """Divergence from the base (`keep`) or the teacher (`distil`) at every token; formulas in `divergence`.

    Args:
        target: (B,T,V) logits; or the likeliest tokens of the batch's real tokens, document after document.
    """
    rows = batch.attention_mask.flatten().nonzero()[:, 0]
    if isinstance(target, Tensor):
        target = target.flatten(0, 1)
        if settings.top_k is not None:
            target = TopK.of(target, settings.top_k, rows)
    some = None if len(rows) == batch.attention_mask.numel() else rows
    losses_M = divergence(logits_BTV.flatten(0, 1), target, settings.divergence, settings.temperature, some)
    return losses_M.sum() / (len(rows) if count is None else count)


def attention_loss(
    attentions: Sequence[Tensor], reads: Sequence[Sequence[Reads]], batch: EncodedBatch, count: float | None = None
) -> Tensor:
    """Attention supervision: -log of the new head's attention from each query to its gold position, mean over heads.

    Args:
        attentions: for each spliced layer, (B,H,Q,T) rows at `batch.query`.
        reads: for each spliced layer and head, which gold position it is to read.

    Raises:
        ValueError: no question of the batch has gold positions, and no count says that others have.
    """
    asked_BQ = _asked(batch)
    if count is None and not bool(asked_BQ.any()):
        raise ValueError("attention: no question has a gold position; give this source weight 0.")
    losses = []
    for rows_BHQT, layer_reads in zip(attentions, reads, strict=True):
        for head, read in enumerate(layer_reads):
            gold_BQ = batch.segment_end if read == "segment_end" else batch.answer_token
            row_BQT = rows_BHQT[:, head].float()
            mass = row_BQT.gather(-1, gold_BQ.clamp(min=0)[..., None])[..., 0]
            losses.append(-torch.log(mass[asked_BQ].clamp(min=1e-9)).sum())
    return torch.stack(losses).mean() / (int(asked_BQ.sum()) if count is None else count)


def reading_loss(
    rows: Sequence[Tensor], teacher_rows: Sequence[Tensor], batch: EncodedBatch, count: float | None = None
) -> Tensor:
    """KL(a' || a) of the new heads' attention from each query, a, and that of the teacher's heads, a'; mean over heads.

    As MiniLM compares attention (arXiv 2002.10957), at the tokens that an answer follows and at no others: elsewhere a
    retrieval head of the teacher attends to nothing in particular, and there are many such tokens. No gold position is
    needed.

    Args:
        rows, teacher_rows: for each spliced layer, (B,H,Q,T) at `batch.query`; questions that are none do not count.
    """
    asked_BQ = batch.query >= 0
    losses = []
    for mine_BHQT, other_BHQT in zip(rows, teacher_rows, strict=True):
        mine, other = (x.float().clamp(min=1e-9) for x in (mine_BHQT, other_BHQT.detach()))
        apart_BHQ = (other * (other.log() - mine.log())).sum(-1)
        losses.append(apart_BHQ.masked_fill(~asked_BQ[:, None], 0.0).sum((0, 2)))
    return torch.cat(losses).mean() / (int(asked_BQ.sum()) if count is None else count)


def mixing_loss(
    rows: Sequence[Tensor], teacher_rows: Sequence[Tensor], batch: EncodedBatch, count: float | None = None
) -> Tensor:
    """Squared distance of the new heads' attention matrices from the teacher's: sum over the tokens that are attended
    to, for each token that attends, mean over heads.

    MOHAWK's first stage (arXiv 2408.10189) takes the Frobenius norm of the matrices' difference, with the
    teacher's stream as both layers' input. Here it is squared, so that it is a sum over tokens, and each model runs on
    its own stream: the branch is trained on what it will see.

    Args:
        rows, teacher_rows: for each spliced layer, (B,H,T,T); padding does not count.
    """
    real = batch.attention_mask.bool()
    seen_BTT = (real[:, :, None] & real[:, None, :]).tril()
    losses = []
    for mine_BHTT, other_BHTT in zip(rows, teacher_rows, strict=True):
        difference = (mine_BHTT.float() - other_BHTT.detach().float()).masked_fill(~seen_BTT[:, None], 0.0)
        losses.append(difference.square().sum((0, 2, 3)))
    return torch.cat(losses).mean() / (int(real.sum()) if count is None else count)


def hidden_loss(
    states: Sequence[Tensor], teacher_states: Sequence[Tensor], batch: EncodedBatch, count: float | None = None
) -> Tensor:
    """L2 norm of the difference between the layers' outputs and the teacher's, at every token, mean over layers.

    MOHAWK's second stage (arXiv 2408.10189) gives every student block the teacher's stream as its input;
    here the student runs as a whole, so that a layer also answers for what those below it leave.

    Args:
        states, teacher_states: (B,T,D) of each layer that is compared.
    """
    real = batch.attention_mask.bool()
    losses = []
    for mine_BTD, other_BTD in zip(states, teacher_states, strict=True):
        difference = mine_BTD[real].float() - other_BTD[real].detach().float()
        losses.append(torch.linalg.vector_norm(difference, dim=-1).sum())
    return torch.stack(losses).mean() / (int(real.sum()) if count is None else count)
