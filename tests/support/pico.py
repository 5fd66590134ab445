"""Tiny models of every family with random weights, a small tokenizer, and padded prompts.

    pico_base()                            a Mamba-2 with 3 layers of 4 heads, hidden size 32
    pico_hybrid([pico_site(1, [2])])       the same weights, with attention added to L1H2
    prompts([9, 14])                       two left-padded prompts that end at a question
    pico_family("zamba2")                  a model of another family, 3 or 4 layers

The seed of each tensor follows from the model's seed and the tensor's name, so a base and a hybrid of one seed have the
same values in shared tensors. No tensor stays at 0 or 1, so that a wrong sign or swapped heads change the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Zamba2Config,
)

from surgery.data.encoding import EncodedBatch
from surgery.data.tokenizer import build_tokenizer
from surgery.hybrid import Mamba2HybridConfig, Mamba2HybridForCausalLM
from surgery.hybrid.modeling_llamba import LlambaConfig
from surgery.hybrid.modeling_mamba2attn import Mamba2AttnConfig
from surgery.models.lookup import family_of
from surgery.models.registry import families

PAD = 0
VOCAB = 61
HEADS, HEAD_DIM, HIDDEN, STATE = 4, 16, 32, 8


_TOKENS = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None}
_MAMBA2 = {"num_heads": HEADS, "head_dim": HEAD_DIM, "state_size": STATE, "chunk_size": 8}


def _fields(n_groups: int = 1, layers: int = 3, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": HIDDEN, "n_groups": n_groups, "num_hidden_layers": layers}
    return _TOKENS | _MAMBA2 | shape | more


def pico_config(**config: Any) -> Mamba2Config:
    """Config of a tiny Mamba-2. Short prompts cross its chunks of 8 tokens; it has no end token to stop generation."""
    return Mamba2Config(**_fields(**config))


def pico_base(seed: int = 0, **config: Any) -> Mamba2ForCausalLM:
    """A plain Mamba-2 with random weights, in eval mode."""
    return randomise(Mamba2ForCausalLM(pico_config(**config)), seed).eval()


def pico_site(
    layer: int,
    heads: Sequence[int] = (2,),
    mode: Literal["add", "replace"] = "add",
    qk_width: int = STATE,
    v_width: int = HEAD_DIM,
    activation: str | None = "silu",
    gate: bool = True,
) -> dict[str, Any]:
    """One entry of `config.splice`: copies of an SSM head by default."""
    names = {"layer": layer, "heads": list(heads), "mode": mode, "init": "ssm", "reads": ["segment_end"] * len(heads)}
    widths = {"head_dim": HEAD_DIM, "qk_width": qk_width, "v_width": v_width, "conv_kernel": 4, "norm_eps": 1e-5}
    return {**names, **widths, "activation": activation, "gate": gate, "bias": False, "conv_bias": True}


def random_site(layer: int, heads: Sequence[int] = (2,), mode: Literal["add", "replace"] = "add") -> dict[str, Any]:
    """One entry of `config.splice` for a random branch: no activation, no gate, and keys wider than values."""
    return {**pico_site(layer, heads, mode, 24, HEAD_DIM, activation=None, gate=False), "init": "random"}


def pico_hybrid(splice: list[dict[str, Any]], seed: int = 0, **config: Any) -> Mamba2HybridForCausalLM:
    """`pico_base` of the same seed with spliced sites.

    Args:
        splice: entries of `config.splice`, from `pico_site` or `random_site`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Mamba2HybridForCausalLM(Mamba2HybridConfig(**_fields(**config), splice=splice))
    return randomise(model, seed).eval()


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int, keep: str | None = None) -> Any:
    """Randomise every parameter from its own seed, except those whose name contains `keep`."""
    for name, p in model.named_parameters():
        if keep is not None and keep in name:
            continue
        rng = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        last = name.rsplit(".", 1)[-1]
        if last == "dt_bias" or name.endswith("dt_proj.bias"):
            value = torch.empty(p.shape).uniform_(-3, 0, generator=rng)
        elif last == "A_log":
            value = torch.empty(p.shape).uniform_(-2, 1, generator=rng)
        elif "norm" in name or last in ("scale", "D"):
            value = torch.empty(p.shape).uniform_(0.5, 1.5, generator=rng)
        elif "embed" in name or p.ndim == 1:
            value = torch.randn(p.shape, generator=rng) * (1 if p.ndim > 1 else 0.3)
        else:
            value = torch.randn(p.shape, generator=rng) * (p[0].numel() ** -0.5)
        p.copy_(value)
    return model


_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_MAMBA1 = {"state_size": 4, "num_hidden_layers": 3, "channels_per_head": 16, "time_step_rank": 3}
_ZAMBA2_LAYERS = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_BAMBA_LAYERS = ["linear_attention", "full_attention", "linear_attention"]

# Config class and fields of a tiny model, by family. The fields include what is special in a family: groups, shared
# blocks, multipliers, adapters, layers without a mixer.
_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mamba2": (Mamba2Config, {**_MAMBA2, "n_groups": 2, "num_hidden_layers": 3}),
    "mamba2attn": (Mamba2AttnConfig, {**_MAMBA2, "n_groups": 1, "num_hidden_layers": 4, "attn_layer_idx": [1],
                                      "d_intermediate": 40,
                                      "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "head_dim": 12, "d_conv": 4,
                                                   "rotary_emb_dim": 8}}),
    "mamba": (MambaConfig, _MAMBA1),
    "falcon_mamba": (FalconMambaConfig, _MAMBA1),
    "llamba": (LlambaConfig, {"d_model": HIDDEN, "n_layer": 3, "pad_vocab_size_multiple": 1, "tie_embeddings": True,
                              "mlp_cfg": {"intermediate_size": 48, "bias": False, "act_fn": "silu"},
                              "ssm_cfg": {"d_state": 8, "n_v_heads": 4, "n_qk_heads": 2, "expand": 1, "chunk_size": 8,
                                          "activation": "identity", "bias": False}}),
    "zamba2": (Zamba2Config, {**_ATTENTION, "num_hidden_layers": 4, "layers_block_type": _ZAMBA2_LAYERS,
                              "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 8, "chunk_size": 8,
                              "num_mem_blocks": 1, "use_mem_rope": True, "use_shared_attention_adapter": True,
                              "adapter_rank": 4, "num_key_value_heads": 4, "intermediate_size": 48}),
    "bamba": (BambaConfig, {**_ATTENTION, **_BAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1],
                            "intermediate_size": 48}),
    "granite": (GraniteMoeHybridConfig, {**_ATTENTION, **_BAMBA, "num_hidden_layers": 3, "layer_types": _BAMBA_LAYERS,
                                         "shared_intermediate_size": 48, "num_local_experts": 2,
                                         "intermediate_size": 24, "residual_multiplier": 0.5,
                                         "embedding_multiplier": 2.0, "logits_scaling": 1.5,
                                         "position_embedding_type": "rope"}),
    "nemotron_h": (NemotronHConfig, {**_ATTENTION, "layers_block_type":
                                     ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
                                     "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
                                     "chunk_size": 8, "intermediate_size": 48, "head_dim": 8, "n_routed_experts": 4,
                                     "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24}),
    "falcon_h1": (FalconH1Config, {**_ATTENTION, **_BAMBA, "num_hidden_layers": 3, "intermediate_size": 48,
                                   "mamba_d_ssm": 64, "head_dim": 8, "ssm_out_multiplier": 0.7,
                                   "attention_out_multiplier": 1.3, "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 1.3]}),
    "llama": (LlamaConfig, {**_ATTENTION, "num_hidden_layers": 3, "intermediate_size": 48}),
    "qwen2": (Qwen2Config, {**_ATTENTION, "num_hidden_layers": 3, "intermediate_size": 48}),
    "gpt_neox": (GPTNeoXConfig, {"num_attention_heads": 4, "max_position_embeddings": 256, "num_hidden_layers": 3,
                                 "intermediate_size": 48}),
}  # fmt: skip
_PLUGGED = {family.name: family.tiny for family in families() if family.tiny is not None}  # with pytest -p MODULE
FAMILY_NAMES = (*_FAMILIES, *_PLUGGED)


def pico_family_config(name: str, **more: Any) -> PreTrainedConfig:
    """Config of a tiny model of a family, with fields replaced by `more`."""
    if name in _PLUGGED:
        return _PLUGGED[name](**dict(_TOKENS, **more))
    config_class, fields = _FAMILIES[name]
    hidden = {} if name == "llamba" else {"hidden_size": HIDDEN}
    return config_class(**dict(_TOKENS | hidden | fields, **more))


SPLICED_FAMILIES = tuple(name for name in FAMILY_NAMES if family_of(pico_family_config(name)).hybrid)


def pico_family(name: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A tiny model of a family with random weights, in eval mode."""
    config = pico_family_config(name, **more)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return randomise(model, seed).eval()


@cache
def pico_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of the shipped checkpoints. Models for it need `vocab_size=1024`."""
    return build_tokenizer()


def tokens(batch: int = 2, length: int = 21, seed: int = 0) -> Tensor:
    """Random tokens (B,T) without padding."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def pad(rows: Sequence[Tensor], side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Pad rows (T_i,) of different lengths. Returns tokens (B,T) and their mask."""
    length = max(map(len, rows))
    ids, mask = torch.full((len(rows), length), PAD), torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        span = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[i, span], mask[i, span] = row, 1
    return ids, mask


def prompts(lengths: Sequence[int] = (9, 14, 12), choices: int = 5, seed: int = 0) -> EncodedBatch:
    """Left-padded random prompts whose last token is a query, as from `encode(..., until_answer=True)`.

    The gold value and the end of its segment are at random places of the prompt. The choices are random tokens.
    """
    rng = torch.Generator().manual_seed(seed)
    ids, mask = pad([tokens(1, n, seed + i)[0] for i, n in enumerate(lengths)], "left")
    longest, B = ids.shape[1], len(lengths)
    at = {name: torch.empty(B, 1, dtype=torch.long) for name in ("segment_start", "answer_token", "segment_end")}
    choice_ids = torch.stack([torch.randperm(VOCAB - 3, generator=rng)[:choices] + 3 for _ in lengths])[:, None]
    for b, n in enumerate(lengths):
        places = (torch.randperm(n - 1, generator=rng)[:3].sort().values + longest - n).tolist()
        for name, place in zip(at, places, strict=True):
            at[name][b, 0] = place
    gold = torch.randint(choices, (B, 1), generator=rng)
    target = choice_ids[:, 0].gather(1, gold)
    query = torch.full((B, 1), longest - 1)
    answers = torch.zeros_like(ids, dtype=torch.bool)
    return EncodedBatch(ids, mask, answers, query=query, target=target, choice_ids=choice_ids, gold=gold, **at)
