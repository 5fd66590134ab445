"""Heads with a factor on them, through which gradients flow. Owns: that one hook. Must never know: probes, scores.

`out_proj` is linear, so a factor on a head's block of its input is a factor on the head's contribution; the derivative
by the factor is the sum over the block's channels and the tokens of `u * d/du`.
Shape legend: B prompts, T tokens, I inner width (H heads of P), D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from surgery.interventions.hooks import Trace, hooked
from surgery.models.lookup import mixer_of, structure_of
from surgery.types import MixerSpec


@contextmanager
def factored(model: PreTrainedModel, specs: Sequence[MixerSpec], factors: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiplies heads, at every token, in the forward pass that runs inside.

    Args:
        factors: by `MixerSpec.name`, (B,H), in float32 at least: what each head is multiplied by; 1 changes nothing.

    Raises:
        ModelError: a mixer's `out_proj` was not called as a module, so nothing was multiplied.
    """
    with hooked(model, specs) as hooks:
        for spec in specs:
            if spec.name in factors:
                out_proj = structure_of(spec).out_proj(mixer_of(model, spec))
                hooks.before(spec.layer, f"{spec.name} out_proj", out_proj, partial(_multiply, factors[spec.name]))
        yield


def _multiply(factor_BH: Tensor, args: tuple) -> tuple:
    """Of (B,T,I)."""
    return (times(args[0], factor_BH), *args[1:])


def times(u_BTI: Tensor, factor_BH: Tensor) -> Tensor:
    """(B,T,I): every head times its factor, in the wider of the two types, and back in that of the heads."""
    u_BTHP = u_BTI.unflatten(-1, (factor_BH.shape[1], -1))
    return (u_BTHP * factor_BH[:, None, :, None]).flatten(2).to(u_BTI.dtype)


def factored_output(model: PreTrainedModel, spec: MixerSpec, trace: Trace, factor_BH: Tensor) -> Tensor:
    """(B,T,D) what the recorded mixer would put out with its heads multiplied; by linearity, without running it."""
    weight_DI = structure_of(spec).out_proj(mixer_of(model, spec)).weight
    u_BTI, output_BTD = trace.heads[spec.name], trace.output[spec.name]
    return output_BTD + (times(u_BTI, factor_BH - 1) @ weight_DI.T).to(output_BTD.dtype)
