"""Every arm on the same prompts. Owns: the result of one arm, its place in the summary, what data held out is asked.

Must never know: how an arm was made, figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.user import read_documents
from surgery.errors import fitting
from surgery.evaluate.contrasts import contrasts, gap_closed
from surgery.evaluate.lm_eval import run_lm_eval
from surgery.evaluate.prompts import PromptSet, make_prompts
from surgery.interventions.heads_off import HEADS_OFF
from surgery.models.loading import check_vocabulary
from surgery.probes.documents import Document
from surgery.recipe import Data, Evaluate, Train
from surgery.scoring.answers import say
from surgery.scoring.generation import exact_matches
from surgery.scoring.ranking import LARGEST, perplexity, ranked
from surgery.stats import bootstrap_mean, mcnemar, wilson

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Arm:
    """What one model did.

    Attributes:
        summary: as in `results.json`: accuracies with Wilson intervals, perplexities, and `notes` on them if any.
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


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Evaluate | None = None,
    seed: int = 0,
    prompts: PromptSet | None = None,
    progress: Progress | None = None,
) -> Arm:
    """Scores one model. Give the same `prompts` (or seed) for every arm.

    Args:
        progress: called with (done, all) after each task.

    Raises:
        ModelError: a tokenizer of another model, or logits that are no numbers.
        RunError: not enough memory.
    """
    check_vocabulary(tokenizer, model.config)
    section = section or Evaluate()
    prompts = prompts or make_prompts(section, seed, tokenizer=tokenizer)
    training = model.training
    model.eval()
    arm = Arm({"kv_retrieval": {}}, {})
    with fitting("evaluate.batch_size", section.batch_size):
        for done, (task, entry) in enumerate(_scored(model, tokenizer, section, seed, prompts, arm.correct), start=1):
            _place(arm.summary, task, entry)
            if progress is not None:
                progress(done, prompts.num_tasks)
    if section.lm_eval is not None:
        with fitting("evaluate.lm_eval.batch_size", section.lm_eval.batch_size):
            arm.summary["lm_eval"] = run_lm_eval(model, tokenizer, section.lm_eval)
    model.train(training)
    return arm


def _place(summary: dict[str, Any], task: str, entry: Any) -> None:
    """Puts a task's entry in its place, with a note where a perplexity is beyond all numbers."""
    # The name of a user's data may have a slash of its own.
    *parents, last = task.split("/", 1) if task.startswith("held_out/") else task.split("/")
    place = summary
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = entry
    if (entry.get("perplexity") if isinstance(entry, dict) else entry) == LARGEST:
        note = f"{task}: the perplexity is {LARGEST:g} or more, as far as it is counted: the model has diverged"
        summary.setdefault("notes", []).append(note)


def _scored(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Evaluate,
    seed: int,
    prompts: PromptSet,
    correct: dict[str, Tensor],
) -> Iterator[tuple[str, Any]]:
    """Every task and what stands in the summary; right or wrong by prompt goes into `correct`."""
    size = section.batch_size
    for task, documents in prompts.choices.items():
        if not section.generates(task.partition("/")[0]):
            correct[task] = ranked(model, prompts.batches(task, tokenizer, size, said=False)).correct
            yield task, share(correct[task])
            continue
        found = say(model, tokenizer, documents, prompts.batches(task, tokenizer, size, said=True))
        assert found.ranked is not None
        correct[task], correct[f"{task}/generated"] = found.ranked.correct, found.said
        begun = float(found.begun.double().mean())
        yield task, share(found.ranked.correct) | {"generated": share(found.said) | {"begun": begun}}
    for task, documents in prompts.copied.items():
        found = say(model, tokenizer, documents, prompts.batches(task, tokenizer, size, said=True))
        correct[task] = found.said
        (tokens,) = bootstrap_mean(found.tokens.double().numpy()[None], seed)
        per_token = {"mean": tokens.value, "low": tokens.low, "high": tokens.high, "n": tokens.n}
        yield task, share(found.said) | {"per_token": per_token}
    for task, documents in prompts.texts.items():
        yield task, perplexity(model, tokenizer, documents, size)
    for name, documents in prompts.held_out.items():
        task = f"held_out/{name}"
        if documents[0].questions:
            correct[task] = exact_matches(model, tokenizer, documents, size)
            yield task, share(correct[task])
        else:
            yield task, {"perplexity": perplexity(model, tokenizer, documents, size), "n": len(documents)}


def share(correct: Tensor) -> dict[str, float]:
    """Accuracy with its Wilson interval."""
    interval = wilson(int(correct.sum()), len(correct))
    return {"accuracy": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}


def compare(arms: Mapping[str, Arm], than: str) -> dict[str, dict[str, float]]:
    """Exact one-sided McNemar p-values that each other arm is right more often than `than`, by task."""
    reference = arms[than].correct

    def better(arm: Arm, task: str) -> float:
        return mcnemar(np.asarray(arm.correct[task], bool), np.asarray(reference[task], bool))

    return {name: {task: better(arm, task) for task in reference} for name, arm in arms.items() if name != than}


def side_by_side(arms: Mapping[str, Arm], seed: int = 0) -> dict[str, Any]:
    """For `results.json`: every arm against the base and the hybrid against its controls, and what of a gap is closed.

    Returns:
        `comparisons`: arm -> than -> task -> `paired.contrast` with `significant`. `gap_closed`: task ->
        `paired.gap_closed`, from the control (the base, where none was trained) to the teacher, if that is an arm.
    """
    flags = {name: {task: np.asarray(x, bool) for task, x in arm.correct.items()} for name, arm in arms.items()}
    pairs = [(name, "base") for name in arms if name != "base"]
    pairs += [("hybrid", than) for than in ("no_splice", HEADS_OFF, "teacher")]
    found: dict[str, Any] = {"comparisons": contrasts(flags, pairs, seed)}
    if "teacher" in flags and "hybrid" in flags:
        control = flags.get("no_splice", flags["base"])
        found["gap_closed"] = {
            task: gap_closed(hybrid, control[task], flags["teacher"][task], seed)
            for task, hybrid in flags["hybrid"].items()
        }
    return found
