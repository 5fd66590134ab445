"""Scale each head's contribution by a differentiable factor, for attribution.

`out_proj` is linear, so a factor on a head's block of its input scales the head's contribution. The derivative with
respect to the factor is the sum of `u * d/du` over the block's channels and the tokens.
Shape legend: B prompts, T tokens, I inner width (H heads of P), D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from surgery.models.hooks import ActivationCache, hooked
from surgery.models.lookup import mixer_of, structure_of
from surgery.types import MixerSpec


@contextmanager
def scaled(model: PreTrainedModel, specs: Sequence[MixerSpec], factors: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply heads, at every token, in the forward pass inside the context.

    Args:
        factors: by `MixerSpec.name`, (B,H) in float32 or wider. A factor of 1 changes nothing.

    Raises:
        ModelError: a mixer's `out_proj` was not called as a module, so nothing was scaled.
    """
    with hooked(model, specs) as hooks:
        for spec in specs:
            if spec.name in factors:
                out_proj = structure_of(spec).out_proj(mixer_of(model, spec))
                hooks.before(spec.layer, f"{spec.name} out_proj", out_proj, partial(_scale_input, factors[spec.name]))
        yield


def _scale_input(factor_BH: Tensor, args: tuple) -> tuple:
    return (scale_heads(args[0], factor_BH), *args[1:])


def scale_heads(u_BTI: Tensor, factor_BH: Tensor) -> Tensor:
    """Multiply the heads of (B,T,I) by factors (B,H), in the wider of both dtypes. Returns the dtype of the heads."""
    u_BTHP = u_BTI.unflatten(-1, (factor_BH.shape[1], -1))
    return (u_BTHP * factor_BH[:, None, :, None]).flatten(2).to(u_BTI.dtype)


def scaled_output(model: PreTrainedModel, spec: MixerSpec, activations: ActivationCache, factor_BH: Tensor) -> Tensor:
    """Compute the output of a recorded mixer with scaled heads, by linearity and without running it.

    Returns:
        (B,T,D)
    """
    weight_DI = structure_of(spec).out_proj(mixer_of(model, spec)).weight
    u_BTI, output_BTD = activations.heads[spec.name], activations.output[spec.name]
    return output_BTD + (scale_heads(u_BTI, factor_BH - 1) @ weight_DI.T).to(output_BTD.dtype)
