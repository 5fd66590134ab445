"""Mamba-2 as transformers has it: `mamba2`, and our own hybrids of it. Owns: its layout.

Layout of `in_proj`'s rows and of the convolution's channels: [z | x | B | C | dt] and [x | B | C]
(Dao and Gu, arXiv 2405.21060; transformers' `Mamba2Mixer`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from surgery.families.base import HeadSlices, Streams
from surgery.heads import MixerSpec
from surgery.hybrid import Mamba2HybridConfig, Mamba2HybridForCausalLM


class Mamba2Family:
    """See `Family` for what each function answers."""

    name = "mamba2"
    model_types: tuple[str, ...] = ("mamba2", "mamba2_hybrid")

    def mixers(self, config: PreTrainedConfig) -> tuple[MixerSpec, ...]:
        return tuple(
            MixerSpec(
                layer=layer,
                path=f"backbone.layers.{layer}.mixer",
                kind=self.name,
                num_heads=config.num_heads,
                head_dim=config.head_dim,
                num_groups=config.n_groups,
                state_size=config.state_size,
            )
            for layer in range(config.num_hidden_layers)
        )

    def weight_slices(self, spec: MixerSpec, head: int) -> HeadSlices:
        inner, groups = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_size
        own = _span(head, spec.head_dim)
        shared = _span(spec.group_of(head), spec.state_size)
        return HeadSlices(
            gate=own,
            value=_shift(own, inner),
            key=_shift(shared, 2 * inner),
            query=_shift(shared, 2 * inner + groups),
            step=_shift(_span(head, 1), 2 * inner + 2 * groups),
            conv_value=own,
            conv_key=_shift(shared, inner),
            conv_query=_shift(shared, inner + groups),
            out=own,
        )

    def block(self, model: PreTrainedModel, layer: int) -> nn.Module:
        return model.backbone.layers[layer]

    def mixer(self, model: PreTrainedModel, layer: int) -> nn.Module:
        return model.backbone.layers[layer].mixer

    def in_proj(self, mixer: nn.Module) -> nn.Module:
        return mixer.in_proj

    def out_proj(self, mixer: nn.Module) -> nn.Linear:
        return mixer.out_proj

    def gated_norm(self, mixer: nn.Module) -> nn.Module:
        return mixer.norm

    def residual_scale(self, config: PreTrainedConfig) -> float:
        return 1.0

    def streams(self, mixer: nn.Module, projected: Tensor, conv_state: Tensor | None = None) -> Streams:
        inner, conv, heads = mixer.intermediate_size, mixer.conv_dim, mixer.num_heads
        _, mixed_BTC, step_BTH = projected.split([inner, conv, heads], dim=-1)
        T, width = mixed_BTC.shape[1], mixer.conv_kernel_size - 1
        mixed_BCT = mixed_BTC.transpose(1, 2)
        before = torch.zeros_like(mixed_BCT[..., :1]).expand(-1, -1, width) if conv_state is None else conv_state
        mixed_BCT = torch.cat([before[..., -width:], mixed_BCT], dim=-1)
        mixed_BCT = F.conv1d(mixed_BCT, mixer.conv1d.weight, mixer.conv1d.bias, groups=conv)[..., -T:]
        x, key, query = (
            mixer.act(mixed_BCT).transpose(1, 2).split([inner, (conv - inner) // 2, (conv - inner) // 2], -1)
        )
        step_BTH = F.softplus(step_BTH + mixer.dt_bias).clamp(*mixer.time_step_limit)
        groups = (mixer.n_groups, mixer.ssm_state_size)
        return Streams(
            x.unflatten(-1, (heads, mixer.head_dim)), key.unflatten(-1, groups), query.unflatten(-1, groups), step_BTH
        )

    def hidden_attention(self, mixer: nn.Module, streams: Streams) -> Tensor:
        """`a[t,s] = (C_t . B_s) exp(A sum_{k=s+1..t} dt_k) dt_s`, masked before the exponential."""
        T = streams.x.shape[1]
        per_group = mixer.num_heads // mixer.n_groups
        scores_BHTS = torch.einsum("btgn,bsgn->bgts", streams.query, streams.key).repeat_interleave(per_group, 1)
        decay_BHT = (-mixer.A_log.exp() * streams.step).cumsum(1).transpose(1, 2)
        log_decay = decay_BHT[..., :, None] - decay_BHT[..., None, :]
        causal = torch.ones(T, T, dtype=torch.bool, device=log_decay.device).tril()
        decay_BHTS = log_decay.masked_fill(~causal, -torch.inf).exp()
        return scores_BHTS * decay_BHTS * streams.step.transpose(1, 2)[:, :, None, :]

    def resume(
        self, model: PreTrainedModel, layer: int, hidden: Tensor, attention_mask: Tensor | None, keep_last: bool
    ) -> Tensor:
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        extra: dict[str, Any] = {}
        if getattr(model.config, "splice", None):
            extra["splice_mask"] = create_causal_mask(model.config, hidden, attention_mask, None)
        for block in model.backbone.layers[layer + 1 :]:
            hidden = block(hidden, attention_mask=attention_mask, **extra)
        hidden = model.backbone.norm_f(hidden[:, -1:] if keep_last else hidden)
        logits: Tensor = model.lm_head(hidden.to(model.lm_head.weight.dtype)).float()
        return logits

    def hybrid_config(self, config: PreTrainedConfig, splice: list[dict[str, Any]]) -> Mamba2HybridConfig:
        fields = {k: v for k, v in config.to_dict().items() if k not in _DERIVED}
        return Mamba2HybridConfig(**fields, splice=splice)

    def build_hybrid(self, config: PreTrainedConfig) -> Mamba2HybridForCausalLM:
        return Mamba2HybridForCausalLM(config)


_DERIVED = ("model_type", "architectures", "auto_map", "transformers_version", "layer_types", "splice", "_name_or_path")


def _span(index: int, width: int) -> slice:
    return slice(index * width, (index + 1) * width)


def _shift(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)
