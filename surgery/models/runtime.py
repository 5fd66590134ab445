"""Settings of a loaded model that its checkpoint does not store: chunk lengths, `requires_grad`, release checks.

The scan in transformers builds a tensor of tokens x chunk x heads x state. With chunks of 256 tokens, as published, it
takes 800 MB per layer and prompt at the shape of mamba2-130m. Chunks of 32 tokens give the same result up to rounding
and are as fast or faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.versions import require_version

from surgery.errors import ModelError
from surgery.models.lookup import family_of, has_family, structure_of

CHUNK_WITHOUT_KERNELS = 32


def check_release(config: PreTrainedConfig) -> None:
    """Refuse a plain model that the installed transformers would compute wrongly without an error.

    Raises:
        ModelError: the model's family has a fault in this release that this config meets.
    """
    if not has_family(config.model_type):
        return
    family = family_of(config)
    wrong = None if family.is_hybrid(config) else family.computed_wrongly(config)
    if wrong is None:
        return
    release, what, fault = wrong
    needed = f"transformers>={release},<6"
    try:
        require_version(needed)
    except ImportError:
        hint = f"Older transformers {fault}. Install {needed}: pip install '{needed}'."
        raise ModelError("base.model", f"{config.model_type} with {what}", hint) from None


def stays_in_fp32(model: PreTrainedModel, name: str) -> bool:
    """Return whether a parameter, such as `layers.0.mixer.D`, is fp32 in a model of half precision.

    The class names the parameters by the last parts of their names: `D`, or `gate.weight`.
    """
    return any(f".{name}".endswith(f".{kept}") for kept in model._keep_in_fp32_modules_strict or ())


def shorten_chunks(model: PreTrainedModel) -> None:
    """Set chunks of at most 32 tokens if there is no kernel for the scan."""
    if find_spec("mamba_ssm") is None:
        for mixer, published in _chunked(model):
            mixer.chunk_size = min(published, CHUNK_WITHOUT_KERNELS)


def restore_chunks(model: PreTrainedModel) -> None:
    """Set the chunk size of the config, which other loaders of the checkpoint use."""
    for mixer, published in _chunked(model):
        mixer.chunk_size = published


@contextmanager
def requires_grad(value: bool, *models: nn.Module) -> Iterator[None]:
    """Set `requires_grad` of all parameters inside the context, and restore it afterwards.

    To compare two models bit by bit, use the same setting for both. It decides how torch multiplies a weight with a
    transposed stream, as in Mamba-1 (at::matmul folds the batch or not), and some CPUs round the two differently.
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
    """Return the mixers whose scan is chunked, each with the config's chunk size."""
    if not has_family(model.config.model_type):
        return []
    specs = [s for s in family_of(model.config).mixers(model.config) if structure_of(s).chunked]
    config = model.config.to_dict()
    published = config.get("chunk_size") or config.get("mamba_chunk_size")
    return [(model.get_submodule(spec.path), published) for spec in specs]
