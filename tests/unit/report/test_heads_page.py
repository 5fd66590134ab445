"""The page holds what it was given, in one file that asks for nothing and that no token can break out of."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surgery.report.heads_page import LEVELS, write_csv, write_page
from surgery.types import HeadSet, PromptAttention, ScoredGroup
from tests.support.reports import HOSTILE, head_set, prompt


class Elements(HTMLParser):
    """The elements of a page: their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._inside = ""
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.titles: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        {"script": self.scripts, "title": self.titles}.get(self._inside, []).append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def written(
    folder: Path, heads: HeadSet | None = None, prompts: Sequence[PromptAttention] | None = None
) -> tuple[str, dict[str, Any], Elements]:
    """The page's text, its data and its elements."""
    heads = heads or head_set()
    path = write_page(heads, [prompt(heads)] if prompts is None else prompts, folder / "locate.html")
    text = path.read_text(encoding="utf-8")
    elements = Elements(text)
    return text, json.loads(elements.scripts[0]), elements


def test_the_map_opens_with_the_column_that_ranks(tmp_path: Path) -> None:
    heads = head_set()
    for method, reads, column, selected in (
        ("sharpen", "segment_end", "segment_end", None),
        ("sharpen", "answer_token", "answer_token", None),
        ("aggregate", "answer_token", "query", None),
        ("ablation", "answer_token", "ablation", None),
        ("random", "answer_token", "query", "drawn at random"),
        ("of_a_plugin", "answer_token", "query", None),
    ):
        chosen = tuple(replace(scored, reads=reads) for scored in heads.chosen)  # type: ignore[arg-type]
        _, data, _ = written(tmp_path, replace(heads, method=method, chosen=chosen))
        assert data["columns"][data["first"]]["key"] == column, method
        assert (data["method"], data["selected"]) == (method, selected)
    few = tuple(replace(s, scores={"context": s.scores["context"]}) for s in heads.heads)  # `ablation` is missing
    _, data, _ = written(tmp_path, replace(heads, method="ablation", chosen=(), heads=few))
    assert data["columns"][data["first"]]["key"] == "context"


def test_holds_the_scores_of_every_head(tmp_path: Path) -> None:
    heads = head_set()
    text, data, _ = written(tmp_path, heads)
    assert text == written(tmp_path / "b", heads)[0], "same values, same bytes"
    assert [h["name"] for h in data["heads"]] == [str(s.head) for s in heads.heads]
    for row, scored in zip(data["heads"], heads.heads, strict=True):
        assert (row["role"], row["reads"]) == (scored.role, scored.reads)
        for column, score in zip(data["columns"], row["scores"], strict=True):
            own = scored.scores[column["key"]]
            assert score == pytest.approx([own.value, own.low, own.high, own.n], rel=1e-3)
    places = {row["name"]: row["place"] for row in data["heads"] if row["place"]}
    assert places == {str(s.head): i + 1 for i, s in enumerate(heads.chosen)}


def test_shares_keep_three_digits_of_the_largest(tmp_path: Path) -> None:
    def shares(packed: dict[str, Any], row: int = 0) -> np.ndarray:
        return np.array(packed["rows"][row]) * packed["top"] / LEVELS

    heads = head_set()
    given = prompt(heads)
    _, data, _ = written(tmp_path, heads, [given])
    (held,) = data["prompts"]
    assert (held["tokens"], held["marks"]) == (list(given.tokens), given.marks)
    assert held["rows"].keys() == given.rows.keys() and held["matrices"].keys() == given.matrices.keys()
    for name, row in given.rows.items():
        np.testing.assert_allclose(shares(held["rows"][name]), row, atol=row.max() / LEVELS, rtol=0)
    for name, whole in given.matrices.items():
        for t, row in enumerate(whole):
            found = shares(held["matrices"][name], t)  # nothing above the diagonal
            np.testing.assert_allclose(found, row[: t + 1], atol=whole.max() / LEVELS, rtol=0)
    assert written(tmp_path, heads, [])[1]["prompts"] == []


def test_no_token_or_name_becomes_markup(tmp_path: Path) -> None:
    """The same elements, whatever the tokens, the model and the groups are called."""
    heads, hostile = head_set(), "".join(HOSTILE)
    score = heads.heads[0].scores["query"]
    named = replace(heads, model=hostile, groups=(ScoredGroup(hostile, (heads.heads[0].head,), {hostile: score}),))
    _, _, plain = written(tmp_path, replace(heads, model="m"), [prompt(heads, tuple("abcdefghij"))])
    _, data, elements = written(tmp_path, named)
    assert elements.found == plain.found
    assert data["prompts"][0]["tokens"] == list(HOSTILE) and data["model"] == hostile
    assert data["groups"][0]["kind"] == hostile and "".join(elements.titles).endswith(hostile)
    assert "{{" not in elements.scripts[1], "what is filled in is not looked into again"


def test_asks_the_network_for_nothing(tmp_path: Path) -> None:
    """No address anywhere, no element that loads, and a policy that would forbid it."""
    text, _, elements = written(tmp_path)
    assert not re.search(r"(https?:)?//[a-z]|url\(|@import|fetch\(|import\(|XMLHttpRequest", text)
    assert not [a for _, attributes in elements.found for a in attributes if a in ("src", "href", "srcset", "data")]
    policies = [a["content"] for tag, a in elements.found if tag == "meta" and "http-equiv" in a]
    assert policies and policies[0] is not None and policies[0].startswith("default-src 'none'")
    assert "innerHTML" not in text and "document.write" not in text


def test_what_was_not_measured_is_empty(tmp_path: Path) -> None:
    """Fewer scores, no role, nothing that the head reads."""
    heads = head_set(chosen=())
    last = heads.heads[-1]
    dropped = replace(last, role="unmeasured", reads=None, scores={"query": last.scores["query"]})
    heads = replace(heads, heads=(*heads.heads[:-1], dropped))
    _, data, _ = written(tmp_path, heads)
    keys = [column["key"] for column in data["columns"]]
    assert [k for k, s in zip(keys, data["heads"][-1]["scores"], strict=True) if s is not None] == ["query"]
    assert (data["heads"][-1]["role"], data["heads"][-1]["reads"]) == ("unmeasured", None)
    row = list(csv.DictReader(write_csv(heads, tmp_path / "heads.csv").open()))[-1]
    assert row["query"] and not row["ablation"] and not row["reads"]


def test_csv_holds_every_score_in_full(tmp_path: Path) -> None:
    heads = head_set()
    rows = list(csv.DictReader(write_csv(heads, tmp_path / "new" / "heads.csv").open(newline="")))
    for rank, (row, scored) in enumerate(zip(rows, heads.heads, strict=True), start=1):
        assert (row["head"], int(row["rank"]), row["role"]) == (str(scored.head), rank, scored.role)
        for name, score in scored.scores.items():
            assert [float(row[f"{name}{end}"]) for end in ("", "_low", "_high")] == [score.value, score.low, score.high]
    chosen = sorted((int(row["chosen"]), row["head"]) for row in rows if row["chosen"])
    assert chosen == [(i + 1, str(s.head)) for i, s in enumerate(heads.chosen)]
