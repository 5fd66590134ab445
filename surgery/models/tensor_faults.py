"""Compare the tensors of a checkpoint with its config: follow the tensors where they decide, refuse the rest."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from itertools import takewhile

import torch
from transformers import PreTrainedModel

from surgery.errors import ModelError
from surgery.models import mamba_ssm_format, tensor_files
from surgery.models.config_checks import quantization_of
from surgery.models.sizes import meta_model
from surgery.models.stored import StoredModel
from surgery.models.tensor_files import Stored

_LOG = logging.getLogger(__name__)
_LISTED = 4  # tensors to list in an error message
# Last parts of the names of tensors that only quantized checkpoints have.
_QUANTIZED = re.compile(
    r"(^|\.)(qweight|qzeros|g_idx|scales|biases|SCB|weight_(scale\w*|packed|format)|weight\.(absmax|quant_\w+.*|nested_\w+)"
    r"|\w+_scale_inv|input_scale|W_q)$"
)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@cache
def note(text: str) -> None:
    """Log a line, once in a process."""
    _LOG.warning(text)


def checked_model(stored: StoredModel, trust_remote_code: bool = False) -> tuple[PreTrainedModel, dict[str, Stored]]:
    """Compare the tensors of a checkpoint with its config, without reading their values.

    In mamba_ssm's format the tensors must be exactly the model's. In transformers' format only shapes are compared,
    since transformers renames tensors when it loads them.

    Returns:
        The model on the meta device, and the tensors.

    Raises:
        ModelError: as `agreed_tensors`; or tensors do not fit.
    """
    model = meta_model(stored.config, trust_remote_code)
    tensors = agreed_tensors(stored, model)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    both = expected.keys() & tensors.keys()
    misshapen = {name: tensors[name].shape for name in both if tensors[name].shape != expected[name]}
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if stored.config.tie_word_embeddings:
        missing -= model.all_tied_weights_keys.keys()
    if not stored.is_mamba_ssm:
        missing = unexpected = set()
    refuse_faults(stored.model, expected, missing, unexpected, {} if quantization_of(stored.config) else misshapen)
    return (meta_model(stored.config, trust_remote_code) if stored.changes else model), tensors


def agreed_tensors(stored: StoredModel, model: PreTrainedModel) -> dict[str, Stored]:
    """Compare the tensors of a checkpoint with its config, and list them by the names of its class.

    A prefix that all names share is removed if the class has the names without it. If the embeddings are tied in
    the config and the files have a head with other values, `config.tie_word_embeddings` becomes false.

    Raises:
        ModelError: as `StoredModel.tensors`; or weights are quantized and the config does not say so, or the reverse;
            or tensors differ that the class shares.
    """
    tensors = stored.tensors()
    expected = model.state_dict()
    prefix = common_prefix(tensors, expected, f"{model.base_model_prefix}.")
    if prefix:
        note(f"{stored.model}: all tensors have names that begin with {prefix!r}. They are read without it.")
        bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        tensors = {n if n in expected else mamba_ssm_format.to_transformers(n): t for n, t in bare.items()}
    check_quantization(stored, tensors, expected)
    for target, source in model.all_tied_weights_keys.items():
        if not {target, source} <= tensors.keys():
            continue
        one, other = tensor_files.read_tensors((tensors[source], tensors[target]))
        if one.shape == other.shape and torch.equal(one, other.to(one.dtype)):
            del tensors[target]
        elif len(model.all_tied_weights_keys) == 1:
            note(
                f"{stored.model}: {target} differs from {source}, so the two are not tied (tie_word_embeddings: false)."
            )
            stored.change({"tie_word_embeddings": False})
        else:
            hint = f"It differs from {source}, but its class has one tensor for both. Remove it from the file."
            raise ModelError("base.model", f"{stored.model}: {target}", hint)
    return tensors


def common_prefix(names: Collection[str], expected: Collection[str], within: str) -> str:
    """Return the prefix to remove from all names of the files so that the class has some of them (`expected`).

    Empty if none is needed. `within` is a prefix of the class's own that files may lack.
    """
    lowest, highest = min(names).split("."), max(names).split(".")
    parts = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(lowest[:-1], highest[:-1], strict=False))]
    for count in range(len(parts) + 1):
        prefix = "".join(f"{part}." for part in parts[:count])
        bare = [mamba_ssm_format.to_transformers(name.removeprefix(prefix)) for name in names]
        if any(name in expected or within + name in expected for name in bare):
            return prefix
    return ""


def check_quantization(
    stored: StoredModel, tensors: Mapping[str, Stored], expected: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Raise ModelError if the weights are quantized and the config does not say so, or the reverse."""
    says = quantization_of(stored.config)
    floats = None if expected is None else {name for name, tensor in expected.items() if tensor.is_floating_point()}
    words = [n for n, tensor in tensors.items() if tensor.dtype not in _FLOATS and (floats is None or n in floats)]
    packed = [*filter(_QUANTIZED.search, tensors), *words]
    if says and not packed:
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        hint = f"But its weights are not quantized ({dtype}). Remove the key from config.json."
        raise ModelError("config.json: quantization_config", says, hint)
    if packed and not says:
        hint = "Its weights are quantized, but config.json has no quantization_config. Use the unquantized checkpoint."
        raise ModelError("base.model", f"{stored.model}: {packed[0]} ({tensors[packed[0]].dtype})", hint)


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
    unexpected: Collection[str],
    misshapen: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise ModelError if tensors do not fit the config. The error lists the first names and the expected shapes.

    `expected` has the shapes of all tensors of the model, `misshapen` those of the files where they are wrong.
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
        hint = "Its tensors do not fit its config. Use the config.json and all weight files of one checkpoint."
        raise ModelError("base.model", f"{model}: {'; '.join(text)}", hint)
