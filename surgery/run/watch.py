"""Progress of a training, with accuracy on held-out prompts."""

from __future__ import annotations

from transformers import PreTrainedModel

from surgery.run.context import Run
from surgery.run.located_prompts import located_prompts
from surgery.scoring.ranking import answer_choices

_WATCHED = 64  # prompts of one measurement during training


class Watch:
    """Report the progress of training, with held-out KV accuracy every `train.check_every` steps."""

    def __init__(self, run: Run, model: PreTrainedModel, name: str) -> None:
        self.run, self.model, self.name = run, model, name
        self.accuracy = ""
        self.prompts = located_prompts(run, "watch", _WATCHED, run.recipe.locate.pairs)
        self._recent: list[tuple[float, float]] = []

    def __call__(self, step: int, losses: dict[str, float]) -> None:
        section, recipe = self.run.recipe.train, self.run.recipe
        if section.check_every and step % section.check_every == 0 and self.run.accelerator.is_main_process:
            self.model.eval()
            scores = answer_choices(self.model, self.run.tokenizer(), self.prompts, recipe.evaluate.batch_size)
            self.model.train()
            self.accuracy = f", KV {scores.correct.float().mean():.2f}"
        self._recent = [*self._recent[-9:], (losses["tokens"], losses["seconds"])]
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        parts = " ".join(f"{k} {v:.3f}" for k, v in losses.items() if k not in ("step", "tokens", "seconds"))
        note = f"{parts}{self.accuracy}, {tokens / max(seconds, 1e-9):.0f} tokens/s"
        self.run.reporter.progress(step, section.num_all_steps, note)
