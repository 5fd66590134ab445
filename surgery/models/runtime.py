"""Settings of a loaded model that are not in its checkpoint: chunk lengths, gradients, and checks of the release.

transformers' own scan builds a tensor of tokens x chunk x heads x state. With the published 256 tokens a chunk it has
800 MB a layer and prompt at mamba2-130m's shape. Chunks of 32 give the same numbers up to rounding, as fast or faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.versions import require_version

from surgery.errors import ModelError
from surgery.models.registry import FAMILIES

CHUNK_WITHOUT_KERNELS = 32
# The gated norm of these types is that of mamba_ssm from here on; before, it took one mean square over all groups.
_NORM_BY_GROUP, _NORM_WAS_WHOLE = "transformers>=5.23,<6", ("mamba2", "bamba", "granitemoehybrid")


def check_release(config: PreTrainedConfig) -> None:
    """Raises ModelError where this transformers would silently compute another model than the one that was trained."""
    groups = getattr(config, "n_groups", None) or getattr(config, "mamba_n_groups", 1)
    if groups == 1 or config.model_type not in _NORM_WAS_WHOLE:
        return
    try:
        require_version(_NORM_BY_GROUP)
    except ImportError:
        hint = f"Older releases of transformers normalise its groups as one: pip install '{_NORM_BY_GROUP}'."
        raise ModelError("base.model", f"{config.model_type} with {groups} groups", hint) from None


def shorten_chunks(model: PreTrainedModel) -> None:
    """Sets chunks of at most 32 tokens where there is no kernel for the scan."""
    if find_spec("mamba_ssm") is None:
        for mixer, published in _chunked(model):
            mixer.chunk_size = min(published, CHUNK_WITHOUT_KERNELS)


def restore_chunks(model: PreTrainedModel) -> None:
    """Sets the chunks that the config names, as whoever loads the checkpoint will have them."""
    for mixer, published in _chunked(model):
        mixer.chunk_size = published


@contextmanager
def requires_grad(value: bool, *models: nn.Module) -> Iterator[None]:
    """Set `requires_grad` of all parameters inside the context, and restore it afterwards.

    Compare bits with the same setting on both sides: it decides how torch multiplies a weight with a transposed stream
    (at::matmul folds the batch, or not), as Mamba-1 has, and some CPUs round the two differently.
    """
    changed = [p for model in models for p in model.parameters() if p.requires_grad != value]
    for parameter in changed:
        parameter.requires_grad_(value)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not value)


def _chunked(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """The Mamba-2 mixers, and the config's chunk size."""
    family = next((f for f in FAMILIES if model.config.model_type in f.model_types), None)
    specs = family.mixers(model.config) if family else ()
    config = model.config.to_dict()
    published = config.get("chunk_size") or config.get("mamba_chunk_size")
    return [(model.get_submodule(s.path), published) for s in specs if s.kind in ("mamba2", "falcon_h1")]
