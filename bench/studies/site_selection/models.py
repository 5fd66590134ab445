"""Models of arms that the library does not build (linear attention), and the rows that supervision reads.

Shape legend: B documents, T tokens, R reads (one for each answer token), H heads, P head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.data.encoding import EncodedBatch
from surgery.hybrid.modeling_hybrid import SplicedAttention, SplicePass
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.types import HeadId

Rows = Callable[[EncodedBatch], list[Tensor]]  # (B,H,R,T) for each supervised layer, after a forward pass


class LinearAttention(SplicedAttention):
    """Attention branch without softmax: causal weights `q.k`. It supports no cache.

    They are divided by the sum of their absolute values, which is also what supervision sees; the branch's output does
    not depend on that scale, since every head goes through an RMSNorm.
    """

    weights_BHTT: Tensor

    def forward(
        self,
        u_BTD: Tensor,
        cache: Any = None,
        splice_pass: SplicePass | None = None,
        streams: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(B,T,D) -> (B,T,D), and the weights. Raises ValueError with a cache, packed documents or rows to collect."""
        given = splice_pass or SplicePass()
        padding_mask = given.padding
        if cache is not None or given.rows is not None or given.documents is not None:
            raise ValueError("LinearAttention supports no cache, packing or splice_queries. Pass use_cache=False.")
        if padding_mask is not None:
            u_BTD = u_BTD * padding_mask[:, :, None].to(u_BTD.dtype)
        query, key, value = self.project(u_BTD, None, given, streams)
        seen_TT = torch.ones(u_BTD.shape[1], u_BTD.shape[1], dtype=torch.bool, device=u_BTD.device).tril()
        scores_BHTT = (query @ key.transpose(2, 3)).masked_fill(~seen_TT, 0.0)
        if padding_mask is not None:
            scores_BHTT = scores_BHTT * padding_mask[:, None, None, :].to(scores_BHTT.dtype)
        weights = scores_BHTT / scores_BHTT.abs().sum(-1, keepdim=True).clamp(min=1e-9)
        self.weights_BHTT = weights.abs()
        return self.put_out((weights @ value).transpose(1, 2), u_BTD), weights


def make_linear(hybrid: PreTrainedModel) -> list[LinearAttention]:
    """Replace every spliced branch by linear attention with the same weights, and return the new branches."""
    found = []
    for mixer in [m for m in hybrid.modules() if isinstance(getattr(m, "attention", None), SplicedAttention)]:
        old = mixer.attention
        site = next(s for s in hybrid.config.splice if s["layer"] == old.layer_idx)
        branch = LinearAttention(hybrid.config, site, old.layer_idx)
        branch.load_state_dict(old.state_dict())
        mixer.attention = branch
        found.append(branch)
    return found


def linear_rows(branches: list[LinearAttention]) -> Rows:
    """Attention rows at the queries, of the last forward pass."""
    return lambda batch: [_at_queries(branch.weights_BHTT, batch) for branch in branches]


@contextmanager
def hidden_rows(model: PreTrainedModel, head: HeadId) -> Iterator[Rows]:
    """The SSM head's own hidden attention, |a[t,s]| |x_s|, each row divided by its sum. With gradients.

    Batches must be right-padded, so that rows at queries contain no padding.
    """
    spec = next(s for s in family_of(model.config).mixers(model.config) if s.name == head.mixer)
    structure, mixer = structure_of(spec), mixer_of(model, spec)
    in_proj = structure.in_proj(mixer)
    assert in_proj is not None, "an attention head has no hidden attention"
    projected: list[Tensor] = []

    def keep(_: nn.Module, __: tuple, output: Tensor) -> None:
        projected[:] = [output]

    def rows(batch: EncodedBatch) -> list[Tensor]:
        streams = structure.streams(mixer, spec, projected[0])
        a_BHTT = structure.hidden_attention(mixer, spec, streams)[:, head.head, None]
        length_BHT = streams.x[:, :, head.head, None].norm(dim=-1).transpose(1, 2)
        share = _at_queries(a_BHTT.abs() * length_BHT[:, :, None], batch)
        return [share / share.sum(-1, keepdim=True).clamp(min=1e-9)]

    handle = in_proj.register_forward_hook(keep)
    try:
        yield rows
    finally:
        handle.remove()


def _at_queries(weights_BHTT: Tensor, batch: EncodedBatch) -> Tensor:
    """(B,H,R,T) rows at the reads. Padded reads take row 0, which the loss ignores."""
    index = batch.read_query.clamp(min=0)[:, None, :, None].expand(-1, weights_BHTT.shape[1], -1, weights_BHTT.shape[3])
    return weights_BHTT.gather(2, index)
