"""Train the branches of candidate heads on a frozen base, and score them on held-out prompts.

All documents are prompts of `locate.task` with keys of the training split. Keys of the evaluation split are never used.

Shape legend: B documents, N held-out prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.ranking import choice_likelihoods, query_batches
from surgery.errors import TrainingDiverged
from surgery.locate.methods import Candidates
from surgery.models.lookup import geometry_of
from surgery.models.torch_scans import torch_scans
from surgery.probes.documents import Document, rng_of
from surgery.recipe.objectives import OBJECTIVES
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.train.losses import answer_loss, attention_loss
from surgery.train.optimizer import spliced_parameters
from surgery.types import HeadSet, Mode, Plan, ScoredHead

QUESTIONS = 4  # of a training document
PASSES = 3  # of a training document: one forward, and a backward that counts as two
_WARMUP = 5  # steps
_BETAS = (0.9, 0.98)
_MAX_GRAD_NORM = 1.0


class TrialPrompts:
    """Documents for training and held-out prompts, of the training split.

    A step's documents depend on the method, the seed and the step only, so all candidates train on the same ones.

    Args:
        method: name of the locating method.
        candidates: its input.
        rows: documents in a step.
    """

    def __init__(self, method: str, candidates: Candidates, rows: int) -> None:
        self.rows, self._key = rows, (f"{method} training", candidates.seed)
        self._tokenizer, self._section = candidates.tokenizer, candidates.section
        self._device = candidates.model.device
        rngs = [rng_of(f"{method} held-out", candidates.seed, i) for i in range(candidates.held_out)]
        documents = [self._document(rng, 1) for rng in rngs]
        self.held_out = query_batches(documents, candidates.tokenizer, candidates.section.batch_size)

    def step(self, step: int) -> EncodedBatch:
        """Documents of one step, each with up to 4 questions."""
        questions = min(QUESTIONS, self._section.pairs)
        rngs = [rng_of(*self._key, step, row) for row in range(self.rows)]
        return encode([self._document(rng, questions) for rng in rngs], self._tokenizer).to(self._device)

    def _document(self, rng: Random, questions: int) -> Document:
        options = self._section.options(questions=questions, tokenizer=self._tokenizer)
        return self._section.probe.generate(rng, "train", options)

    def log_probabilities(self, model: PreTrainedModel) -> NDArray[Any]:
        """(N,) log-probability of the answer among the values of each held-out prompt, in nats.

        Training can enlarge the margin of a model without more right answers, by the scale of its logits.
        """
        values = []
        with precision(model):
            for batch in (cpu_batch.to(model.device) for cpu_batch in self.held_out):
                shares_BK = choice_likelihoods(model, batch).log_softmax(-1)
                values.append(shares_BK.gather(1, batch.last_question()[1][:, None])[:, 0])
        found: NDArray[Any] = torch.cat(values).cpu().double().numpy()
        return found


def splice_candidates(
    candidates: Candidates, heads: Sequence[ScoredHead], mode: Mode | None = None
) -> tuple[PreTrainedModel, Plan]:
    """Splice heads into a copy of the base, of which only the branches can train. The base is not changed.

    The state keeps all channels, also with `splice.state_size`.

    Args:
        candidates: input of the method.
        heads: the heads to splice.
        mode: `splice.mode` to use instead of the recipe's.

    Returns:
        The hybrid in eval mode, and its plan. Branches are in float32 or wider.
    """
    splice, config = candidates.splice.model_copy(update={"state_size": None}), candidates.model.config
    if mode is not None:
        splice = splice.model_copy(update={"mode": mode})
    head_set = HeadSet("base", "", geometry_of(config), (), tuple(heads), "trial", candidates.seed)
    plan = make_plan(head_set, config, splice, candidates.seed)
    hybrid = splice_model(candidates.model, plan, splice)
    hybrid.requires_grad_(False)
    for parameter in spliced_parameters(hybrid):
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        parameter.requires_grad_(True)
    return hybrid, plan


def precision(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Context manager for passes of a base in half precision with branches in float32."""
    if model.dtype not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return torch.autocast(model.device.type, model.dtype)


def adamw(parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """AdamW without weight decay for the branches. `take_step` sets the rate."""
    return torch.optim.AdamW([{"params": list(parameters), "lr": lr, "peak_lr": lr}], betas=_BETAS, weight_decay=0.0)


def trial_loss(hybrid: PreTrainedModel, plan: Plan, batch: EncodedBatch) -> Tensor:
    """Answer loss plus attention supervision of every branch at the position that it reads, in nats."""
    with precision(hybrid), torch_scans(hybrid):
        output = hybrid(
            batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, splice_queries=batch.read_query
        )
    reads = [graft.reads for graft in plan.grafts]
    answers, supervised = (OBJECTIVES[name].count(batch) for name in ("answer", "attention"))
    attention = attention_loss(output.splice_attentions, reads, batch)
    return answer_loss(output.logits, batch) / answers + attention / supervised


def take_step(loss: Tensor, optimizer: torch.optim.AdamW, step: int, method: str) -> None:
    """Update the parameters, with a linear warm-up over the first steps and a constant rate after it.

    Raises:
        TrainingDiverged: the loss is NaN or infinite.
    """
    value, lr = float(loss.detach()), optimizer.param_groups[0]["peak_lr"]
    if not math.isfinite(value):
        raise TrainingDiverged(
            f"locate.method_options.{method}.lr", lr, f"The loss is {value} at step {step + 1}. Set a lower rate."
        )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for group in optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], _MAX_GRAD_NORM)
        group["lr"] = group["peak_lr"] * min(1.0, (step + 1) / (_WARMUP + 1))
    optimizer.step()


def constant(value: float, prompts: int) -> NDArray[Any]:
    """(N,) the same number for every prompt."""
    return np.full(prompts, value)
