"""Every spliced family on the device against the CPU: forward pass, cached decoding, gradients of all parameters.

The reference is the CPU in fp32 with the same weights, rounded first if the device computes in bf16. For bf16 the limit
is a multiple of the CPU's own bf16 error, because two roundings of one function are compared. Gradients are computed in
training mode, where the fused kernels run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from bench.gpu.env import Row
from bench.gpu.models import (
    base_of,
    exact_fp32,
    host,
    hybrid_of,
    in_words,
    out_columns,
    plan_of,
    prompt_length,
    prompts,
    ssm_specs,
    watch,
)
from bench.gpu.runner import Options
from surgery.errors import ModelError
from surgery.models.hooks import record
from surgery.models.lookup import mixer_of, structure_of
from surgery.train.packing import packing_fault
from surgery.types import Mode
from tests.support.pico import SPLICED_FAMILIES

BATCH, STEPS, PADS = 2, 4, 5
MODES: tuple[Mode, ...] = ("add", "replace")
# Relative to the reference. Triton multiplies fp32 on tensor cores in tf32, which is near 3e-4 for one product.
FP32_LIMIT, FP32_TENSOR_LIMIT = 5e-3, 5e-2
BF16_LIMIT, BF16_TENSOR_LIMIT, TIMES_CPU = 3e-2, 1e-1, 3.0
# A gradient that is nearly zero has no direction to compare; it counts relative to this share of the largest one.
SMALL_GRADIENT = 1e-3


@dataclass
class Outcome:
    """Outputs of one model, moved to the CPU in fp64: logits (B,T,V), logits while decoding, gradients by name."""

    forward: Tensor
    decode: Tensor
    gradients: dict[str, Tensor]


@dataclass
class Apart:
    """Relative differences: of the logits, of all gradients as one vector, and of the tensor that differs most."""

    forward: float
    decode: float
    gradient: float
    tensor: float
    name: str

    @property
    def numbers(self) -> dict[str, float]:
        return {"forward": self.forward, "decode": self.decode, "gradient": self.gradient, "tensor": self.tensor}


def items(options: Options) -> list[str]:
    """The families."""
    return list(SPLICED_FAMILIES)


warm = items


def run(item: str, options: Options) -> list[Row]:
    """Rows of `correctness`, and one of `behaviour`."""
    exact_fp32()
    ran: dict[str, str] = {}
    rows = [compare(item, mode, dtype, options, ran) for mode in MODES for dtype in ("fp32", "bf16")]
    return [*rows, behaviour(item, options, ran)]


def compare(name: str, mode: Mode, dtype: str, options: Options, ran: dict[str, str]) -> Row:
    """Compare one model on the device with the CPU. Adds the implementations that the device used to `ran`."""
    hybrid = hybrid_of(base_of(name, options.toy, dtype), mode)
    ids = prompts(hybrid, BATCH, prompt_length(name, options.toy))
    own = outcome(hybrid, ids) if dtype == "bf16" else None
    with watch(hybrid) as seen:
        found = outcome(hybrid.to(options.device), ids)
    ran.update(seen)
    reference = outcome(hybrid.to("cpu").float(), ids)
    difference = apart(found, reference)
    row: Row = {"table": "correctness", "family": name, "mode": mode, "dtype": dtype, **difference.numbers}
    row["differs most"] = difference.name
    yardstick = None
    if own is not None:
        yardstick = apart(own, reference)
        row["cpu"] = yardstick.numbers
    row["ok"] = close(difference, yardstick)
    return row


def outcome(model: PreTrainedModel, ids: Tensor) -> Outcome:
    """Forward without a cache, left-padded decoding with one, and the gradients of a language modelling loss."""
    ids = ids.to(model.device)
    return Outcome(host(_forward(model, ids)), host(_decode(model, ids)), _gradients(model, ids))


@torch.no_grad()
def _forward(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.eval()(ids, use_cache=False).logits


@torch.no_grad()
def _decode(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(B,STEPS+1,V): the last logits of a prompt whose second row is padded, and those of the tokens after it."""
    mask = torch.ones_like(ids)
    mask[1, :PADS] = 0
    start = ids.shape[1] - STEPS
    output = model.eval()(ids[:, :start], attention_mask=mask[:, :start], use_cache=True)
    logits = [output.logits[:, -1:]]
    for t in range(start, ids.shape[1]):
        output = model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], use_cache=True, cache=output.cache)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def _gradients(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Gradients by parameter name, in training mode. Afterwards the model is in eval mode without gradients."""
    model.train().zero_grad()
    _loss(model, ids).backward()
    gradients = {name: host(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.eval().zero_grad()
    return gradients


def _loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def apart(found: Outcome, reference: Outcome) -> Apart:
    """Compare two outcomes. The difference is infinite if one lacks a gradient that the other has."""
    forward, decode = relative(found.forward, reference.forward), relative(found.decode, reference.decode)
    ours, theirs = found.gradients, reference.gradients
    if ours.keys() != theirs.keys():
        return Apart(forward, decode, float("inf"), float("inf"), min(ours.keys() ^ theirs.keys()))
    floor = SMALL_GRADIENT * max(float(g.norm()) for g in theirs.values())
    tensors = {name: relative(ours[name], theirs[name], floor) for name in theirs}
    worst = max(tensors, key=lambda name: tensors[name])
    one, other = (torch.cat([g[name].flatten() for name in theirs]) for g in (ours, theirs))
    return Apart(forward, decode, relative(one, other), tensors[worst], worst)


def relative(found: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference divided by the norm of the reference; infinite for NaN."""
    value = float((found - reference).norm() / max(float(reference.norm()), floor, 1e-30))
    return value if value == value else float("inf")


def close(difference: Apart, yardstick: Apart | None) -> bool:
    """True if the difference is within the tolerance for rounding."""
    for what, value in difference.numbers.items():
        if yardstick is None:
            limit = FP32_TENSOR_LIMIT if what == "tensor" else FP32_LIMIT
        else:
            own = yardstick.numbers[what]
            limit = max(BF16_TENSOR_LIMIT if what == "tensor" else BF16_LIMIT, TIMES_CPU * own)
        if not value <= limit:
            return False
    return True


def behaviour(name: str, options: Options, ran: dict[str, str]) -> Row:
    """Check behaviour: replaced heads stay silent in training, and hooks fire or raise an error."""
    silent, packed = silence(name, options), packing(name, options)
    hooks = [hooked(name, options, training) for training in (False, True)]
    return {
        "table": "behaviour",
        "family": name,
        "silenced head": "stays silent" if silent else "COMES BACK",
        "hooks, eval": hooks[0],
        "hooks, training": hooks[1],
        "packing": packed,
        "ran": in_words(ran),
        "ok": silent and hooks[0] == "fire" and hooks[1] in ("fire", "refuse") and "changes the logits" not in packed,
    }


def silence(name: str, options: Options) -> bool:
    """Check that the replaced heads' columns of `out_proj` are zero after a training step with weight decay."""
    base = base_of(name, options.toy)
    plan, hybrid = plan_of(base, "replace"), hybrid_of(base, "replace").to(options.device)
    optimizer = torch.optim.AdamW(hybrid.train().parameters(), lr=1e-2, weight_decay=0.1)
    _loss(hybrid, prompts(hybrid, BATCH, prompt_length(name, options.toy))).backward()
    optimizer.step()
    for graft in plan.grafts:
        weight = structure_of(graft.site).out_proj(mixer_of(hybrid, graft.site)).weight
        columns = torch.cat([weight[:, columns] for columns in out_columns(graft.site, graft.heads)], dim=1)
        if bool(columns.ne(0).any()):
            return False
    return True


def packing(name: str, options: Options) -> str:
    """`apart`, or the reason why documents of one row are not separate. Tests training mode, then eval mode."""
    hybrid = hybrid_of(base_of(name, options.toy), "add").to(options.device)
    return packing_fault({"training": hybrid.train()}) or packing_fault({"eval": hybrid.eval()}) or "apart"


def hooked(name: str, options: Options, training: bool) -> str:
    """`fire` if the hooks fire, `refuse` if they raise ModelError, `MISSED` if neither happens."""
    hybrid = hybrid_of(base_of(name, options.toy), "add").to(options.device).train(training)
    specs, ids = ssm_specs(hybrid), prompts(hybrid, BATCH, prompt_length(name, options.toy))
    try:
        with torch.no_grad(), record(hybrid, specs) as trace:
            hybrid(ids, use_cache=False)
    except ModelError:
        return "refuse"
    seen = all(trace.heads[spec.name].shape[:2] == ids.shape for spec in specs)
    return "fire" if seen else "MISSED"
