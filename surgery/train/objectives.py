"""What training asks for. Owns: the formula of each objective. Must never know: optimizers, data, files.

Shape legend: B documents, T tokens, V vocabulary, Q questions, H spliced heads of a layer. All reduce to a mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.heads import Reads
from surgery.probes.documents import EncodedBatch


def _next_token_loss(logits_BTV: Tensor, ids_BT: Tensor, counts_BT: Tensor) -> Tensor:
    """Mean of -log p(token t | tokens < t) over the tokens where `counts_BT` is True."""
    keep = counts_BT[:, 1:]
    return F.cross_entropy(logits_BTV[:, :-1][keep].float(), ids_BT[:, 1:][keep])


def answer_loss(logits_BTV: Tensor, batch: EncodedBatch) -> Tensor:
    """Retrieval cross-entropy: -log p of every answer token, and of nothing else.

    Raises:
        ValueError: no document of the batch has an answer.
    """
    if not bool(batch.answers.any()):
        raise ValueError("answer: no document has an answer; give this source weight 0.")
    return _next_token_loss(logits_BTV, batch.input_ids, batch.answers)


def text_loss(logits_BTV: Tensor, batch: EncodedBatch) -> Tensor:
    """Language modelling: -log p of every token but a document's first."""
    real = batch.attention_mask.bool()
    return _next_token_loss(logits_BTV, batch.input_ids, real & real.roll(1, dims=1))


def keep_loss(logits_BTV: Tensor, base_logits_BTV: Tensor, batch: EncodedBatch) -> Tensor:
    """KL(base || student), mean over tokens: keeps what the base knows (Hinton et al., arXiv 1503.02531)."""
    real = batch.attention_mask.bool()
    student = F.log_softmax(logits_BTV[real].float(), dim=-1)
    base = F.log_softmax(base_logits_BTV[real].float(), dim=-1)
    return F.kl_div(student, base, log_target=True, reduction="batchmean")


def attention_loss(attentions: Sequence[Tensor], reads: Sequence[Sequence[Reads]], batch: EncodedBatch) -> Tensor:
    """Attention supervision: -log of the new head's attention from each query to its gold position.

    Args:
        attentions: for each spliced layer, (B, H, Q, T) rows at `batch.query`.
        reads: for each spliced layer and head, which gold position it is to read.

    Raises:
        ValueError: no question of the batch has a gold position.
    """
    losses = []
    for rows_BHQT, layer_reads in zip(attentions, reads, strict=True):
        for head, read in enumerate(layer_reads):
            gold_BQ = batch.segment_end if read == "segment_end" else batch.answer_token
            asked = gold_BQ >= 0
            if not bool(asked.any()):
                raise ValueError("attention: no question has a gold position; give this source weight 0.")
            row_BQT = rows_BHQT[:, head].float()
            mass = row_BQT.gather(-1, gold_BQ.clamp(min=0)[..., None])[..., 0]
            losses.append(-torch.log(mass[asked].clamp(min=1e-9)).mean())
    return torch.stack(losses).mean()
