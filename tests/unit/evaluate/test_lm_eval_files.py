"""The tasks for lm-eval: the committed files are what the code makes, small, and ask what the probes ask."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path

import pytest
import yaml

from surgery.evaluate.lm_eval_files import lm_eval_groups, row_of, write_tasks
from surgery.lm_eval_tasks import FOLDER
from surgery.lm_eval_tasks.data import rows
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from surgery.probes.needle import needle_document

MAKERS = {name: make for group in ("retrieval", "knowledge") for name, make in lm_eval_groups()[group].items()}


@cache
def shipped(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", MAKERS)
def test_the_shipped_prompts_are_those_that_the_code_makes(name: str) -> None:
    assert len(shipped(name)) == 100
    for i in (0, 1, 99):
        assert shipped(name)[i] == row_of(MAKERS[name](rng_of("lm_eval", 0, name, i)))


def test_task_files_and_groups_agree_with_what_is_there(tmp_path: Path) -> None:
    write_tasks(tmp_path, examples=1)
    names = {p.name for p in FOLDER.iterdir() if p.suffix in (".yaml", ".jsonl")}
    assert {p.name for p in tmp_path.iterdir()} == names | {"data.py", "_ranked_yaml", "_generated_yaml"}
    for path in tmp_path.glob("*.yaml"):
        made, kept = (yaml.safe_load(p.read_text()) for p in (path, FOLDER / path.name))
        for content in (made, kept):
            content.pop("generation_kwargs", None)  # room for the longest of so many answers
        assert made == kept
    tasks = {
        yaml.safe_load(p.read_text()).get("task") for p in FOLDER.glob("*.yaml") if not p.name.startswith("surgery_")
    }
    groups = [yaml.safe_load((FOLDER / f"surgery_{g}.yaml").read_text())["task"] for g in ("retrieval", "knowledge")]
    assert sorted(tasks) == sorted(name for group in groups for name in group)


def test_the_whole_is_small() -> None:
    assert sum(p.stat().st_size for p in FOLDER.iterdir() if p.is_file()) < 2_000_000


def test_rows_hold_the_prompt_and_what_ranking_puts_behind_it() -> None:
    document = needle_document(rng_of(3), 900, len, "multi_query")
    row, last = row_of(document), document.questions[-1]
    assert (
        document.text.startswith(row["prompt"] + row["given"])
        and row["choices"][row["gold"]] == document.text[slice(*last.answer)]
    )
    assert row["answers"] == [document.text[slice(*q.answer)].strip() for q in document.questions]
    plain = row_of(kv_document(rng_of(3), 5))
    assert "given" not in plain and plain["choices"][plain["gold"]] == plain["answers"][0]


def test_own_probes_can_be_written_and_read_where_they_lie(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_tasks(tmp_path, {"mine": {"kv_5": partial(kv_document, pairs=5)}}, examples=4, seed=7)
    assert yaml.safe_load((tmp_path / "surgery_mine.yaml").read_text())["task"] == [
        "surgery_kv_5",
        "surgery_kv_5_generated",
    ]
    found = rows("needle_multi_value_2k.jsonl", pretrained="anything", version=1.0)["test"]
    assert found[0]["ranked"].startswith(found[0]["prompt"]) and len(found[0]["ranked"]) > len(found[0]["prompt"])
    assert rows("kv_retrieval_4.jsonl")["test"][0]["ranked"] == shipped("kv_retrieval_4")[0]["prompt"]
