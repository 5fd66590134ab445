"""The export format `nemotron_h`: a hybrid with inserted layers as a checkpoint of transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import NemotronHConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import ModelError, reading
from surgery.export import transformers_folder
from surgery.export.files import AGAIN, read_object
from surgery.export.transformers_folder import check_generation_config, check_tensors, reload_and_compare
from surgery.files.atomic import write_text
from surgery.models.inserted import CLASS, has_inserted, portable_config
from surgery.models.loading import load_config
from surgery.models.spliced import plan_of_hybrid
from surgery.recipe import Base, Export
from surgery.types import Plan


def write_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, section: Export) -> None:
    """Write weights, config and tokenizer. Raises ModelError if no layers were inserted into the model."""
    if not has_inserted(model.config) or not isinstance(model.config, NemotronHConfig):
        hint = "This format holds models with inserted layers. Set splice.form: block or pair, or export.format: "
        raise ModelError("export.format", f"nemotron_h for a {model.config.model_type}", hint + "transformers.")
    transformers_folder.write_folder(model, tokenizer, folder, section)
    data = portable_config(read_object(folder, "config.json"), model.config)
    write_text(folder / "config.json", json.dumps(data, indent=2, sort_keys=True) + "\n")


def compare_with_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """As `transformers_folder.compare_with_model`, without remote code."""
    return transformers_folder.compare_with_model(folder, model, tokenizer, remote_code=False)


def plan_in(folder: Path, trust_remote_code: bool = False) -> tuple[str, Plan] | None:
    """Read the plan from config.json; None if nothing was inserted. There is no code to trust."""
    config = _load_config(folder)
    with reading("config.json", None, AGAIN):
        return ("config.json", plan_of_hybrid(config, "")) if has_inserted(config) else None


def verify_copy(folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Check a copy: tensors, the class, and the logits in a process without this library and without remote code.

    Returns and raises as `transformers_folder.verify_copy`.
    """
    config = _load_config(folder)
    if not has_inserted(config):
        hint = "It is a plain model: no layers were inserted into it."
        raise ModelError("FOLDER", f"{folder} ({config.model_type})", hint)
    data = read_object(folder, "config.json")
    if data.get("architectures") != [CLASS] or data.get("auto_map"):
        value = f"architectures {data.get('architectures')}, auto_map {data.get('auto_map')}"
        raise ModelError("config.json", value[:200], f"An export in this format names {CLASS} and no code. {AGAIN}")
    tensors = check_tensors(folder, config)
    check_generation_config(folder)
    return {"tensors": tensors, **reload_and_compare(folder, folder, config, remote_code=False)}


def _load_config(folder: Path) -> PreTrainedConfig:
    """Load the config with transformers' class. Raises ModelError if it is not that of a Nemotron-H."""
    with reading("config.json", None, AGAIN):
        config = load_config(Base(model=str(folder)))
        if not isinstance(config, NemotronHConfig):
            raise TypeError(f"model_type {config.model_type}")
        return config
