"""Train and evaluate one arm."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.studies.site_selection.arms import Arm, Budget
from bench.studies.site_selection.models import Rows, hidden_rows, linear_rows, make_linear
from surgery.data.encoding import EncodedBatch
from surgery.evaluate.evaluation import evaluate_model
from surgery.evaluate.prompts import PromptSet
from surgery.models.lookup import geometry_of
from surgery.recipe import Source, Splice
from surgery.recipe.objectives import OBJECTIVES
from surgery.run.evaluate_stage import versions
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.train.objectives import ObjectiveInputs, Outputs
from surgery.train.targets import Targets
from surgery.train.trainer import StageTrainer
from surgery.train.training import make_accelerator
from surgery.types import HeadId, HeadSet, Plan, Reads, ScoredHead


@dataclass(frozen=True)
class RowTargets(Targets):
    """Losses of the library, with attention supervision of rows that its models do not return.

    Attributes:
        rows: returns (B,H,R,T) for each supervised layer after a forward pass; None supervises nothing.
        reads: for each of those layers and heads, the gold position that it should attend to.
    """

    rows: Rows | None = None
    reads: tuple[tuple[Reads, ...], ...] = ()

    def weighted_losses(
        self, model: torch.nn.Module, source: Source, batch: EncodedBatch, *given: Any, **named: Any
    ) -> dict[str, Tensor]:
        """Losses of the library, and the attention loss on documents with a gold position."""
        losses = super().weighted_losses(model, source, batch, *given, **named)
        if self.rows is not None and bool((batch.answer_token >= 0).any()):
            objective, none = OBJECTIVES["attention"], Outputs()
            inputs = ObjectiveInputs(batch, Outputs(attention=self.rows(batch)), none, none, self.distil, self.reads)
            losses["attention"] = objective.loss(inputs) / objective.count(batch)
        return losses


def plan_of(arm: Arm, base: PreTrainedModel) -> Plan:
    """The arm's sites in the form of the library's HeadSet."""
    scored = tuple(
        ScoredHead(HeadId.parse(head), "neither", reads, {}) for head, reads in zip(arm.heads, arm.reads, strict=True)
    )
    heads = HeadSet(arm.base, "", geometry_of(base.config), scored, scored, "list", arm.seed)
    return make_plan(heads, base.config, _splice_section(arm), arm.seed)


def _splice_section(arm: Arm) -> Splice:
    if arm.init != "random":
        return Splice(select="list", heads=arm.heads, mode=arm.mode, init=arm.init, min_width=arm.width)
    width = {} if arm.width is None else {"random_width": arm.width}
    return Splice(select="list", heads=arm.heads, mode=arm.mode, init=arm.init, **width)


@contextmanager
def prepared(arm: Arm, base: PreTrainedModel, budget: Budget) -> Iterator[tuple[PreTrainedModel, dict[str, Any]]]:
    """The model before training, and the arguments of `RowTargets`."""
    if arm.kind in ("none", "hidden"):
        model = copy.deepcopy(base)
        if arm.kind == "none":
            yield model, {}
            return
        with hidden_rows(model, HeadId.parse(arm.heads[0])) as rows:
            yield model, {"rows": rows, "reads": (arm.reads,)}
        return
    plan = plan_of(arm, base)
    model = splice_model(base, plan, _splice_section(arm))
    if arm.kind == "linear":
        branches = make_linear(model)
        supervised = linear_rows(branches) if arm.supervised else None
        yield model, {"rows": supervised, "reads": tuple(graft.reads for graft in plan.grafts)}
        return
    yield model, {"grafts": plan.grafts}


def run_arm(
    arm: Arm, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, budget: Budget, prompts: PromptSet
) -> dict[str, Any]:
    """Train the arm and evaluate it on every prompt.

    Returns:
        Plain data: the definition, accuracies, right and wrong by prompt (one character each), losses, seconds.
    """
    began = time.perf_counter()
    section = budget.train(arm.supervised and arm.kind == "softmax", arm.trains)
    with prepared(arm, base, budget) as (model, supervision):
        targets = RowTargets(base=base, **supervision)
        history = StageTrainer(model, tokenizer, section, arm.seed, make_accelerator(), targets).run()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    halfway = time.perf_counter()
    result = evaluate_model(model, tokenizer, budget.evaluate, 0, prompts)
    return {
        "arm": asdict(arm),
        "budget": asdict(budget),
        "summary": result.summary,
        "correct": {task: "".join("01"[int(x)] for x in right) for task, right in result.correct.items()},
        "losses": _last_losses(history),
        "parameters": {"all": sum(p.numel() for p in model.parameters()), "trained": trained},
        "seconds": {"train": round(halfway - began, 1), "evaluate": round(time.perf_counter() - halfway, 1)},
        "versions": versions(),
    }


def _last_losses(history: list[dict[str, float]]) -> dict[str, float]:
    """Mean of every loss over the last tenth of the steps."""
    last = history[-max(1, len(history) // 10) :]
    names = [name for name in last[-1] if name not in ("step", "seconds", "tokens")]
    return {name: round(sum(h[name] for h in last) / len(last), 5) for name in names}
