"""The recurrence of a discrete Mamba-2, one token at a time and in chunks; pure functions of tensors.

Shipped with every exported checkpoint that needs it, so it imports torch only.

    h_t = exp(log_decay_t) h_{t-1} + x_t B_t^T        y_t = h_t C_t

Shape legend: B batch, T tokens, H heads of P, G key heads, R = H / G heads that share one, N state width, C chunks of L
tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def scan_step(
    x_BHP: Tensor, key_BGN: Tensor, query_BGN: Tensor, log_decay_BH: Tensor, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one token: return (B,H,P) without the skip, and the new state (B,H,P,N)."""
    shared = x_BHP.shape[1] // key_BGN.shape[1]
    key_BHN, query_BHN = (k.repeat_interleave(shared, dim=1) for k in (key_BGN, query_BGN))
    state_BHPN = state_BHPN * log_decay_BH.exp()[..., None, None] + x_BHP[..., None] * key_BHN[:, :, None]
    return torch.einsum("bhpn,bhn->bhp", state_BHPN, query_BHN), state_BHPN


def chunked_scan(
    x_BTHP: Tensor,
    key_BTGN: Tensor,
    query_BTGN: Tensor,
    log_decay_BTH: Tensor,
    state_BHPN: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Run many tokens as matrix products: return (B,T,H,P) without the skip, and the last state (B,H,P,N).

    Tokens of one chunk interact directly, and a state is carried between chunks (arXiv 2405.21060, section 6). The
    largest intermediate has one L x L matrix a head and chunk.

    Args:
        log_decay_BTH: logarithm of the factor on the state at each token, not above 0; -inf where a document begins.
        state_BHPN: the state before the first token.
    """
    T, G = x_BTHP.shape[1], key_BTGN.shape[2]
    size = min(chunk_size, T)
    # The last chunk is filled with tokens without input and decay, which do not change the state.
    x, key, query = (F.pad(v, (0, 0, 0, 0, 0, -T % size)) for v in (x_BTHP, key_BTGN, query_BTGN))
    x_BCGRLP = x.unflatten(1, (-1, size)).unflatten(3, (G, -1)).permute(0, 1, 3, 4, 2, 5)
    key_BCGLN, query_BCGLN = (v.unflatten(1, (-1, size)).transpose(2, 3) for v in (key, query))
    log_decay = F.pad(log_decay_BTH, (0, 0, 0, -T % size)).unflatten(1, (-1, size)).unflatten(3, (G, -1))
    log_BCGRL = log_decay.permute(0, 1, 3, 4, 2)

    decay_BCGRLL = _decays(log_BCGRL)
    scores_BCGLL = query_BCGLN @ key_BCGLN.transpose(-1, -2)
    within = (scores_BCGLL[:, :, :, None] * decay_BCGRLL) @ x_BCGRLP

    left_BCGRLP = x_BCGRLP * decay_BCGRLL[..., -1, :, None]
    added_BCGRPN = torch.einsum("bcgrlp,bcgln->bcgrpn", left_BCGRLP, key_BCGLN)
    since_BCGRL = log_BCGRL.cumsum(-1).exp()
    state, before = state_BHPN.unflatten(1, (G, -1)), []
    for added_BGRPN, whole_BGR in zip(added_BCGRPN.unbind(1), since_BCGRL[..., -1].unbind(1), strict=True):
        before.append(state)
        state = state * whole_BGR[..., None, None] + added_BGRPN
    carried = torch.einsum("bcgln,bcgrpn->bcgrlp", query_BCGLN, torch.stack(before, 1)) * since_BCGRL[..., None]

    y_BTHP = (within + carried).permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :T]
    return y_BTHP, state.flatten(1, 2)


def _decays(log_XL: Tensor) -> Tensor:
    """(...,L) -> (...,L,L): at [t,s] the factor at token t on the input of token s; 0 above the diagonal.

    Each sum starts at s. A difference of two sums from the chunk's start would lose the digits of a weak decay after a
    strong one. The mask comes before the exponential, so that no gradient is NaN.
    """
    L = log_XL.shape[-1]
    later = torch.ones(L, L, dtype=torch.bool, device=log_XL.device).tril(-1)
    sums_XLL = log_XL[..., :, None].expand(*log_XL.shape, L).masked_fill(~later, 0).cumsum(-2)
    return sums_XLL.masked_fill_(later.T, -torch.inf).exp_()
