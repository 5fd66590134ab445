"""The attention branch that a splice adds to an SSM mixer.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

A hybrid mixer computes `ssm(u) + attention(u)`. The branch has softmax attention without positions, a short causal
convolution and a gate like those of the SSM head that it copies (C is its query, B its key, x its value; arXiv
2405.21060), and an RMSNorm of every head before its output projection.

Shape legend: B batch, T new tokens, S tokens in the cache and new ones, H spliced heads of this layer, G key/value
heads, K query/key width, V value width, D model width.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils import logging
from transformers.utils.versions import require_version

from .backends import attend, is_decoding, projected
from .packing import SpliceRows, convolved, masked
from .sites import FLAG, Check, at_least, register_branch, wrong

logger = logging.get_logger(__name__)

# 5.24 renamed the argument for the cache in all models.
require_version("transformers>=5.24,<6", "This hybrid checkpoint needs it: pip install 'transformers>=5.24,<6'.")

NEWEST_TESTED = "5.24"


def warn_if_untested(installed: str) -> None:
    """Warn of a newer release: it may change what this code extends, as 5.24 renamed the argument for the cache."""
    minor, newest = ([int(part) for part in release.split(".")[:2]] for release in (installed, NEWEST_TESTED))
    if minor > newest:
        logger.warning(
            f"The hybrid's code was tested with transformers {NEWEST_TESTED}, and {installed} is installed. If "
            f"loading or generating fails: pip install 'transformers=={NEWEST_TESTED}.*'."
        )


warn_if_untested(transformers.__version__)

CONV_STATE = 1  # the branch's own convolution state; state 0 is the SSM's
RANDOM_KERNEL = 4  # width of a random branch's convolution; the one of Mamba-2


@register_branch("ssm")
class SplicedAttention(nn.Module):
    """The attention heads of one layer, as copies of SSM heads; the base class of every branch.

    A subclass under `@register_branch(NAME)` is a new kind of branch, built where `splice.init` is NAME. It may
    override the class attributes and the methods without an underscore. Its file travels with exports, so it imports
    `surgery.hybrid`, torch, transformers and the standard library only.

    Args:
        config: the hybrid's config; `hidden_size` and `_attn_implementation` are read.
        site: this layer's entry of `config.splice`: `heads`, `mode`, `qk_width`, `v_width`, `activation` (`silu` or
            None), `gate`, `bias`, `norm_eps` and the keys of `fields`; `gate_bias` where the gate has one of its own;
            `copied_width` where only the first channels of query and key are copies.
        layer_idx: index of the layer, which is also its slot in the cache.

    Attributes:
        fields: entries of `site` that this kind needs, with the check of each, beside those of every branch.
        equal_widths: fields of `site` that have to equal the width of the model's heads.
        unit_scale: whether queries start unscaled, as the linear attention does that SSM heads are; else 1/sqrt(K).
        needs_teacher: whether it is built from a Transformer (`splice.teacher`).
        reads_streams: whether it reads the input and the output of the mixer's `x_proj`.
        reads_positions: whether it reads the positions of the tokens.
    """

    fields: Mapping[str, Check] = {"conv_kernel": at_least(1), "conv_bias": FLAG}
    equal_widths: tuple[str, ...] = ("head_dim",)
    unit_scale = True
    needs_teacher = False
    reads_streams = False
    reads_positions = False

    is_causal = True
    num_key_value_groups = 1

    @classmethod
    def check_site(cls, name: str, site: Mapping[str, Any]) -> None:
        """Check what fields say together.

        Args:
            name: of the entry, for messages, such as `splice[0]`.

        Raises:
            ValueError: names the field, its value and what it needs.
        """
        if site.get("copied_width", 1) > site["qk_width"]:
            accepted = f"{site['qk_width']} or less, the width of query and key"
            raise wrong(f"{name}.copied_width", site["copied_width"], accepted)

    @classmethod
    def plan_fields(cls, source: Any) -> dict[str, Any]:
        """Return the fields of `site` that this kind decides. Called when a plan becomes a config.

        Args:
            source: a `surgery.splice.source.PlanSource`.
        """
        site = source.site
        width = max(site.state_size, source.min_width or 0)
        return {
            "qk_width": width,
            **({"copied_width": site.state_size} if width > site.state_size else {}),
            "v_width": site.head_dim,
            "conv_kernel": site.conv_kernel,
            "gate": True,
        }

    @staticmethod
    def kv_numel(site: Mapping[str, Any]) -> int:
        """Count the numbers that the cache keeps for each token."""
        return len(site["heads"]) * (site["qk_width"] + site["v_width"])

    @staticmethod
    def state_numel(site: Mapping[str, Any]) -> int:
        """Count the numbers that the cache keeps whatever the length: the convolution's state."""
        return len(site["heads"]) * (2 * site["qk_width"] + site["v_width"]) * site["conv_kernel"]

    def __init__(self, config: Any, site: Mapping[str, Any], layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.qk_width, self.v_width = len(site["heads"]), site["qk_width"], site["v_width"]
        self.copied_width = site.get("copied_width", self.qk_width)
        self.conv_kernel, self.mode, self.silu = site["conv_kernel"], site["mode"], site["activation"] == "silu"
        self.norm_eps = site["norm_eps"]
        self.initial_scale = 1.0 if self.unit_scale else self.qk_width**-0.5
        self.widths = [self.num_heads * w for w in (self.qk_width, self.qk_width, self.v_width)]
        self.build_inputs(config, site)
        gate_bias = site.get("gate_bias", site["bias"])
        self.gate_proj = nn.Linear(config.hidden_size, self.widths[2], bias=gate_bias) if site["gate"] else None
        self.scale = nn.Parameter(torch.full((self.num_heads,), self.initial_scale))
        self.o_proj = nn.Linear(self.widths[2], config.hidden_size, bias=site.get("out_bias", False))

    def build_inputs(self, config: Any, site: Mapping[str, Any]) -> None:
        """Build the modules that `project` uses."""
        channels = sum(self.widths)
        self.qkv_proj = nn.Linear(config.hidden_size, channels, bias=site["bias"])
        self.conv1d = nn.Conv1d(channels, channels, self.conv_kernel, groups=channels, bias=site["conv_bias"])

    def initialize(self) -> None:
        """Set initial values where a checkpoint has none. In `add` mode the branch adds nothing until it is trained."""
        init.constant_(self.scale, self.initial_scale)
        self.initialize_inputs()
        if self.mode == "add":
            init.zeros_(self.o_proj.weight)

    def initialize_inputs(self) -> None:
        """Set initial values of the modules of `build_inputs` that transformers cannot initialise."""
        init.kaiming_uniform_(self.conv1d.weight, a=math.sqrt(5))

    def fill(self, source: Any) -> None:
        """Set the values at the splice. The output projection is zeroed afterwards in `add` mode.

        Args:
            source: a `surgery.splice.source.HeadSource`, with the base's mixer and the teacher.
        """
        source.copy(self.gate_proj, "gate")
        widths = (self.qk_width, self.qk_width, self.v_width)
        source.copy(self.qkv_proj, "query", "key", "value", widths=widths)
        source.copy(self.conv1d, "conv_query", "conv_key", "conv_value", widths=widths)
        self.fill_new_channels(source, "qkv_proj", "conv1d")
        source.copy_output(self.o_proj)

    def fill_new_channels(self, source: Any, projection: str, *others: str) -> None:
        """Draw the channels of query and key that are no copies, and set the new queries to 0.

        The attention is that of the copies at first. New keys are not 0, so new queries have gradients at once.

        Args:
            source: as of `fill`.
            projection: module that computes queries and keys.
            others: modules that are applied to its channels.
        """
        if self.copied_width == self.qk_width:
            return
        for name in (projection, *others):
            weight = self.get_submodule(name).weight
            new = self.new_channels(weight)
            new.copy_(source.draw(f"{name}.weight, new channels", new.shape, fan_in=weight[0].numel()))
        self.new_channels(self.get_submodule(projection).weight)[0].zero_()

    def new_channels(self, weight: Tensor) -> Tensor:
        """Return a view (2,H,...) of the rows of query and key that are no copies; `weight` begins with both."""
        rows = weight[: sum(self.widths[:2])].unflatten(0, (2, self.num_heads, self.qk_width))
        return rows[:, :, self.copied_width :]

    def forward(
        self,
        u_BTD: Tensor,
        cache: Any = None,
        padding_mask: Tensor | None = None,
        causal_mask: Any = None,
        rows: SpliceRows | None = None,
        streams: tuple[Tensor, Tensor] | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        onto: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B,T,D) -> (B,T,D), and the weights (B,H,T,S) where the attention implementation returns them.

        Args:
            cache: a transformers Cache whose layer `layer_idx` is of type `hybrid`; updated in place.
            padding_mask: (B,T), 0 on padding; None when there is none.
            causal_mask: as made by transformers' `create_causal_mask` for the implementation in use.
            rows: collects the attention rows that the caller requested.
            streams: input and output of the mixer's `x_proj`, for a branch with `reads_streams`.
            positions: (B or 1,T) of the new tokens, for a branch with `reads_positions`.
            documents: (B,T) index of the document that each token belongs to; None where a row holds one document.
            onto: (B,T,D) to add the output to.
        """
        u_BTD = masked(u_BTD, padding_mask)
        query, key, value = self.project(u_BTD, cache, streams, positions, documents, padding_mask)
        if rows is not None:
            whole_key = key.repeat_interleave(self.num_key_value_groups, dim=1)
            rows.collect(self.layer_idx, query, whole_key, padding_mask)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        mixed_BTHV, weights = attend(self, query, key, value, causal_mask)
        if onto is None:
            return self.put_out(mixed_BTHV, u_BTD), weights
        return self.put_out(mixed_BTHV, u_BTD, onto), weights

    def put_out(self, mixed_BTHV: Tensor, u_BTD: Tensor, onto: Tensor | None = None) -> Tensor:
        """Gate, normalise and project the heads' outputs: (B,T,H,V) -> (B,T,D), and add them to `onto` (B,T,D)."""
        if self.gate_proj is not None:
            gate = self.gate_proj(u_BTD).view(mixed_BTHV.shape)
            mixed_BTHV = mixed_BTHV * F.silu(gate)
        # RMSNorm of every head by itself, in fp32, without a weight: `o_proj` can hold it.
        if is_decoding(u_BTD):
            normed = F.rms_norm(mixed_BTHV, mixed_BTHV.shape[-1:], eps=self.norm_eps)
        else:
            x = mixed_BTHV.float()
            normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps)).to(mixed_BTHV.dtype)
        return projected(self.o_proj, normed.flatten(2), onto)

    def project(
        self,
        u_BTD: Tensor,
        cache: Any,
        streams: Any,
        positions: Tensor | None,
        documents: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query, key and value, (B,H,T,K), (B,G,T,K) and (B,G,T,V), with the query scaled.

        Args:
            u_BTD: the mixer's input, 0 on padding. The other arguments are as of `forward`.
        """
        # A bias is not 0 on padding, and the convolution would carry it into the text.
        x_BCT = masked(self.qkv_proj(u_BTD), padding_mask).transpose(1, 2)
        T = x_BCT.shape[-1]
        if cache is not None:
            x_BCT = cache.update_conv_state(
                x_BCT, self.layer_idx, state_idx=CONV_STATE, conv_kernel_size=self.conv_kernel
            )
        x_BCT = convolved(self.conv1d, self.conv_kernel, x_BCT, T, documents)
        # Contiguous channels: SDPA's fused kernels refuse a head whose last dimension has a stride.
        x_BTC = self.activate(x_BCT).transpose(1, 2).contiguous()
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in x_BTC.split(self.widths, dim=-1)
        )
        return self.scale_query(query), key, value

    def activate(self, x_BCT: Tensor) -> Tensor:
        """Apply SiLU, where the SSM has it, to values and to copied channels of query and key."""
        if not self.silu:
            return x_BCT
        activated_BCT = F.silu(x_BCT)
        if self.copied_width == self.qk_width:
            return activated_BCT
        if torch.is_grad_enabled():
            is_new_C = torch.zeros(x_BCT.shape[1], dtype=torch.bool, device=x_BCT.device)
            self.new_channels(is_new_C).fill_(True)
            return torch.where(is_new_C[:, None], x_BCT, activated_BCT)
        self.new_channels(activated_BCT.transpose(0, 1)).copy_(self.new_channels(x_BCT.transpose(0, 1)))
        return activated_BCT

    def scale_query(self, query_BHTK: Tensor) -> Tensor:
        """Multiply by the learned scale of each head, and M new channels also by 1/sqrt(M)."""
        query_BHTK = query_BHTK * self.scale[:, None, None]
        if self.copied_width == self.qk_width:
            return query_BHTK
        copied, new = query_BHTK.tensor_split([self.copied_width], dim=-1)
        if torch.is_grad_enabled():
            return torch.cat([copied, new * new.shape[-1] ** -0.5], dim=-1)
        new.mul_(new.shape[-1] ** -0.5)
        return query_BHTK


@register_branch("random")
class RandomAttention(SplicedAttention):
    """The control: heads with random weights, `splice.random_width` wide, without a gate."""

    unit_scale = False

    @classmethod
    def plan_fields(cls, source: Any) -> dict[str, Any]:
        """Return widths, convolution, and no activation and gate."""
        return {
            "qk_width": source.random_width,
            "v_width": source.site.head_dim,
            "conv_kernel": RANDOM_KERNEL,
            "gate": False,
            "activation": None,
        }

    def fill(self, source: Any) -> None:
        """Draw every weight from the plan's seed."""
        source.randomize(self)
        source.copy_output(self.o_proj)
