"""The attention branch of a spliced layer in plain torch: projections, padding, gate and norm.

The convolution with its state and the attention with its paged cache come from the caller, so the module runs without
vLLM too. The formulas are those of `surgery/hybrid/modeling_hybrid.py`, which every export holds a copy of.

Shape legend: N tokens of all requests, D model width, C channels, H heads of this layer, K query/key width, V value
width, P heads and W width in vLLM, padded with zeros, I inner width of Mamba-1, R width of its [dt | B | C].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .splice import Site

Convolve = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]  # x (N,C), weight (C,kernel), bias (C,) -> (N,C)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # three of (N,P*W) -> (N,P*W); scores are not scaled
Streams = tuple[Tensor, Tensor] | None  # input (N,I) and output (N,R) of the mixer's x_proj


class AttentionBranch(nn.Module):
    """Attention heads whose output is added to the mixer's.

    Args:
        hidden_size: D.
        site: the layer's entry of `config.splice`.
        heads, width: P and W.
    """

    def __init__(self, hidden_size: int, site: Site, heads: int, width: int) -> None:
        super().__init__()
        self.site, self.heads, self.width = site, heads, width
        self.build_inputs(hidden_size)
        values = site.widths[2]
        self.gate_proj = nn.Linear(hidden_size, values, bias=site.gate_bias) if site.gate else None
        self.scale = nn.Parameter(torch.ones(len(site.heads)))
        self.o_proj = nn.Linear(values, hidden_size, bias=site.out_bias)

    def build_inputs(self, hidden_size: int) -> None:
        """Build the modules that `project` uses."""
        channels = sum(self.site.widths)
        self.qkv_proj = nn.Linear(hidden_size, channels, bias=self.site.bias)
        self.conv1d = nn.Conv1d(channels, channels, self.site.conv_kernel, groups=channels, bias=self.site.conv_bias)

    def forward(self, u_ND: Tensor, convolve: Convolve, attend: Attend, streams: Streams = None) -> Tensor:
        """(N,D), the mixer's input -> (N,D), to add to its output. `StreamBranch` needs the streams."""
        query, key, value = self.project(u_ND, convolve, streams)
        mixed_NPW = attend(self.padded(self.scaled(query)), self.padded(key), self.padded(value))
        mixed_NPW = mixed_NPW.view(-1, self.heads, self.width)
        return self.put_out(mixed_NPW[:, : len(self.site.heads), : self.site.v_width], u_ND)

    def project(self, u_ND: Tensor, convolve: Convolve, streams: Streams) -> tuple[Tensor, ...]:
        """Return query, key and value: (N,H,K), (N,H,K), (N,H,V)."""
        x_NC = convolve(self.qkv_proj(u_ND), self.conv1d.weight.squeeze(1), self.conv1d.bias)
        return tuple(part.unflatten(-1, (len(self.site.heads), -1)) for part in self.split(x_NC))

    def split(self, x_NC: Tensor) -> tuple[Tensor, ...]:
        """Apply SiLU to values and to copied channels of query and key; return (N,H*K), (N,H*K), (N,H*V)."""
        if not self.site.silu:
            return x_NC.split(self.site.widths, dim=-1)
        activated = F.silu(x_NC).split(self.site.widths, dim=-1)
        if self.site.copied_width == self.site.qk_width:
            return activated
        is_copied_K = torch.arange(self.site.qk_width, device=x_NC.device) < self.site.copied_width
        is_copied = is_copied_K.repeat(len(self.site.heads))
        query, key, _ = x_NC.split(self.site.widths, dim=-1)
        return torch.where(is_copied, activated[0], query), torch.where(is_copied, activated[1], key), activated[2]

    def scaled(self, query_NHK: Tensor) -> Tensor:
        """Multiply by the learned scale of each head, and M new channels also by 1/sqrt(M)."""
        query_NHK = query_NHK * self.scale[:, None]
        new = self.site.qk_width - self.site.copied_width
        if not new:
            return query_NHK
        copied_NHK, new_NHK = query_NHK.tensor_split([self.site.copied_width], dim=-1)
        return torch.cat([copied_NHK, new_NHK * new**-0.5], dim=-1)

    def padded(self, x_NHK: Tensor) -> Tensor:
        """Return (N,P*W), with zeros for the missing heads and channels."""
        return F.pad(x_NHK, (0, self.width - x_NHK.shape[2], 0, self.heads - x_NHK.shape[1])).flatten(1)

    def put_out(self, mixed_NHV: Tensor, u_ND: Tensor) -> Tensor:
        """Gate, normalise every head in fp32, and project: (N,H,V) -> (N,D)."""
        if self.gate_proj is not None:
            mixed_NHV = mixed_NHV * F.silu(self.gate_proj(u_ND)).view(mixed_NHV.shape)
        x = mixed_NHV.float()
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.site.norm_eps)).to(mixed_NHV.dtype)
        return self.o_proj(normed.flatten(1))


class StreamBranch(AttentionBranch):
    """Copied heads of Mamba-1: query and key are a linear map of the mixer's [dt | B | C], the value is its x."""

    def build_inputs(self, hidden_size: int) -> None:
        """Build the map from [dt | B | C] to queries and keys."""
        self.stream_widths = [self.site.rank, self.site.copied_width, self.site.copied_width]
        self.qk_proj = nn.Linear(sum(self.stream_widths), sum(self.site.widths[:2]), bias=False)

    def project(self, u_ND: Tensor, convolve: Convolve, streams: Streams) -> tuple[Tensor, ...]:
        """Return query, key and value: (N,H,K), (N,H,K), (N,H,V)."""
        assert streams is not None, "the mixer did not call x_proj"
        x_NI, parameters_NR = streams
        if self.site.stream_eps is not None:
            parts = parameters_NR.float().split(self.stream_widths, dim=-1)
            normed = [p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + self.site.stream_eps) for p in parts]
            parameters_NR = torch.cat(normed, dim=-1).to(parameters_NR.dtype)
        query, key = self.qk_proj(parameters_NR).unflatten(-1, (2, len(self.site.heads), -1)).unbind(1)
        return query, key, x_NI.unflatten(-1, (-1, self.site.v_width))[:, list(self.site.heads)]


def branch_of(hidden_size: int, site: Site, heads: int, width: int) -> AttentionBranch:
    """Return the branch of a layer. Arguments are as of `AttentionBranch`."""
    return (AttentionBranch if site.rank is None else StreamBranch)(hidden_size, site, heads, width)
