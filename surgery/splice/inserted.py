"""Insert new layers into a Mamba-2, as transformers' own Nemotron-H: attention blocks, or pairs with a Gather layer.

A block is `h + attention(norm(h))` with plain softmax attention and no position code. A pair is a new Mamba-2 layer
followed by a block. Output projections start at 0, so the hybrid's logits equal the base's.

The Mamba-2 layer of a pair passes earlier tokens to the block. In channels of the base this disturbs all layers above,
which costs a small base its knowledge. So the residual stream gets side channels: only that layer writes to them, and
the base's weights for them are 0. The base's norms average over them too. So all that the base writes to the stream is
multiplied by the square root of (new width / old width), and the norms' weights are divided by it: the hybrid's logits
then differ from the base's by rounding only. The block's own norm multiplies the side channels, so that small values
there count as much as the stream below them, however large that is.

Nemotron-H (arXiv 2504.03624) holds Mamba-2 layers and such blocks in one stack, so the result needs no code of this
library: transformers, vLLM and llama.cpp have this class.

Shape legend: D model width with side channels, I inner width of an SSM layer, K taps of its convolution, H attention
heads, P their width.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.errors import PlanError
from surgery.models.inserted import FIELD, SIDE, as_inserted, side_channels
from surgery.models.lookup import family_of, geometry_of, mixer_of
from surgery.recipe import Splice
from surgery.recipe.splice import SIDE_CHANNELS
from surgery.types import Graft, Plan

HEAD_DIM = 64  # default of `splice.head_dim`
CONTEXT = 131072  # max_position_embeddings if the base states none. Nothing in the model depends on positions
_STEP_MIN = 1e-30  # Nemotron-H's lower limit of dt in prefill. Its initialisation takes the logarithm
_RIDGE = 1e-3  # as a share of the mean square of the stream
_SIDE_RMS = 0.1  # of what a Gather layer writes to side channels, as the block above reads it at full size
_ATTENTION, _SSM = "full_attention", "linear_attention"


def check_inserts(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> None:
    """Check that Nemotron-H can express this base.

    Args:
        config: config of the base.
        dtype: dtype of its weights in memory; None to skip its check.

    Raises:
        PlanError: names the field and its value.
    """
    form = "Set splice.form: head."
    if config.model_type != "mamba2":
        hint = f"Layers can be inserted into models of type mamba2 only. {form}"
        raise PlanError("base.model", config.model_type, hint)
    limit = tuple(float(x) for x in config.time_step_limit)
    if limit != (0.0, math.inf):
        raise PlanError(
            "base.model time_step_limit", limit, f"Nemotron-H has no limits on dt, so only (0, inf) can be kept. {form}"
        )
    if dtype not in (None, torch.float32):
        hint = "Nemotron-H rounds like the base in float32 only. Set base.dtype: float32. export.dtype may differ."
        raise PlanError("base.dtype", str(dtype).removeprefix("torch."), hint)


def check_place(before: int, config: PreTrainedConfig) -> None:
    """Raise PlanError if the base has no layer `before`."""
    if not 0 <= before < config.num_hidden_layers:
        hint = f"The base has layers 0 to {config.num_hidden_layers - 1}. New layers are inserted before one of them."
        raise PlanError("splice.before", before, hint)


def inserted_config(plan: Plan, config: PreTrainedConfig, splice: Splice | None = None) -> NemotronHConfig:
    """Build the config of the hybrid.

    All blocks have one number of heads and one width, as Nemotron-H has: the largest number of a graft. Missing heads
    are zero and stay so in training.

    Args:
        plan: grafts with `form: block` or `pair`, ordered by `before`.
        config: config of the base.
        splice: the recipe's section `splice`, for `head_dim` and `side_channels`; None for their defaults.

    Raises:
        PlanError: as `check_inserts` and `check_place`; the plan has both forms of heads and of layers, was made for
            another geometry, or is not ordered.
    """
    check_inserts(config)
    _check_grafts(plan, config)
    kinds: list[str] = []
    entries = []
    for layer in range(config.num_hidden_layers):
        for graft in plan.grafts:
            if graft.before != layer:
                continue
            new = [_SSM, _ATTENTION] if graft.form == "pair" else [_ATTENTION]
            entries.append({
                "form": graft.form,
                "layers": list(range(len(kinds), len(kinds) + len(new))),
                "before": layer,
                "site": graft.site.layer,
                "heads": list(graft.heads),
                "reads": list(graft.reads),
            })  # fmt: skip
            kinds += new
        kinds.append(_SSM)
    count = max(len(graft.heads) for graft in plan.grafts)
    pairs = any(graft.form == "pair" for graft in plan.grafts)
    side = ((SIDE_CHANNELS if splice is None else splice.side_channels) or 0) if pairs else 0
    hybrid = NemotronHConfig(
        layers_block_type=kinds,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size + side,
        tie_word_embeddings=False,  # Nemotron-H ties nothing: lm_head is a tensor of its own
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        num_attention_heads=count,
        num_key_value_heads=count,
        head_dim=(splice.head_dim if splice is not None else None) or HEAD_DIM,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or CONTEXT,
        intermediate_size=config.hidden_size * config.expand,  # of MLPs, which it has none of
        ssm_state_size=config.state_size,
        mamba_num_heads=config.num_heads,
        mamba_head_dim=config.head_dim,
        mamba_hidden_act=config.hidden_act,
        n_groups=config.n_groups,
        conv_kernel=config.conv_kernel,
        expand=config.expand,
        chunk_size=config.chunk_size,
        use_bias=config.use_bias,
        mamba_proj_bias=config.use_bias,
        use_conv_bias=config.use_conv_bias,
        time_step_min=_STEP_MIN,
        time_step_max=config.time_step_max,
        time_step_floor=config.time_step_floor,
        time_step_limit=tuple(config.time_step_limit),
        layer_norm_epsilon=config.layer_norm_epsilon,
        initializer_range=config.initializer_range,
        residual_in_fp32=config.residual_in_fp32,
        rescale_prenorm_residual=False,
        dtype=config.dtype,
    )
    setattr(hybrid, FIELD, entries)
    if side:
        setattr(hybrid, SIDE, side)
    hybrid._attn_implementation = "sdpa"
    return hybrid


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
    sites = family_of(config).sites(config)
    for graft in plan.grafts:
        check_place(graft.before or 0, config)
        if graft.site not in sites or not graft.heads:
            raise PlanError("plan.json site", graft.site.name, "The base has no such mixer. Plan again.")
        if (graft.mode, graft.init, graft.unit) != ("add", "random", "head"):
            value = f"{graft.mode}, {graft.init}, {graft.unit}"
            raise PlanError(
                "plan.json mode, init, unit",
                value,
                "Inserted layers need mode add, init random and unit head. Plan again.",
            )


@torch.no_grad()
def insert_layers(model: PreTrainedModel, plan: Plan, splice: Splice | None = None) -> PreTrainedModel:
    """Build the hybrid of a plan with `form: block` or `pair`. The base is not changed and shares no memory with it.

    Args:
        model: the Mamba-2 that the plan was made for.
        plan: from `make_plan`.
        splice: the recipe's section `splice`, for `head_dim` and `side_channels`; None for their defaults.

    Returns:
        A Nemotron-H in eval mode, on the base's device and in its dtype. Its logits equal the base's, bit for bit
        without side channels. Saving it writes a checkpoint of transformers' own class.

    Raises:
        PlanError: as `inserted_config` and `check_inserts`.
    """
    check_inserts(model.config, model.dtype)
    config = inserted_config(plan, model.config, splice)
    with torch.device("meta"):
        hybrid: PreTrainedModel = NemotronHForCausalLM(config)
    missing, unexpected = hybrid.load_state_dict(dict(_renamed(model, hybrid)), strict=False, assign=True)
    new = tuple(f"model.layers.{layer}." for entry in getattr(config, FIELD) for layer in entry["layers"])
    assert not unexpected and all(name.startswith(new) for name in missing), (missing, unexpected)
    for number, (graft, entry) in enumerate(zip(plan.grafts, getattr(config, FIELD), strict=True)):
        draw = _Draw(f"{plan.seed}:{number}", model.device)
        blocks = [hybrid.get_submodule(f"model.layers.{layer}") for layer in entry["layers"]]
        for block in blocks:
            block.to_empty(device=model.device).norm.weight.fill_(1)
        _fill_attention(blocks[-1].mixer, graft, draw)
        if graft.form == "pair":
            gather, block = blocks
            stream = _stream(model, entry["before"], draw)
            _fill_delay_line(gather.mixer, draw, _constant_direction(stream, model.config.layer_norm_epsilon))
            gather.norm.weight.div_(_scale(config))
            block.norm.weight[model.config.hidden_size :] = float(stream.square().mean().sqrt()) / _SIDE_RMS
    published = mixer_of(model, family_of(model.config).mixers(model.config)[0]).chunk_size
    for spec in family_of(config).mixers(config):
        if spec.is_ssm:
            mixer_of(hybrid, spec).chunk_size = published  # the same rounding as the base
    hybrid.generation_config = copy.deepcopy(model.generation_config)
    return as_inserted(hybrid.to(device=model.device, dtype=model.dtype).eval())


def _scale(config: NemotronHConfig) -> float:
    """Return the factor by which the base's part of the stream is larger than in the base."""
    return math.sqrt(config.hidden_size / (config.hidden_size - side_channels(config)))


def _renamed(model: PreTrainedModel, hybrid: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the base's tensors under their names in the hybrid, with zeros for side channels."""
    scale, shapes = _scale(hybrid.config), {name: tensor.shape for name, tensor in hybrid.state_dict().items()}
    new = {layer for entry in getattr(hybrid.config, FIELD) for layer in entry["layers"]}
    places = [layer for layer in range(len(hybrid.config.layers_block_type)) if layer not in new]
    for name, tensor in model.state_dict().items():
        head, _, rest = name.partition("backbone.layers.")
        if rest:
            layer, _, inside = rest.partition(".")
            name = f"model.layers.{places[int(layer)]}.{inside}"
        else:
            name = head.replace("backbone.", "model.")
        padded = tensor.new_zeros(shapes[name])
        padded[tuple(map(slice, tensor.shape))] = tensor
        if ".mixer.out_proj." in name or name.endswith("embeddings.weight"):
            padded *= scale
        elif name.endswith("norm_f.weight") or (name.endswith("norm.weight") and ".mixer." not in name):
            padded /= scale
        yield name, padded


class _Draw:
    """Draw random tensors, each from its own seed.

    Args:
        key: identifies plan and graft.
        device: of the results.
    """

    def __init__(self, key: str, device: Any) -> None:
        self.key, self.device = key, device

    def _generator(self, name: str) -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(f"{self.key}:{name}".encode()).digest()[:8], "big") % 2**63
        return torch.Generator().manual_seed(seed)

    def normal(self, name: str, rows: int, columns: int) -> Tensor:
        """Return (rows, columns) with variance 1/columns."""
        return (torch.randn(rows, columns, generator=self._generator(name)) * columns**-0.5).to(self.device)

    def tokens(self, name: str, count: int, vocab_size: int, length: int = 128) -> Tensor:
        """Return (count / length, length) token ids: permutations of the vocabulary, one after the other."""
        generator = self._generator(name)
        ids = torch.cat([torch.randperm(vocab_size, generator=generator) for _ in range(-(-count // vocab_size))])
        length = min(length, count)
        return ids[: count // length * length].view(-1, length).to(self.device)

    def uniform(self, name: str, count: int, low: float, high: float) -> Tensor:
        """Return (count,) between `low` and `high`."""
        return (torch.rand(count, generator=self._generator(name)) * (high - low) + low).to(self.device)


def _fill_attention(mixer: nn.Module, graft: Graft, draw: _Draw) -> None:
    """Random query, key and value for the heads of the graft, zeros for others, and a zero output projection."""
    used = len(graft.heads) * mixer.head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(mixer, name).weight
        weight.zero_()
        weight[:used] = draw.normal(name, used, weight.shape[1])
    mixer.o_proj.weight.zero_()


class _Reached(Exception):
    """A forward pass has reached the layer whose input is needed."""


def _stream(model: PreTrainedModel, layer: int, draw: _Draw) -> Tensor:
    """Run the base on random tokens, in which all of the vocabulary is as frequent, up to a layer.

    Args:
        model: the base, with D channels.
        layer: the layer.
        draw: seeds the order of the tokens.

    Returns:
        (N,D) input of the layer at N of about 16 D tokens.
    """
    inputs: list[Tensor] = []

    def stop(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(arguments[0])
        raise _Reached

    handle = model.backbone.layers[layer].register_forward_pre_hook(stop)
    try:
        model(draw.tokens("gate", 16 * model.config.hidden_size, model.config.vocab_size), use_cache=False)
    except _Reached:
        pass
    finally:
        handle.remove()
    return inputs[0].flatten(0, 1)


def _constant_direction(stream: Tensor, epsilon: float) -> Tensor:
    """Find a vector of base channels whose product with a layer's normed input is about 1 at every token.

    Uses ridge regression.

    Args:
        stream: from `_stream`.
        epsilon: of the layer's norm.
    """
    x = stream.double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    gram = normed.T @ normed / len(normed)
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + ridge, normed.mean(0)).to(stream.dtype)


def _fill_delay_line(mixer: nn.Module, draw: _Draw, constant: Tensor) -> None:
    """A Mamba-2 layer whose channels hold the tokens 1 to K-1 places before, with the scan off and a zero output.

    x is a random projection of the base's channels, and the convolution of channel i only passes what stood
    `1 + i % (K-1)` tokens before. The gate is about the same at every token, since a random one would hide much of x.
    (Before layer 0 of checkpoints/pico-mamba2, a linear map finds the token three places before in 95% of cases, and in
    70% with a random gate.) The scan is off because C is 0. B is not 0, so C has gradients as soon as the output is not
    0.

    Args:
        mixer: filled in place.
        draw: the random numbers.
        constant: from `_constant_direction`, for the base's channels.
    """
    channels = len(constant)
    I = mixer.intermediate_size  # noqa: E741
    states, K = mixer.n_groups * mixer.ssm_state_size, mixer.conv_kernel_size
    for module in (mixer.in_proj, mixer.conv1d, mixer.out_proj):
        if module.bias is not None:
            module.bias.zero_()
    mixer.in_proj.weight.zero_()
    z, x, B, *_ = mixer.in_proj.weight[:, :channels].split([I, I, states, states, mixer.num_heads])  # C and dt stay 0
    z.copy_(2 * constant.expand(len(z), channels))  # silu(2) = 1.76
    for name, rows in (("x", x), ("B", B)):
        rows.copy_(draw.normal(name, len(rows), channels))
    mixer.conv1d.weight.zero_()
    lags = 1 + torch.arange(I, device=draw.device) % max(1, K - 1) if K > 1 else torch.zeros(I, dtype=torch.long)
    mixer.conv1d.weight[torch.arange(I, device=draw.device), 0, K - 1 - lags.to(draw.device)] = 1
    mixer.conv1d.weight[I:, 0, K - 1] = 1  # B and C: the token itself
    steps = draw.uniform("dt_bias", mixer.num_heads, math.log(1e-3), math.log(1e-1)).exp()
    mixer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
    mixer.A_log.copy_(draw.uniform("A_log", mixer.num_heads, 1, 16).log())
    mixer.D.fill_(1)
    mixer.norm.weight.fill_(1)
    mixer.out_proj.weight.zero_()
