"""Reads pretrained checkpoints: folders and Hub ids. Owns: every check before and after loading.

Must never know: surgery, recipes' other sections. transformers would fill a missing tensor with random numbers and
say so in a table; here it is an error. Pickles load with `weights_only=True` (transformers' default), and remote
code runs only when asked for.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import surgery.hybrid  # noqa: F401  (registers the hybrid classes)
from surgery.errors import ModelError
from surgery.recipe import Base
from surgery.rundir import digest

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def load_config(base: Base) -> PreTrainedConfig:
    """The config alone.

    Raises:
        ModelError: no such folder or repository, no config, a broken one, an unknown model type.
    """
    folder = Path(base.model)
    looks_local = folder.exists() or base.model.count("/") != 1 or base.model.startswith((".", "~"))
    if looks_local:
        if not folder.is_dir():
            raise ModelError("base.model", base.model, "There is no such folder.")
        if not (folder / "config.json").is_file():
            found = sorted(p.name for p in folder.iterdir())[:5]
            raise ModelError("base.model", base.model, f"It has no config.json (it holds {found or 'nothing'}).")
    try:
        return AutoConfig.from_pretrained(base.model, revision=base.revision, trust_remote_code=base.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ModelError("base.model", base.model, _first_line(error)) from None


def load_model(base: Base) -> PreTrainedModel:
    """The model in eval mode on the CPU, in `base.dtype`.

    Raises:
        ModelError: as `load_config`; truncated files; missing, unexpected or misshapen tensors, by name.
    """
    config = load_config(base)
    if Path(base.model).is_dir():
        _check_files(Path(base.model))
    dtype = "auto" if base.dtype == "auto" else getattr(torch, base.dtype)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            base.model,
            config=config,
            revision=base.revision,
            trust_remote_code=base.trust_remote_code,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ModelError("base.model", base.model, _first_line(error)) from None
    faults = [f"missing {sorted(info['missing_keys'])[:4]}"] if info["missing_keys"] else []
    faults += [f"unexpected {sorted(info['unexpected_keys'])[:4]}"] if info["unexpected_keys"] else []
    shapes = [f"{n} is {tuple(a)}, expected {tuple(b)}" for n, a, b in sorted(info["mismatched_keys"])[:4]]
    faults += [f"misshapen {shapes}"] if shapes else []
    if faults:
        hint = "Its tensors are not those of its config. Download it again, or correct config.json."
        raise ModelError("base.model", f"{base.model}: {'; '.join(faults)}", hint)
    return model.eval()


def load_tokenizer(base: Base) -> PreTrainedTokenizerBase:
    """The tokenizer, from `base.tokenizer` or from beside the model; it gets a padding token if it has none.

    Raises:
        ModelError: there is none, or it is not a fast one (probes need character offsets).
    """
    source = base.tokenizer or base.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=None if base.tokenizer else base.revision, trust_remote_code=base.trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError("base.tokenizer", source, _first_line(error)) from None
    if not tokenizer("a 7", add_special_tokens=False)["input_ids"]:
        raise ModelError("base.tokenizer", source, "There is no tokenizer there; say in base.tokenizer where it is.")
    if not tokenizer.is_fast:
        raise ModelError("base.tokenizer", source, "It is not a fast tokenizer; probes need character offsets.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def revision_of(base: Base) -> str:
    """What identifies the weights: the commit of a Hub id, a hash of the files of a folder."""
    if Path(base.model).is_dir():
        return _with_tokenizer(base, digest(*_files(Path(base.model)))[:16])
    return _with_tokenizer(base, str(getattr(load_config(base), "_commit_hash", None) or base.revision or ""))


def _with_tokenizer(base: Base, revision: str) -> str:
    """A tokenizer from another folder counts too."""
    if base.tokenizer is None or not Path(base.tokenizer).is_dir():
        return revision
    return f"{revision}+{digest(*sorted(Path(base.tokenizer).glob('tokenizer*.json')))[:8]}"


def _files(folder: Path) -> list[Path]:
    patterns = ("config.json", "tokenizer*.json", *_WEIGHTS)
    return sorted(p for pattern in patterns for p in folder.glob(pattern))


def _check_files(folder: Path) -> None:
    """Every safetensors file is as long as its header says; there are weights at all."""
    if not any(p for pattern in _WEIGHTS for p in folder.glob(pattern)):
        raise ModelError("base.model", str(folder), "It holds no weights (*.safetensors or pytorch_model.bin).")
    for file in folder.glob("*.safetensors"):
        size = file.stat().st_size
        try:
            with open(file, "rb") as handle:
                (length,) = struct.unpack("<Q", handle.read(8))
                if length > size:
                    raise ValueError
                header = json.loads(handle.read(length))
            expected = (
                8 + length + max((t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"), default=0)
            )
        except (struct.error, ValueError, KeyError, TypeError):
            raise ModelError("base.model", str(file), "Its header is broken. Download it again.") from None
        if expected != size:
            hint = f"It is {size} bytes long, and its header says {expected}. Download it again."
            raise ModelError("base.model", str(file), hint)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
