"""Mamba-1 (arXiv 2312.00752) and Falcon-Mamba (arXiv 2410.05355) with spliced attention heads.

Both families have the same mixer but for norms of dt, B and C. A head is a group of channels, and copies of it read the
mixer's own streams.

Shape legend: B batch, T new tokens, I inner width, H spliced heads, K query/key width, W width of [dt | B | C].
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import FalconMambaConfig, GenerationMixin, MambaConfig
from transformers import initialization as init
from transformers.models.falcon_mamba.modeling_falcon_mamba import (
    FalconMambaForCausalLM,
    FalconMambaMixer,
    FalconMambaModel,
    FalconMambaPreTrainedModel,
)
from transformers.models.mamba.modeling_mamba import MambaForCausalLM, MambaMixer, MambaModel, MambaPreTrainedModel

from .configuration_hybrid import POSITIVE_OR_NONE, Check, HybridConfigMixin, at_least
from .modeling_hybrid import (
    HybridCausalLMMixin,
    HybridInitMixin,
    HybridMixerMixin,
    HybridModelMixin,
    LogitsMixin,
    RecordingMixin,
    SplicedAttention,
    SplicePass,
    is_decoding,
)


class StreamAttention(SplicedAttention):
    """Attention heads that read the mixer's own streams, after its convolution and `x_proj`.

    Mamba-1 makes one B and one C a layer from all its channels, so copies of their rows would be the whole layer. The
    branch has a small linear map of its own over `[dt | B | C]`; at first it picks C as query and B as key, and other
    channels are new. Its value is the channel group's x.

    Args:
        site: also `rank`, the width of dt, and `stream_eps`, the epsilon where the model normalises dt, B and C, or
            None; `heads` are channel groups of `v_width`.
    """

    fields: Mapping[str, Check] = {"conv_kernel": at_least(0), "rank": at_least(1), "stream_eps": POSITIVE_OR_NONE}
    equal_widths = ("head_dim", "v_width")
    reads_streams = True

    def build_inputs(self, config: Any, site: Mapping[str, Any]) -> None:
        """Build the map from [dt | B | C] to queries and keys."""
        self.heads, self.stream_eps = list(site["heads"]), site["stream_eps"]
        self.stream_widths = [site["rank"], self.copied_width, self.copied_width]
        self.qk_proj = nn.Linear(sum(self.stream_widths), 2 * self.widths[0], bias=False)

    def initialize_inputs(self) -> None:
        """Pick C as query and B as key. In further channels, queries are 0 and keys random."""
        init.zeros_(self.qk_proj.weight)
        rank, width, _ = self.stream_widths
        query_HKW, key_HKW = self.qk_proj.weight.view(2, self.num_heads, self.qk_width, -1)
        init.copy_(query_HKW[:, :width, rank + width :], torch.eye(width).expand(self.num_heads, -1, -1))
        init.copy_(key_HKW[:, :width, rank : rank + width], torch.eye(width).expand(self.num_heads, -1, -1))
        if self.qk_width > width:
            init.normal_(key_HKW[:, width:], std=key_HKW.shape[-1] ** -0.5)

    def project(
        self, u_BTD: Tensor, cache: Any, splice_pass: SplicePass, streams: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map [dt | B | C] to queries and keys, and take the heads' channels as values."""
        assert streams is not None, "the mixer did not call x_proj"
        x_BTI, parameters_BTW = streams
        if self.stream_eps is not None:
            parts = parameters_BTW.float().split(self.stream_widths, dim=-1)
            if is_decoding(u_BTD):
                normed = [F.rms_norm(part, part.shape[-1:], eps=self.stream_eps) for part in parts]
            else:
                normed = [p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + self.stream_eps) for p in parts]
            parameters_BTW = torch.cat(normed, dim=-1).to(parameters_BTW.dtype)
        query, key = self.qk_proj(parameters_BTW).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x_BTHV = x_BTI.unflatten(-1, (-1, self.v_width))
        if is_decoding(u_BTD):  # a list of indices would wait for the device
            value_BTHV = torch.cat([x_BTHV[:, :, head : head + 1] for head in self.heads], dim=2)
        else:
            value_BTHV = x_BTHV[:, :, self.heads]
        return self.scale_query(query), key, value_BTHV.transpose(1, 2)


class ChannelGroupsMixin(HybridConfigMixin):
    """Put before a config whose layers have no heads: `channels_per_head` is the width of the groups of channels."""

    branch_variants = {"ssm": StreamAttention}

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer."""
        return self.cache_types(["linear_attention"] * self.num_hidden_layers)

    def ssm_heads(self) -> tuple[int, int]:
        """Return how many channel groups a layer has, and their width."""
        width = min(self.channels_per_head, self.intermediate_size)
        return self.intermediate_size // width, width


class MambaHybridConfig(ChannelGroupsMixin, MambaConfig):
    """MambaConfig and the fields `splice` and `channels_per_head`."""

    model_type = "mamba_hybrid"

    splice: list | None = None
    channels_per_head: int = 64


class FalconMambaHybridConfig(ChannelGroupsMixin, FalconMambaConfig):
    """FalconMambaConfig and the fields `splice` and `channels_per_head`."""

    model_type = "falcon_mamba_hybrid"

    splice: list | None = None
    channels_per_head: int = 64


class MambaHybridMixer(HybridMixerMixin, MambaMixer):
    """`MambaMixer` with a branch where the config splices one."""

    one_by_one = True


class FalconMambaHybridMixer(HybridMixerMixin, FalconMambaMixer):
    """`FalconMambaMixer` with a branch where the config splices one."""

    one_by_one = True


class Mamba1ModelMixin(HybridModelMixin, RecordingMixin):
    """Put before a model of blocks that hand nothing but cache and mask to their mixer."""

    reads_positions = False
    passes_kwargs = False
    mixer_class: type[nn.Module]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, block in enumerate(self.layers):
            block.mixer = self.mixer_class(config, index, initialize_mixer_weights=False)
        self.post_init()


class MambaHybridPreTrainedModel(HybridInitMixin, MambaPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = MambaHybridConfig
    _keep_in_fp32_modules_strict = {"A_log", "D"}
    _no_split_modules = ["MambaBlock"]


class FalconMambaHybridPreTrainedModel(HybridInitMixin, FalconMambaPreTrainedModel):
    """Flags and initialisation common to both classes."""

    config_class = FalconMambaHybridConfig
    _keep_in_fp32_modules_strict = {"A_log", "D"}
    _no_split_modules = ["FalconMambaBlock"]


class MambaHybridModel(Mamba1ModelMixin, MambaHybridPreTrainedModel, MambaModel):
    """`MambaModel` whose mixers may have a branch."""

    mixer_class = MambaHybridMixer


class FalconMambaHybridModel(Mamba1ModelMixin, FalconMambaHybridPreTrainedModel, FalconMambaModel):
    """`FalconMambaModel` whose mixers may have a branch."""

    mixer_class = FalconMambaHybridMixer


class MambaHybridForCausalLM(
    HybridCausalLMMixin, LogitsMixin, MambaHybridPreTrainedModel, MambaForCausalLM, GenerationMixin
):
    """Mamba-1 language model with spliced attention heads."""

    def __init__(self, config: MambaHybridConfig) -> None:
        super(MambaForCausalLM, self).__init__(config)
        self._build(MambaHybridModel(config))


class FalconMambaHybridForCausalLM(
    HybridCausalLMMixin, LogitsMixin, FalconMambaHybridPreTrainedModel, FalconMambaForCausalLM, GenerationMixin
):
    """Falcon-Mamba language model with spliced attention heads."""

    def __init__(self, config: FalconMambaHybridConfig) -> None:
        super(FalconMambaForCausalLM, self).__init__(config)
        self._build(FalconMambaHybridModel(config))


__all__ = [
    "FalconMambaHybridConfig",
    "FalconMambaHybridForCausalLM",
    "FalconMambaHybridModel",
    "MambaHybridConfig",
    "MambaHybridForCausalLM",
    "MambaHybridModel",
]
