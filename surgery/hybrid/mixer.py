"""The mixin that adds an attention branch to a family's SSM mixer.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.

Shape legend: B batch, T new tokens, D model width, I inner width.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .backends import is_decoding, is_plain
from .kernels import kernels_by_device
from .packing import SplicePass
from .sites import splice_sites

IN_FP32 = {"A_log", "dt_bias", "D"}  # parameters of the recurrence, also in a model of half precision


class Watched:
    """A projection of a mixer while the mixer runs: it silences heads in its input, or records its input and output.

    It wraps the module that is there at the call, so that adapters and quantisers may replace it.

    Args:
        keep: returns the factors of an input's channels, or None.
        seen: a list that collects each input with its output, or None.
    """

    def __init__(self, module: nn.Module, keep: Callable[[Tensor], Tensor] | None = None, seen: Any = None) -> None:
        self.module, self.keep, self.seen = module, keep, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, x_BTI: Tensor) -> Tensor:
        if self.keep is not None:
            x_BTI = x_BTI * self.keep(x_BTI)
        output = self.module(x_BTI)
        if self.seen is not None:
            self.seen.append((x_BTI, output))
        return output


class HybridMixerMixin:
    """Put before a family's mixer class: `class HybridMixer(HybridMixerMixin, Mamba2Mixer)`.

    It calls the mixer's own forward, so scans, kernels and parameter names stay.

    Attributes:
        one_by_one: set where the family's scan takes no initial state: several new tokens after a cache then run one
            by one.
        bypassed: modules whose weights the family's forward reads itself, so that an adapter there does nothing.
    """

    one_by_one = False
    bypassed: tuple[str, ...] = ("conv1d", "dt_proj")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kernels_by_device(cls)

    @classmethod
    def take_over(cls, mixer: nn.Module, config: Any) -> None:
        """Turn a mixer that the family has built into one of this class, so that none is built twice."""
        mixer.__class__ = cls
        mixer.splice_attention(config, mixer.layer_idx)

    def splice_attention(self, config: Any, layer_idx: int) -> None:
        """Build the branch that `config.splice` has for this layer, if any."""
        site = splice_sites(config.splice).get(layer_idx)
        self.attention = config.branch_class(site["init"])(config, site, layer_idx) if site else None
        methods = [getattr(self.attention, name) for name in ("forward", "put_out")] if site else []
        self.takes_sum = all("onto" in inspect.signature(method).parameters for method in methods)
        self.silenced = (list(site["heads"]), site["head_dim"]) if site and site["mode"] == "replace" else None
        self.kept_I: Tensor | None = None
        self.seen: list[tuple[Tensor, Tensor]] | None = None  # a list while the mixer runs
        for name, parameter in self.named_parameters(recurse=False):
            if name in IN_FP32:
                parameter.data = parameter.data.float()

    def _unfused(self) -> bool:
        """Return whether modules have to be called.

        The fused training kernels read the weights of `out_proj` and `x_proj` themselves: they would bring a silenced
        head back, and bypass adapters and a branch that reads there.

        Raises:
            ValueError: an adapter that the unfused code bypasses too.
        """
        for name in self.bypassed:
            if hasattr(self._modules.get(name), "base_layer"):
                hint = f"Pass exclude_modules=[{name!r}] to the adapter's config."
                raise ValueError(f"target_modules: {name} has an adapter, and the scan reads its weight. {hint}")
        parts = [self._modules[name] for name in ("out_proj", "x_proj") if name in self._modules]
        reads = self.attention is not None and self.attention.reads_streams
        return self.silenced is not None or reads or any(type(part) is not nn.Linear for part in parts)

    @property
    def out_proj(self) -> Any:
        """The output projection. It ignores a replaced head's channels, also where it has an adapter."""
        module = nn.Module.__getattr__(self, "out_proj")
        return module if self.seen is None or self.silenced is None else Watched(module, self._kept)

    def _kept(self, x_BTI: Tensor) -> Tensor:
        """Return (I,): 0 for channels of silenced heads, else 1. It is made once, since indices wait for the device."""
        if self.kept_I is not None and (self.kept_I.dtype, self.kept_I.device) == (x_BTI.dtype, x_BTI.device):
            return self.kept_I
        heads, width = self.silenced
        with nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False):
            keep_H = torch.ones(x_BTI.shape[-1] // width, dtype=x_BTI.dtype, device=x_BTI.device)
            keep_H[heads] = 0
            kept_I = keep_H.repeat_interleave(width)
        if type(x_BTI) is Tensor and not torch.compiler.is_compiling():
            self.kept_I = kept_I
        return kept_I

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Any = None,
        splice_pass: SplicePass | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B,T,D) -> (B,T,D): `ssm(u) + attention(u)`."""
        if isinstance(attention_mask, SplicePass):  # Mamba-1's model passes no other argument down
            splice_pass, attention_mask = attention_mask, attention_mask.padding
        if self.attention is None:
            return self._scan(hidden_states, cache, attention_mask, **kwargs)
        splice_pass = splice_pass or SplicePass(attention_mask)
        seen = self.seen = []
        try:
            output = self._scan(hidden_states, cache, attention_mask, **kwargs)
        finally:
            self.seen = None
        if seen and not is_decoding(hidden_states):
            seen = [tuple(torch.cat(parts, dim=1) for parts in zip(*seen, strict=True))]
        # One operator less for each token, where nothing looks at what the branch returns.
        sums = self.takes_sum and is_decoding(hidden_states) and is_plain(self.attention)
        added, _ = self.attention(
            hidden_states,
            cache,
            attention_mask,
            splice_pass.causal,
            splice_pass.rows,
            seen[0] if seen else None,
            splice_pass.positions,
            splice_pass.documents,
            **({"onto": output} if sums else {}),
        )
        return added if sums else output + added

    def _scan(self, hidden_states: Tensor, cache: Any, padding: Tensor | None, **kwargs: Any) -> Tensor:
        """Run the family's own forward. Fused kernels are for training: in eval mode it calls its modules."""
        T, training = hidden_states.shape[1], self.training
        # State 0 is the scan's; the cache has a second one, which not every branch fills.
        continues = cache is not None and cache.has_previous_state(self.layer_idx, state_idx=0)
        family = super().forward
        self.training = training and not self._unfused()
        try:
            if not (self.one_by_one and T > 1 and continues):
                return family(hidden_states, attention_mask=padding, cache=cache, **kwargs)
            parts = hidden_states.split(1, dim=1), [None] * T if padding is None else padding.split(1, dim=1)
            return torch.cat(
                [family(x, attention_mask=m, cache=cache, **kwargs) for x, m in zip(*parts, strict=True)], 1
            )
        finally:
            self.training = training
