"""Evaluate models ("arms") on the same prompts, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.generation import ExactAnswers, exact_answers, generate_answers
from surgery.data.ranking import LARGEST, answer_nats, perplexity, ranked
from surgery.data.user import named_data, read_documents
from surgery.errors import fitting
from surgery.evaluate.contrasts import contrasts, gap_closed
from surgery.evaluate.lm_eval import run_lm_eval
from surgery.evaluate.prompts import READ_TWICE, PromptSet, make_prompts
from surgery.models.alterations import HEADS_OFF
from surgery.models.loading import check_vocabulary
from surgery.models.runtime import evaluating
from surgery.models.torch_scans import torch_scans
from surgery.probes.documents import Document
from surgery.recipe import Evaluate, Train
from surgery.report.text import cut_middle
from surgery.stats import bootstrap_mean, wilson

_SHOWN = 12  # rows of a data set
_PROMPT = 2000  # characters of a prompt to keep
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Arm:
    """Results of one model.

    Attributes:
        summary: entry of `results.json`: accuracies with Wilson intervals, perplexities, and `notes` if any.
        correct: task -> (N,) True for each prompt that the model answers correctly, for paired tests.
        examples: name of the user's data -> a dozen held-out rows with the model's text.
    """

    summary: dict[str, Any]
    correct: dict[str, Tensor]
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)


def held_out_documents(
    train: Train,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    context: int | None = None,
    vocab_size: int | None = None,
) -> dict[str, list[Document]]:
    """Read the documents that `holdout` excludes from training, at most `limit` of each data set, by its name.

    Documents have to fit into the model's `context` and `vocab_size`, if these are given.

    Raises:
        DataError: the data cannot be read, or `holdout` selects no row.
    """
    held_out: dict[str, list[Document]] = {}
    for source, name in named_data(train):
        if source.data is not None and source.data.holdout:
            given = (source.data, tokenizer, source.max_tokens, limit, context, vocab_size)
            held_out[name], _ = read_documents(*given, held_out=True)
    return held_out


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Evaluate | None = None,
    seed: int = 0,
    prompts: PromptSet | None = None,
    progress: Progress | None = None,
) -> Arm:
    """Evaluate one model. Pass the same `prompts` (or seed) for every arm.

    Args:
        model: on any device.
        tokenizer: the model's.
        section: the recipe's section `evaluate`: tasks and sizes. Its defaults if None.
        seed: of the prompts.
        prompts: from `make_prompts`. Generated from the section and the seed if None.
        progress: called with (done, total) after each task.

    Raises:
        ModelError: the tokenizer belongs to another model, or a logit is NaN or infinite.
        RunError: out of memory.
    """
    check_vocabulary(tokenizer, model.config)
    section = section or Evaluate()
    prompts = prompts or make_prompts(section, seed, tokenizer=tokenizer)
    arm = Arm({"kv_retrieval": {}}, {})
    with evaluating(model), torch_scans(model):
        with fitting("evaluate.batch_size", section.batch_size):
            for done, (task, entry) in enumerate(_measure(arm, model, tokenizer, section, seed, prompts), start=1):
                _insert(arm.summary, task, entry)
                if progress is not None:
                    progress(done, prompts.num_tasks)
        if section.lm_eval is not None:
            with fitting("evaluate.lm_eval.batch_size", section.lm_eval.batch_size):
                arm.summary["lm_eval"] = run_lm_eval(model, tokenizer, section.lm_eval)
    return arm


def mark_seen(summary: dict[str, Any], section: Evaluate, train: Train) -> None:
    """Set `seen` in an arm's entries of tasks whose content `train` may have used, such as facts of the same half."""
    used = {(source.task, source.split) for stage in train.sequence for source in stage.sources}
    for task in section.tasks:
        kept_from, evaluated = task.probe.held_out_from, task.probe.evaluated
        if any(name in kept_from and (half is None or evaluated in (None, half)) for name, half in used):
            _mark_seen({task.result_name: summary.get(task.result_name)})


def _mark_seen(entry: dict[str, Any]) -> None:
    """Mark the accuracies inside, at every size and of generated answers too. A perplexity has no mark."""
    for part in entry.values():
        if isinstance(part, dict):
            _mark_seen(part)
    if "accuracy" in entry:
        entry["seen"] = True


def _measure(
    arm: Arm,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: Evaluate,
    seed: int,
    prompts: PromptSet,
) -> Iterator[tuple[str, Any]]:
    """Yield the entry of each task. `correct` and `examples` go into the arm; generation is a task of its own there."""
    size = section.batch_size
    for task, documents in prompts.choices.items():
        if section.generates(task.partition("/")[0]):
            answers = generate_answers(model, tokenizer, documents, prompts.batches(task, tokenizer, size, True))
            assert answers.ranked is not None
            correct = {task: answers.ranked.correct, f"{task}/generated": answers.correct}
            begun = {"begun": float(answers.begun.double().mean())}
            generated = {"generated": accuracy_of(answers.correct) | begun}
        else:
            correct = {task: ranked(model, prompts.batches(task, tokenizer, size, with_answers=False)).correct}
            generated = {}
        arm.correct.update(correct)
        chance = sum(1 / len(document.questions[-1].choices) for document in documents) / len(documents)
        yield task, accuracy_of(correct[task]) | {"chance": chance} | generated
    for task, documents in prompts.generation.items():
        answers = generate_answers(model, tokenizer, documents, prompts.batches(task, tokenizer, size, True))
        arm.correct[task] = answers.correct
        (mean,) = bootstrap_mean(answers.token_accuracy.double().numpy()[None], seed)
        per_token = {"mean": mean.value, "low": mean.low, "high": mean.high, "n": mean.n}
        yield task, accuracy_of(answers.correct) | {"per_token": per_token}
    for task, documents in prompts.texts.items():
        yield task, perplexity(model, tokenizer, documents, size)
    for name, documents in prompts.held_out.items():
        entry: dict[str, Any]
        if documents[0].questions:
            exact = exact_answers(model, tokenizer, documents, size)
            nats, tokens = answer_nats(model, tokenizer, documents, size)
            entry = accuracy_of(exact.correct) | {"first_token": accuracy_of(exact.first_token)}
            entry["loss"] = {"nats": nats, "tokens": tokens}
            arm.correct[f"held_out/{name}"] = exact.correct
            arm.examples[name] = examples_of(documents, exact)
        else:
            entry = {"perplexity": perplexity(model, tokenizer, documents, size), "n": len(documents)}
        yield f"held_out/{name}", entry


def _insert(summary: dict[str, Any], task: str, entry: Any) -> None:
    """Insert a task's entry, nested by the slashes of its name. Note a perplexity at the limit."""
    # The name of a user's data may contain slashes.
    *parents, last = task.split("/", 1) if task.startswith("held_out/") else task.split("/")
    level = summary
    for part in parents:
        level = level.setdefault(part, {})
    level[last] = entry
    if (entry.get("perplexity") if isinstance(entry, dict) else entry) == LARGEST:
        note = f"{task}: the perplexity is at least {LARGEST:g}, the largest that is reported: the model has diverged"
        summary.setdefault("notes", []).append(note)


def accuracy_of(correct: Tensor) -> dict[str, float]:
    """Accuracy with its 95% Wilson interval."""
    interval = wilson(int(correct.sum()), len(correct))
    return {"accuracy": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}


def compare_arms(arms: Mapping[str, Arm], seed: int = 0) -> dict[str, Any]:
    """Compare every arm with the base, and the hybrid with its controls.

    Returns:
        Entries of `results.json`. `comparisons`: the result of `contrasts`. If a teacher was evaluated, `gap_closed`:
        task -> the result of `gap_closed`, from the control (or the base, if no control was trained) to the teacher.
    """
    flags = {name: {task: np.asarray(x, bool) for task, x in arm.correct.items()} for name, arm in arms.items()}
    pairs = [(name, "base") for name in arms if name != "base"]
    references = ("no_splice", f"no_splice{READ_TWICE}", f"base{READ_TWICE}", HEADS_OFF, "teacher")
    pairs += [("hybrid", reference) for reference in references]
    comparisons: dict[str, Any] = {"comparisons": contrasts(flags, pairs, seed)}
    if "teacher" in flags and "hybrid" in flags:
        control = flags["no_splice" if "no_splice" in flags else "base"]
        comparisons["gap_closed"] = {
            task: gap_closed(hybrid, control[task], flags["teacher"][task], seed)
            for task, hybrid in flags["hybrid"].items()
        }
    return comparisons


def examples_of(documents: Sequence[Document], answers: ExactAnswers) -> list[dict[str, str]]:
    """Select a dozen rows, spread evenly over all. They depend on the number of documents only.

    Returns:
        For each row: `prompt`, a long one cut in the middle; `wanted`, the answer without the end token; `generated`,
        the model's text.
    """
    count = min(_SHOWN, len(documents))
    chosen = [i * len(documents) // count for i in range(count)]
    return [
        {
            "prompt": cut_middle(documents[i].text[: documents[i].questions[-1].answer[0]], _PROMPT),
            "wanted": answers.wanted[i],
            "generated": answers.generated[i],
        }
        for i in chosen
    ]


def side_by_side(examples: Mapping[str, Mapping[str, Sequence[dict[str, str]]]]) -> dict[str, list[dict[str, Any]]]:
    """Join the examples of all arms: entry `held_out_examples` of results.json.

    Args:
        examples: arm -> data set -> examples of the same rows.

    Returns:
        Data set -> rows with `prompt`, `wanted` and `generated`, the text of each arm.
    """
    joined: dict[str, list[dict[str, Any]]] = {}
    for name in dict.fromkeys(name for of_arm in examples.values() for name in of_arm):
        by_arm = {arm: of_arm[name] for arm, of_arm in examples.items() if name in of_arm}
        joined[name] = [
            {**rows[0], "generated": {arm: row["generated"] for arm, row in zip(by_arm, rows, strict=True)}}
            for rows in zip(*by_arm.values(), strict=True)
        ]
    return joined
