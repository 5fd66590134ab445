"""What trains, and at what rate. Owns: the choice of parameters, AdamW's groups, the schedule of the learning rate.

Must never know: data, losses, files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surgery.errors import RunError
from surgery.hybrid.attention import SplicedAttention
from surgery.models.lookup import block_of, family_of
from surgery.recipe import Optimizer, TrainStage
from surgery.train.lora import adapter_parameters


def spliced_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the spliced heads, each once."""
    return [p for m in model.modules() if isinstance(m, SplicedAttention) for p in m.parameters()]


def trainable(model: PreTrainedModel, stage: TrainStage, layers: Sequence[int] = ()) -> list[nn.Parameter]:
    """Marks what trains, and returns it, each once. Every other parameter is frozen.

    Args:
        layers: what `spliced_layers` means for a model without a splice, the control.

    Raises:
        RunError: nothing would train.
    """
    chosen = {id(p): p for p in _chosen(model, stage, layers)}
    if not chosen:
        raise RunError("train.trains", stage.trains, "The model has no spliced heads: nothing would train.")
    model.requires_grad_(False)
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    return list(chosen.values())


def _chosen(model: PreTrainedModel, stage: TrainStage, layers: Sequence[int]) -> list[nn.Parameter]:
    if stage.trains == "all":
        return list(model.parameters())
    if stage.trains == "lora":
        return spliced_parameters(model) + adapter_parameters(model)
    if stage.trains == "new_heads":
        return spliced_parameters(model)
    spec = family_of(model.config).mixers(model.config)[0]
    spliced = {site["layer"] for site in getattr(model.config, "splice", None) or ()} or set(layers)
    return [p for layer in sorted(spliced) for p in block_of(model, layer, spec).parameters()]


def adamw(model: nn.Module, parameters: Sequence[nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    """AdamW over new heads, adapters and the rest; vectors (norms, biases, scales, A_log, D) do not decay."""
    new, adapters = ({id(p) for p in found} for found in (spliced_parameters(model), adapter_parameters(model)))
    lora_lr = settings.new_heads_lr if settings.lora_lr is None else settings.lora_lr
    rates = {id(p): settings.lr for p in parameters}
    rates |= dict.fromkeys(new & rates.keys(), settings.new_heads_lr) | dict.fromkeys(adapters, lora_lr)
    groups = []
    for is_new, is_adapter in ((True, False), (False, True), (False, False)):
        for decays in (True, False):
            members = [
                p
                for p in parameters
                if (id(p) in new) == is_new and (id(p) in adapters) == is_adapter and (p.ndim > 1) == decays
            ]
            if members:
                decay, lr = settings.weight_decay if decays else 0.0, rates[id(members[0])]
                groups.append({"params": members, "lr": lr, "peak_lr": lr, "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=settings.betas)


def learning_rate_factor(step: int, steps: int, settings: Optimizer) -> float:
    """The share of the peak at `step`, counted from 0: a linear warm-up, then the schedule down to `floor`."""
    if step < settings.warmup:
        return (step + 1) / (settings.warmup + 1)
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * (step - settings.warmup) / max(1, steps - settings.warmup)))
    else:
        line = max(1, round(settings.decay * steps))
        share = min(1.0, (steps - step) / line)
    return settings.floor + (1 - settings.floor) * share


def set_learning_rates(optimizer: Any, settings: Optimizer, step: int, steps: int) -> None:
    """Sets every group's rate for this step."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * learning_rate_factor(step, steps, settings)
