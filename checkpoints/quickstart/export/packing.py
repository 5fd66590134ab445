"""Padding, and several documents in one row: positions, masks, and a convolution that does not cross borders.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

Shape legend: B rows, T tokens, D model width, C channels, S tokens and the zeros between documents.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask


def documents_of(seq_idx_BT: Tensor) -> Tensor:
    """Return (B,T) int32: the index of the document that each token belongs to, counted from 0 in every row.

    A document ends where the index changes. Kernels compare the indices of any two tokens, so documents of a row must
    have different ones.
    """
    return begins_of(seq_idx_BT).cumsum(1).to(torch.int32)


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
