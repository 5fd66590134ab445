"""Plan and weights -> a hybrid. Owns: initial values of the branch, silencing, the gap at step 0.

Must never know: how heads were chosen, files, training. METHOD 4: an SSM head is linear attention with C as query,
B as key and x as value, so the branch starts from its own copies of those rows and of their short convolutions.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.errors import PlanError
from surgery.families import Family, family_of, geometry_of
from surgery.heads import Graft, Plan
from surgery.hybrid.attention import SplicedAttention
from surgery.plan import splice_field
from surgery.recipe import Splice


@torch.no_grad()
def splice(model: PreTrainedModel, plan: Plan, section: Splice | None = None) -> PreTrainedModel:
    """Builds the hybrid. The base is not changed, and shares no memory with it.

    Args:
        model: the base whose geometry the plan was made for.
        section: widths of randomly initialised heads.

    Returns:
        The hybrid in eval mode, in the base's dtype. With `mode: add` its logits equal the base's bit for bit.

    Raises:
        PlanError: the plan was made for another geometry.
    """
    family = family_of(model.config)
    if plan.geometry != geometry_of(model.config):
        raise PlanError("plan.json geometry", plan.geometry, "The plan was made for another model. Plan again.")
    fields = splice_field(plan, section, model.config.conv_kernel)
    config = family.hybrid_config(model.config, fields)
    config._attn_implementation = "sdpa"
    hybrid = family.build_hybrid(config)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    missing, unexpected = hybrid.load_state_dict(state, strict=False, assign=True)
    new = {name for name, _ in hybrid.named_parameters() if ".attention." in name}
    assert not unexpected and set(missing) <= new, (missing, unexpected)
    hybrid.tie_weights()
    for graft in plan.grafts:
        source, target = family.mixer(model, graft.site.layer), family.mixer(hybrid, graft.site.layer)
        _initialize(family, source, target, graft, plan.seed)
    hybrid.to(model.device).eval()
    for name, parameter in hybrid.named_parameters():
        kept = name.rsplit(".", 1)[-1] in hybrid._keep_in_fp32_modules_strict
        parameter.data = parameter.data.to(torch.float32 if kept else model.dtype)
    hybrid.generation_config = copy.deepcopy(model.generation_config)
    return hybrid


def _initialize(family: Family, source: nn.Module, target: nn.Module, graft: Graft, seed: int) -> None:
    """Fills the branch of one layer and, in `replace` mode, silences the heads whose place it takes."""
    branch: SplicedAttention = target.attention
    slices = [family.weight_slices(graft.site, head) for head in graft.heads]
    if graft.init == "ssm":
        in_proj, conv = family.in_proj(source), source.conv1d
        rows = [s.query for s in slices] + [s.key for s in slices] + [s.value for s in slices]
        channels = [s.conv_query for s in slices] + [s.conv_key for s in slices] + [s.conv_value for s in slices]
        _copy(branch.qkv_proj, in_proj, rows)
        _copy(branch.conv1d, conv, channels)
        _copy(branch.gate_proj, in_proj, [s.gate for s in slices])
        branch.scale.fill_(1.0)
    else:
        _randomize(branch, f"{seed}:L{graft.site.layer}")
    out_proj = family.out_proj(target)
    if graft.mode == "add":
        branch.o_proj.weight.zero_()
        return
    norm = family.gated_norm(source).weight
    blocks = [out_proj.weight[:, s.out] * norm[s.out] for s in slices]
    branch.o_proj.weight.copy_(torch.cat(blocks, dim=1))
    silence(target, family, graft)


def _copy(target: nn.Module, source: nn.Module, rows: list[slice]) -> None:
    """Own copies of the source's rows, weights and biases, in the order given."""
    target.weight.copy_(torch.cat([source.weight[r] for r in rows]))
    if target.bias is not None:
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


@torch.no_grad()
def silence(mixer: nn.Module, family: Family, graft: Graft) -> None:
    """Zeroes the heads' columns of `out_proj`. Training leaves them zero; merging into `out_proj` needs it again."""
    for head in graft.heads:
        family.out_proj(mixer).weight[:, family.weight_slices(graft.site, head).out] = 0


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


@torch.no_grad()
def step_zero_gap(base: PreTrainedModel, hybrid: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Gap:
    """Compares the two on the same prompts, (B,T) each. With `mode: add` the gap is exactly zero.

    With `mode: replace` it is not: the branch is not the recurrence, and the silenced head, though its columns are
    zero, still enters the mean square of the gated norm that the other heads are divided by.
    """
    real = attention_mask.bool()
    a = base(input_ids, attention_mask=attention_mask, use_cache=False).logits[real].float()
    b = hybrid(input_ids, attention_mask=attention_mask, use_cache=False).logits[real].float()
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    kl = (log_a.exp() * (log_a - log_b)).sum(-1).mean()
    same = (a.argmax(-1) == b.argmax(-1)).float().mean()
    return Gap(float((a - b).abs().max()), float(kl), float(same))
