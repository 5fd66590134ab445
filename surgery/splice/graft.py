"""Build a hybrid from a plan and the base's weights, and compare both before training.

An SSM head is linear attention with C as query, B as key and x as value (arXiv 2405.21060). A copied branch starts from
these rows and their short convolutions. In Mamba-1 it reads the mixer's B, C and x instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import PlanError
from surgery.hybrid.configuration_hybrid import is_whole
from surgery.hybrid.modeling_hybrid import SplicedAttention
from surgery.models.alterations import silence
from surgery.models.hooks import record
from surgery.models.inserted import attention_layers
from surgery.models.lookup import block_of, family_of, geometry_of, mixer_of, structure_of
from surgery.models.runtime import requires_grad, stays_in_fp32
from surgery.models.spliced import BASE_STATE_SIZE
from surgery.models.torch_scans import torch_scans
from surgery.recipe import Splice
from surgery.splice.gated_pair import copy_outputs
from surgery.splice.insertion import insert_layers
from surgery.splice.plan import check_not_spliced, check_state_size, hybrid_config, splice_field
from surgery.splice.source import HeadSource, donor_of
from surgery.splice.state_size import StateCut
from surgery.types import Graft, Plan

# Differences of logits that may be rounding, as fractions of the largest one. Kernels that differ change them by up to
# 3e-3 in fp32 (tf32), and 3e-2 in bf16 (mamba2-24m, H100).
_ROUNDING, _ROUNDING_IN_HALF = 1e-2, 0.1


@torch.no_grad()
def splice_model(
    model: PreTrainedModel,
    plan: Plan,
    section: Splice | None = None,
    teacher: PreTrainedModel | None = None,
    cut: StateCut | None = None,
    prompts: Sequence[Tensor] = (),
) -> PreTrainedModel:
    """Build the hybrid. The base is not changed and shares no memory with it.

    Args:
        model: the base that the plan was made for, or a model of the same geometry.
        plan: heads and branches, from `make_plan`.
        section: the recipe's section `splice`; None for the one that `make_plan` had. A plan that was read from a file
            has none, and gets the defaults. The section sets the widths of the branches, and whether a teacher's norms
            and MLP are copied.
        teacher: with `init: teacher`, the Transformer whose attention is transplanted.
        cut: with `splice.state_size`, the channels of the state to keep, from `choose_channels`. Branches are copies of
            the base's heads with all channels.
        prompts: for a pair with `output: copy`, (1,T) ids each, up to a query.

    Returns:
        The hybrid in eval mode, in the base's dtype. With `mode: add`, `output: zero` and no cut, its logits equal
        the base's bit for bit. With `form: block` or `pair` it is a Nemotron-H (`insert_layers`).

    Raises:
        PlanError: the model is a hybrid, the plan was made for another geometry, the cut is not the section's, or
            `splice_field` or the branch's `fill` fails.
    """
    check_not_spliced(model.config)  # the base's plan fits it too, and its trained heads would be lost
    section = section or plan.section
    if any(graft.form != "head" for graft in plan.grafts):
        hybrid = insert_layers(model, plan, section)
        if section is not None and section.output == "copy":
            if not prompts:
                raise PlanError("splice.output", "copy", "splice_model needs `prompts` for it. Pass some, or set zero.")
            copy_outputs(hybrid, model, plan, prompts)
        return hybrid
    family = family_of(model.config)
    if plan.geometry != geometry_of(model.config):
        raise PlanError("plan.json geometry", plan.geometry, "The plan was made for another model. Plan again.")
    fields = splice_field(plan, model.config, section, None if teacher is None else teacher.config)
    state_size = section.state_size if section is not None else None
    if state_size != (None if cut is None else cut.state_size):
        given = "no channels were chosen" if cut is None else f"{cut.state_size} channels were chosen"
        hint = f"For splice_model, {given}. Pass cut=choose_channels(contributions, state_size)."
        raise PlanError("splice.state_size", state_size, hint)
    copies_all = section is not None and section.output == "copy"
    copying = {graft for graft in plan.grafts if copies_all or graft.mode == "replace"}
    squares = _mean_squares(model, [graft for graft in copying if graft.init == "ssm"], plan.seed)
    for graft, entry in zip(plan.grafts, fields, strict=True):
        entry["norm_eps"] = squares.get(graft, entry["norm_eps"])
    config = hybrid_config(model.config, fields, state_size)
    with torch.device("meta"):
        hybrid = family.build_hybrid(config)
    _take_over(model, hybrid, cut)
    for graft in plan.grafts:
        target = mixer_of(hybrid, graft.site)
        branch: SplicedAttention = target.attention.to_empty(device=model.device)
        branch.initialize()
        branch.fill(HeadSource(graft, mixer_of(model, graft.site), plan.seed, teacher, graft in copying))
        if graft.unit == "layer":
            if section is not None and section.with_block:
                _transplant_block(hybrid, graft, teacher)
        elif graft not in copying:
            branch.o_proj.weight.zero_()
        elif graft.mode == "replace":
            silence(structure_of(graft.site).out_proj(target), graft)
    hybrid.to(model.device).eval()
    for name, parameter in hybrid.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if stays_in_fp32(hybrid, name) else model.dtype)
    return hybrid


@torch.no_grad()
def cut_model(model: PreTrainedModel, cut: StateCut) -> PreTrainedModel:
    """Build a copy of a model without a splice whose state has fewer channels: the control of `splice.state_size`.

    Args:
        model: the base. It is not changed.
        cut: the channels to keep.

    Raises:
        PlanError: the state of this model cannot be cut so.
    """
    check_state_size(cut.state_size, model.config)
    config = family_of(model.config).with_state_size(model.config, cut.state_size)
    with torch.device("meta"):
        smaller: PreTrainedModel = type(model)(config)
    _take_over(model, smaller, cut)
    return smaller.to(model.device).eval()


def _mean_squares(model: PreTrainedModel, grafts: Collection[Graft], seed: int) -> dict[Graft, float]:
    """Measure by which mean square the norm behind the SSM divides the heads of each graft, on random tokens.

    That norm spans many heads: one that holds little adds little to the stream. A branch has a norm for each head,
    which would give all that it reads one size. With this mean square as epsilon, a copied output adds at most what the
    SSM head would. Without a norm behind the SSM it is 1.
    """
    squares = dict.fromkeys(grafts, 1.0)
    norms = {graft: structure_of(graft.site).norm_weight(mixer_of(model, graft.site)) for graft in grafts}
    weights = {graft: weight.float() for graft, weight in norms.items() if weight is not None}
    if not weights:
        return squares
    draw = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(model.config.get_text_config().vocab_size, (1, 512), generator=draw)
    with torch_scans(model), record(model, [graft.site for graft in weights]) as trace:
        model(ids_BT.to(model.device), use_cache=False)
    for graft, weight in weights.items():
        structure, name = structure_of(graft.site), graft.site.name
        heads = [structure.weight_slices(graft.site, head) for head in graft.heads]
        scan, gate = trace.scan[name].float(), F.silu(trace.projected[name].float())
        before = torch.stack([scan[..., h.out] * gate[..., h.gate] * weight[h.out] for h in heads])
        after = torch.stack([trace.heads[name][..., h.out].float() for h in heads])
        ratio = before.square().mean(-1) / after.square().mean(-1)
        square = float(ratio.nanmedian().nan_to_num(1.0))  # NaN: heads that are 0
        squares[graft] = float(f"{square:.2g}")  # two digits, so that a hybrid that is built again is the same
    return squares


def _take_over(model: PreTrainedModel, hybrid: PreTrainedModel, cut: StateCut | None) -> None:
    """Load copies of the base's weights and buffers. Weights that are tied in the base stay tied."""
    copies = {} if cut is None else cut.weights(model)
    stored = model.state_dict()
    state = {name: copies.setdefault(t.data_ptr(), t.clone()) for name, t in stored.items()}
    missing, unexpected = hybrid.load_state_dict(state, strict=False, assign=True)
    new = {name for name, _ in hybrid.named_parameters() if ".attention." in name}
    sites = getattr(hybrid.config, "splice", None) or []
    whole = tuple(f"layers.{site['layer']}.mixer." for site in sites if is_whole(site))
    unexpected = [name for name in unexpected if not any(part in name for part in whole)]
    assert not unexpected and set(missing) <= new, (missing, unexpected)
    hybrid.tie_weights()
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        hybrid.get_submodule(owner).register_buffer(last, buffer.clone(), persistent=name in stored)
    hybrid.generation_config = copy.deepcopy(model.generation_config)


def _transplant_block(hybrid: PreTrainedModel, graft: Graft, teacher: PreTrainedModel | None) -> None:
    """Copy the norms and the MLP around a transplanted layer. Raises PlanError if shapes or activations differ."""
    assert teacher is not None
    spec, _ = donor_of(graft, teacher.config)
    activation = hybrid.config.hidden_act
    if teacher.config.hidden_act != activation:
        hint = f"The base's MLP has {activation}. Set with_block: false."
        raise PlanError("splice.with_block", f"a teacher with hidden_act: {teacher.config.hidden_act}", hint)
    donor = block_of(teacher, spec.layer, spec).state_dict()
    for name, tensor in block_of(hybrid, graft.site.layer, graft.site).state_dict().items():
        if name.startswith("mixer."):
            continue
        shape = None if name not in donor else tuple(donor[name].shape)
        if shape != tuple(tensor.shape):
            hint = f"The base's block has shape {tuple(tensor.shape)}, the teacher's {shape or 'no such tensor'}. "
            hint += "Set with_block: false."
            raise PlanError("splice.with_block", name, hint)
        tensor.copy_(donor[name])


@dataclass(frozen=True)
class Gap:
    """Difference between a hybrid and its base before training, over all tokens of some prompts.

    Attributes:
        max_logit: largest absolute difference of a logit.
        kl: mean KL(base || hybrid) in nats per token.
        same_top: share of tokens with the same most likely next token.
    """

    max_logit: float
    kl: float
    same_top: float


@torch.no_grad()
def step_zero_gap(
    base: PreTrainedModel, hybrid: PreTrainedModel, plan: Plan, input_ids: Tensor, attention_mask: Tensor
) -> Gap:
    """Compare base and hybrid before training, and check that they differ where the splice changes them alone.

    With `mode: add` and `output: zero` the gap is exactly zero. With `mode: replace` it is not, since softmax attention
    differs from the recurrence, and the silenced head contributes to the mean square of the gated norm, which scales
    the other heads.

    The check: heads that replace others or add copies, and a state that is cut, change what their layers add to the
    stream. These layers add what the base's do instead, so that all else is compared: embeddings, other layers, norms
    and head. Inserted blocks with an output are left out.

    Args:
        base, hybrid: as loaded from their folders.
        plan: of the splice.
        input_ids, attention_mask: (B,T) real prompts.

    Raises:
        PlanError: a logit of the check differs by more than rounding.
    """
    heads = [graft for graft in plan.grafts if graft.form == "head"]
    inserted = [hybrid.get_submodule(f"model.layers.{layer}") for layer in attention_layers(hybrid.config)]
    inserted = [block for block in inserted if block.mixer.o_proj.weight.any()]
    layers = {
        graft.site.layer
        for graft in heads
        if graft.mode == "replace" or mixer_of(hybrid, graft.site).attention.o_proj.weight.any()
    }
    if getattr(hybrid.config, BASE_STATE_SIZE, None) is not None:
        layers = {spec.layer for spec in family_of(base.config).mixers(base.config) if spec.is_ssm}
    added: dict[int, Tensor] = {}

    def keep(layer: int, _: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        added[layer] = (output[0] if isinstance(output, tuple) else output) - _stream(args, kwargs)

    def add(layer: int, _: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        stream = _stream(args, kwargs) + added[layer]
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    def skip(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        return (_stream(args, kwargs), *output[1:]) if isinstance(output, tuple) else _stream(args, kwargs)

    def logits(
        model: PreTrainedModel, hook: Callable[..., Any], hooked: Collection[int], skipped: Sequence[nn.Module] = ()
    ) -> Tensor:
        """Logits of the N real tokens, (N,V) in fp32, with a hook on the blocks of some layers, without others."""
        spec = family_of(base.config).mixers(base.config)[0]
        with ExitStack() as hooks, requires_grad(False, model):
            for block in skipped:
                hooks.callback(block.register_forward_hook(skip, with_kwargs=True).remove)
            for layer in hooked:
                block = block_of(model, layer, spec)
                hooks.callback(block.register_forward_hook(partial(hook, layer), with_kwargs=True).remove)
            output = model(input_ids, attention_mask=attention_mask, use_cache=False).logits
        return output[attention_mask.bool()].float()

    a, kept = logits(base, keep, layers), logits(hybrid, add, layers, inserted)
    apart, rounding = float((a - kept).abs().max()), _ROUNDING if base.dtype == torch.float32 else _ROUNDING_IN_HALF
    if not apart <= rounding * float(a.abs().max()):
        value = f"its logits differ from the base's by up to {apart:.2g} before training, which rounding does not"
        hint = "The weights and config.json of base.model disagree, such as lm_head.weight and tie_word_embeddings."
        raise PlanError("the hybrid", value, f"{hint} Correct them.")
    b = logits(hybrid, add, ()) if layers or inserted else kept
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    kl = (log_a.exp() * (log_a - log_b)).sum(-1).mean()
    same = (a.argmax(-1) == b.argmax(-1)).float().mean()
    return Gap(float((a - b).abs().max()), float(kl), float(same))


def _stream(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The residual stream that enters a block."""
    return args[0] if args else kwargs["hidden_states"]
