"""Convert a checkpoint to a transformers folder, tensor by tensor: the weights are never in memory as a whole."""

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
from surgery.models import mamba_ssm_format
from surgery.models.loading import StoredModel, open_checkpoint, refuse_faults
from surgery.models.tensor_files import Stored, write_shards
from surgery.recipe import Base

DTYPES = ("float32", "bfloat16", "float16")
_IN_FP32 = ("A_log", "dt_bias", "D")  # as the exported classes load them
_PACKED = "quantization_config"  # such a checkpoint's tensors have other shapes
_OTHER_FILES = (
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
    """The number of tensors that were written, and of files with weights."""

    tensors: int
    shards: int


def convert(base: Base, folder: Path, dtype: str | None = None, overwrite: bool = False) -> Converted:
    """Write config, safetensors shards, and the tokenizer where there is one. The folder is complete or absent.

    Args:
        base: a checkpoint in mamba_ssm's format or in transformers'. The second keeps its names and fields.
        dtype: of floating-point numbers, except `A_log`, `dt_bias` and `D`, which become fp32; as stored if None.
        overwrite: replace a model that this toolkit wrote into `folder`.

    Raises:
        RunError: `folder` holds the checkpoint itself or other files than a model of this toolkit, or another process
            writes into it; an unknown dtype.
        ModelError: as `open_checkpoint`; tensors that do not fit the config.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RunError("--dtype", dtype, f"Choose one of {', '.join(DTYPES)}.")
    with hold(folder, "FOLDER"):
        if check_replaceable("FOLDER", folder, "model", {"MODEL": base.model}) and not overwrite:
            raise RunError("FOLDER", str(folder), "It has a model already. Choose another folder, or pass --overwrite.")
        return _convert(open_checkpoint(base), folder, dtype)


def _convert(source: StoredModel, folder: Path, dtype: str | None) -> Converted:
    tensors = source.tensors()
    model = _check_tensors(source, tensors)

    def dtype_of(name: str, stored: torch.dtype) -> torch.dtype:
        if dtype is None or not stored.is_floating_point:
            return stored
        return torch.float32 if name.rsplit(".", 1)[-1] in _IN_FP32 else getattr(torch, dtype)

    with new_folder(folder) as new:
        shards = write_shards(new, tensors, dtype_of)
        if not source.is_mamba_ssm or model is None:
            _copy_config(source, new, dtype)
        else:
            model.config.dtype = dtype_of("", tensors[mamba_ssm_format.TIED[0]].dtype)
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(new)  # with the modelling files where transformers has no such class
        for name in _OTHER_FILES:
            file = source.find(name)
            if file is not None:
                shutil.copyfile(file, new / name)
        mark(new, "model")
    return Converted(len(tensors), shards)


def _check_tensors(source: StoredModel, tensors: dict[str, Stored]) -> PreTrainedModel | None:
    """Compare the files' tensors with the config's model, and return that model on the meta device.

    In mamba_ssm's format the tensors have to be exactly the model's. transformers renames tensors when it loads its own
    format, so only shapes are compared there. None where transformers has no language model for the config, or the
    tensors are packed.
    """
    config = source.config
    if not source.is_mamba_ssm and (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, _PACKED)):
        return None
    with reading("base.model", source.model, "No model can be built on its config.json."), torch.device("meta"):
        model = (
            mamba_ssm_format.model_class(config)(config)
            if source.is_mamba_ssm
            else AutoModelForCausalLM.from_config(config)
        )
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    both = expected.keys() & tensors.keys()
    misshapen = {name: tensors[name].shape for name in both if tensors[name].shape != expected[name]}
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if config.tie_word_embeddings:
        missing -= {mamba_ssm_format.TIED[1]}
    if not source.is_mamba_ssm:
        missing = unexpected = set()
    refuse_faults(source.model, expected, missing, unexpected, misshapen)
    return model


def _copy_config(source: StoredModel, folder: Path, dtype: str | None) -> None:
    """Write the config with the new dtype, and its modelling files or their place on the Hub."""
    config_file = source.find("config.json")
    if config_file is None:
        raise ModelError("base.model", source.model, "It has no config.json.")
    with reading("base.model", str(config_file), "Correct it, or download it again."):
        config = json.loads(config_file.read_text(encoding="utf-8"))
        if "auto_map" in config and source.folder is None:
            named = config["auto_map"].items()
            config["auto_map"] = {k: v if "--" in v else f"{source.model}--{v}" for k, v in named}
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    if source.folder is not None:
        for file in source.folder.glob("*.py"):
            shutil.copyfile(file, folder / file.name)
    write_json(folder / "config.json", config)
