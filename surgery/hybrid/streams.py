"""The branch of Mamba-1, which reads the mixer's own streams, and the mixin that records them.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

Shape legend: B batch, T new tokens, I inner width, H spliced heads, K query/key width, W width of [dt | B | C].
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .attention import SplicedAttention
from .backends import is_decoding
from .mixer import HybridMixerMixin, Watched
from .sites import POSITIVE_OR_NONE, Check, at_least


class StreamAttention(SplicedAttention):
    """Attention heads of a Mamba-1 layer: they read the mixer's own streams, after its convolution and `x_proj`.

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

    @classmethod
    def plan_fields(cls, source: Any) -> dict[str, Any]:
        """As of a copied head; the streams have passed the mixer's own convolution."""
        return {**super().plan_fields(source), "conv_kernel": 0}

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

    def fill(self, source: Any) -> None:
        """Copy the gate; copied queries and keys are as `initialize_inputs` sets them."""
        source.copy(self.gate_proj, "gate")
        self.fill_new_channels(source, "qk_proj")
        source.copy_output(self.o_proj)

    def project(
        self,
        u_BTD: Tensor,
        cache: Any,
        streams: Any,
        positions: Tensor | None,
        documents: Tensor | None = None,
        padding_mask: Tensor | None = None,
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
        qk_BTRHK = self.qk_proj(parameters_BTW).unflatten(-1, (2, self.num_heads, -1))
        query, key = qk_BTRHK.permute(2, 0, 3, 1, 4)
        x_BTHV = x_BTI.unflatten(-1, (-1, self.v_width))
        if is_decoding(u_BTD):  # a list of indices would wait for the device
            value_BTHV = torch.cat([x_BTHV[:, :, head : head + 1] for head in self.heads], dim=2)
        else:
            value_BTHV = x_BTHV[:, :, self.heads]
        value = value_BTHV.transpose(1, 2)
        return self.scale_query(query), key, value


class StreamMixerMixin(HybridMixerMixin):
    """Put before Mamba-1's mixers, whose branches may read the input and the output of `x_proj`."""

    one_by_one = True

    @property
    def x_proj(self) -> Any:
        """The projection to dt, B and C; its input and output are recorded while the mixer runs."""
        module = nn.Module.__getattr__(self, "x_proj")
        return module if self.seen is None else Watched(module, seen=self.seen)
