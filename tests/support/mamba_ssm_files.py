"""Checkpoints in mamba_ssm's format, made of tiny transformers models.

write(folder, model)                  config.json and pytorch_model.bin, as `MambaLMHeadModel.save_pretrained`
write(folder, model, "safetensors")   the same tensors in another file format
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from tests.support.pico import pico_family, randomise

Kind = Literal["bin", "legacy bin", "sharded bin", "safetensors"]
KINDS: tuple[Kind, ...] = ("bin", "legacy bin", "sharded bin", "safetensors")
VOCAB, PADDED = 61, 64


def tiny(layer: str, tied: bool = True) -> PreTrainedModel:
    """A random Mamba-1 or Mamba-2 whose vocabulary of 61 is padded to 64."""
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    common = {"vocab_size": PADDED, "num_hidden_layers": 2, "tie_word_embeddings": tied, **none}
    if layer == "Mamba1":  # `pico_family` has other channels in a head than the format
        config = MambaConfig(**common, hidden_size=32, state_size=4)
        return randomise(MambaForCausalLM(config), seed=0).eval()
    return pico_family("mamba2", **common)


def config_of(model: PreTrainedModel) -> dict[str, Any]:
    """mamba_ssm's config.json for the model, with nothing in it that is a default there."""
    config = model.config
    ssm: dict[str, Any] = {"d_state": config.state_size, "d_conv": config.conv_kernel, "bias": config.use_bias}
    ssm["conv_bias"] = config.use_conv_bias
    if config.model_type != "mamba":
        ssm |= {"layer": "Mamba2", "headdim": config.head_dim, "ngroups": config.n_groups}
        ssm |= {"chunk_size": config.chunk_size, "dt_limit": list(config.time_step_limit)}
    data = {
        "d_model": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "vocab_size": VOCAB,
        "ssm_cfg": ssm,
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": config.tie_word_embeddings,
    }
    if config.model_type == "mamba2attn_hybrid":
        data |= {"attn_layer_idx": config.attn_layer_idx or [], "d_intermediate": config.d_intermediate}
        data["attn_cfg"] = {**(config.attn_cfg or {}), "causal": True}
    return data


def state_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Its tensors under mamba_ssm's names."""
    return {
        name.replace("backbone.embeddings.", "backbone.embedding."): tensor
        for name, tensor in model.state_dict().items()
    }


def write(
    folder: Path,
    model: PreTrainedModel,
    kind: Kind = "bin",
    config: dict[str, Any] | None = None,
    state: dict[str, Tensor] | None = None,
) -> Path:
    """Writes the folder and returns it; `config` and `state` replace the model's own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or config_of(model), indent=4))
    state = state_of(model) if state is None else state
    if kind == "safetensors":
        save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    elif kind == "sharded bin":
        names = list(state)
        parts = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for file, part in parts.items():
            torch.save({name: state[name].clone() for name in part}, folder / file)
        index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin")
    return folder


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(PADDED, (2, 11), generator=torch.Generator().manual_seed(0))
    return model(ids, use_cache=False).logits


def assert_same_logits(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    assert torch.equal(logits_of(found), logits_of(expected))
