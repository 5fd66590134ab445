"""Progress of a training, with accuracy on held-out prompts."""

from __future__ import annotations

from transformers import PreTrainedModel

from surgery.recipe import Train
from surgery.run.context import Run
from surgery.run.located_prompts import located_prompts
from surgery.scoring.ranking import answer_choices
from surgery.train.plateau import LAST_STEP, stage_lengths

_WATCHED = 64  # prompts of one measurement during training


class Watch:
    """Report the progress of training, with held-out KV accuracy every `train.check_every` steps.

    Until a plateau is found, the total is the largest number of steps.

    Args:
        run: the run.
        model: the model that is trained.
        name: of its arm.
        section: the section `train` that it is trained with.
    """

    def __init__(self, run: Run, model: PreTrainedModel, name: str, section: Train) -> None:
        self.run, self.model, self.name, self.section = run, model, name, section
        self._plateaus: list[dict[str, float]] = []  # entries of the steps after which one was found
        self.accuracy = ""
        self.prompts = located_prompts(run, "watch", _WATCHED, run.recipe.locate.pairs)
        self._recent: list[tuple[float, float]] = []

    def __call__(self, step: int, losses: dict[str, float]) -> None:
        section, recipe = self.section, self.run.recipe
        if section.check_every and step % section.check_every == 0 and self.run.accelerator.is_main_process:
            self.model.eval()
            scores = answer_choices(self.model, self.run.tokenizer(), self.prompts, recipe.evaluate.batch_size)
            self.model.train()
            self.accuracy = f", KV {scores.correct.float().mean():.2f}"
        self._recent = [*self._recent[-9:], (losses["tokens"], losses["seconds"])]
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        parts = " ".join(f"{k} {v:.3f}" for k, v in losses.items() if k not in ("step", "tokens", "seconds", LAST_STEP))
        note = f"{parts}{self.accuracy}, {tokens / max(seconds, 1e-9):.0f} tokens/s"
        self._plateaus += [losses] if LAST_STEP in losses else []
        if section.has_plateau:
            note += f", plateau at step {self._plateaus[-1]['step']}" if self._plateaus else ", no plateau yet"
        self.run.reporter.progress(step, sum(stage_lengths(self._plateaus, section)), note)
