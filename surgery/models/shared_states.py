"""Run a decode step of several variants from SSM states that all of them read and none writes.

Shape legend: B prompts, D model width, W variants folded into the batch: row w*B + b is prompt b under variant w.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.hybrid.modeling_hybrid import HybridMixerMixin
from surgery.models.hooks import ActivationCache, replaced_once
from surgery.models.layouts import ReadsState
from surgery.models.lookup import mixer_of, structure_of
from surgery.types import MixerSpec


def reading(specs: Sequence[MixerSpec]) -> tuple[MixerSpec, ...]:
    """Select the mixers that can run a token without the state after it."""
    return tuple(spec for spec in specs if isinstance(structure_of(spec), ReadsState))


@contextmanager
def from_shared_states(
    model: PreTrainedModel,
    specs: Sequence[MixerSpec],
    cache: Cache,
    activations: ActivationCache,
    unchanged: MixerSpec | None = None,
) -> Iterator[None]:
    """Let mixers read their states in the decode step inside the context. Their states are not updated.

    Args:
        specs: mixers of `reading`. The others run as usual, from their own copy of the cache.
        cache: states of B rows for these mixers (`branched(..., shared=...)`).
        activations: activations of a clean pass, for the form of the mixers' outputs.
        unchanged: a mixer whose input is the same in all variants. It runs once up to its gated norm.

    Raises:
        ModelError: one of the mixers did not run.
    """
    with ExitStack() as patches:
        for spec in specs:
            mixer = mixer_of(model, spec)
            step = partial(_step, mixer, spec, cache, spec is unchanged)
            # A spliced branch still runs beside the SSM.
            method = "_scan" if isinstance(mixer, HybridMixerMixin) else "forward"
            patches.enter_context(replaced_once(mixer, step, spec.name in activations.tuples, method))
        yield


def _step(mixer: nn.Module, spec: MixerSpec, cache: Cache, is_unchanged: bool, u_R1D: Tensor) -> Tensor:
    """(W*B,1,D) -> (W*B,1,D) at the states of B prompts."""
    structure, states = structure_of(spec), cache.layers[spec.layer]
    assert isinstance(structure, ReadsState)
    before, state = states.conv_states[0], states.recurrent_states[0]
    copies = len(u_R1D) // len(state) if is_unchanged else 1
    return structure.step_from_state(mixer, spec, u_R1D[: len(u_R1D) // copies], before, state, copies)
