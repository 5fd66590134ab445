"""Write probes as tasks of lm-eval: prompts as JSONL, task files for ranking and for generation, and groups.

`python -c "from surgery.evaluate.lm_eval_files import write_tasks; write_tasks()"` rewrites `surgery/lm_eval_tasks`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import yaml

from surgery.lm_eval_tasks import FOLDER
from surgery.probes.documents import Document, rng_of
from surgery.probes.registry import PROBES, Options
from surgery.scoring.generation import answer_list, expected_answers, max_answer_tokens

SHARED_FILES = ("data.py", "_ranked_yaml", "_generated_yaml")  # included by the task files
Maker = Callable[[Random], Document]


def lm_eval_groups() -> dict[str, dict[str, Maker]]:
    """Collect the tasks of all probes with an `lm_eval_group`: group -> task -> function that generates a document."""
    groups: dict[str, dict[str, Maker]] = {}
    for name, probe in PROBES.items():
        if probe.lm_eval_group is None:
            continue
        makers = groups.setdefault(probe.lm_eval_group, {})
        if "tokens" in probe.options:  # without a tokenizer, lengths are in characters
            sizes = {f"{name}_{size}k": Options(tokens=1000 * size) for size in probe.lm_eval_sizes}
        elif probe.pairs is not None:
            low, high = probe.pairs
            sizes = {f"{name}_{size}": Options(pairs=size) for size in probe.lm_eval_sizes if low <= size <= high}
        else:
            sizes = {name: Options()}
        makers |= {task: partial(probe.generate, split="eval", options=options) for task, options in sizes.items()}
    return groups


def write_tasks(
    folder: Path = FOLDER,
    groups: Mapping[str, Mapping[str, Maker]] | None = None,
    examples: int = 100,
    seed: int = 0,
) -> None:
    """Write tasks for lm-eval: `surgery_NAME` (ranked, if it has choices), `surgery_NAME_generated`, `surgery_GROUP`.

    Args:
        folder: pass it to lm-eval's `--include_path`.
        groups: group -> task -> function that generates one document; `lm_eval_groups()` by default.
        examples: prompts of each task.
    """
    groups = groups if groups is not None else lm_eval_groups()
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHARED_FILES:
        if folder.resolve() != FOLDER:
            shutil.copyfile(FOLDER / name, folder / name)
    for group, makers in groups.items():
        names = []
        for name, make in makers.items():
            documents = [make(rng_of("lm_eval", seed, name, i)) for i in range(examples)]
            names += _write_task(folder, name, documents)
        _write(folder / f"surgery_{group}.yaml", {"group": f"surgery_{group}", "task": names})


def row_of(document: Document) -> dict[str, Any]:
    """Make one row of a task.

    Returns:
        `prompt`; expected `answers`; `bounded`, False for an answer without an end; `choices` with the index `gold` of
        the correct one. For a list of answers, `given` is all but the last one: ranking appends it to the prompt.
    """
    questions, last = answer_list(document), document.questions[-1]
    answers, bounded = expected_answers(document)
    row: dict[str, Any] = {"prompt": document.text[: questions[0].answer[0]], "answers": answers, "bounded": bounded}
    if last.choices:
        row |= {"choices": list(last.choices), "gold": last.gold}
    if len(questions) > 1:
        row["given"] = document.text[questions[0].answer[0] : last.answer[0]]
    return row


def _write_task(folder: Path, name: str, documents: Sequence[Document]) -> list[str]:
    """Write the prompts and task files. Return the names of the tasks."""
    lines = (json.dumps(row_of(d), separators=(",", ":")) for d in documents)
    (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    data = {"dataset_kwargs": {"file": f"{name}.jsonl"}}
    tasks = []
    if documents[0].questions[-1].choices:
        tasks.append(f"surgery_{name}")
        _write(folder / f"{name}.yaml", {"include": "_ranked_yaml", "task": tasks[-1], **data})
    tasks.append(f"surgery_{name}_generated")
    limit = {
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": max(map(max_answer_tokens, documents))}
    }
    _write(folder / f"{name}_generated.yaml", {"include": "_generated_yaml", "task": tasks[-1], **data, **limit})
    return tasks


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
