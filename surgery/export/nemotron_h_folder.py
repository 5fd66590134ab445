"""The export format `nemotron_h`: a hybrid with inserted layers as a checkpoint of transformers' own class.

config.json is written so that other programs read it too: vLLM and llama.cpp take `hybrid_override_pattern` and their
own names of some sizes, and a config with fields of experts for a model with experts.
"""

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
from surgery.models.inserted import has_inserted
from surgery.models.loading import load_config
from surgery.models.spliced import plan_of_hybrid
from surgery.recipe import Base
from surgery.types import Plan

CLASS = "NemotronHForCausalLM"
# Fields of multi-token prediction, and the limit of dt, which Nemotron-H does not read. Their defaults are those of the
# model.
_LEFT_OUT = (
    "layers_block_type", "layer_types", "mtp_layers_block_type", "num_nextn_predict_layers", "time_step_limit",
)  # fmt: skip
_OF_EXPERTS = (
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap",
    "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok",
    "output_router_logits", "routed_scaling_factor", "topk_group",
)  # fmt: skip


def write_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, max_shard_size: str) -> None:
    """Write weights, config and tokenizer.

    Raises:
        ModelError: no layers were inserted into the model.
    """
    if not has_inserted(model.config) or not isinstance(model.config, NemotronHConfig):
        hint = "This format holds models with inserted layers. Set splice.form: block or pair, or export.format: "
        hint += "transformers."
        raise ModelError("export.format", f"nemotron_h for a {model.config.model_type}", hint)
    transformers_folder.write_folder(model, tokenizer, folder, max_shard_size)
    path, config = folder / "config.json", model.config
    left_out = _LEFT_OUT if "moe" in config.layers_block_type else (*_LEFT_OUT, *_OF_EXPERTS)
    data = {key: value for key, value in read_object(folder, path.name).items() if key not in left_out}
    data |= {
        "architectures": [CLASS],
        "hybrid_override_pattern": config.hybrid_override_pattern,
        "num_hidden_layers": config.num_hidden_layers,
        "mamba_n_groups": config.n_groups,
        "mamba_d_conv": config.conv_kernel,
        "tie_word_embeddings": False,
    }
    write_text(path, json.dumps(data, indent=2, sort_keys=True) + "\n")


def plan_in(folder: Path) -> tuple[str, Plan] | None:
    """Read the plan from config.json; None if nothing was inserted."""
    config = _load_config(folder)
    with reading("config.json", None, AGAIN):
        return ("config.json", plan_of_hybrid(config, "")) if has_inserted(config) else None


def verify_copy(folder: Path) -> dict[str, Any]:
    """Check a copy: tensors, the class, and the logits in a process without this library and without remote code.

    Returns:
        As `transformers_folder.verify_copy`.

    Raises:
        ModelError: a check fails. The error names the file or tensor.
    """
    config = _load_config(folder)
    if not has_inserted(config):
        hint = "It is a plain model: no layers were inserted into it."
        raise ModelError("FOLDER", f"{folder} ({config.model_type})", hint)
    data = read_object(folder, "config.json")
    if data.get("architectures") != [CLASS] or data.get("auto_map"):
        value = f"architectures {data.get('architectures')}, auto_map {data.get('auto_map')}"
        raise ModelError("config.json", value[:200], f"An export in this format names {CLASS} and no code. {AGAIN}")
    report = {"tensors": check_tensors(folder, config)}
    check_generation_config(folder)
    return {**report, **reload_and_compare(folder, folder, config, remote_code=False)}


def _load_config(folder: Path) -> PreTrainedConfig:
    """Load the config with transformers' class. Raises ModelError if it is not that of a Nemotron-H."""
    with reading("config.json", None, AGAIN):
        config = load_config(Base(model=str(folder)))
        if not isinstance(config, NemotronHConfig) or type(config.vocab_size) is not int or config.vocab_size < 1:
            raise TypeError(f"model_type {config.model_type}, vocab_size {config.vocab_size}")
        return config
