"""The tasks for lm-eval: small, complete, made anew when the probes change, and asking what the probes ask."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import yaml

from surgery.evaluate import lm_eval_files
from surgery.evaluate.lm_eval_files import lm_eval_groups, row_of, tasks_folder, write_tasks
from surgery.lm_eval_tasks.data import rows
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import kv_document
from tests.support.samples import document_of


def test_every_task_has_its_prompts_and_its_group() -> None:
    folder, tasks = tasks_folder(), []
    for group, makers in lm_eval_groups().items():
        for name, make in makers.items():
            made = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            assert len(made) == 100, name
            assert all(made[i] == row_of(make(rng_of("lm_eval", 0, name, i))) for i in (0, 99)), name
        listed = yaml.safe_load((folder / f"surgery_{group}.yaml").read_text())["task"]
        tasks += listed
        assert {name.removeprefix("surgery_").removesuffix("_generated") for name in listed} == set(makers)
    files = [path for path in folder.glob("*.yaml") if not path.name.startswith("surgery_")]
    assert sorted(yaml.safe_load(path.read_text())["task"] for path in files) == sorted(tasks)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000


def test_tasks_are_written_again_only_if_the_code_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(lm_eval_files, "FOLDER", tmp_path / "tasks")
    monkeypatch.setattr(lm_eval_files, "write_tasks", written.append)
    tasks_folder()
    assert tasks_folder() == tmp_path / "tasks" and len(written) == 1
    (tmp_path / "tasks" / "sources.sha256").write_text("of other probes")
    tasks_folder()
    assert len(written) == 2


def test_rows_hold_the_prompt_and_what_ranking_puts_behind_it() -> None:
    document = document_of("needle_multi_query", 3, tokens=900)
    row, last = row_of(document), document.questions[-1]
    assert document.text.startswith(row["prompt"] + row["given"])
    assert row["choices"][row["gold"]] == document.text[slice(*last.answer)]
    assert row["answers"] == [document.text[slice(*q.answer)].strip() for q in document.questions]
    plain = row_of(kv_document(rng_of(3), 5))
    assert "given" not in plain and plain["choices"][plain["gold"]] == plain["answers"][0]


def test_own_probes_can_be_written_and_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    write_tasks(tmp_path, {"mine": {"kv_5": partial(kv_document, pairs=5)}}, examples=4, seed=7)
    listed = yaml.safe_load((tmp_path / "surgery_mine.yaml").read_text())["task"]
    assert listed == ["surgery_kv_5", "surgery_kv_5_generated"]
    monkeypatch.setattr("surgery.lm_eval_tasks.data.__file__", str(tasks_folder() / "data.py"))
    found = rows("needle_multi_value_2k.jsonl", pretrained="anything", version=1.0)["test"]
    assert found[0]["ranked"].startswith(found[0]["prompt"]) and len(found[0]["ranked"]) > len(found[0]["prompt"])
    plain = rows("kv_retrieval_4.jsonl")["test"][0]
    assert plain["ranked"] == plain["prompt"]
