"""Write probes as tasks of lm-eval: prompts as JSONL, task files for ranking and for generation, and groups.

A wheel holds the tasks of this package: `setup.py` writes them. A checkout writes them when they are first used.
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

from surgery.files.atomic import digest, new_folder, text_or_empty
from surgery.probes.documents import Document, answer_list, expected_answers, max_answer_tokens, rng_of
from surgery.probes.registry import PROBES, Options

PACKAGE = Path(__file__).parents[1]
TEMPLATES = PACKAGE / "lm_eval_tasks"
SHARED_FILES = ("data.py", "_ranked_yaml", "_generated_yaml")  # of TEMPLATES; the task files include them
FOLDER = TEMPLATES / "tasks"
_SOURCES = "sources.sha256"  # in FOLDER, so that a checkout whose probes have changed writes the tasks again
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


def tasks_folder() -> Path:
    """Return the folder of this package's tasks, for lm-eval's `--include_path`. Writes them if there are none yet."""
    code = [*sorted((PACKAGE / "probes").glob("*.py")), Path(__file__), *(TEMPLATES / name for name in SHARED_FILES)]
    sources = digest(*code)
    if text_or_empty(FOLDER / _SOURCES) != sources:
        with new_folder(FOLDER) as folder:
            write_tasks(folder)
            (folder / _SOURCES).write_text(sources, encoding="utf-8")
    return FOLDER


def write_tasks(
    folder: Path, groups: Mapping[str, Mapping[str, Maker]] | None = None, examples: int = 100, seed: int = 0
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
        shutil.copyfile(TEMPLATES / name, folder / name)
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
    limit = {"until": [], "do_sample": False, "max_gen_toks": max(map(max_answer_tokens, documents))}
    content = {"include": "_generated_yaml", "task": tasks[-1], **data, "generation_kwargs": limit}
    _write(folder / f"{name}_generated.yaml", content)
    return tasks


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
