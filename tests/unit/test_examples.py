"""The generators of examples/: what their lines ask, where the answer stands, and that a seed is a file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from runpy import run_path
from typing import Any

import pytest

from surgery.data.documents import Reader
from surgery.data.user import IndexedDocuments
from surgery.recipe import Source, load_recipe, shipped
from tests.support.pico import pico_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDS = run_path(str(EXAMPLES / "records.py"))
TEXTS = run_path(str(EXAMPLES / "short_texts.py"))
RECORD_LINES: list[dict[str, Any]] = [RECORDS["record_line"](Random(i)) for i in range(60)]
TEXT_LINES: list[dict[str, Any]] = [TEXTS["text_line"](Random(i)) for i in range(60)]
FAQ = run_path(str(EXAMPLES / "faq.py"))
FAQ_LINES: list[dict[str, Any]] = [FAQ["faq_line"](Random(i)) for i in range(300)]
SCRIPTS = ("records.py", "short_texts.py", "faq.py")


def test_a_record_has_its_agent_and_the_question_asks_for_one() -> None:
    for line in RECORD_LINES:
        records = re.findall(r"^(\w+) wrote about (.+); this case is now with agent (\d+)\.$", line["prompt"], re.M)
        assert 3 <= len(records) <= 6 and line["prompt"].count("\n") == len(records) + 1
        assert all(len({row[column] for row in records}) == len(records) for column in (0, 2))
        asked = re.search(r"\nWhich agent has the case of (\w+)\?\n$", line["prompt"])
        assert asked is not None and {name: agent for name, _, agent in records}[asked[1]] == line["answer"]
        start, end = line["answer_span"]
        assert line["prompt"][start:end] == line["answer"]
        assert line["prompt"][:start].split("\n")[-1].startswith(f"{asked[1]} wrote")


def test_the_article_of_the_question_has_the_answer() -> None:
    for line in FAQ_LINES:
        *articles, question, ask, end = line["prompt"].split("\n")
        assert (ask, end) == ("Answer:", "")
        assert 6 <= len(articles) == len(set(articles)) <= 12
        told = []
        for subjects, text, asked, answers in FAQ["ARTICLES"]:
            told += [
                text.format(x=x, v=v) for x in subjects for v in answers if question == f"Question: {asked.format(x=x)}"
            ]
        (article,) = set(told) & set(articles)
        start, stop = line["answer_span"]
        assert line["prompt"][start:stop] == line["answer"]
        place = line["prompt"].index(article)
        assert place < start and stop < place + len(article)


def test_the_answer_of_a_short_text_is_what_it_says_of_that_person() -> None:
    kinds: Counter[str] = Counter()
    for line in TEXT_LINES:
        *people, question, end = line["prompt"].split("\n")
        assert end == "" and 2 <= len(people) <= 4 and all(text.count(".") == 4 for text in people)
        (kind,) = [k for k, (_, asked) in TEXTS["FACTS"].items() if re.fullmatch(_pattern(asked), question)]
        match = re.fullmatch(_pattern(TEXTS["FACTS"][kind][1]), question)
        assert match is not None
        wordings = [_pattern(wording) for wording in TEXTS["FACTS"][kind][0]]
        told = [m for wording in wordings for m in re.finditer(wording, line["prompt"]) if m["name"] == match["name"]]
        assert [m["answer"] for m in told] == [line["answer"]]
        assert list(told[0].span("answer")) == line["answer_span"]
        assert line["prompt"].count(line["answer"]) == 1
        kinds[kind] += 1
    assert set(kinds) == set(TEXTS["FACTS"])


def _pattern(wording: str) -> str:
    """A template as a regular expression with the groups `name` and `answer`."""
    return re.escape(wording).replace(r"\{name\}", r"(?P<name>\w+)").replace(r"\{answer\}", r"(?P<answer>\w+)")


def test_what_is_asked_for_may_stand_anywhere() -> None:
    for lines, count in ((RECORD_LINES, 6), (TEXT_LINES, 4), (FAQ_LINES, 12)):
        assert len({line["prompt"][: line["answer_span"][0]].count("\n") for line in lines}) == count


@pytest.mark.parametrize(
    "options", [("--records", "16", "8"), ("--records", "500", "500"), ("--digits", "0"), ("--lines", "0")]
)
def test_a_wrong_option_is_one_line_and_leaves_no_file(options: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "records.py"), str(tmp_path / "x.jsonl"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and options[0] in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_seed_is_a_file_that_fine_tuning_reads(script: str, tmp_path: Path) -> None:
    def written(name: str, *options: str) -> list[dict[str, Any]]:
        path = tmp_path / name
        command = [sys.executable, str(EXAMPLES / script), str(path), "--lines", "30", *options]
        assert subprocess.run(command, capture_output=True).returncode == 0
        return [json.loads(row) for row in path.read_text().splitlines()]

    first, same, other = written("a", "--seed", "0"), written("b", "--seed", "0"), written("c.jsonl", "--seed", "1")
    assert first == same != other and len(first) == 30
    bare = written("d.jsonl", "--seed", "1", "--no-spans")
    assert bare == [{key: value for key, value in line.items() if key != "answer_span"} for line in other]
    source = load_recipe(shipped("finetune")).train.sequence[0].sources[0].model_dump(mode="json")
    source["data"]["path"] = str(tmp_path / "c.jsonl")
    read = Source.model_validate(source)
    assert read.data is not None
    documents = IndexedDocuments(read, Reader(read.data, pico_tokenizer()), 0, 0)
    assert 20 <= len(documents) <= 30, "a tenth is held out"
    for document in documents.step(0):
        (question,) = document.questions
        assert question.value is not None
        assert document.text[slice(*question.value)] in document.text[slice(*question.answer)]
