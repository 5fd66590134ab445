"""Let a pair begin with what its SSM heads put out: their values, their gate and their output (`output: copy`).

An attention block has no gate, so what it reads would change every token of a text, where the gate of an SSM head is
closed. Here the first token is the gate: its values are 0, and a head attends to it where the SSM head's gate is
closed. All of it is in the weights of the pair, so the hybrid stays a Nemotron-H of transformers:

    values   The Gather layer copies x of the heads, with their convolution, and writes the principal directions of what
             the heads put out. Its scan takes x off again at the first token alone.
    mark     A side channel that is 0 at all other tokens: `silu(40 (1/4 - c))`, where c is about 1 at each token, and 0
             before the first, of the token before. It is B of that scan too, and the key of the first token.
    norm     A channel of 1000 makes the norm behind the scan a constant, and the gate of its channels cancels.
    query    `20 - 40 k` for the openness k of the SSM head's gate, by ridge regression on prompts: gate times norm,
             projected on their mean at the queries, as a share of it.
    output   The head's columns of `out_proj`, times that mean, times a quarter: the SSM head adds its part too.

Training keeps what values, mark and norm are made of (`held_parameters` and `read_masks` of `surgery.models.held`):
otherwise the values of the first token are not 0 for long (paper/SCALE.md).

Shape legend: T tokens, D channels of a stream, N tokens of all prompts, C channels of x of the heads of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.models.held import halves, value_channels
from surgery.models.hooks import record
from surgery.models.inserted import head_slots, inserted_entries, own_channels
from surgery.models.lookup import block_of, mixer_of, structure_of
from surgery.splice.draw import Draw
from surgery.splice.gather import constant_direction, copy_channels, input_of, ridge
from surgery.types import Graft, Plan

_SINK = 20.0  # score of the first token where the gate is closed, and less that where it is open
_MARK, _LARGE = 40.0, 1000.0
_SIZE = 0.25  # more disturbs what the base answers by itself


@dataclass
class _Heads:
    """What the heads of one layer hold on all prompts.

    Attributes:
        x: (N,C) after the convolution.
        factor: (N,C) of the scan's output: gate, norm and the norm's weight.
        last: (N,) whether a token is the query of its prompt.
    """

    x: Tensor
    factor: Tensor
    last: Tensor

    @property
    def at_query(self) -> Tensor:
        """(C,) the mean factor at queries."""
        return self.factor[self.last].mean(0)


@torch.no_grad()
def copy_outputs(hybrid: PreTrainedModel, base: PreTrainedModel, plan: Plan, prompts: Sequence[Tensor]) -> None:
    """Fill values, gate and output of the pairs of a hybrid in place, from below.

    Args:
        hybrid: from `insert_layers`.
        base: the model that the plan was made for.
        prompts: (1,T) ids each, up to a query.
    """
    # The gate is closed on random tokens: they stand for all other text.
    random = Draw(f"{plan.seed}:closed", base.device).tokens("closed", 2048, base.config.vocab_size)
    rows = [*prompts, *random[:, None]]
    held = _heads(base, plan.grafts, rows, len(prompts))
    for graft, entry in zip(plan.grafts, inserted_entries(hybrid.config), strict=True):
        heads, own = held[graft], own_channels(entry)
        assert own is not None
        gather, block = (hybrid.get_submodule(f"model.layers.{layer}") for layer in entry["layers"])
        followed = base.base_model.layers[entry["before"]]
        stream = torch.cat([input_of(base, followed, ids)[0] for ids in rows]).double()
        constant = constant_direction(F.rms_norm(stream, stream.shape[-1:], eps=base.config.layer_norm_epsilon)).float()
        copies, values = halves(own)
        before = _read(hybrid, block, rows[:1])[1:, copies].square().mean()
        _mark_the_first_token(gather.mixer, constant, value_channels(gather.mixer, len(graft.heads)))
        _write_values(gather.mixer, base, graft, heads, values)
        after = _read(hybrid, block, rows[:1])[1:, copies].square().mean()
        gather.mixer.out_proj.weight[copies] *= (before / after).sqrt()
        _fill_block(block.mixer, base, graft, heads, _read(hybrid, block, rows), values)


def _heads(base: PreTrainedModel, grafts: Sequence[Graft], rows: Sequence[Tensor], prompts: int) -> dict[Graft, _Heads]:
    """Run the base on all rows, of which the first ones are prompts."""
    parts: dict[Graft, list[tuple[Tensor, Tensor, Tensor]]] = {graft: [] for graft in grafts}
    for number, ids in enumerate(rows):
        with record(base, [graft.site for graft in grafts]) as trace:
            base(ids, use_cache=False)
        last = torch.arange(ids.shape[1], device=ids.device) == (ids.shape[1] - 1 if number < prompts else -1)
        for graft in grafts:
            structure, mixer, name = structure_of(graft.site), mixer_of(base, graft.site), graft.site.name
            places = [structure.weight_slices(graft.site, head) for head in range(graft.site.num_heads)]
            projected, weight = trace.projected[name], structure.norm_weight(mixer)
            opened = F.silu(torch.cat([projected[0, :, place.gate] for place in places], -1)) * weight
            whole = trace.scan[name][0] * opened
            norm = (whole * trace.heads[name][0]).sum(-1, keepdim=True) / whole.square().sum(-1, keepdim=True)
            factor = torch.cat([(opened * norm)[:, places[head].out] for head in graft.heads], -1)
            x = structure.streams(mixer, graft.site, projected).x[0][:, list(graft.heads)].flatten(1)
            parts[graft].append((x, factor, last))
    return {graft: _Heads(*map(torch.cat, zip(*found, strict=True))) for graft, found in parts.items()}


def _read(hybrid: PreTrainedModel, block: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    """(N,D) the input of a block's projections."""
    return torch.cat([input_of(hybrid, block.mixer.v_proj, ids)[0] for ids in rows])


def _mark_the_first_token(mixer: nn.Module, constant: Tensor, values: slice) -> None:
    """Hold the norm by the channel before the last, mark the first token in the last, and take values off there."""
    I, N, K, P = mixer.intermediate_size, mixer.ssm_state_size, mixer.conv_kernel_size, mixer.head_dim  # noqa: E741
    mixer.in_proj.weight[:I, : len(constant)] = 2 * constant
    for channels in (slice(I - 2, I), slice(I, I + 2 * N)):  # these two, and B and C
        mixer.in_proj.weight[I + channels.start : I + channels.stop] = 0
        mixer.conv1d.weight[channels] = 0
        mixer.conv1d.bias[channels] = 0
    mixer.conv1d.bias[I - 2] = _LARGE
    for channel in (I - 1, I):
        mixer.in_proj.weight[I + channel, : len(constant)] = _MARK * constant
        mixer.conv1d.weight[channel, 0, K - 2] = -1
        mixer.conv1d.bias[channel] = _MARK / 4
    mixer.conv1d.bias[I + N] = 1  # C
    heads = slice(values.start // P, values.stop // P)
    mixer.dt_bias[:] = -20  # no scan
    mixer.dt_bias[heads] = math.log(math.e - 1)  # a step of 1
    mixer.A_log[heads] = math.log(30)  # of one token
    of_first = F.silu(mixer.conv1d.bias[I]) * F.silu(mixer.conv1d.bias[I + N])
    mixer.D[heads] = -of_first


def _write_values(mixer: nn.Module, base: PreTrainedModel, graft: Graft, heads: _Heads, side: slice) -> None:
    """Copy x of the heads into the Gather layer, and write its principal directions and the mark to side channels."""
    structure, source = structure_of(graft.site), mixer_of(base, graft.site)
    places = [structure.weight_slices(graft.site, head) for head in graft.heads]
    theirs = [channel for place in places if place.conv_value for channel in range(10**9)[place.conv_value]]
    ours, I = value_channels(mixer, len(graft.heads)), mixer.intermediate_size  # noqa: E741
    copy_channels(mixer, block_of(base, graft.site.layer, graft.site), theirs, ours.start)
    output = torch.cat([structure.out_proj(source).weight[:, place.out] for place in places], -1)
    size = heads.at_query.abs() * output.norm(dim=0)  # of what a channel puts out
    weighted = (heads.x * size).double()
    directions = torch.linalg.eigh(weighted.T @ weighted).eigenvectors.flip(1)[:, : side.stop - side.start - 1]
    spread = weighted.square().mean().sqrt() * (len(theirs) / directions.shape[1]) ** 0.5
    norm = _LARGE / I**0.5  # what the norm divides by
    weight = mixer.out_proj.weight
    weight[:, ours.start :] = 0
    weight[side] = 0
    kept = slice(side.start, side.start + directions.shape[1])
    weight[kept, ours] = (directions.T * size / spread).to(weight) * norm / mixer.D[ours.start // mixer.head_dim]
    weight[side.stop - 1, -1] = norm * 4 / _MARK


def _fill_block(
    attention: nn.Module, base: PreTrainedModel, graft: Graft, heads: _Heads, inputs: Tensor, side: slice
) -> None:
    """Fill values, output, and the row of query and key that chooses the first token, of each head of a block."""
    structure, source = structure_of(graft.site), mixer_of(base, graft.site)
    held = slice(side.start, side.stop - 1)
    mark = inputs[:, side.stop - 1].max()
    scale = math.sqrt(inputs.shape[1] / base.config.hidden_size)
    values, P, dim = ridge(inputs[:, held], heads.x), source.head_dim, attention.head_dim
    v, k, q = (getattr(attention, name).weight for name in ("v_proj", "k_proj", "q_proj"))
    v.zero_()
    for number, (slot, head) in enumerate(zip(head_slots(len(graft.heads), attention), graft.heads, strict=True)):
        own = slice(number * P, (number + 1) * P)
        key_slot = slot // attention.num_key_value_groups
        v[key_slot * dim : key_slot * dim + P, held] = values[:, own].T
        k[(key_slot + 1) * dim - 1] = 0
        k[(key_slot + 1) * dim - 1, side.stop - 1] = dim**0.5 / mark
        opened = heads.factor[:, own] @ heads.at_query[own] / heads.at_query[own].square().sum()
        scores = _SINK - 2 * _SINK * opened.clamp(0, 1)
        q[(slot + 1) * dim - 1] = ridge(inputs, scores[:, None])[:, 0]
        output = structure.out_proj(source).weight[:, structure.weight_slices(graft.site, head).out]
        attention.o_proj.weight[: len(output), slot * dim : slot * dim + P] = (
            output * heads.at_query[own] * scale * _SIZE
        )
