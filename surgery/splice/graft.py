"""Plan and weights -> a hybrid. Owns: initial values of the branch, silencing, the gap at step 0.

Must never know: how heads were chosen, files, training. An SSM head is linear attention with C as query,
B as key and x as value, so the branch starts from its own copies of those rows and of their short convolutions, or
reads them where the mixer makes them (Mamba-1).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import PlanError
from surgery.hybrid.attention import SplicedAttention, is_whole
from surgery.hybrid.donor import DonorAttention
from surgery.interventions.silence import silence
from surgery.models.donors import donor_weights
from surgery.models.layouts import HeadSlices
from surgery.models.lookup import block_of, family_of, geometry_of, mixer_of, structure_of
from surgery.recipe import Splice
from surgery.splice.plan import donor_of, reads_streams, splice_field
from surgery.types import Graft, Plan


@torch.no_grad()
def splice_model(
    model: PreTrainedModel, plan: Plan, section: Splice | None = None, teacher: PreTrainedModel | None = None
) -> PreTrainedModel:
    """Builds the hybrid. The base is not changed, and shares no memory with it.

    Args:
        model: the base whose geometry the plan was made for.
        section: widths of randomly initialised heads; whether a teacher's norms and MLP come too.
        teacher: whose attention is transplanted, with `init: teacher`.

    Returns:
        The hybrid in eval mode, in the base's dtype. With `mode: add` its logits equal the base's bit for bit.

    Raises:
        PlanError: the plan was made for another geometry.
    """
    family = family_of(model.config)
    if plan.geometry != geometry_of(model.config):
        raise PlanError("plan.json geometry", plan.geometry, "The plan was made for another model. Plan again.")
    fields = splice_field(plan, model.config, section, None if teacher is None else teacher.config)
    config = family.hybrid_config(model.config, fields)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        hybrid = family.build_hybrid(config)
    _take_over(model, hybrid)
    for graft in plan.grafts:
        source, target = mixer_of(model, graft.site), mixer_of(hybrid, graft.site)
        branch: SplicedAttention = target.attention.to_empty(device=model.device)
        branch.initialize()
        if graft.init == "teacher":
            assert teacher is not None
            _transplant(branch, graft, teacher)
        if graft.unit == "head":
            _initialize(branch, source, target, graft, plan.seed)
        elif section is not None and section.with_block:
            _transplant_block(block_of(hybrid, graft.site.layer, graft.site), graft, teacher)
    hybrid.to(model.device).eval()
    for name, parameter in hybrid.named_parameters():
        kept = name.rsplit(".", 1)[-1] in hybrid._keep_in_fp32_modules_strict
        parameter.data = parameter.data.to(torch.float32 if kept else model.dtype)
    for spec in family.mixers(config):
        if spec.kind == "mamba2":
            mixer_of(hybrid, spec).chunk_size = mixer_of(model, spec).chunk_size  # the same rounding as the base
    hybrid.generation_config = copy.deepcopy(model.generation_config)
    return hybrid


def _take_over(model: PreTrainedModel, hybrid: PreTrainedModel) -> None:
    """Copies of the base's weights and buffers; weights that share memory in the base share their copies."""
    copies: dict[int, Tensor] = {}
    state = {name: copies.setdefault(t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    missing, unexpected = hybrid.load_state_dict(state, strict=False, assign=True)
    new = {name for name, _ in hybrid.named_parameters() if ".attention." in name}
    whole = tuple(f"layers.{site['layer']}.mixer." for site in hybrid.config.splice if is_whole(site))
    left = [name for name in unexpected if not any(part in name for part in whole)]
    assert not left and set(missing) <= new, (missing, left)
    hybrid.tie_weights()
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        hybrid.get_submodule(owner).register_buffer(last, buffer.clone(), persistent=False)


def _initialize(branch: SplicedAttention, source: nn.Module, target: nn.Module, graft: Graft, seed: int) -> None:
    """Fills the branch of some heads and, in `replace` mode, silences the heads whose place it takes."""
    structure = structure_of(graft.site)
    slices = [structure.weight_slices(graft.site, head) for head in graft.heads]
    if graft.init == "ssm":
        _copy_inputs(branch, source, graft, slices)
    elif graft.init == "random":
        _randomize(branch, f"{seed}:L{graft.site.layer}")
    if graft.mode == "add":
        branch.o_proj.weight.zero_()
        return
    silence(structure.out_proj(target), graft)
    if graft.init == "teacher":
        return
    norm = structure.norm_weight(source)
    folded = structure.out_proj(source).weight if norm is None else structure.out_proj(source).weight * norm
    branch.o_proj.weight.copy_(torch.cat([folded[:, s.out] for s in slices], dim=1))


def _transplant(branch: SplicedAttention, graft: Graft, teacher: PreTrainedModel) -> None:
    """The teacher's own weights, all of them."""
    assert isinstance(branch, DonorAttention)
    branch.restore_rotary()
    weights = donor_weights(teacher, *donor_of(graft, teacher.config))
    missing, unexpected = branch.load_state_dict(weights, strict=False)
    assert missing == ["scale"] and not unexpected, (missing, unexpected)


def _transplant_block(block: nn.Module, graft: Graft, teacher: PreTrainedModel | None) -> None:
    """The norms and the MLP around a transplanted layer. Raises PlanError where they are not of the same shapes."""
    assert teacher is not None
    spec, _ = donor_of(graft, teacher.config)
    donor = block_of(teacher, spec.layer, spec).state_dict()
    own = {name: tensor for name, tensor in block.state_dict().items() if not name.startswith("mixer.")}
    for name, tensor in own.items():
        found = None if name not in donor else tuple(donor[name].shape)
        if found != tuple(tensor.shape):
            hint = f"The teacher's block has {found or 'no such tensor'} where the base's has {tuple(tensor.shape)}."
            raise PlanError("splice.with_block", name, hint)
        tensor.copy_(donor[name])


def _copy_inputs(branch: SplicedAttention, source: nn.Module, graft: Graft, slices: Sequence[HeadSlices]) -> None:
    """Own copies of the heads' C, B, x and gate rows and of their short convolutions, as far as they have their own."""
    in_proj = structure_of(graft.site).in_proj(source)
    assert in_proj is not None and branch.gate_proj is not None
    gate_bias = structure_of(graft.site).gate_bias(source)
    _copy(branch.gate_proj, in_proj, [s.gate for s in slices])
    if gate_bias is not None:
        branch.gate_proj.bias.add_(torch.cat([gate_bias[s.out] for s in slices]))
    if reads_streams(graft.site):
        return
    _copy(branch.qkv_proj, in_proj, [getattr(s, part) for part in ("query", "key", "value") for s in slices])
    channels = [getattr(s, part) for part in ("conv_query", "conv_key", "conv_value") for s in slices]
    _copy(branch.conv1d, source.conv1d, channels)


def _copy(target: nn.Module, source: nn.Module, rows: Sequence[slice | None]) -> None:
    """Own copies of the source's rows, weights and biases, in the order given."""
    target.weight.copy_(torch.cat([source.weight[r] for r in rows]))
    if target.bias is not None:
        target.bias.zero_()
    if source.bias is not None:
        target.bias.copy_(torch.cat([source.bias[r] for r in rows]))


def _randomize(branch: SplicedAttention, key: str) -> None:
    """Normal with variance 1/fan-in, from a seed that depends on the tensor's name alone."""
    for name, parameter in branch.named_parameters():
        if name.endswith("weight"):
            seed = int.from_bytes(hashlib.sha256(f"{key}:{name}".encode()).digest()[:8], "big") % 2**63
            generator = torch.Generator().manual_seed(seed)
            fan_in = parameter[0].numel()
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
        elif name.endswith("bias"):
            parameter.zero_()
    branch.scale.fill_(branch.initial_scale)


@dataclass(frozen=True)
class Gap:
    """How far a hybrid is from its base before training, over all tokens of some prompts.

    Attributes:
        max_logit: largest difference of a logit.
        kl: mean KL(base || hybrid) in nats a token.
        same_top: share of tokens with the same most likely next token.
    """

    max_logit: float
    kl: float
    same_top: float


@contextmanager
def frozen(*models: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient inside: whether it does decides how torch multiplies a weight with a transposed
    stream (at::matmul folds the batch, or not), as Mamba-1's are, and on some CPUs the two round differently.
    """
    asking = [p for model in models for p in model.parameters() if p.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@torch.no_grad()
def step_zero_gap(base: PreTrainedModel, hybrid: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Gap:
    """Compares the two on the same prompts, (B,T) each. With `mode: add` the gap is exactly zero.

    With `mode: replace` it is not: the branch is not the recurrence, and the silenced head, though its columns are
    zero, still enters the mean square of the gated norm that the other heads are divided by.
    """
    real = attention_mask.bool()
    with frozen(base, hybrid):
        a = base(input_ids, attention_mask=attention_mask, use_cache=False).logits[real].float()
        b = hybrid(input_ids, attention_mask=attention_mask, use_cache=False).logits[real].float()
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    kl = (log_a.exp() * (log_a - log_b)).sum(-1).mean()
    same = (a.argmax(-1) == b.argmax(-1)).float().mean()
    return Gap(float((a - b).abs().max()), float(kl), float(same))
