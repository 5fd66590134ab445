"""Every arm on the same prompts. Owns: which prompts, the result of one arm, tests between arms.

Must never know: how an arm was made, figures. Facts and sentences come in disjoint halves: half 0 may be what a KL
term saw, half 1 is what is scored; both are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.evaluate.scoring import answer_choices, perplexity
from surgery.locate.statistics import mcnemar, wilson
from surgery.probes.documents import Document, rng_of
from surgery.probes.knowledge import fact_question, letter_choice, option_text
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Evaluate
from surgery.train.data import fact_half, sentence_half

SEEN, HELD_OUT = 0, 1
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Prompts:
    """What every arm is asked: tasks with choices, and texts for perplexity."""

    choices: Mapping[str, Sequence[Document]]
    texts: Mapping[str, Sequence[Document]]


@dataclass(frozen=True)
class Arm:
    """What one model did.

    Attributes:
        summary: as in `results.json`: accuracies with Wilson intervals, perplexities.
        correct: task -> right or wrong by prompt, for paired tests.
    """

    summary: dict[str, Any]
    correct: dict[str, Tensor]


def make_prompts(section: Evaluate, seed: int) -> Prompts:
    """All prompts of an evaluation, from the evaluation splits: no prompt of training is among them.

    Raises:
        ProbeError: more pairs than there are values.
    """

    def rng(task: str, index: int) -> Any:
        return rng_of("evaluate", seed, task, index)

    n = range(section.examples)
    choices: dict[str, Sequence[Document]] = {
        f"kv_retrieval/{pairs}": [kv_document(rng(f"kv{pairs}", i), pairs, split="eval") for i in n]
        for pairs in section.pairs
    }
    choices["letter_choice"] = [letter_choice(rng("letter", i), "eval") for i in n]
    choices["option_text"] = [option_text(rng("letter", i), "eval") for i in n]
    choices["closed_book"] = [fact_question(f) for f in fact_half(HELD_OUT)]
    choices["closed_book_seen"] = [fact_question(f) for f in fact_half(SEEN)]
    sentences = range(section.sentences)
    texts = {
        "perplexity": [sentence_half(rng("text", i), HELD_OUT, "eval") for i in sentences],
        "perplexity_seen": [sentence_half(rng("seen", i), SEEN, "train") for i in sentences],
    }
    return Prompts(choices, texts)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Evaluate | None = None,
    seed: int = 0,
    prompts: Prompts | None = None,
    progress: Progress | None = None,
) -> Arm:
    """Scores one model. Give the same `prompts` (or seed) for every arm.

    Args:
        progress: called with (done, all) after each task.
    """
    section = section or Evaluate()
    prompts = prompts or make_prompts(section, seed)
    steps = len(prompts.choices) + len(prompts.texts)
    training = model.training
    model.eval()
    correct: dict[str, Tensor] = {}
    summary: dict[str, Any] = {"kv_retrieval": {}}
    for done, (task, documents) in enumerate(prompts.choices.items()):
        correct[task] = answer_choices(model, tokenizer, documents, section.batch_size).correct
        interval = wilson(int(correct[task].sum()), len(documents))
        entry = {"accuracy": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}
        name, _, pairs = task.partition("/")
        if pairs:
            summary[name][pairs] = entry
        else:
            summary[name] = entry
        if progress is not None:
            progress(done + 1, steps)
    for done, (task, documents) in enumerate(prompts.texts.items()):
        summary[task] = perplexity(model, tokenizer, documents, section.batch_size)
        if progress is not None:
            progress(len(prompts.choices) + done + 1, steps)
    model.train(training)
    return Arm(summary, correct)


def compare(arms: Mapping[str, Arm], than: str) -> dict[str, dict[str, float]]:
    """Exact one-sided McNemar p-values that each other arm is right more often than `than`, by task."""
    reference = arms[than].correct

    def better(arm: Arm, task: str) -> float:
        return mcnemar(np.asarray(arm.correct[task], bool), np.asarray(reference[task], bool))

    return {name: {task: better(arm, task) for task in reference} for name, arm in arms.items() if name != than}


__all__ = ["Arm", "Prompts", "compare", "evaluate", "make_prompts"]
