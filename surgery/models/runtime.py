"""Settings of a loaded model that its checkpoint does not store: precision, `requires_grad`, release checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.versions import require_version

from surgery.errors import ModelError
from surgery.models.lookup import family_of, has_family


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


def run_device() -> torch.device:
    """Return the device that commands run models on: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
