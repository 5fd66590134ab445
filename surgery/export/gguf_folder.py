"""The export format `gguf`: the files of the format `nemotron_h`, and model.gguf for llama.cpp.

A copy verifies as one of `nemotron_h`. Then every tensor, the vocabulary and the shapes in model.gguf are compared with
these files, so llama.cpp is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import ModelError, RecipeError, reading
from surgery.export import transformers_folder
from surgery.export.files import AGAIN, read_object
from surgery.export.gguf_converter import convert, pre_tokenizer_of
from surgery.export.transformers_folder import plan_in as plan_in  # the format's functions are called by name
from surgery.models.tensor_files import inventory, read_tensors, weight_files
from surgery.recipe import Export

_CONTROL = 3  # type of a special token in a GGUF file
FILE = "model.gguf"
_OF_EXPERTS = {  # fields of llama.cpp and of config.json
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "moe_latent_size": "moe_latent_size",
}
_PERMUTED = {"q.weight": "num_attention_heads", "k.weight": "num_key_value_heads"}  # number of heads, in config.json


def checked_pre_tokenizer(section: Export, tokenizer: PreTrainedTokenizerBase) -> str:
    """Check that llama.cpp and the package `gguf` are there, and return llama.cpp's name for the pre-tokenizer."""
    if find_spec("gguf") is None:
        raise RecipeError("export.format", "gguf", "It needs the package gguf. Install it: pip install gguf.")
    return pre_tokenizer_of(tokenizer, section)


def check_base(config: PreTrainedConfig) -> None:
    """Raise RecipeError for layers of a base, a Mamba-2 or a Nemotron-H, that llama.cpp does not compute."""
    kinds = set(getattr(config, "layers_block_type", ())) & {"mlp", "moe"}
    of_ssm = getattr(config, "mamba_hidden_act", None) or getattr(config, "hidden_act", "silu")
    fault = ""
    if of_ssm not in ("silu", "swish"):
        fault = f"The base's SSM layers have the activation {of_ssm}, and llama.cpp supports only silu."
    elif getattr(config, "use_bias", False):
        fault = "The base's SSM layers have a bias (use_bias), which llama.cpp does not support."
    elif len(kinds) == 2:
        fault = "The base has both MLPs and experts, and llama.cpp supports only one of the two."
    elif kinds and config.mlp_hidden_act != "relu2":
        fault = f"The base has mlp_hidden_act: {config.mlp_hidden_act}, and llama.cpp supports only relu2."
    elif "moe" in kinds and config.mlp_bias:
        fault = "The base's experts have a bias (mlp_bias), which llama.cpp does not support."
    if fault:
        raise RecipeError("export.format", "gguf", f"{fault} Set export.format: nemotron_h.")


def write_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, section: Export) -> None:
    """Write the files of `nemotron_h`, and model.gguf."""
    check_base(model.config)
    pre_tokenizer = checked_pre_tokenizer(section, tokenizer)
    transformers_folder.write_folder(model, tokenizer, folder, section)
    convert(folder, folder / FILE, pre_tokenizer, section)


def compare_with_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """As of `nemotron_h`, with `pre_tokenizer`. Also compares model.gguf with the other files."""
    checked = transformers_folder.compare_with_model(folder, model, tokenizer)
    return {**checked, "pre_tokenizer": compare_with_files(folder)["pre_tokenizer"]}


def verify_copy(folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Check a copy as `transformers_folder.verify_copy` does, and compare model.gguf with its files."""
    if not (folder / FILE).is_file():
        raise ModelError(FILE, "missing", AGAIN)
    report = transformers_folder.verify_copy(folder, trust_remote_code)
    if find_spec("gguf") is None:
        skipped = f"{FILE}: its tensors, for which the package gguf is needed (pip install gguf)"
        return {**report, "not_checked": [*report["not_checked"], skipped]}
    return {**report, **compare_with_files(folder)}


def compare_with_files(folder: Path) -> dict[str, Any]:
    """Compare model.gguf with config, tokenizer and weights. Returns `also_checked` (sentences) and `pre_tokenizer`."""
    from gguf import GGUFReader

    config = read_object(folder, "config.json")
    with reading(FILE, None, AGAIN):
        reader = GGUFReader(folder / FILE)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        _check_fields(config, fields)
        _check_vocabulary(folder, config, fields)
        _check_tensors(folder, config, tensors)
    name, count = fields["tokenizer.ggml.pre"], len(fields["tokenizer.ggml.tokens"])
    sentence = f"{FILE}: {len(tensors)} tensors and {count} tokens equal the model's, the pre-tokenizer is {name}"
    return {"also_checked": [sentence], "pre_tokenizer": name}


def _check_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Compare the shapes."""
    pattern = config["hybrid_override_pattern"]
    architecture = "nemotron_h_moe" if "E" in pattern else "nemotron_h"
    widths = {"-": "intermediate_size", "E": "moe_intermediate_size"}
    kv_heads = [config["num_key_value_heads"] if kind == "*" else 0 for kind in pattern]
    expected = {
        "block_count": len(pattern),
        "embedding_length": config["hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": kv_heads,
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_epsilon": float(np.float32(config["layer_norm_epsilon"])),
        "feed_forward_length": [config[widths[kind]] if kind in widths else 0 for kind in pattern],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }
    if "E" in pattern:
        expected |= {name: config[field] for name, field in _OF_EXPERTS.items() if config[field] is not None}
        expected["expert_weights_scale"] = float(np.float32(config["routed_scaling_factor"]))
    wanted = {"general.architecture": architecture} | {f"{architecture}.{key}": v for key, v in expected.items()}
    for name, value in wanted.items():
        if fields.get(name) != value:
            raise ModelError(FILE, f"{name} is {fields.get(name)}", f"config.json needs {value}. {AGAIN}")


def _check_vocabulary(folder: Path, config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Compare tokens, merges and the ids of special tokens with tokenizer.json."""
    tokenizer = read_object(folder, "tokenizer.json")
    tokens, vocabulary = fields["tokenizer.ggml.tokens"], tokenizer["model"]["vocab"]
    if len(tokens) != config["vocab_size"]:
        value = f"it has {len(tokens)} tokens, but the tensors have {config['vocab_size']}"
        raise ModelError(FILE, value, f"llama.cpp does not load it. {AGAIN}")
    added = {token["id"]: token for token in tokenizer.get("added_tokens", ())}
    special = {token["content"]: index for index, token in added.items() if token["special"]}
    plain = ((token, index) for token, index in vocabulary.items() if index not in added)
    for token, index in (*special.items(), *plain):
        if tokens[index] != token:
            raise ModelError(FILE, f"token {index} is {tokens[index]!r}", f"tokenizer.json has {token!r}. {AGAIN}")
    types = fields["tokenizer.ggml.token_type"]
    for token, index in special.items():
        if types[index] != _CONTROL:
            raise ModelError(FILE, f"token {index}, {token!r}, has type {types[index]}", f"It is special. {AGAIN}")
    in_text = read_object(folder, "tokenizer_config.json")
    for name, key in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        token, ids = in_text.get(key), config.get(f"{key}_id")
        content = token["content"] if isinstance(token, dict) else token
        allowed = {special.get(content), *(ids if isinstance(ids, list) else [ids])} - {None}
        found = fields.get(f"tokenizer.ggml.{name}_token_id")
        if allowed and found not in allowed:
            hint = f"The model's is {' or '.join(map(str, sorted(allowed)))}. {AGAIN}"
            raise ModelError(FILE, f"tokenizer.ggml.{name}_token_id is {found}", hint)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    if fields["tokenizer.ggml.merges"] != merges:
        raise ModelError(FILE, "its merges differ", f"They differ from those of tokenizer.json. {AGAIN}")


def _check_tensors(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Compare every tensor."""
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    pattern = config["hybrid_override_pattern"]
    architecture = getattr(MODEL_ARCH, "NEMOTRON_H_MOE" if "E" in pattern else "NEMOTRON_H", None)
    if architecture is None:
        raise ModelError(FILE, "the installed package gguf is too old", "Update it: pip install --upgrade gguf.")
    names = get_tensor_name_map(architecture, len(pattern))
    regular = {path.name: path for path in folder.iterdir() if path.is_file()}
    stored = inventory(weight_files(regular.get))
    sources: dict[str, list[str]] = {}  # names in the checkpoint by that in llama.cpp; experts by their numbers
    for source in sorted(stored, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        sources.setdefault(_in_llama_cpp(source, names), []).append(source)
    for name in sorted(set(tensors) ^ set(sources)):
        fault = "missing" if name in sources else "not of the model"
        raise ModelError(FILE, f"tensor {name}", f"It is {fault}. {AGAIN}")
    orders: dict[str, set[str]] = {}
    for name, in_checkpoint in sources.items():
        read = list(read_tensors([stored[source] for source in in_checkpoint]))
        expected = torch.stack(read) if "_exps." in name else read[0]
        found = torch.from_numpy(np.array(dequantize(tensors[name].data, tensors[name].tensor_type), dtype=np.float32))
        rounding = 1e-6 * name.endswith("ssm_a")  # exp may round differently on another machine
        same = {
            order
            for order, tensor in _as_stored(name, expected.float(), config).items()
            if tensor.numel() == found.numel() and torch.allclose(found.flatten(), tensor, rtol=rounding, atol=0)
        }
        if not same:
            several = " and the others" if len(in_checkpoint) > 1 else ""
            value = f"It differs from {in_checkpoint[0]}{several} of the safetensors files. {AGAIN}"
            raise ModelError(FILE, f"tensor {name}", value)
        layer, _, kind = name.rpartition(".attn_")
        if kind in _PERMUTED and not orders.setdefault(layer, same) & same:
            raise ModelError(FILE, f"tensor {name}", f"Query and key have their channels in different orders. {AGAIN}")


def _as_stored(name: str, tensor: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Flatten a tensor as llama.cpp stores it, in every order that computes the same.

    Its converter interleaves the two halves of the channels of query and key, for a position code that this model does
    not have. The product of query and key is the same if both are.
    """
    if name.endswith("ssm_a"):
        return {"as it is": -tensor.exp().flatten()}  # the checkpoint stores log(-A)
    orders = {"as it is": tensor.flatten()}
    heads = _PERMUTED.get(name.rpartition(".attn_")[2])
    if heads is not None:
        halves = tensor.view(config[heads], 2, -1, tensor.shape[1])
        orders["interleaved"] = halves.transpose(1, 2).flatten()
    return orders


def _in_llama_cpp(source: str, names: Any) -> str:
    """Name in llama.cpp of a tensor of the checkpoint, from the package's map. Those of all experts have one name."""
    inside = re.sub(r"^backbone(\.layers\.\d+\.)mixer(\.experts\.)\d+\.", r"model\1mlp\2", source)
    inside = inside.replace("e_score_correction_bias", "e_score_correction.bias").replace("dt_bias", "dt_proj.bias")
    return names.get_name(inside, try_suffixes=(".weight", ".bias")) or source
