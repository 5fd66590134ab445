"""Fill the Gather layer of a pair, so that the attention block above it can match keys from the first step.

The layer is a delay line: it brings the tokens before. With `init: ssm` its first channels copy the keys and queries of
the SSM layer that follows, which match where the base gathers a key into the tokens of its value.

Shape legend: B batch, T tokens, D model width of the base, I inner width of an SSM layer, N state size, K taps of its
convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.models.inserted import head_slots
from surgery.splice.draw import Draw
from surgery.types import Graft

_RIDGE = 1e-3  # as a share of the mean square of the inputs
_RANDOM_RMS = 0.1  # of what a layer that begins at 0 writes to side channels, as the block reads it at full size
_GAIN = 2048  # copies are this much smaller than the stream, and the block's norm multiplies them by it
_RANDOM_SHARE = 0.5  # size of the other channels of query and key beside the copies


def fill_gather(
    mixer: nn.Module, block: nn.Module, graft: Graft, model: PreTrainedModel, layer: int, side: slice | None, draw: Draw
) -> None:
    """Fill the Gather layer of a pair, and what the block above it reads.

    The layer is a delay line with a zero output. With `init: ssm` it also holds keys and queries of the base, and it
    writes to the side channels from the first step.

    Args:
        mixer: of the Gather layer.
        block: the attention block, with a random query and key.
        layer: of the base, before which the pair is inserted.
        side: the side channels of this pair; None if it has none.
    """
    # All of the vocabulary is as frequent.
    ids = draw.tokens("gate", 16 * model.config.hidden_size, model.config.vocab_size)
    stream = input_of(model, model.base_model.layers[layer], ids)
    x = stream.double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.layer_norm_epsilon)
    _fill_delay_line(mixer, draw, constant_direction(normed.flatten(0, 1)).to(stream.dtype))
    base = stream.shape[-1]
    others = torch.arange(len(block.norm.weight), device=draw.device) >= base
    if side is not None:
        others[side] = False
    # With a weight of 0 in the norm and behind it, side channels of other pairs stay unread in training too.
    block.norm.weight[others] = 0
    for projection in (block.mixer.q_proj, block.mixer.k_proj, block.mixer.v_proj):
        projection.weight[:, others] = 0
    if side is None:
        return
    size = float(stream.square().mean().sqrt())
    if graft.init == "random":
        block.norm.weight[side] = size / _RANDOM_RMS
        return
    # The base's norms, which average over side channels too, change by rounding only.
    mixer.norm.weight.fill_(size / _GAIN)
    block.norm.weight[side] = _GAIN
    per_group = mixer.num_heads // mixer.n_groups
    room = mixer.intermediate_size // (4 * mixer.ssm_state_size)  # one half stays a delay line
    groups = sorted({head // per_group for head in graft.heads})[:room]
    _copy_keys_and_queries(mixer, model.base_model.layers[layer], groups)
    kept = _write_side_channels(mixer, normed.to(stream.dtype), len(groups), block.mixer.head_dim, side, draw)
    identity = torch.eye(kept, device=draw.device)
    attention = block.mixer

    def copy_rows(projection: nn.Module, slot: int, column: int) -> None:
        rows = projection.weight.unflatten(0, (-1, attention.head_dim))[slot]
        rows *= _RANDOM_SHARE
        rows[:kept] = F.pad(identity, (column, rows.shape[1] - column - kept))

    of_keys: dict[int, int] = {}  # by key-value head, the group that it copies: that of its first head
    for slot, head in zip(head_slots(len(graft.heads), attention), graft.heads, strict=True):
        key_slot = slot // attention.num_key_value_groups
        new, group = key_slot not in of_keys, of_keys.setdefault(key_slot, head // per_group)
        if group in groups:
            first = side.start + 2 * kept * groups.index(group)
            copy_rows(attention.q_proj, slot, first + kept)
            if new:
                copy_rows(attention.k_proj, key_slot, first)


class _Reached(Exception):
    """A forward pass has reached the module whose input is needed."""


def input_of(model: PreTrainedModel, module: nn.Module, ids: Tensor) -> Tensor:
    """Run a model on (B,T) ids up to one of its modules, and return the module's first input."""
    inputs: list[Tensor] = []

    def stop(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(arguments[0])
        raise _Reached

    with ExitStack() as hooks, suppress(_Reached):
        hooks.callback(module.register_forward_pre_hook(stop).remove)
        model(ids, use_cache=False)
    return inputs[0]


def constant_direction(normed: Tensor) -> Tensor:
    """Find a vector whose product with a layer's normed input (N,D) is about 1 at every token."""
    return ridge(normed, normed.new_ones(len(normed), 1))[:, 0]


def ridge(inputs: Tensor, targets: Tensor) -> Tensor:
    """Regress targets (N,B) on inputs (N,A), in float64. Returns (A,B) in the dtype of the inputs."""
    x, y = inputs.double(), targets.double()
    gram = x.T @ x
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram, x.T @ y).to(inputs.dtype)


def _fill_delay_line(mixer: nn.Module, draw: Draw, constant: Tensor) -> None:
    """A Mamba-2 layer whose channels hold the tokens 1 to K-1 places before, with the scan off and a zero output.

    x is a random projection of the base's channels, and the convolution of channel i only passes what stood
    `1 + i % (K-1)` tokens before. The gate is about the same at every token, since a random one would hide much of x.
    (Before layer 0 of checkpoints/pico-mamba2, a linear map finds the token three places before in 95% of cases, and in
    70% with a random gate.) The scan is off because C is 0. B is not 0, so C has gradients as soon as the output is not
    0.
    """
    channels = len(constant)
    I = mixer.intermediate_size  # noqa: E741
    states, K = mixer.n_groups * mixer.ssm_state_size, mixer.conv_kernel_size
    for module in (mixer.in_proj, mixer.conv1d, mixer.out_proj):
        if module.bias is not None:
            module.bias.zero_()
    mixer.in_proj.weight.zero_()
    z, x, B, *_ = mixer.in_proj.weight[:, :channels].split([I, I, states, states, mixer.num_heads])  # C and dt stay 0
    z.copy_(2 * constant.expand(len(z), channels))  # silu(2) = 1.76
    for name, rows in (("x", x), ("B", B)):
        rows.copy_(draw.normal(name, len(rows), channels))
    mixer.conv1d.weight.zero_()
    channel = torch.arange(I, device=draw.device)
    mixer.conv1d.weight[channel, 0, K - 2 - channel % (K - 1) if K > 1 else 0] = 1
    mixer.conv1d.weight[I:, 0, K - 1] = 1  # B and C: the token itself
    steps = draw.uniform("dt_bias", mixer.num_heads, math.log(1e-3), math.log(1e-1)).exp()
    mixer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
    mixer.A_log.copy_(draw.uniform("A_log", mixer.num_heads, 1, 16).log())
    mixer.D.fill_(1)
    mixer.norm.weight.fill_(1)
    mixer.out_proj.weight.zero_()


def _copy_keys_and_queries(mixer: nn.Module, followed: nn.Module, groups: Sequence[int]) -> None:
    """Let the first channels of a delay line hold B and C of an SSM layer: its keys and queries (arXiv 2405.21060).

    They include the convolution of that layer, which is in the block `followed`. The order is N channels of B and N of
    C for each group.
    """
    N, I = mixer.ssm_state_size, mixer.intermediate_size  # noqa: E741
    starts = [start for group in groups for start in (group * N, (mixer.n_groups + group) * N)]
    theirs = [I + start + n for start in starts for n in range(N)]
    copy_channels(mixer, followed, theirs, 0)


def copy_channels(mixer: nn.Module, followed: nn.Module, theirs: Sequence[int], first: int) -> None:
    """Let channels of a Gather layer, from `first` on, hold those of the convolution of the SSM layer `followed`."""
    source, I = followed.mixer, mixer.intermediate_size  # noqa: E741
    ours = torch.arange(first, first + len(theirs), device=mixer.D.device)
    rows = torch.tensor(theirs, dtype=torch.long, device=mixer.D.device)
    weight = source.in_proj.weight[I + rows] * followed.norm.weight
    mixer.in_proj.weight[I + ours, : weight.shape[1]] = weight
    mixer.in_proj.weight[I + ours, weight.shape[1] :] = 0
    mixer.conv1d.weight[ours] = source.conv1d.weight[rows]
    if mixer.in_proj.bias is not None:
        mixer.in_proj.bias[I + ours] = source.in_proj.bias[I + rows]
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias[ours] = source.conv1d.bias[rows]


def _write_side_channels(mixer: nn.Module, normed: Tensor, groups: int, width: int, side: slice, draw: Draw) -> int:
    """Write keys and queries to at most one half of the side channels, and a mixture of the delay lines to the others.

    States larger than their room are projected at random to fewer channels, keys and queries alike.

    Args:
        normed: (B,T,D) normed input of the layer.
        groups: number of copied groups, whose channels come first.
        width: of the attention heads.

    Returns:
        The number of side channels of one group's keys: first these, then as many of its queries, for each group.
    """
    I, N = mixer.intermediate_size, mixer.ssm_state_size  # noqa: E741
    T, base = normed.shape[1:]
    rows = mixer.out_proj.weight[side]
    xBC = mixer.in_proj(F.pad(normed, (0, mixer.in_proj.in_features - base)))[..., I : I + mixer.conv_dim]
    power = F.silu(mixer.conv1d(xBC.mT)[:, :I, :T]).square().mean((0, 2))
    size = (power / power.mean()).sqrt()  # of a channel after the gated norm, about
    kept = min(N, width, len(rows) // (4 * groups)) if groups else 0
    projection = torch.eye(N, device=rows.device)
    if 0 < kept < N:
        projection = torch.linalg.qr(draw.normal("copies", N, N))[0] * (N / kept) ** 0.5
    rows.zero_()
    for number in range(2 * groups):
        channels = slice(number * N, (number + 1) * N)
        block = rows[number * kept : (number + 1) * kept, channels]
        block.copy_(projection[:kept] / size[channels].square().mean().sqrt())
    written, copied = 2 * groups * kept, 2 * groups * N
    rows[written:, copied:] = draw.normal("out_proj", len(rows) - written, I - copied)
    return kept
