"""Formulas of the objectives. Each returns the sum of a loss over its terms (tokens or reads).

The training loop divides by the number of terms of the whole step, so the parts of a step, such as micro-batches and
the shares of processes, add up to its mean. A part without terms has a loss of zero that still depends on the model's
outputs.

`weights` (B,T) has a factor for the terms of each token, for a batch of several sources; None for 1 everywhere. The
token of a term is the one that predicts.

Shape legend: B documents, T tokens, V vocabulary, R reads (one for each answer token), H spliced heads of a layer, D
model width, N rows of the logits, M selected rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.data.encoding import EncodedBatch
from surgery.recipe import Distil
from surgery.train.divergence import TopK, cross_entropy, divergence
from surgery.types import Reads

# Attention below this counts as this, without a gradient. Down to here the logarithm's gradient is finite in fp32.
LEAST_ATTENTION = 1e-30


@dataclass(frozen=True)
class LogitRows:
    """Logits of some tokens of a batch."""

    values: Tensor  # (M,V)
    rows: Tensor  # (M,) indices of the tokens in the flattened batch, in order


def answer_tokens(batch: EncodedBatch) -> Tensor:
    """(B,T-1) bool: the next token belongs to an answer."""
    return batch.answers[:, 1:] & batch.same_document


def answer_rows(batch: EncodedBatch) -> Tensor:
    """(M,) indices in the flattened batch of the tokens before answer tokens, whose logits the answer loss reads."""
    return _rows(answer_tokens(batch))


def has_gold_positions(batch: EncodedBatch) -> Tensor:
    """(B,R) bool: the read has gold positions."""
    return (batch.read_segment_end >= 0) & (batch.read_answer_token >= 0)


def answer_loss(logits: Tensor | LogitRows, batch: EncodedBatch, weights: Tensor | None = None) -> Tensor:
    """Retrieval cross-entropy: -log p of every answer token, from (B,T,V) logits or those of `answer_rows`."""
    if isinstance(logits, LogitRows):
        return _next_token_loss(logits.values, batch, logits.rows, None, weights)
    return _loss_of_rows(logits, batch, answer_rows(batch), weights)


def lm_loss(logits_BTV: Tensor, batch: EncodedBatch, weights: Tensor | None = None) -> Tensor:
    """Language modelling: -log p of every token except the first of each document."""
    return _loss_of_rows(logits_BTV, batch, _rows(batch.same_document), weights)


def _rows(included_BT: Tensor) -> Tensor:
    """(B,T-1) bool -> (M,) indices in the flattened batch."""
    return F.pad(included_BT, (0, 1)).flatten().nonzero()[:, 0]


def _loss_of_rows(logits_BTV: Tensor, batch: EncodedBatch, rows_M: Tensor, weights: Tensor | None) -> Tensor:
    logits_NV = logits_BTV.flatten(0, 1)
    if 2 * len(rows_M) < len(logits_NV):  # keep only these rows for the backward pass
        return _next_token_loss(logits_NV.index_select(0, rows_M), batch, rows_M, None, weights)
    return _next_token_loss(logits_NV, batch, rows_M, rows_M, weights)


def _next_token_loss(
    logits_NV: Tensor, batch: EncodedBatch, rows_M: Tensor, selected_M: Tensor | None, weights: Tensor | None
) -> Tensor:
    """Sum of -log p(next token) at the tokens `rows_M` of the flattened batch.

    Args:
        selected_M: the rows of the logits that belong to these tokens; None for all rows.
    """
    losses_M = cross_entropy(logits_NV, batch.input_ids.flatten()[rows_M + 1], selected_M)
    if weights is not None:
        losses_M = losses_M * weights.flatten()[rows_M]
    return losses_M.sum()


def divergence_loss(
    logits_BTV: Tensor, target: Tensor | TopK, batch: EncodedBatch, settings: Distil, weights: Tensor | None = None
) -> Tensor:
    """Divergence from the base (`base_kl`) or the teacher (`distil`) at every token. See `divergence` for formulas.

    Args:
        target: (B,T,V) logits, or the most likely tokens for all tokens without padding, document after document.
    """
    rows = batch.attention_mask.flatten().nonzero()[:, 0]
    if isinstance(target, Tensor):
        target = target.flatten(0, 1)
        if settings.top_k is not None:
            target = TopK.of(target, settings.top_k, rows)
    selected = None if len(rows) == batch.attention_mask.numel() else rows
    losses_M = divergence(logits_BTV.flatten(0, 1), target, settings.divergence, settings.temperature, selected)
    if weights is not None:
        losses_M = losses_M * weights.flatten()[rows]
    return losses_M.sum()


def attention_loss(
    attentions: Sequence[Tensor],
    reads: Sequence[Sequence[Reads]],
    batch: EncodedBatch,
    weights: Tensor | None = None,
) -> Tensor:
    """Attention supervision: -log of the new head's attention from each query to its gold position, mean over heads.

    Every answer token has a query, the token before it, and a gold position. `EncodedBatch` has the rule.

    Args:
        attentions: for each spliced layer, (B,H,R,T) rows at `batch.read_query`.
        reads: for each spliced layer and head, the gold position that it should attend to.
    """
    included_BR = has_gold_positions(batch)
    losses, weights_BR = [], _of_reads(weights, batch)
    for rows_BHRT, layer_reads in zip(attentions, reads, strict=True):
        for head, read in enumerate(layer_reads):
            gold_BR = batch.read_segment_end if read == "segment_end" else batch.read_answer_token
            row_BRT = rows_BHRT[:, head].float()
            mass = row_BRT.gather(-1, gold_BR.clamp(min=0)[..., None])[..., 0]
            log_mass = torch.log(mass[included_BR].clamp(min=LEAST_ATTENTION))
            losses.append(-(log_mass if weights_BR is None else log_mass * weights_BR[included_BR]).sum())
    return torch.stack(losses).mean()


def attention_kl_loss(
    rows: Sequence[Tensor], teacher_rows: Sequence[Tensor], batch: EncodedBatch, weights: Tensor | None = None
) -> Tensor:
    """KL(a' || a) from the teacher's attention a' to the new heads' attention a at each query, mean over heads.

    MiniLM (arXiv 2002.10957) compares attention in this way at all tokens. Here only the tokens before an answer token
    count: at the many others, the attention of a teacher's retrieval head is diffuse. No gold position is needed.

    Args:
        rows: for each spliced layer, (B,H,R,T) at `batch.read_query`. Padded reads do not count.
        teacher_rows: the same for the corresponding heads of the teacher.
    """
    included_BR = batch.read_query >= 0
    losses, weights_BR = [], _of_reads(weights, batch)
    for rows_BHRT, teacher_BHRT in zip(rows, teacher_rows, strict=True):
        a, target = (x.float().clamp(min=LEAST_ATTENTION) for x in (rows_BHRT, teacher_BHRT.detach()))
        kl_BHR = (target * (target.log() - a.log())).sum(-1)
        if weights_BR is not None:
            kl_BHR = kl_BHR * weights_BR[:, None]
        losses.append(kl_BHR.masked_fill(~included_BR[:, None], 0.0).sum((0, 2)))
    return torch.cat(losses).mean()


def attention_mse_loss(rows: Sequence[Tensor], teacher_rows: Sequence[Tensor], batch: EncodedBatch) -> Tensor:
    """Squared distance of the new heads' attention matrices from the teacher's, for each query token, mean over heads.

    MOHAWK's first stage (arXiv 2408.10189) uses the Frobenius norm of the difference, and feeds the teacher's residual
    stream to both layers. Here the norm is squared, which makes it a sum over tokens. Each model runs on its own
    residual stream, so the branch is trained on the inputs that it gets at inference.

    Args:
        rows: for each spliced layer, (B,H,T,T). Padding does not count.
        teacher_rows: the same for the corresponding heads of the teacher.
    """
    real = batch.attention_mask.bool()
    causal_BTT = (real[:, :, None] & real[:, None, :]).tril()
    losses = []
    for rows_BHTT, teacher_BHTT in zip(rows, teacher_rows, strict=True):
        difference = (rows_BHTT.float() - teacher_BHTT.detach().float()).masked_fill(~causal_BTT[:, None], 0.0)
        losses.append(difference.square().sum((0, 2, 3)))
    return torch.cat(losses).mean()


def hidden_loss(states: Sequence[Tensor], teacher_states: Sequence[Tensor], batch: EncodedBatch) -> Tensor:
    """L2 norm of the difference between the layers' outputs and the teacher's, at every token, mean over layers.

    MOHAWK's second stage (arXiv 2408.10189) feeds the teacher's residual stream to every student block. Here the
    student runs as a whole, so a layer can correct errors of the layers below it.

    Args:
        states: (B,T,D) of each compared layer.
        teacher_states: (B,T,D) of the corresponding layers of the teacher.
    """
    real = batch.attention_mask.bool()
    losses = []
    for states_BTD, teacher_BTD in zip(states, teacher_states, strict=True):
        difference = states_BTD[real].float() - teacher_BTD[real].detach().float()
        losses.append(torch.linalg.vector_norm(difference, dim=-1).sum())
    return torch.stack(losses).mean()


def rows_at_queries(rows_BHTT: Tensor, batch: EncodedBatch) -> Tensor:
    """Select the rows of the reads, (B,H,R,T), from those of all tokens. Padded reads take row 0."""
    index = batch.read_query.clamp(min=0)[:, None, :, None]
    return rows_BHTT.gather(2, index.expand(-1, rows_BHTT.shape[1], -1, rows_BHTT.shape[3]))


def _of_reads(weights_BT: Tensor | None, batch: EncodedBatch) -> Tensor | None:
    """(B,T) -> (B,R), the weights of the tokens that predict."""
    return None if weights_BT is None else weights_BT.gather(1, batch.read_query.clamp(min=0))
