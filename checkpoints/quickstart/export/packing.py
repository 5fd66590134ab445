"""What travels with one forward pass: padding, the documents of packed rows, masks, requested attention rows.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

Shape legend: B rows, T tokens, D model width, C channels, H spliced heads of a layer, K query/key width, Q requested
rows, N documents of all rows, L tokens of the longest, S tokens and the zeros between documents.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # as flash attention's callers pass them


def marked_documents(given: Mapping[str, Any], seq_idx: Tensor | None, embeds: Tensor, mask: Any) -> Tensor | None:
    """Return (B,T) int32, the index of the document that each token belongs to; None if each row holds one.

    Documents are marked by `seq_idx`, by `cu_seq_lens_q`, or by positions that start again. Where padding begins or
    ends, a document does too, so the result replaces a padding mask.

    Args:
        given: keyword arguments of the forward pass; `BORDERS` and `position_ids` are read.
        embeds: (B,T,D); only its shape and device are read.
        mask: the padding mask (B,S), or masks by kind of layer. Positions on padding mark nothing.

    Raises:
        ValueError: two marks contradict, or one has a wrong shape.
    """
    shape, real_BT = embeds.shape[:2], mask.get("linear_attention") if isinstance(mask, Mapping) else mask
    lengths = {name: given[name] for name in BORDERS if given.get(name) is not None}
    positions, begins_BT = given.get("position_ids"), None
    if seq_idx is not None:
        if seq_idx.shape != shape:
            raise ValueError(f"seq_idx: {tuple(seq_idx.shape)}. It needs one index a token, {tuple(shape)}.")
        begins_BT = begins_of(seq_idx)
    if lengths:
        starts = lengths.get("cu_seq_lens_q")
        if starts is None:
            raise ValueError(f"{next(iter(lengths))}: it says nothing without cu_seq_lens_q. Pass both.")
        if starts[0] != 0 or starts[-1] != shape.numel() or not torch.equal(starts, lengths.get(BORDERS[1], starts)):
            hint = f"It needs to go from 0 to the number of tokens, {shape.numel()}, and to equal cu_seq_lens_k."
            raise ValueError(f"cu_seq_lens_q: from {int(starts[0])} to {int(starts[-1])}. {hint}")
        at_start = torch.zeros(shape.numel() + 1, dtype=torch.bool, device=embeds.device)
        at_start[starts.long()] = True
        by_length_BT = at_start[:-1].view(shape)
        by_length_BT[:, 0] = False
        if begins_BT is not None and not torch.equal(begins_BT, by_length_BT):
            raise ValueError("cu_seq_lens_q: it marks other documents than seq_idx. Pass one of them.")
        begins_BT = by_length_BT
    if positions is not None and shape[1] > 1:
        again_BT = F.pad(positions[..., 1:] <= positions[..., :-1], (1, 0)).expand(shape)
        if begins_BT is not None and not torch.equal(again_BT, begins_BT):
            raise ValueError("position_ids: with seq_idx they start at 0 in every document. Do not pass them.")
        if begins_BT is None and isinstance(real_BT, Tensor) and real_BT.ndim == 2:
            real_BT = real_BT[:, -shape[1] :].bool()
            again_BT = again_BT & real_BT & F.pad(real_BT[:, :-1], (1, 0))
        if begins_BT is None and torch.compiler.is_compiling():  # a graph cannot depend on the positions
            torch._assert_async(~again_BT.any(), "position_ids: they start again. Pass seq_idx to a compiled model.")
        elif begins_BT is not None or again_BT.any():
            begins_BT = again_BT
    if begins_BT is None:
        return None
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise ValueError("attention_mask: with several documents in a row it needs to be (B,T), or None.")
        begins_BT = begins_BT | begins_of(mask)
    return begins_BT.cumsum(1).to(torch.int32)


class Unpacked:
    """The documents of packed rows as rows of their own, for scans that do not keep the documents of a row apart.

    Args:
        documents_BT: from `marked_documents`.
    """

    def __init__(self, documents_BT: Tensor) -> None:
        self.shape, begins_BT = documents_BT.shape, begins_of(documents_BT)
        begins_BT[:, 0] = True
        starts_N = begins_BT.flatten().nonzero()[:, 0]
        lengths_N = starts_N.diff(append=starts_N.new_tensor([begins_BT.numel()]))
        index_L = torch.arange(int(lengths_N.max()), device=documents_BT.device)
        self.mask_NL = index_L < lengths_N[:, None]
        self.place_NL = (starts_N[:, None] + index_L).where(self.mask_NL, starts_N[:, None])

    def split(self, x_BTD: Tensor) -> Tensor:
        """(B,T,...) -> (N,L,...), with padding on the right."""
        return x_BTD.expand(*self.shape, *x_BTD.shape[2:]).flatten(0, 1)[self.place_NL]

    def joined(self, output: Mapping[str, Any]) -> dict[str, Any]:
        """Return the output of a model with the rows of the caller. The cache is None."""
        values = {name: value for name, value in output.items() if value is not None}
        return {n: tuple(map(self.join, v)) if isinstance(v, tuple) else self.join(v) for n, v in values.items()}

    def join(self, x_NLD: Tensor) -> Tensor:
        """(N,L,...) -> (B,T,...); a router's logits (N L,...) -> (B T,...)."""
        if x_NLD.shape[:2] != self.mask_NL.shape:
            return x_NLD[self.mask_NL.flatten()]
        return x_NLD[self.mask_NL].unflatten(0, self.shape)


def begins_of(seq_idx_BT: Tensor) -> Tensor:
    """Return (B,T) bool: whether a token is the first one of its document. False for the first token of a row."""
    return F.pad(seq_idx_BT[:, 1:] != seq_idx_BT[:, :-1], (1, 0))


def positions_of(documents_BT: Tensor) -> Tensor:
    """Return (B,T): how many tokens of its document come before each token."""
    index_BT = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand(documents_BT.shape)
    return index_BT - index_BT.where(begins_of(documents_BT), 0).cummax(1).values


def packed_masks(config: Any, embeds_BTD: Tensor, positions_BT: Tensor) -> dict[str, Any]:
    """Return the masks of rows of several documents by kind of layer, as families with several kinds take them.

    Attention's is block-diagonal; scans use `seq_idx` instead. Not all families make these masks from positions.
    """
    causal = create_causal_mask(config, embeds_BTD, None, None, position_ids=positions_BT)
    return {"full_attention": causal, "linear_attention": None}


def masked(x_BTC: Tensor, padding_mask_BT: Tensor | None) -> Tensor:
    """Return `x_BTC` with 0 on padding."""
    return x_BTC if padding_mask_BT is None else x_BTC * padding_mask_BT[:, :, None].to(x_BTC.dtype)


def convolved(conv1d: nn.Module, kernel: int, x_BCT: Tensor, length: int, documents_BT: Tensor | None = None) -> Tensor:
    """Return the last `length` outputs of a causal convolution, with zeros before a text or a document.

    It calls the module, so that hooks which load offloaded weights run.
    """
    past = kernel - 1
    if length == 1 and x_BCT.shape[-1] > past:  # one new token after a cache: its inputs are all there
        return conv1d(x_BCT[..., -kernel:])
    if documents_BT is None:
        return conv1d(F.pad(x_BCT, (past, 0)))[..., -length:]
    place_BT = torch.arange(length, device=x_BCT.device) + past * (documents_BT.long() + 1)
    place_BCT = place_BT[:, None].expand(x_BCT.shape)
    spaced_BCS = x_BCT.new_zeros(*x_BCT.shape[:2], int(place_BT.max()) + 1).scatter(2, place_BCT, x_BCT)
    return conv1d(spaced_BCS).gather(2, place_BCT - past)


class SpliceRows:
    """Collect the attention rows of chosen query tokens, for attention supervision.

    One object travels down one forward pass, and each spliced layer adds its rows. It closes when the pass ends:
    gradient checkpointing computes the rows again, and they must not be stored twice.

    Args:
        queries_BQ: (B,Q) token indices, -1 where there is none.
        documents: (B,T) index of the document that each token belongs to; None where a row holds one document.
    """

    def __init__(self, queries_BQ: Tensor, documents: Tensor | None = None) -> None:
        self.queries_BQ, self.documents = queries_BQ, documents
        self._rows: dict[int, Tensor] | None = {}

    def collect(self, layer: int, query_BHTK: Tensor, key_BHTK: Tensor, padding: Any) -> None:
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
        if self.documents is not None:
            seen_BQT = seen_BQT & (self.documents.gather(1, index_BQ)[..., None] == self.documents[:, None, :])
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
