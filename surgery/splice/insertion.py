"""Insert new layers into a Mamba-2 or a Nemotron-H: attention blocks, or pairs with a Gather layer.

A block is `h + attention(norm(h))` with plain softmax attention and no position code. A pair is a new Mamba-2 layer
followed by a block. The block's output projection starts at 0, so the hybrid's logits equal the base's.

The Mamba-2 layer of a pair passes earlier tokens to the block. In channels of the base this disturbs all layers above,
which costs a small base its knowledge. So the residual stream gets side channels for each pair: only its Mamba-2 layer
writes to them, and the base's weights for them are 0. The base's norms average over them too. So all that the base
writes to the stream is multiplied by the square root of (new width / old width), and the norms' weights are divided by
it: the hybrid's logits then differ from the base's by rounding only. The block's own norm multiplies the side channels,
so that small values there count as much as the stream below them, however large that is (`surgery.splice.gather`).

Nemotron-H (arXiv 2504.03624) holds Mamba-2 layers and such blocks in one stack, so the result is a Nemotron-H and needs
no code of this library: transformers, vLLM and llama.cpp have this class.

Shape legend: D model width with side channels, H attention heads, P their width.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.errors import PlanError
from surgery.models.config_checks import STEP_MIN
from surgery.models.inserted import BASE_TYPE, FIELD, SIDE, as_inserted, head_slots, own_channels, side_channels
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Splice
from surgery.recipe.splice import INSERTED_INITS, SIDE_CHANNELS
from surgery.splice.draw import Draw
from surgery.splice.gather import fill_gather
from surgery.types import Graft, HeadId, Plan

HEAD_DIM = 64  # default of `splice.head_dim`
CONTEXT = 131072  # max_position_embeddings if the base states none. Nothing in the model depends on positions
_ATTENTION, _SSM = "full_attention", "linear_attention"
_SAME = (  # fields of a Mamba-2's config that a Nemotron-H's has too
    "vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id", "n_groups", "conv_kernel", "expand",
    "chunk_size", "use_bias", "use_conv_bias", "time_step_max", "time_step_floor", "layer_norm_epsilon",
    "initializer_range", "residual_in_fp32", "dtype",
)  # fmt: skip
_ROW = 8  # 16 bytes of 16-bit numbers: transformers' product of experts takes rows of a multiple of it


def check_inserts(config: PreTrainedConfig, splice: Splice | None = None, dtype: torch.dtype | None = None) -> None:
    """Check that a Nemotron-H can hold this base and new layers.

    Args:
        config: config of the base.
        splice: the recipe's section `splice`; None for its defaults.
        dtype: dtype of the base's weights in memory; None to skip its check.

    Raises:
        PlanError: names the field and its value.
    """
    form = "Set splice.form: head."
    if config.model_type not in ("mamba2", "nemotron_h"):
        hint = f"Layers can be inserted into models of type mamba2 or nemotron_h only. {form}"
        raise PlanError("base.model", config.model_type, hint)
    limit = tuple(float(x) for x in config.time_step_limit)
    if config.model_type == "mamba2" and limit != (0.0, math.inf):
        hint = f"Nemotron-H has no limits on dt, so only (0, inf) can be kept. {form}"
        raise PlanError("base.model time_step_limit", limit, hint)
    if dtype not in (None, torch.float32):
        hint = "The hybrid rounds like the base in float32 only. Set base.dtype: float32. export.dtype may differ."
        raise PlanError("base.dtype", str(dtype).removeprefix("torch."), hint)
    if splice is None:
        return
    if splice.output == "copy":
        groups, bias, width = config.n_groups, config.use_conv_bias, splice.head_dim or HEAD_DIM
        has = f"{groups} groups" if groups > 1 else "no bias of the convolution" if not bias else ""
        if has or width < _head_dim(config):
            has = has or f"heads of {_head_dim(config)} channels, more than splice.head_dim"
            raise PlanError("splice.output", "copy", f"The base has {has}. With form: pair, set zero.")
    kinds = getattr(config, "layers_block_type", ())
    if _ATTENTION in kinds and splice.head_dim not in (None, config.head_dim):
        hint = f"The base has attention, so it must be {config.head_dim}, its width. Leave it out."
        raise PlanError("splice.head_dim", splice.head_dim, hint)
    side = splice.side_channels or 0
    if "moe" in kinds and config.moe_latent_size is None and (rest := (config.hidden_size + side) % _ROW):
        hint = f"The base has experts, so hidden_size ({config.hidden_size}) and side_channels must together be a "
        raise PlanError("splice.side_channels", side, f"{hint}multiple of {_ROW}. Set {side - rest + _ROW}.")
    _check_place(splice.before, config, splice.init)
    check_counts(Counter(HeadId.parse(head).layer for head in splice.heads), config, "splice.heads")


def _head_dim(config: PreTrainedConfig) -> int:
    return family_of(config).sites(config)[0].head_dim


def _check_place(before: int | None, config: PreTrainedConfig, init: str) -> None:
    """Check the layer of the base before which new layers are inserted; None for the layers of the heads."""
    last = config.num_hidden_layers - 1
    if before is None:
        return
    if not 0 <= before <= last:
        hint = f"The base has layers 0 to {last}. New layers are inserted before one of them."
        raise PlanError("splice.before", before, hint)
    layers = [spec.layer for spec in family_of(config).mixers(config) if spec.is_ssm]
    if init == "ssm" and before not in layers:
        hint = f"init: ssm copies from the layer that follows, which must be an SSM layer: {str(layers)[1:-1]}."
        raise PlanError("splice.before", before, f"{hint} Set one of them, or splice.init: random.")


def check_counts(counts: Mapping[int, int], config: PreTrainedConfig, field: str) -> None:
    """Raise PlanError if a layer has more heads than the base's own attention, which is all that a block has room for.

    `field` is named in the error.
    """
    if _ATTENTION not in getattr(config, "layers_block_type", ()):
        return
    for layer, count in counts.items():
        if count > config.num_attention_heads:
            hint = f"New blocks have as many heads as the base's attention, {config.num_attention_heads}. Choose fewer."
            raise PlanError(field, f"{count} heads in layer {layer}", hint)


def inserted_config(plan: Plan, config: PreTrainedConfig, splice: Splice | None = None) -> NemotronHConfig:
    """Build the config of the hybrid.

    All attention layers have one number of heads and one width, as Nemotron-H has: those of the base's attention, or
    else the largest number of a graft. Heads that fill a block up are zero, and this library's training keeps them so.

    Args:
        plan: grafts with `form: block` or `pair`, ordered by `before`.
        config: config of the base.
        splice: the recipe's section `splice`, for `head_dim` and `side_channels`; None for their defaults.

    Raises:
        PlanError: as `check_inserts` and `check_counts`; the plan has both forms of heads and of layers, was made for
            another geometry, or is not ordered.
    """
    check_inserts(config, splice)
    _check_grafts(plan, config)
    hybrid = copy.deepcopy(config) if isinstance(config, NemotronHConfig) else nemotron_h_config(config)
    hybrid.__dict__.pop("auto_map", None)  # names code that published checkpoints bring, and exports do not
    kinds: list[str] = []
    entries = []
    width = hybrid.hidden_size
    for layer, kind in enumerate(hybrid.layers_block_type):
        for graft in plan.grafts:
            if graft.before != layer:
                continue
            new = [_SSM, _ATTENTION] if graft.form == "pair" else [_ATTENTION]
            entry: dict[str, Any] = {
                "form": graft.form,
                "init": graft.init,
                "layers": list(range(len(kinds), len(kinds) + len(new))),
                "before": layer,
                "site": graft.site.layer,
                "heads": list(graft.heads),
                "reads": list(graft.reads),
            }
            side = SIDE_CHANNELS.get(graft.init, 0) if splice is None else splice.side_channels
            if graft.form == "pair" and side:
                entry["channels"] = [width, width + side]
                width += side
            if splice is not None and splice.output == "copy":
                _check_room(graft, hybrid)
                entry["output"] = "copy"
            entries.append(entry)
            kinds += new
        kinds.append(kind)
    if _ATTENTION not in hybrid.layers_block_type:
        hybrid.num_attention_heads = hybrid.num_key_value_heads = max(len(graft.heads) for graft in plan.grafts)
        hybrid.head_dim = (splice.head_dim if splice is not None else None) or HEAD_DIM
    if width > hybrid.hidden_size:
        setattr(hybrid, SIDE, width - hybrid.hidden_size)
    hybrid.hidden_size = width
    hybrid.layers_block_type = kinds
    setattr(hybrid, FIELD, entries)
    if config.model_type != "mamba2":
        setattr(hybrid, BASE_TYPE, config.model_type)
    hybrid._attn_implementation = "sdpa"
    return hybrid


def _check_room(graft: Graft, config: NemotronHConfig) -> None:
    """Raise PlanError if keys, queries and values of the heads of a graft do not fit into a Gather layer."""
    inner, width = config.mamba_num_heads * config.mamba_head_dim, config.mamba_head_dim
    room = (inner - 2 * config.ssm_state_size) // width - 1  # the last head holds the mark
    if len(graft.heads) > room:
        hint = f"With form: pair, {max(room, 0)} heads of a layer fit. Choose fewer, or set zero."
        raise PlanError("splice.output", f"copy with {len(graft.heads)} heads in layer {graft.site.layer}", hint)


def nemotron_h_config(config: PreTrainedConfig) -> NemotronHConfig:
    """Return the config of a Mamba-2 as that of a Nemotron-H of SSM layers alone."""
    return NemotronHConfig(
        **{field: getattr(config, field) for field in _SAME},
        layers_block_type=[_SSM] * config.num_hidden_layers,
        tie_word_embeddings=False,  # Nemotron-H ties nothing: lm_head is a tensor of its own
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or CONTEXT,
        intermediate_size=config.hidden_size * config.expand,  # of MLPs, which it has none of
        ssm_state_size=config.state_size,
        mamba_num_heads=config.num_heads,
        mamba_head_dim=config.head_dim,
        mamba_hidden_act=config.hidden_act,
        mamba_proj_bias=config.use_bias,
        time_step_min=STEP_MIN,
        time_step_limit=tuple(config.time_step_limit),
        rescale_prenorm_residual=False,
    )


def _check_grafts(plan: Plan, config: PreTrainedConfig) -> None:
    """Check the grafts of a plan, which may come from an edited file."""
    if plan.geometry != geometry_of(config):
        raise PlanError("plan.json geometry", plan.geometry, "The plan was made for another model. Plan again.")
    forms = [graft.form for graft in plan.grafts]
    if not forms or "head" in forms:
        raise PlanError("plan.json form", forms, "Use block or pair for every graft, or head for all. Plan again.")
    places = [graft.before for graft in plan.grafts if graft.before is not None]
    if places != sorted(places):
        raise PlanError("plan.json before", places, "Order the grafts by the layer that follows them. Plan again.")
    check_counts({graft.site.layer: len(graft.heads) for graft in plan.grafts}, config, "plan.json heads")
    sites = family_of(config).sites(config)
    for graft in plan.grafts:
        _check_place(graft.before, config, graft.init)
        if graft.site not in sites or not graft.heads:
            raise PlanError("plan.json site", graft.site.name, "The base has no such mixer. Plan again.")
        if (graft.mode, graft.unit) != ("add", "head") or graft.init not in INSERTED_INITS[graft.form]:
            value, hint = f"{graft.mode}, {graft.init}, {graft.unit}", " or ".join(INSERTED_INITS[graft.form])
            hint = f"A {graft.form} needs mode add, init {hint}, and unit head. Plan again."
            raise PlanError("plan.json mode, init, unit", value, hint)


@torch.no_grad()
def insert_layers(model: PreTrainedModel, plan: Plan, splice: Splice | None = None) -> PreTrainedModel:
    """Build the hybrid of a plan with `form: block` or `pair`. The base is not changed and shares no memory with it.

    Args:
        model: the Mamba-2 or Nemotron-H that the plan was made for.
        plan: from `make_plan`.
        splice: the recipe's section `splice`, for `head_dim` and `side_channels`; None for their defaults.

    Returns:
        A Nemotron-H in eval mode, on the base's device and in its dtype. Its logits equal the base's, bit for bit
        without side channels. Saving it writes a checkpoint of transformers' own class.

    Raises:
        PlanError: as `inserted_config` and `check_inserts`.
    """
    check_inserts(model.config, splice, model.dtype)
    config = inserted_config(plan, model.config, splice)
    with torch.device("meta"):
        hybrid: PreTrainedModel = NemotronHForCausalLM(config)
    missing, unexpected = hybrid.load_state_dict(dict(_renamed(model, hybrid)), strict=False, assign=True)
    new = tuple(f"model.layers.{layer}." for entry in getattr(config, FIELD) for layer in entry["layers"])
    assert not unexpected and all(name.startswith(new) for name in missing), (missing, unexpected)
    for number, (graft, entry) in enumerate(zip(plan.grafts, getattr(config, FIELD), strict=True)):
        draw = Draw(f"{plan.seed}:{number}", model.device)
        blocks = [hybrid.get_submodule(f"model.layers.{layer}") for layer in entry["layers"]]
        for block in blocks:
            block.to_empty(device=model.device).norm.weight.fill_(1)
        _fill_attention(blocks[-1].mixer, graft, draw)
        if graft.form == "pair":
            gather, block = blocks
            fill_gather(gather.mixer, block, graft, model, entry["before"], own_channels(entry), draw)
            gather.norm.weight.div_(_scale(config))
    hybrid.generation_config = copy.deepcopy(model.generation_config)
    return as_inserted(hybrid.to(device=model.device, dtype=model.dtype).eval())


def _scale(config: NemotronHConfig) -> float:
    """Return the factor by which the base's part of the stream is larger than in the base."""
    return math.sqrt(config.hidden_size / (config.hidden_size - side_channels(config)))


def _renamed(model: PreTrainedModel, hybrid: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the base's tensors under their names in the hybrid, with zeros for side channels."""
    scale, shapes = _scale(hybrid.config), {name: tensor.shape for name, tensor in hybrid.state_dict().items()}
    writes = ["out_proj.", "o_proj.", "down_proj.", "shared_experts.down_proj.", "fc2_latent_proj."]
    if getattr(model.config, "moe_latent_size", None) is None:
        writes.append("experts.down_proj")
    new = {layer for entry in getattr(hybrid.config, FIELD) for layer in entry["layers"]}
    places = [layer for layer in range(len(hybrid.config.layers_block_type)) if layer not in new]
    for name, tensor in model.state_dict().items():
        name = name.replace("backbone.", "model.")  # of a Mamba-2
        _, _, rest = name.partition("model.layers.")
        if rest:
            layer, _, inside = rest.partition(".")
            name = f"model.layers.{places[int(layer)]}.{inside}"
        padded = tensor.new_zeros(shapes[name])
        padded[tuple(map(slice, tensor.shape))] = tensor
        if name.endswith("embeddings.weight") or any(f".mixer.{part}" in name for part in writes):
            padded *= scale
        elif name.endswith("norm_f.weight") or (name.endswith("norm.weight") and ".mixer." not in name):
            padded /= scale
        yield name, padded


def _fill_attention(mixer: nn.Module, graft: Graft, draw: Draw) -> None:
    """Random query, key and value for the heads of the graft, zeros for others, and a zero output projection."""
    slots = head_slots(len(graft.heads), mixer)
    key_slots = sorted({slot // mixer.num_key_value_groups for slot in slots})
    for name, heads in (("q_proj", slots), ("k_proj", key_slots), ("v_proj", key_slots)):
        weight = getattr(mixer, name).weight
        weight.zero_()
        drawn = draw.normal(name, len(heads) * mixer.head_dim, weight.shape[1])
        weight.unflatten(0, (-1, mixer.head_dim))[heads] = drawn.unflatten(0, (-1, mixer.head_dim))
    mixer.o_proj.weight.zero_()
