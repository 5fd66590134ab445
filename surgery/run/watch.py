"""Progress of a training, with accuracy on held-out prompts."""

from __future__ import annotations

from itertools import accumulate

from transformers import PreTrainedModel

from surgery.data.ranking import answer_choices
from surgery.recipe import Train
from surgery.run.context import Run
from surgery.run.located_prompts import located_prompts
from surgery.train.numerics import autocast, precision_of
from surgery.train.plateau import LAST_STEP, stage_lengths

_WATCHED = 64  # prompts of one measurement during training


class Watch:
    """Report the progress of training, with held-out KV accuracy every `train.check_every` steps.

    A stage counts with its largest number of steps until its plateau is found.

    Attributes:
        num_steps: number of steps that this session has trained.
    """

    def __init__(self, run: Run, model: PreTrainedModel, section: Train) -> None:
        self.run, self.model, self.section = run, model, section
        self.accuracy, self.num_steps = "", 0
        self.prompts = located_prompts(run, "watch", _WATCHED, run.recipe.locate.pairs)
        self._recent: list[tuple[float, float]] = []

    def __call__(self, step: int, history: list[dict[str, float]]) -> None:
        section, recipe, losses = self.section, self.run.recipe, history[-1]
        self.num_steps += 1
        if section.check_every and step % section.check_every == 0 and self.run.accelerator.is_main_process:
            self.model.eval()
            with autocast(precision_of(section, self.model), self.run.accelerator):  # as in training
                scores = answer_choices(self.model, self.run.tokenizer(), self.prompts, recipe.evaluate.batch_size)
            self.model.train()
            self.accuracy = f", KV {scores.correct.float().mean():.2f}"
        self._recent = [*self._recent[-9:], (losses["tokens"], losses["seconds"])]
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        parts = " ".join(f"{k} {v:.3f}" for k, v in losses.items() if k not in ("step", "tokens", "seconds", LAST_STEP))
        note = f"{parts}{self.accuracy}, {tokens / max(seconds, 1e-9):.0f} tokens/s"
        lengths = stage_lengths(history, section)
        ends = list(accumulate(lengths))
        number = next(number for number, end in enumerate(ends) if step <= end)
        if section.sequence[number].plateau is not None:
            found = [entry["step"] for entry in history if entry.get(LAST_STEP) == ends[number]]
            note += f", plateau at step {found[0]}" if found else ", no plateau yet"
        self.run.reporter.progress(step, ends[-1], note)
