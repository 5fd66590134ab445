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
from surgery.probes.copying import copying_document
from surgery.probes.documents import Document, rng_of
from surgery.probes.hops import hop_document
from surgery.probes.json_kv import json_kv_document
from surgery.probes.knowledge import fact_question, facts, letter_choice, option_text
from surgery.probes.kv_retrieval import kv_document
from surgery.probes.needle import Kind, needle_document
from surgery.probes.phonebook import phonebook_document
from surgery.scoring.answers import answers_of, listed, most_tokens

CALLED_BY_TASKS = ("data.py", "_ranked_yaml", "_generated_yaml")
Maker = Callable[[Random], Document]
_KINDS: tuple[Kind, ...] = ("single", "multi_key", "multi_value", "multi_query")


def _needle(kind: Kind, characters: int) -> Maker:
    """At any depth; as long as so many characters, since the tokenizer is not known."""
    return lambda rng: needle_document(rng, characters, len, kind, depth=rng.random(), split="eval")


RETRIEVAL: dict[str, Maker] = {
    **{f"kv_retrieval_{n}": partial(kv_document, pairs=n, split="eval") for n in (4, 8, 16, 32, 64)},
    **{f"phonebook_{n}": partial(phonebook_document, pairs=n, split="eval") for n in (8, 32)},
    **{f"json_kv_{n}": partial(json_kv_document, pairs=n, split="eval") for n in (8, 16)},
    **{f"multi_hop_{n}": partial(hop_document, pairs=n, split="eval") for n in (8, 32)},
    **{f"copying_{n}": partial(copying_document, pieces=n, split="eval") for n in (8, 32)},
    **{f"needle_{kind}_2k": _needle(kind, 2000) for kind in _KINDS},
}
KNOWLEDGE: dict[str, Maker] = {
    "letter_choice": partial(letter_choice, split="eval"),
    "option_text": partial(option_text, split="eval"),
    "closed_book": lambda rng: fact_question(rng.choice(facts())),
}


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
    groups = groups if groups is not None else {"retrieval": RETRIEVAL, "knowledge": KNOWLEDGE}
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
    asked, last = listed(document), document.questions[-1]
    answers, bounded = answers_of(document)
    row: dict[str, Any] = {"prompt": document.text[: asked[0].answer[0]], "answers": answers, "bounded": bounded}
    if last.choices:
        row |= {"choices": list(last.choices), "gold": last.gold}
    if len(asked) > 1:
        row["given"] = document.text[asked[0].answer[0] : last.answer[0]]
    return row


def _task_files(folder: Path, name: str, documents: Sequence[Document]) -> list[str]:
    """Their names."""
    given = {"dataset_kwargs": {"file": f"{name}.jsonl"}}
    found = []
    if documents[0].questions[-1].choices:
        found.append(f"surgery_{name}")
        _write(folder / f"{name}.yaml", {"include": "_ranked_yaml", "task": found[-1], **given})
    found.append(f"surgery_{name}_generated")
    most = {"generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": max(map(most_tokens, documents))}}
    _write(folder / f"{name}_generated.yaml", {"include": "_generated_yaml", "task": found[-1], **given, **most})
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


__all__ = ["KNOWLEDGE", "RETRIEVAL", "row_of", "write_tasks"]
