"""Refuse tensors that do not fit the config, or that are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from surgery.errors import ModelError

_LISTED = 4  # tensors to list in an error message


def refuse_not_finite(model: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ModelError for the first tensor with NaN or infinity."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() and not all(x.isfinite() for x in tensor.detach().aminmax()):
            hint = "Its training diverged, or the file is damaged. Use an earlier checkpoint, or download it again."
            raise ModelError("base.model", f"{model}: {name} holds NaN or infinity", hint)


def refuse_faults(
    model: str,
    expected: Mapping[str, tuple[int, ...]],
    missing: Iterable[str],
    unexpected: Iterable[str],
    misshapen: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise ModelError if tensors do not fit the config. The error lists the first names and the expected shapes.

    Args:
        model: folder or Hub id.
        expected: shape of every tensor of the model, by name.
        missing: names of tensors that the files lack.
        unexpected: names of tensors that the model lacks.
        misshapen: shape in the files of tensors with a wrong shape, by name.
    """
    faults = {
        "missing": [f"{name} {expected.get(name, '')}".strip() for name in sorted(missing)],
        "unexpected": sorted(unexpected),
        "misshapen": [f"{name} {shape}, expected {expected[name]}" for name, shape in sorted(misshapen.items())],
    }
    text = []
    for kind, names in faults.items():
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        text += [f"{kind} {'; '.join(names[:_LISTED])}{more}"] if names else []
    if text:
        hint = "Its tensors do not fit its config. Download it again, or correct config.json."
        raise ModelError("base.model", f"{model}: {'; '.join(text)}", hint)
