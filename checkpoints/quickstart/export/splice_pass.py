"""The values that travel with one forward pass: masks, positions, and the attention rows that a caller requested.

Shipped with every exported checkpoint, so it imports the standard library and torch only.

Shape legend: B batch, T tokens, H spliced heads of a layer, K query/key width, Q requested rows.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class SpliceRows:
    """Collect the attention rows of chosen query tokens, for attention supervision.

    One object travels down one forward pass, and each spliced layer adds its rows. It closes when the pass ends:
    gradient checkpointing computes the rows again, and they must not be stored twice.

    Args:
        queries_BQ: (B,Q) token indices, -1 where there is none.
    """

    def __init__(self, queries_BQ: Tensor) -> None:
        self.queries_BQ = queries_BQ
        self._rows: dict[int, Tensor] | None = {}

    def collect(self, layer: int, query_BHTK: Tensor, key_BHTK: Tensor, padding: Any, documents: Any = None) -> None:
        """Compute the softmax rows (B,H,Q,T) of this layer in fp32."""
        index_BQ = self.queries_BQ.clamp(min=0)
        rows_BHQK = query_BHTK.gather(
            2, index_BQ[:, None, :, None].expand(-1, query_BHTK.shape[1], -1, query_BHTK.shape[3])
        )
        device = rows_BHQK.device.type
        in_fp32 = torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
        with in_fp32:
            scores = rows_BHQK.float() @ key_BHTK.float().transpose(2, 3)
        seen_BQT = torch.arange(key_BHTK.shape[2], device=scores.device) <= index_BQ[..., None]
        if padding is not None:
            seen_BQT = seen_BQT & padding[:, None, :].bool()
        if documents is not None:
            seen_BQT = seen_BQT & (documents.gather(1, index_BQ)[..., None] == documents[:, None, :])
        scores = scores.masked_fill(~seen_BQT[:, None], torch.finfo(scores.dtype).min)
        requested = (self.queries_BQ >= 0)[:, None, :, None]
        rows_BHQT = torch.where(requested, scores.softmax(-1), 0.0)
        if self._rows is not None:
            self._rows[layer] = rows_BHQT

    def take(self) -> tuple[Tensor, ...]:
        """Return the rows by layer, from below, and close the collection."""
        rows, self._rows = self._rows or {}, None
        return tuple(rows[layer] for layer in sorted(rows))


@dataclass
class SplicePass:
    """The inputs that one forward pass gives to all its spliced layers.

    Attributes:
        padding: (B,T) of the new tokens, 0 on padding; None where there is none.
        causal: the mask of transformers' `create_causal_mask`.
        rows: collects attention rows, or None.
        positions: (B or 1,T) of the new tokens.
        documents: (B,T) index of the document that each token belongs to; None where a row holds one document.
    """

    padding: Tensor | None = None
    causal: Any = None
    rows: SpliceRows | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
