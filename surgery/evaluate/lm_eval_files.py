"""Writes probes as tasks of lm-eval: prompts as JSONL, one task file for ranking and one for saying, two groups.

`python -c "from surgery.evaluate.lm_eval_files import write_tasks; write_tasks()"` makes those of
`surgery/lm_eval_tasks` again. Owns: which probes are shipped, their rows. Must never know: models, tokenizers.
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

CALLED_BY_TASKS = ("data.py", "_ranked_yaml", "_generated_yaml")
Maker = Callable[[Random], Document]


def lm_eval_groups() -> dict[str, dict[str, Maker]]:
    """Group -> task -> function that generates one document, of all registered probes with an `lm_eval_group`."""
    groups: dict[str, dict[str, Maker]] = {}
    for name, probe in PROBES.items():
        if probe.lm_eval_group is None:
            continue
        makers = groups.setdefault(probe.lm_eval_group, {})
        if "tokens" in probe.options:  # the tokenizer is not known: lengths are in characters
            sizes = {f"{name}_{size}k": Options(tokens=1000 * size) for size in probe.lm_eval_sizes}
        elif probe.pairs is not None:
            low, high = probe.pairs
            sizes = {f"{name}_{size}": Options(pairs=size) for size in probe.lm_eval_sizes if low <= size <= high}
        else:
            sizes = {name: Options()}
        makers |= {task: partial(probe.document, split="eval", options=options) for task, options in sizes.items()}
    return groups


def write_tasks(
    folder: Path = FOLDER,
    groups: Mapping[str, Mapping[str, Maker]] | None = None,
    examples: int = 100,
    seed: int = 0,
) -> None:
    """Every task as `surgery_NAME` (ranked, if it has choices) and `surgery_NAME_generated`; groups as `surgery_GROUP`.

    Args:
        folder: gets what lm-eval needs besides, so that `--include_path` may name it.
        groups: group -> name -> what makes one document; the shipped ones if not said.
        examples: prompts of each task.
    """
    groups = groups if groups is not None else lm_eval_groups()
    folder.mkdir(parents=True, exist_ok=True)
    for name in CALLED_BY_TASKS:
        if folder.resolve() != FOLDER:
            shutil.copyfile(FOLDER / name, folder / name)
    for group, makers in groups.items():
        names = []
        for name, make in makers.items():
            documents = [make(rng_of("lm_eval", seed, name, i)) for i in range(examples)]
            lines = (json.dumps(row_of(d), separators=(",", ":")) for d in documents)
            (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            names += _task_files(folder, name, documents)
        _write(folder / f"surgery_{group}.yaml", {"group": f"surgery_{group}", "task": names})


def row_of(document: Document) -> dict[str, Any]:
    """`prompt`, `answers` to be said, `choices` and which is `gold`; `given`: what ranking puts behind the prompt."""
    questions, last = answer_list(document), document.questions[-1]
    answers, bounded = expected_answers(document)
    row: dict[str, Any] = {"prompt": document.text[: questions[0].answer[0]], "answers": answers, "bounded": bounded}
    if last.choices:
        row |= {"choices": list(last.choices), "gold": last.gold}
    if len(questions) > 1:
        row["given"] = document.text[questions[0].answer[0] : last.answer[0]]
    return row


def _task_files(folder: Path, name: str, documents: Sequence[Document]) -> list[str]:
    """Their names."""
    given = {"dataset_kwargs": {"file": f"{name}.jsonl"}}
    found = []
    if documents[0].questions[-1].choices:
        found.append(f"surgery_{name}")
        _write(folder / f"{name}.yaml", {"include": "_ranked_yaml", "task": found[-1], **given})
    found.append(f"surgery_{name}_generated")
    most = {
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": max(map(max_answer_tokens, documents))}
    }
    _write(folder / f"{name}_generated.yaml", {"include": "_generated_yaml", "task": found[-1], **given, **most})
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


__all__ = ["lm_eval_groups", "row_of", "write_tasks"]
