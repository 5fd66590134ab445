"""Attention matrices of SSM and attention heads, for the page of the heads.

An SSM head mixes tokens like linear attention, `y_t = sum_s a[t,s] x_s` (Dao and Gu, arXiv 2405.21060; Ali et al.,
arXiv 2403.01590). So it has a hidden attention matrix:

    share[t,s] = |a[t,s] x_s| / sum_s' |a[t,s'] x_s'|

A share is the magnitude of what token s adds to the head's output at t, divided by the sum over all past tokens. `a`
alone does not distinguish heads: with `n_groups=1` all heads of a layer share C.B, and differ in the decay and in x.
In Mamba-1 every channel of a group has its own `a`, and the magnitude is the norm over the channels. For softmax
attention the share is the attention weight. The skip connection `D x_t` is not included.

They show where a head looks, not its effect: a head may read sharply and write nothing.
Shape legend: B prompts, T tokens, H heads, P head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import ModelError
from surgery.models.hooks import ActivationCache, record
from surgery.models.layouts import Streams
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.mixers.mamba1 import Mamba1Structure
from surgery.probes.documents import Document
from surgery.types import HeadId, MixerSpec, PromptAttention

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class Patterns:
    """Activations of one forward pass over unpadded prompts, from which the heads' matrices are computed.

    Attributes:
        attention: by `MixerSpec.name`, (B,H,T,T) the weights of attention mixers.
    """

    model: PreTrainedModel
    activations: ActivationCache
    attention: dict[str, Tensor]

    @torch.no_grad()
    def shares(self, spec: MixerSpec, heads: Sequence[int], constant: bool = False) -> Tensor:
        """(B,H,T,T) shares, in fp32 at least.

        Args:
            constant: hold queries and keys constant. The rows of an SSM head then show its decay alone, and those of
                softmax attention are uniform.
        """
        if spec.is_ssm:
            return normalised(self._contributions(spec, heads, constant))
        weights_BHTT = self.attention[spec.name][:, list(heads)]
        return normalised(torch.ones_like(weights_BHTT).tril()) if constant else weights_BHTT

    def _contributions(self, spec: MixerSpec, heads: Sequence[int], constant: bool) -> Tensor:
        """(B,H,T,T) magnitude of what token s adds at token t."""
        structure, mixer = structure_of(spec), mixer_of(self.model, spec)
        streams = structure.streams(mixer, spec, self.activations.projected[spec.name]).in_fp32()
        if constant:  # C.B becomes 1, with equal weight on all channels of the state
            key, query = torch.full_like(streams.key, 1 / spec.state_size), torch.ones_like(streams.query)
            streams = replace(streams, key=key, query=query)
        if isinstance(structure, Mamba1Structure):
            groups = [_group_contributions(structure, mixer, spec, streams, head) for head in heads]
            return torch.stack(groups, dim=1)
        weights_BHTT = structure.hidden_attention(mixer, spec, streams)[:, list(heads)]
        length_BHT = streams.x[:, :, list(heads)].norm(dim=-1).transpose(1, 2)
        return weights_BHTT.abs() * length_BHT[:, :, None, :]


def _group_contributions(
    structure: Mamba1Structure, mixer: nn.Module, spec: MixerSpec, streams: Streams, head: int
) -> Tensor:
    """(B,T,T) magnitudes of one channel group of Mamba-1. The matrices of a whole layer would not fit in memory."""
    channels = structure.weight_slices(spec, head).out
    part = nn.Module()
    part.A_log = nn.Parameter(mixer.A_log[channels], requires_grad=False)
    group = replace(streams, x=streams.x[:, :, head, None], step=streams.step[..., channels])
    weights_BPTT = structure.hidden_attention(part, replace(spec, num_heads=1), group)
    return (weights_BPTT * group.x[:, :, 0].transpose(1, 2)[:, :, None, :]).norm(dim=1)


def normalised(lengths: Tensor) -> Tensor:
    """Scale rows to sum to 1."""
    return lengths / lengths.sum(-1, keepdim=True).clamp(min=torch.finfo(lengths.dtype).tiny)


@torch.no_grad()
def observe_patterns(model: PreTrainedModel, batch: EncodedBatch, specs: Sequence[MixerSpec]) -> Patterns:
    """Run prompts of one length, and record the activations from which the matrices of these mixers are computed.

    Raises:
        ModelError: attention that returns no weights.
    """
    names = [spec.name for spec in family_of(model.config).mixers(model.config) if not spec.is_ssm]
    implementation, wanted = model.config._attn_implementation, {}
    if names:  # kernels do not return their weights
        model.set_attn_implementation("eager")
        wanted["output_attentions"] = True
    try:
        with record(model, specs) as activations:
            output = model(batch.input_ids.to(model.device), use_cache=False, logits_to_keep=1, **wanted)
    finally:
        if names:
            model.set_attn_implementation(implementation)
    weights = [tensor.float() for tensor in getattr(output, "attentions", None) or () if tensor is not None]
    if len(weights) != len(names):
        hint = f"It returned the weights of {len(weights)} of {len(names)} attention mixers (output_attentions)."
        raise ModelError("attention", model.config.model_type, hint)
    return Patterns(model, activations, dict(zip(names, weights, strict=True)))


def numpy_of(shares: Tensor) -> Shares:
    array: Shares = shares.detach().double().cpu().numpy()
    return array


def prompt_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    specs: Sequence[MixerSpec],
    full: Sequence[HeadId] = (),
) -> list[PromptAttention]:
    """Collect the attention of every head of these mixers at the query of each document, for `write_page`.

    Args:
        full: heads whose whole matrix is included, T^2 numbers each.
    """
    prompts, names = [], set(map(str, full))
    for document in documents:
        batch = encode([document], tokenizer, until_answer=True)
        patterns = observe_patterns(model, batch, specs)
        rows: dict[str, Shares] = {}
        matrices: dict[str, Shares] = {}
        for spec in specs:
            shares_HTT = patterns.shares(spec, range(spec.num_heads))[0]
            for head, shares_TT in zip(map(str, spec.heads), shares_HTT, strict=True):
                rows[head] = numpy_of(shares_TT[-1])
                if head in names:
                    matrices[head] = numpy_of(shares_TT)
        places = {"segment end": batch.segment_end, "answer token": batch.answer_token, "query": batch.query}
        marks = {name: int(position[0, -1]) for name, position in places.items() if int(position[0, -1]) >= 0}
        tokens = tuple(tokenizer.decode([i]) for i in batch.input_ids[0].tolist())
        prompts.append(PromptAttention(tokens, marks, rows, matrices))
    return prompts
