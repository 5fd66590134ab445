"""Formulas of the objectives, each named NAME_loss: the sum of a loss over its terms (tokens or reads).

The training loop divides by the number of terms of the whole step, so the parts of a step, such as micro-batches and
the shares of processes, add up to its mean. A part without terms has a loss of zero that still depends on the model's
outputs.

The token of a term, whose weight it has, is the one that predicts.

Shape legend: B documents, T tokens, V vocabulary, R reads (one for each answer token), H spliced heads of a layer, D
model width, N rows of the logits, M selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.data.encoding import EncodedBatch
from surgery.train.divergence import TopK, cross_entropy, divergence
from surgery.train.objectives import ObjectiveInputs

# Attention below this counts as this, without a gradient. Down to here the logarithm's gradient is finite in fp32.
LEAST_ATTENTION = 1e-30


@dataclass(frozen=True)
class LogitRows:
    """Logits of some tokens of a batch."""

    values: Tensor  # (M,V)
    rows: Tensor  # (M,) indices of the tokens in the flattened batch, in order


def answer_rows(batch: EncodedBatch) -> Tensor:
    """(M,) indices in the flattened batch of the tokens before answer tokens, whose logits the answer loss reads."""
    return _rows(batch.answers[:, 1:] & batch.same_document)


def has_gold_positions(batch: EncodedBatch) -> Tensor:
    """(B,R) bool: the read has gold positions."""
    return (batch.read_segment_end >= 0) & (batch.read_answer_token >= 0)


def answer_loss(inputs: ObjectiveInputs) -> Tensor:
    """Retrieval cross-entropy: -log p of every answer token, from (B,T,V) logits or those of `answer_rows`."""
    logits = inputs.model.logits
    if isinstance(logits, LogitRows):
        return _next_token_loss(logits.values, inputs, logits.rows)
    return _loss_of_rows(inputs, answer_rows(inputs.batch))


def lm_loss(inputs: ObjectiveInputs) -> Tensor:
    """Language modelling: -log p of every token except the first of each document."""
    return _loss_of_rows(inputs, _rows(inputs.batch.same_document))


def _rows(included_BT: Tensor) -> Tensor:
    """(B,T-1) bool -> (M,) indices in the flattened batch."""
    return F.pad(included_BT, (0, 1)).flatten().nonzero()[:, 0]


def _loss_of_rows(inputs: ObjectiveInputs, rows_M: Tensor) -> Tensor:
    logits_NV = inputs.model.logits.flatten(0, 1)
    if 2 * len(rows_M) < len(logits_NV):  # keep only these rows for the backward pass
        return _next_token_loss(logits_NV.index_select(0, rows_M), inputs, rows_M)
    return _next_token_loss(logits_NV, inputs, rows_M, rows_M)


def _next_token_loss(
    logits_NV: Tensor, inputs: ObjectiveInputs, rows_M: Tensor, selected_M: Tensor | None = None
) -> Tensor:
    """Sum of -log p(next token) at the tokens `rows_M` of the flattened batch.

    Args:
        selected_M: the rows of the logits that belong to these tokens; None for all rows.
    """
    targets_M = inputs.batch.input_ids.flatten()[rows_M + 1]
    return _weighted_sum(cross_entropy(logits_NV, targets_M, selected_M), inputs, rows_M)


def _weighted_sum(losses_M: Tensor, inputs: ObjectiveInputs, rows_M: Tensor) -> Tensor:
    return (losses_M if inputs.weights is None else losses_M * inputs.weights.flatten()[rows_M]).sum()


def base_kl_loss(inputs: ObjectiveInputs) -> Tensor:
    """Divergence from the base at every token. See `divergence` for formulas."""
    return _divergence_loss(inputs, inputs.base.logits)


def distil_loss(inputs: ObjectiveInputs) -> Tensor:
    """Divergence from the teacher at every token, as of `base_kl_loss`."""
    return _divergence_loss(inputs, inputs.teacher.logits)


def _divergence_loss(inputs: ObjectiveInputs, target: Tensor | TopK) -> Tensor:
    """`target`: (B,T,V) logits, or the most likely tokens for all tokens without padding, document after document."""
    settings, mask = inputs.distil, inputs.batch.attention_mask
    rows_M = mask.flatten().nonzero()[:, 0]
    if isinstance(target, Tensor):
        target = target.flatten(0, 1)
        if settings.top_k is not None:
            target = TopK.of(target, settings.top_k, rows_M)
    selected = None if len(rows_M) == mask.numel() else rows_M
    logits_NV = inputs.model.logits.flatten(0, 1)
    losses_M = divergence(logits_NV, target, settings.divergence, settings.temperature, selected)
    return _weighted_sum(losses_M, inputs, rows_M)


def attention_loss(inputs: ObjectiveInputs) -> Tensor:
    """Attention supervision: -log of the new head's attention from each query to its gold position, mean over heads.

    Every answer token has a query, the token before it, and a gold position. `EncodedBatch` has the rule.
    """
    batch, weights_BR = inputs.batch, _of_reads(inputs)
    included_BR, losses = has_gold_positions(batch), []
    for rows_BHRT, layer_reads in zip(inputs.model.attention, inputs.reads, strict=True):
        for head, read in enumerate(layer_reads):
            gold_BR = batch.read_segment_end if read == "segment_end" else batch.read_answer_token
            row_BRT = rows_BHRT[:, head].float()
            mass = row_BRT.gather(-1, gold_BR.clamp(min=0)[..., None])[..., 0]
            log_mass = torch.log(mass[included_BR].clamp(min=LEAST_ATTENTION))
            losses.append(-(log_mass if weights_BR is None else log_mass * weights_BR[included_BR]).sum())
    return torch.stack(losses).mean()


def attention_kl_loss(inputs: ObjectiveInputs) -> Tensor:
    """KL(a' || a) from the teacher's attention a' to the new heads' attention a at each query, mean over heads.

    MiniLM (arXiv 2002.10957) compares attention in this way at all tokens. Here only the tokens before an answer token
    count: at the many others, the attention of a teacher's retrieval head is diffuse. No gold position is needed.
    """
    included_BR = inputs.batch.read_query >= 0
    losses, weights_BR = [], _of_reads(inputs)
    for rows_BHRT, teacher_BHRT in zip(inputs.model.attention, inputs.teacher.attention, strict=True):
        a, target = (x.float().clamp(min=LEAST_ATTENTION) for x in (rows_BHRT, teacher_BHRT.detach()))
        kl_BHR = (target * (target.log() - a.log())).sum(-1)
        if weights_BR is not None:
            kl_BHR = kl_BHR * weights_BR[:, None]
        losses.append(kl_BHR.masked_fill(~included_BR[:, None], 0.0).sum((0, 2)))
    return torch.cat(losses).mean()


def attention_mse_loss(inputs: ObjectiveInputs) -> Tensor:
    """Squared distance of the new heads' attention matrices from the teacher's, for each query token, mean over heads.

    MOHAWK's first stage (arXiv 2408.10189) uses the Frobenius norm of the difference, and feeds the teacher's residual
    stream to both layers. Here the norm is squared, which makes it a sum over tokens. Each model runs on its own
    residual stream, so the branch is trained on the inputs that it gets at inference. Padding does not count.
    """
    real = inputs.batch.attention_mask.bool()
    causal_BTT = (real[:, :, None] & real[:, None, :]).tril()
    losses = []
    for rows_BHTT, teacher_BHTT in zip(inputs.model.full_attention, inputs.teacher.full_attention, strict=True):
        difference = (rows_BHTT.float() - teacher_BHTT.detach().float()).masked_fill(~causal_BTT[:, None], 0.0)
        losses.append(difference.square().sum((0, 2, 3)))
    return torch.cat(losses).mean()


def hidden_mse_loss(inputs: ObjectiveInputs) -> Tensor:
    """L2 norm of the difference between the layers' outputs and the teacher's, at every token, mean over layers.

    MOHAWK's second stage (arXiv 2408.10189) feeds the teacher's residual stream to every student block. Here the
    student runs as a whole, so a layer can correct errors of the layers below it.
    """
    real = inputs.batch.attention_mask.bool()
    losses = []
    for states_BTD, teacher_BTD in zip(inputs.model.hidden_states, inputs.teacher.hidden_states, strict=True):
        difference = states_BTD[real].float() - teacher_BTD[real].detach().float()
        losses.append(torch.linalg.vector_norm(difference, dim=-1).sum())
    return torch.stack(losses).mean()


def rows_at_queries(rows_BHTT: Tensor, batch: EncodedBatch) -> Tensor:
    """Select the rows of the reads, (B,H,R,T), from those of all tokens. Padded reads take row 0."""
    index = batch.read_query.clamp(min=0)[:, None, :, None]
    return rows_BHTT.gather(2, index.expand(-1, rows_BHTT.shape[1], -1, rows_BHTT.shape[3]))


def _of_reads(inputs: ObjectiveInputs) -> Tensor | None:
    """(B,R) weights of the tokens that predict."""
    return None if inputs.weights is None else inputs.weights.gather(1, inputs.batch.read_query.clamp(min=0))
