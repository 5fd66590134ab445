"""Rewrites a checkpoint as a transformers folder, tensor by tensor. Owns: what such a folder holds.

Must never know: surgery. The weights never lie in memory as a whole: one shard is mapped, a part of one tensor is cast.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from surgery.errors import ModelError, RunError, reading
from surgery.files.atomic import new_folder, write_json
from surgery.files.lock import hold
from surgery.files.ownership import check_replaceable, mark
from surgery.models import mamba_ssm_format as formats
from surgery.models.loading import Checkpoint, open_checkpoint, refuse_faults
from surgery.models.tensor_files import Stored, write_shards
from surgery.recipe import Base

DTYPES = ("float32", "bfloat16", "float16")
_KEPT_IN_FP32 = ("A_log", "dt_bias", "D")  # as the exported classes load them
_PACKED = "quantization_config"  # such a checkpoint's tensors have other shapes
_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Converted:
    """What was written: tensors, and the files that hold them."""

    tensors: int
    shards: int


def convert(base: Base, folder: Path, dtype: str | None = None, overwrite: bool = False) -> Converted:
    """Writes config, safetensors shards, and the tokenizer where there is one; the folder is whole or absent.

    Args:
        base: a checkpoint in mamba_ssm's format or in transformers'. Of the second, names and fields stay.
        dtype: of floating numbers, but for `A_log`, `dt_bias` and `D`, which are fp32 then; as stored if None.
        overwrite: replaces a model that this toolkit wrote into `folder`.

    Raises:
        RunError: `folder` is not empty, holds the checkpoint itself or what is no model of this toolkit, or another
            process writes into it; an unknown dtype.
        ModelError: as `open_checkpoint`; tensors that do not fit the config.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RunError("--dtype", dtype, f"Choose one of {', '.join(DTYPES)}.")
    with hold(folder, "FOLDER"):
        if check_replaceable("FOLDER", folder, "model", {"MODEL": base.model}) and not overwrite:
            raise RunError("FOLDER", str(folder), "There is a model already. Name another folder, or give --overwrite.")
        return _convert(open_checkpoint(base), folder, dtype)


def _convert(found: Checkpoint, folder: Path, dtype: str | None) -> Converted:
    tensors = found.tensors()
    model = _check_tensors(found, tensors)

    def dtype_of(name: str, stored: torch.dtype) -> torch.dtype:
        if dtype is None or not stored.is_floating_point:
            return stored
        return torch.float32 if name.rsplit(".", 1)[-1] in _KEPT_IN_FP32 else getattr(torch, dtype)

    with new_folder(folder) as new:
        shards = write_shards(new, tensors, dtype_of)
        if not found.is_mamba_ssm or model is None:
            _copy_config(found, new, dtype)
        else:
            model.config.dtype = dtype_of("", tensors[formats.TIED[0]].dtype)
            _write_config(model, new)
        for name in _BESIDE:
            file = found.find(name)
            if file is not None:
                shutil.copyfile(file, new / name)
        mark(new, "model")
    return Converted(len(tensors), shards)


def _check_tensors(found: Checkpoint, tensors: dict[str, Stored]) -> PreTrainedModel | None:
    """The model without memory for its weights, once the files hold its tensors: exactly those in mamba_ssm's format.

    transformers renames tensors when it loads its own, so that of those only the shapes are compared. None where it
    has no language model for the config, or the tensors are packed.
    """
    config = found.config
    if not found.is_mamba_ssm and (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, _PACKED)):
        return None
    with reading("base.model", found.model, "No model can be built on its config.json."), torch.device("meta"):
        model = formats.model_class(config)(config) if found.is_mamba_ssm else AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    both = expected.keys() & tensors.keys()
    misshapen = {name: tensors[name].shape for name in both if tensors[name].shape != expected[name]}
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if config.tie_word_embeddings:
        missing -= {formats.TIED[1]}
    if not found.is_mamba_ssm:
        missing = unexpected = set()
    refuse_faults(found.model, expected, missing, unexpected, misshapen)
    return model


def _write_config(model: PreTrainedModel, folder: Path) -> None:
    """The config; with the modelling files where transformers has no such class."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def _copy_config(found: Checkpoint, folder: Path, dtype: str | None) -> None:
    """The config as it is, but for the dtype; with its modelling files, or where they are on the Hub."""
    source = found.find("config.json")
    if source is None:
        raise ModelError("base.model", found.model, "It has no config.json.")
    with reading("base.model", str(source), "Correct it, or download it again."):
        config = json.loads(source.read_text(encoding="utf-8"))
        if "auto_map" in config and found.folder is None:
            named = config["auto_map"].items()
            config["auto_map"] = {k: v if "--" in v else f"{found.model}--{v}" for k, v in named}
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    if found.folder is not None:
        for file in found.folder.glob("*.py"):
            shutil.copyfile(file, folder / file.name)
    write_json(folder / "config.json", config)
