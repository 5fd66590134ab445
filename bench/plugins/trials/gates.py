"""Train candidate heads together behind gates, with a cost for each open one, and rank them by what they contribute.

FlashMorph (arXiv 2606.30562) chooses layers of a Transformer in this way: all weights are frozen, and gates between the
attention and a converted linear attention are trained on generated retrieval data, with a term that favours the linear
one. Here a candidate is an attention head that does not exist yet. It begins with zero output, so that branches and
gates train together, and only the base is frozen. Gates are hard concrete variables (Louizos et al., arXiv 1712.01312).

Shape legend: B documents, H heads of a layer, N held-out prompts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.plugins.scaling import gated
from bench.plugins.trials.training import (
    PASSES,
    TrialPrompts,
    adamw,
    constant,
    splice_candidates,
    take_step,
    trial_loss,
)
from surgery.locate.methods import Candidates, TrainedScores
from surgery.probes.documents import rng_of
from surgery.train.optimizer import spliced_parameters
from surgery.types import HeadId, Plan

_TEMPERATURE, _LOW, _HIGH = 2 / 3, -0.1, 1.1  # the constants of arXiv 1712.01312
_START = 2.0  # open with probability 0.97
_FIXED_SHARE = 4  # gates stay as they are for the first 1/4 of the steps, until the branches have an output

Gates = dict[int, Tensor]


class HardConcrete:
    """Gates in [0, 1], exactly 0 or 1 with a probability above 0. One for each spliced head.

    Args:
        plan: the spliced heads.
        device: of the hybrid.
        seed: of the samples.

    Attributes:
        logits: by layer, (H,) parameters.
    """

    def __init__(self, plan: Plan, device: torch.device, seed: int) -> None:
        self._sampler = torch.Generator().manual_seed(rng_of("gates", seed).randrange(2**63))
        self.logits: dict[int, Tensor] = {
            graft.site.layer: torch.full((len(graft.heads),), _START, device=device, requires_grad=True)
            for graft in plan.grafts
        }

    def sample(self, rows: int) -> Gates:
        """By layer, (B,H) samples, one for each document."""
        gates = {}
        for layer, logits in self.logits.items():
            noise = torch.rand(rows, len(logits), generator=self._sampler).clamp(1e-6, 1 - 1e-6).logit()
            gates[layer] = _stretched(torch.sigmoid((noise.to(logits.device) + logits) / _TEMPERATURE))
        return gates

    def values(self) -> Gates:
        """By layer, (1,H) gates without noise."""
        return {layer: _stretched(torch.sigmoid(logits.detach()))[None] for layer, logits in self.logits.items()}

    def open_probabilities(self) -> Gates:
        """By layer, (H,) probability that a sample is above 0."""
        shift = _TEMPERATURE * float(np.log(-_LOW / _HIGH))
        return {layer: torch.sigmoid(logits - shift) for layer, logits in self.logits.items()}


def _stretched(share: Tensor) -> Tensor:
    """Stretch (0, 1) over both ends, and cut it there."""
    return (share * (_HIGH - _LOW) + _LOW).clamp(0, 1)


def train_gates(candidates: Candidates) -> TrainedScores:
    """Train all candidates and their gates, and score each one on held-out prompts.

    A head contributes the mean of two differences of the answer's log-probability: its gate open against all gates
    closed, and all gates as trained against its gate closed. Two heads that can stand in for one another share it.
    The score is this contribution times the gate.
    """
    budget = candidates.section.options_of("gates")
    prompts = TrialPrompts("gates", candidates, budget.rows)
    hybrid, plan = splice_candidates(candidates, candidates.heads, "add")
    gates = HardConcrete(plan, hybrid.device, candidates.seed)
    gate_logits = list(gates.logits.values())
    optimizer = adamw(spliced_parameters(hybrid), budget.lr)
    optimizer.add_param_group({"params": gate_logits, "lr": budget.gate_lr, "peak_lr": budget.gate_lr})
    for step in range(budget.steps):
        batch = prompts.step(step)
        for logits in gate_logits:
            logits.requires_grad_(_FIXED_SHARE * (step + 1) > budget.steps)
        with torch.enable_grad(), gated(hybrid, gates.sample(len(batch))):
            loss = trial_loss(hybrid, plan, batch)
            loss = loss + budget.cost * torch.cat(list(gates.open_probabilities().values())).sum()
        take_step(loss, optimizer, step, "gates")
        candidates.tick()
    values = gates.values()
    closed = {layer: torch.zeros_like(gate) for layer, gate in values.items()}
    measured = 0

    def answered(gates: Gates) -> NDArray[Any]:
        nonlocal measured
        measured += 1
        with gated(hybrid, gates):
            return prompts.log_probabilities(hybrid)

    with_all, without_any = answered(values), answered(closed)
    scores: dict[HeadId, NDArray[Any]] = {}
    probabilities: dict[HeadId, NDArray[Any]] = {}
    by_place = {(s.head.layer, s.head.head): s.head for s in candidates.heads}
    for graft in plan.grafts:
        layer = graft.site.layer
        for index, number in enumerate(graft.heads):
            head, gate = by_place[layer, number], float(values[layer][0, index])
            probability = float(gates.open_probabilities()[layer][index].detach())
            probabilities[head] = constant(probability, candidates.held_out)
            if gate == 0:
                scores[head] = constant(0.0, candidates.held_out)
                continue
            only, others = closed[layer].clone(), values[layer].clone()
            only[0, index], others[0, index] = gate, 0.0
            alone = answered({**closed, layer: only}) - without_any
            last = with_all - answered({**values, layer: others})
            scores[head] = gate * (alone + last) / 2
    passes = float(PASSES * budget.steps * budget.rows + measured * candidates.held_out)
    return TrainedScores({"gates": scores, "gate": probabilities}, passes, budget.steps)
