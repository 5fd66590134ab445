"""Select the parameters to train, and set up AdamW and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from surgery.errors import RunError
from surgery.models.held import held_parameters
from surgery.models.inserted import new_modules
from surgery.models.lookup import block_of, family_of
from surgery.recipe import Optimizer, Train, TrainStage
from surgery.train.lora import adapter_parameters
from surgery.train.own_inputs import reading_parameters

_UNDECAYED = ("A_log", "D", "dt_bias")  # of an SSM. In Mamba-1, A_log is a matrix.


def spliced_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the spliced heads and of inserted layers, each once, in the model's order."""
    return [p for module in new_modules(model).values() for p in module.parameters()]


def base_size(model: nn.Module) -> int:
    """Number of weights without spliced heads, inserted layers and adapters. Default learning rates depend on it."""
    new = {id(p) for p in (*spliced_parameters(model), *adapter_parameters(model))}
    return sum(p.numel() for p in model.parameters() if id(p) not in new)


def learning_rates_text(section: Train) -> str:
    """Describe the peak learning rates of all stages, such as `2e-4 for the base, 2e-3 for new heads`."""
    texts, stages = [], section.sequence
    for stage in stages:
        settings = stage.optimizer
        rates = {"the base": settings.lr, "new heads": settings.new_heads_lr}
        if stage.trainable in ("reads", "new_heads", "lora"):
            del rates["the base"]
        if stage.trainable == "lora":
            rates["adapters"] = settings.adapters_lr
        text = ", ".join(f"{rate:.3g} for {what}" for what, rate in rates.items())
        texts.append(f"{stage.name}: {text}" if len(stages) > 1 else text)
    return "; ".join(texts)


def mark_trainable(model: PreTrainedModel, stage: TrainStage, layers: Sequence[int] = ()) -> list[nn.Parameter]:
    """Set `requires_grad` of all parameters according to the stage's `trainable`.

    Args:
        layers: layers to train for `spliced_layers` if the model has no splice, as the control.

    Returns:
        The parameters that train, each once.

    Raises:
        RunError: the stage would train no parameter.
    """
    if stage.trainable == "all":
        parameters = list(model.parameters())
    elif stage.trainable == "lora":
        parameters = spliced_parameters(model) + adapter_parameters(model)
    elif stage.trainable == "new_heads":
        parameters = spliced_parameters(model)
    elif stage.trainable == "reads":
        parameters = reading_parameters(model)
    else:
        spec = family_of(model.config).mixers(model.config)[0]
        spliced = {site["layer"] for site in getattr(model.config, "splice", None) or ()} or set(layers)
        parameters = [p for layer in sorted(spliced) for p in block_of(model, layer, spec).parameters()]
    if not parameters:
        raise RunError(
            "train.trainable", stage.trainable, "The model has no spliced heads, so no weight would train. Set all."
        )
    held = {id(p) for p in held_parameters(model, stage.trainable == "reads")}
    trained = {id(p): p for p in parameters if id(p) not in held}
    model.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    return list(trained.values())


def adamw(model: nn.Module, parameters: Sequence[nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    """AdamW with separate learning rates for new heads, adapters and the other parameters of the model.

    Rates that the settings leave out are those for the model's size. Vectors, such as norms and biases, and an SSM's
    A_log, D and dt_bias have no weight decay.
    """
    settings = settings.at_size(base_size(model))
    new, adapters = ({id(p) for p in kind} for kind in (spliced_parameters(model), adapter_parameters(model)))
    rest = {id(p) for p in parameters} - new - adapters
    undecayed = {id(p) for name, p in model.named_parameters() if p.ndim < 2 or name.rpartition(".")[2] in _UNDECAYED}
    groups = []
    for kind, lr in ((new, settings.new_heads_lr), (adapters, settings.adapters_lr), (rest, settings.lr)):
        for decays in (True, False):
            members = [p for p in parameters if id(p) in kind and (id(p) in undecayed) != decays]
            if members:
                decay = settings.weight_decay if decays else 0.0
                groups.append({"params": members, "lr": lr, "peak_lr": lr, "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=settings.betas)


def learning_rate_factor(step: int, steps: int, settings: Optimizer) -> float:
    """Learning rate at a step, from 0, divided by its peak: linear warm-up, then the schedule down to `floor`."""
    if step < settings.warmup:
        return (step + 1) / (settings.warmup + 1)
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * (step - settings.warmup) / max(1, steps - settings.warmup)))
    else:
        line = max(1, min(round(settings.decay * steps), steps - settings.warmup))  # not before the warm-up ends
        share = min(1.0, (steps - step) / line)
    return settings.floor + (1 - settings.floor) * share
