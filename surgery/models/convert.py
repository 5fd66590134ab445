"""Convert a checkpoint to a transformers folder, tensor by tensor, without loading all weights at once."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, NemotronHConfig, PreTrainedModel

from surgery.errors import RunError, reading
from surgery.files.atomic import new_folder, write_text
from surgery.files.lock import hold
from surgery.files.ownership import check_replaceable, mark
from surgery.models import mamba_ssm_format
from surgery.models.config_checks import CONFIG_HINT, quantization_of
from surgery.models.inserted import has_inserted, portable_config
from surgery.models.loading import open_checkpoint
from surgery.models.runtime import stays_in_fp32
from surgery.models.stored import SLOW_TOKENIZER, TOKENIZER, StoredModel
from surgery.models.tensor_faults import checked_model
from surgery.models.tensor_files import check_small, write_shards
from surgery.recipe import Base

DTYPES = ("float32", "bfloat16", "float16")
_IN_FP32 = ("A_log", "dt_bias", "D")  # kept in fp32, as in the exported classes


@dataclass(frozen=True)
class Converted:
    """Number of written tensors, and of files with weights; and whether a tokenizer was there to copy."""

    tensors: int
    shards: int
    tokenizer: bool


def convert(base: Base, folder: Path, dtype: str | None = None, overwrite: bool = False) -> Converted:
    """Convert a checkpoint, with its tokenizer if it has one, to config and safetensors. Writes atomically.

    Args:
        base: a checkpoint in mamba_ssm's or transformers' format. The latter keeps its names and fields.
        folder: folder to write.
        dtype: dtype of floating-point tensors, except `A_log`, `dt_bias` and `D`, which become fp32. By default as
            stored.
        overwrite: replace a model that this toolkit wrote into `folder`.

    Raises:
        RunError: `folder` holds the checkpoint itself or files that are no model of this toolkit, another process
            writes into it, or the dtype is unknown or set for quantized weights.
        ModelError: as `open_checkpoint`; or the tensors do not fit the config.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RunError("--dtype", dtype, f"Use one of {', '.join(DTYPES)}.")
    with hold(folder, "FOLDER"):
        if check_replaceable("FOLDER", folder, "model", {"MODEL": base.model}) and not overwrite:
            hint = "The folder already holds a model. Set another folder, or pass --overwrite."
            raise RunError("FOLDER", str(folder), hint)
        return _convert(open_checkpoint(base), folder, dtype)


def _convert(source: StoredModel, folder: Path, dtype: str | None) -> Converted:
    model: PreTrainedModel | None = None
    method = quantization_of(source.config)
    if method and dtype is not None:
        hint = f"The weights are stored quantized ({method}), and no other type has their values. Remove it."
        raise RunError("--dtype", dtype, hint)
    if source.is_mamba_ssm or (type(source.config) in MODEL_FOR_CAUSAL_LM_MAPPING and not method):
        model, tensors = checked_model(source)
    else:
        tensors = source.tensors()

    def dtype_of(name: str, stored: torch.dtype) -> torch.dtype:
        if dtype is None or not stored.is_floating_point:
            return stored
        in_fp32 = name.rsplit(".", 1)[-1] in _IN_FP32 or (model is not None and stays_in_fp32(model, name))
        return torch.float32 if in_fp32 else getattr(torch, dtype)

    with new_folder(folder) as new:
        shards = write_shards(new, tensors, dtype_of)
        if not source.is_mamba_ssm or model is None:
            _copy_config(source, new, dtype)
        else:
            model.config.dtype = dtype_of("", tensors[mamba_ssm_format.TIED[0]].dtype)
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(new)  # with the modelling files, if transformers has no such class
        others = source.files((*TOKENIZER, *SLOW_TOKENIZER, "generation_config.json"))
        for file in others:
            check_small(file, str(file))
            shutil.copyfile(file, new / file.name)
        mark(new, "model")
    has_tokenizer = bool({file.name for file in others} - {"generation_config.json", "chat_template.jinja"})
    return Converted(len(tensors), shards, has_tokenizer)


def class_on_hub(name: Any, model: str) -> Any:
    """Name of a class with its repository; of each class for the two of a tokenizer, of which one may be null."""
    if isinstance(name, list):
        return [class_on_hub(part, model) for part in name]
    return name if name is None or "--" in name else f"{model}--{name}"


def _copy_config(source: StoredModel, folder: Path, dtype: str | None) -> None:
    """Write the config with the new dtype. Copy modelling files, or add their Hub repository to `auto_map`."""
    config_file = source.find("config.json")
    assert config_file is not None  # `open_checkpoint` has read it
    with reading("base.model", str(config_file), CONFIG_HINT):
        config = json.loads(config_file.read_text(encoding="utf-8"))
        if "auto_map" in config and source.folder is None:
            config["auto_map"] = {k: class_on_hub(v, source.model) for k, v in config["auto_map"].items()}
    config |= source.changes
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    if isinstance(source.config, NemotronHConfig) and has_inserted(source.config):
        config = portable_config(config, source.config)
    if source.folder is not None:
        for file in source.folder.glob("*.py"):
            shutil.copyfile(file, folder / file.name)
    # With Infinity, as transformers 4 wrote time_step_limit; `write_json` refuses it.
    write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")
