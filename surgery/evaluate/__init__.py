"""Every arm on the same prompts. Owns: which prompts, the result of one arm, tests between arms.

Must never know: how an arm was made, figures. Facts and sentences come in disjoint halves: half 0 may be what a KL
term saw, half 1 is what is scored; both are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.evaluate.generated import exact_matches
from surgery.evaluate.scoring import answer_choices, perplexity
from surgery.locate.statistics import mcnemar, wilson
from surgery.probes.documents import Document, rng_of
from surgery.probes.knowledge import fact_question, letter_choice, option_text
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Evaluate, Train
from surgery.train.data import fact_half, sentence_half
from surgery.train.userdata import read_documents
from surgery.training import Data

SEEN, HELD_OUT = 0, 1
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Prompts:
    """What every arm is asked: tasks with choices, texts for perplexity, and what the user's own data held out."""

    choices: Mapping[str, Sequence[Document]]
    texts: Mapping[str, Sequence[Document]]
    held_out: Mapping[str, Sequence[Document]] = field(default_factory=dict)

    @property
    def num_tasks(self) -> int:
        """Of all kinds."""
        return len(self.choices) + len(self.texts) + len(self.held_out)


@dataclass(frozen=True)
class Arm:
    """What one model did.

    Attributes:
        summary: as in `results.json`: accuracies with Wilson intervals, perplexities.
        correct: task -> right or wrong by prompt, for paired tests.
    """

    summary: dict[str, Any]
    correct: dict[str, Tensor]


def held_out_documents(
    train: Train,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    context: int | None = None,
    vocab_size: int | None = None,
) -> dict[str, list[Document]]:
    """What each of the user's own data holds out of training, `limit` documents at most, by the data's name.

    Args:
        context, vocab_size: of the model, for checks; not checked if None.

    Raises:
        DataError: the data cannot be read, or hold out nothing although they are to.
    """
    found: dict[str, list[Document]] = {}
    asked: list[Data] = []
    for source in [source for stage in train.sequence for source in stage.sources]:
        data = source.data
        if data is None or not data.holdout or data in asked:
            continue
        asked.append(data)
        documents, _ = read_documents(data, tokenizer, source.max_tokens, limit, context, vocab_size, held_out=True)
        name = documents[0].task
        same = sum(known.split(" (")[0] == name for known in found)
        found[f"{name} ({same + 1})" if same else name] = documents
    return found


def make_prompts(section: Evaluate, seed: int, held_out: Mapping[str, Sequence[Document]] | None = None) -> Prompts:
    """All prompts of an evaluation, from the evaluation splits: no prompt of training is among them.

    Args:
        held_out: of the user's own data, by name: `held_out_documents`.

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
    return Prompts(choices, texts, held_out or {})


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
    training = model.training
    model.eval()
    correct: dict[str, Tensor] = {}
    summary: dict[str, Any] = {"kv_retrieval": {}}
    done = 0

    def finish(task: str, entry: Any) -> None:
        nonlocal done
        name, _, part = task.partition("/")
        if part:
            summary.setdefault(name, {})[part] = entry
        else:
            summary[name] = entry
        done += 1
        if progress is not None:
            progress(done, prompts.num_tasks)

    for task, documents in prompts.choices.items():
        correct[task] = answer_choices(model, tokenizer, documents, section.batch_size).correct
        finish(task, _share(correct[task]))
    for task, documents in prompts.texts.items():
        finish(task, perplexity(model, tokenizer, documents, section.batch_size))
    for name, documents in prompts.held_out.items():
        task = f"held_out/{name}"
        if documents[0].questions:
            correct[task] = exact_matches(model, tokenizer, documents, section.batch_size)
            finish(task, _share(correct[task]))
        else:
            worse = perplexity(model, tokenizer, documents, section.batch_size)
            finish(task, {"perplexity": worse, "n": len(documents)})
    model.train(training)
    return Arm(summary, correct)


def _share(correct: Tensor) -> dict[str, float]:
    """Accuracy with its Wilson interval."""
    interval = wilson(int(correct.sum()), len(correct))
    return {"accuracy": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}


def compare(arms: Mapping[str, Arm], than: str) -> dict[str, dict[str, float]]:
    """Exact one-sided McNemar p-values that each other arm is right more often than `than`, by task."""
    reference = arms[than].correct

    def better(arm: Arm, task: str) -> float:
        return mcnemar(np.asarray(arm.correct[task], bool), np.asarray(reference[task], bool))

    return {name: {task: better(arm, task) for task in reference} for name, arm in arms.items() if name != than}


__all__ = ["Arm", "Prompts", "compare", "evaluate", "held_out_documents", "make_prompts"]
