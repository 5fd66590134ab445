"""Hybrids with inserted layers: transformers' own Nemotron-H, whose config lists the new layers in `inserted`.

The files of such a model need no code of this library. In memory its class is `InsertedForCausalLM`, which also returns
the attention rows that training supervises.

The residual stream may have side channels: the last `side_channels` ones, which the base lacks. Its weights for them
are 0 at first. The Gather layer of a pair writes to those of its pair alone.

Shape legend: B batch, T tokens, H attention heads of a block, P their width, Q requested rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NotRequired

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor, nn
from transformers import (
    Mamba2Config,
    NemotronHConfig,
    NemotronHForCausalLM,
    NemotronHModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from surgery.errors import ModelError
from surgery.hybrid.modeling_hybrid import HybridCausalLMMixin, HybridModelMixin, SplicedAttention, SpliceRows
from surgery.types import Graft, MixerSpec

FIELD = "inserted"  # field of the config: one entry for each graft, from below
SIDE = "side_channels"  # field of the config: channels of the residual stream that the base lacks
BASE_TYPE = "inserted_into"  # field of the config: model_type of the base. Mamba-2 if it is missing

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


def has_inserted(config: PreTrainedConfig) -> bool:
    """Return whether layers were inserted into the base of this model."""
    return bool(getattr(config, FIELD, None))


class Inserted(TypedDict):
    """An entry of the field `inserted`: one graft.

    Attributes:
        layers: indices of the new layers in the hybrid, the attention block last.
        before: layer of the base that follows them.
        site: layer of the located heads.
        channels: of a pair with side channels, its first one, and the first one behind them.
        output: `copy` for a pair that begins with the values, the gate and the output of its heads. The second half of
            its side channels holds the values, and the last one marks the first token.
    """

    form: Literal["block", "pair"]
    init: Literal["random", "ssm"]
    layers: list[int]
    before: int
    site: int
    heads: list[NonNegativeInt]
    reads: list[Any]
    channels: NotRequired[list[int]]
    output: NotRequired[Literal["copy"]]


_ENTRIES: TypeAdapter[list[Any]] = TypeAdapter(list[Inserted], config=ConfigDict(strict=True, extra="forbid"))


def inserted_entries(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the checked entries of the field `inserted`; empty if nothing was inserted.

    Raises:
        ModelError: an entry is malformed, or does not fit the layers of the config.
    """
    hint = "The field lists the layers that were inserted into the base. Export the model again."
    try:
        entries: list[dict[str, Any]] = _ENTRIES.validate_python(getattr(config, FIELD, None) or [])
    except ValidationError as error:
        raise ModelError(f"config.json {FIELD}", error.errors()[0]["loc"], hint) from None
    if not entries:
        return []
    side = side_channels(config)
    start, channel = 0, config.hidden_size - side  # the first layer and side channel that the next entry can have
    removed = 0
    for entry in entries:
        layers, is_pair = entry["layers"], entry["form"] == "pair"
        kinds = ["linear_attention", "full_attention"] if is_pair else ["full_attention"]
        first, end = entry["before"] + removed, (entry.get("channels") or [channel])[-1]
        fits = [
            layers == list(range(first, first + len(kinds))) and first >= start,
            list(getattr(config, "layers_block_type", ()))[first : first + len(kinds)] == kinds,
            0 < len(entry["heads"]) == len(entry["reads"]) <= getattr(config, "num_attention_heads", 0),
            is_pair or entry["init"] == "random",
            entry.get("channels") == ([channel, end] if is_pair and side else None),
            end > channel or "channels" not in entry,
            "output" not in entry or (entry["init"] == "ssm" and "channels" in entry),
        ]
        if not all(fits):
            raise ModelError(f"config.json {FIELD}", str(entry)[:160], hint)
        start, channel, removed = layers[-1] + 1, end, removed + len(kinds)
    if channel != config.hidden_size:
        raise ModelError(f"config.json {FIELD} channels", side, hint)
    return entries


def new_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the indices of the inserted layers in the hybrid."""
    return tuple(layer for entry in inserted_entries(config) for layer in entry["layers"])


def attention_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the indices of the inserted attention blocks in the hybrid."""
    return tuple(entry["layers"][-1] for entry in inserted_entries(config))


def side_channels(config: PreTrainedConfig) -> int:
    """Return the number of side channels of the residual stream.

    Raises:
        ModelError: the config has no such number, or the base would have no channel.
    """
    number = getattr(config, SIDE, 0)
    if type(number) is not int or not 0 <= number < config.hidden_size:
        hint = f"It must be a whole number below hidden_size ({config.hidden_size}). Export the model again."
        raise ModelError(f"config.json {SIDE}", str(number)[:80], hint)
    return number


def own_channels(entry: Mapping[str, Any]) -> slice | None:
    """Return the side channels of a pair; None if it has none."""
    return slice(*entry["channels"]) if "channels" in entry else None


def base_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the model that layers were inserted into. That of a Mamba-2 has its shapes alone.

    Raises:
        ModelError: as `inserted_entries` and `side_channels`, or the base was of an unknown type.
    """
    new, base = new_layers(config), getattr(config, BASE_TYPE, "mamba2")
    kinds = [kind for layer, kind in enumerate(config.layers_block_type) if layer not in new]
    if base == "nemotron_h":
        of_base = copy.deepcopy(config)
        of_base.layers_block_type = kinds
        of_base.hidden_size -= side_channels(config)
        for field in (FIELD, SIDE, BASE_TYPE):
            of_base.__dict__.pop(field, None)
        return of_base
    if base != "mamba2" or set(kinds) != {"linear_attention"}:
        hint = "It must be nemotron_h, or missing for a Mamba-2. Export the model again."
        raise ModelError(f"config.json {BASE_TYPE}", str(base)[:80], hint)
    return Mamba2Config(
        num_hidden_layers=len(kinds),
        hidden_size=config.hidden_size - side_channels(config),
        vocab_size=config.vocab_size,
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        expand=config.expand,
        state_size=config.ssm_state_size,
        n_groups=config.n_groups,
        conv_kernel=config.conv_kernel,
    )


def portable_config(data: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the content of config.json in the form that vLLM and llama.cpp read too.

    They take `hybrid_override_pattern` and their own names of some sizes, and a config with fields of experts for a
    model with experts. transformers drops the first and writes the last whenever it saves (`data`).
    """
    left_out = _LEFT_OUT if "moe" in config.layers_block_type else (*_LEFT_OUT, *_OF_EXPERTS)
    return {
        **{key: value for key, value in data.items() if key not in left_out},
        "architectures": [CLASS],
        "hybrid_override_pattern": config.hybrid_override_pattern,
        "num_hidden_layers": config.num_hidden_layers,
        "mamba_n_groups": config.n_groups,
        "mamba_d_conv": config.conv_kernel,
        "tie_word_embeddings": False,
    }


def grafts_of(config: PreTrainedConfig, sites: Mapping[int, MixerSpec]) -> tuple[Graft, ...]:
    """Return the grafts of a hybrid with inserted layers, from the SSM mixers of the base by layer.

    Raises:
        ModelError: as `inserted_entries`, or an entry names a layer that the base lacks.
    """
    grafts = []
    for entry in inserted_entries(config):
        if entry["site"] not in sites:
            hint = f"Layers of the base: {sorted(sites)}. Export the model again."
            raise ModelError(f"config.json {FIELD}", f"site {entry['site']}", hint)
        heads, reads = tuple(entry["heads"]), tuple(entry["reads"])
        site, form, before = sites[entry["site"]], entry["form"], entry["before"]
        grafts.append(Graft(site, heads, "add", entry["init"], reads, form=form, before=before))
    return tuple(grafts)


def new_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return spliced heads and inserted blocks by name, in the model's order."""
    config = getattr(model, "config", None)
    blocks = {f"model.layers.{layer}" for layer in new_layers(config)} if has_inserted(config) else set()
    return {n: m for n, m in model.named_modules() if n in blocks or isinstance(m, SplicedAttention)}


def pairs_of(model: nn.Module) -> list[tuple[nn.Module, nn.Module, dict[str, Any]]]:
    """Return Gather layer, block and entry of each pair, from below."""
    config = getattr(model, "config", None)
    if not has_inserted(config):
        return []
    entries = [entry for entry in inserted_entries(config) if entry["form"] == "pair"]
    blocks = [[model.get_submodule(f"model.layers.{layer}") for layer in entry["layers"]] for entry in entries]
    return [(gather, block, entry) for (gather, block), entry in zip(blocks, entries, strict=True)]


def head_slots(count: int, mixer: nn.Module) -> list[int]:
    """Return which attention heads of an inserted block are its own: spread, so that few share keys and values.

    Args:
        count: number of its own heads. Others fill it up to the number of heads of all attention layers.
        mixer: the attention of the block.
    """
    shared = mixer.num_key_value_groups
    key_heads = mixer.k_proj.out_features // mixer.head_dim
    return [slot % key_heads * shared + slot // key_heads for slot in range(count)]


class InsertedModel(HybridModelMixin, NemotronHModel):
    """`NemotronHModel` in memory: it keeps packed documents apart, and collects rows of its inserted blocks."""

    _makes_masks = False
    _keep_in_fp32_modules_strict = NemotronHModel._keep_in_fp32_modules_strict

    def forward(self, *args: Any, splice_queries: SpliceRows | None = None, **kwargs: Any) -> Any:
        """As Nemotron-H's own forward; `splice_queries` collects the attention rows of the inserted blocks."""
        if splice_queries is None:
            return super().forward(*args, **kwargs)
        mixers = {layer: self.layers[layer].mixer for layer in attention_layers(self.config)}
        projected: dict[nn.Module, Tensor] = {}

        def record(projection: nn.Module, _: Any, output: Tensor) -> None:
            projected.setdefault(projection, output)

        # Queries and keys are recorded inside the blocks and compared outside: gradient checkpointing runs a block
        # again, and its second run must save the same tensors.
        with ExitStack() as hooks:
            for mixer in mixers.values():
                for projection in (mixer.q_proj, mixer.k_proj):
                    hooks.callback(projection.register_forward_hook(record).remove)
            output = super().forward(*args, splice_queries=splice_queries, **kwargs)
        for entry in inserted_entries(self.config):
            layer = entry["layers"][-1]
            mixer = mixers[layer]
            heads = head_slots(len(entry["heads"]), mixer)
            query, key = (
                projected[projection].unflatten(-1, (-1, mixer.head_dim)).transpose(1, 2)
                for projection in (mixer.q_proj, mixer.k_proj)
            )
            key = key.repeat_interleave(mixer.num_key_value_groups, dim=1)[:, heads]
            splice_queries.collect(layer, query[:, heads] * mixer.scaling, key, kwargs.get("attention_mask"))
        return output


class InsertedForCausalLM(HybridCausalLMMixin, NemotronHForCausalLM):
    """`NemotronHForCausalLM` in memory. It is saved as transformers' own class."""

    _keep_in_fp32_modules_strict = NemotronHForCausalLM._keep_in_fp32_modules_strict

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers' own class, without code of this library."""
        self.__class__ = NemotronHForCausalLM
        try:
            return self.save_pretrained(*args, **kwargs)
        finally:
            self.__class__ = InsertedForCausalLM


def as_inserted(model: PreTrainedModel) -> PreTrainedModel:
    """Turn a Nemotron-H with inserted layers into an `InsertedForCausalLM` in place. Returns any model.

    Raises:
        ModelError: as `inserted_entries`.
    """
    if not (has_inserted(model.config) and isinstance(model.config, NemotronHConfig)):
        return model
    if isinstance(model, InsertedForCausalLM):
        return model
    entries, side = inserted_entries(model.config), side_channels(model.config)
    for entry in entries:
        mixer = model.model.layers[entry["layers"][-1]].mixer
        if mixer.num_key_value_groups > 1:
            slots = head_slots(len(entry["heads"]), mixer)
            mixer.o_proj.register_forward_hook(partial(_train_own_heads_only, slots, mixer.head_dim))
    if side:
        of_pairs = ((entry["layers"][0], own_channels(entry)) for entry in entries)
        gathers = {layer: own for layer, own in of_pairs if own is not None}
        for layer, own in gathers.items():
            # Not a hook of `out_proj`: fused kernels do not call it.
            model.model.layers[layer].mixer.register_forward_hook(partial(_train_own_channels_only, own))
        if any(entry["init"] == "ssm" for entry in entries):
            model.model.embeddings.register_forward_hook(partial(_train_base_channels_only, side))
            for number, block in enumerate(model.model.layers):
                if number not in gathers:
                    block.mixer.register_forward_hook(partial(_train_base_channels_only, side))
    model.__class__, model.model.__class__ = InsertedForCausalLM, InsertedModel
    _CAN_RECORD_REGISTRY[model.model] = model.model._can_record_outputs  # transformers goes by the class at building
    return model


def _train_own_heads_only(
    slots: list[int], width: int, o_proj: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """Stop the gradient of the output weights of heads that fill a block up, so they stay 0.

    They would get gradients through keys and values that they share with the block's own heads.
    """
    if not torch.is_grad_enabled():
        return output
    own = torch.zeros(o_proj.in_features // width, dtype=torch.bool, device=output.device)
    own[slots] = True
    weight = torch.where(own.repeat_interleave(width), o_proj.weight, o_proj.weight.detach())
    return F.linear(inputs[0], weight, o_proj.bias)


def _train_own_channels_only(own: slice, _: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Stop the gradient of what a Gather layer writes to channels of others, so its weights there stay 0."""
    return torch.cat([output[..., : own.start].detach(), output[..., own], output[..., own.stop :].detach()], -1)


def _train_base_channels_only(side: int, _: nn.Module, __: Any, output: Any) -> Any:
    """Stop the gradient of what any other module writes to side channels, so its weights there stay 0.

    The block's norm multiplies side channels with copies by so much that a step of the optimizer would hide them.
    """
    written = output[0] if isinstance(output, tuple) else output
    written = torch.cat([written[..., :-side], written[..., -side:].detach()], -1)
    return (written, *output[1:]) if isinstance(output, tuple) else written
