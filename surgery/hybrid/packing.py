"""Several documents in one row: where each of them begins, and a convolution that reaches into no other.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. It must never
know how documents are chosen for a row.

Shape legend: B rows, T tokens, D model width, C channels, S tokens and the zeros between documents.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask


def documents_of(seq_idx_BT: Tensor) -> Tensor:
    """(B,T) int32: the document of its row that each token belongs to, counted from 0.

    One ends where the index changes. Kernels compare any two tokens' indices, so documents of a row may not share one.
    """
    begins_BT = F.pad(seq_idx_BT[:, 1:] != seq_idx_BT[:, :-1], (1, 0))
    return begins_BT.cumsum(1).to(torch.int32)


def positions_of(documents_BT: Tensor) -> Tensor:
    """(B,T) how many tokens of its own document stand before each token."""
    index_BT = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand(documents_BT.shape)
    begins_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
    return index_BT - index_BT.where(begins_BT, 0).cummax(1).values


def packed_masks(config: Any, embeds_BTD: Tensor, positions_BT: Tensor) -> dict[str, Any]:
    """The masks of rows of several documents, by kind of layer, in the form that families of several kinds take.

    Attention's is block-diagonal; scans are told by `seq_idx`. Not all families make these from positions themselves.
    """
    causal = create_causal_mask(config, embeds_BTD, None, None, position_ids=positions_BT)
    return {"full_attention": causal, "linear_attention": None}


def convolved(conv1d: nn.Module, kernel: int, x_BCT: Tensor, length: int, documents_BT: Tensor | None = None) -> Tensor:
    """The last `length` outputs of a causal convolution of that kernel. Before a text, or document, there are zeros.

    The module is called, so that weights that were put aside are brought.
    """
    past = kernel - 1
    if documents_BT is None:
        return conv1d(F.pad(x_BCT, (past, 0)))[..., -length:]
    place_BT = torch.arange(length, device=x_BCT.device) + past * (documents_BT.long() + 1)
    place_BCT = place_BT[:, None].expand(x_BCT.shape)
    spaced_BCS = x_BCT.new_zeros(*x_BCT.shape[:2], int(place_BT.max()) + 1).scatter(2, place_BCT, x_BCT)
    return conv1d(spaced_BCS).gather(2, place_BCT - past)
