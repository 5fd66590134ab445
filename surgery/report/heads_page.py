"""Write a HeadSet as an interactive page (`locate.html`) and as a table (`heads.csv`).

The page is a single file with the data inside, made from `page.html`, `page.css`, `page_reading.js` and `page.js` of
this folder. Its content security policy forbids network requests. Text of tokens is inserted as text, never as markup.

Shape legend: T tokens of a prompt.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgery.files.atomic import write_text
from surgery.recipe.methods import RANKINGS, UNRANKED, Column, all_columns, unit_of
from surgery.types import HeadId, HeadSet, Interval, ScoredHead

LEVELS = 999  # shares are stored as integers from 0 to 999, relative to the largest one
_FIRST = "query"  # the column that colours the map if no ranking chose the heads


@dataclass(frozen=True)
class Prompt:
    """Attention of heads over one prompt.

    Attributes:
        tokens: T decoded tokens.
        marks: name (`segment end`) -> position in 0..T-1. The rows are those of the token `query`.
        rows: name of a head -> (T,) shares of the query's row, 0 to 1.
        matrices: name of a head -> (T,T) shares, for a few heads. Row t is what token t reads; zero above the diagonal.
    """

    tokens: tuple[str, ...]
    marks: Mapping[str, int]
    rows: Mapping[str, NDArray[Any]]
    matrices: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptAttention:
    """Attention of heads over a few prompts."""

    prompts: tuple[Prompt, ...] = ()


def write_page(heads: HeadSet, attention: PromptAttention, path: Path, title: str = "") -> Path:
    """Write the page to `path` (`locate.html`) and return it. The same values give the same bytes.

    Args:
        heads: with the scores of every head.
        attention: rows of all or some heads. `PromptAttention()` omits that part of the page.
        path: file to write.
        title: heading and title of the page; names the model by default.
    """
    data = {**_head_data(heads), "prompts": [_prompt_data(prompt) for prompt in attention.prompts]}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":  # nothing in the data can end the element that holds it
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    parts = {
        "TITLE": html.escape(title or f"Retrieval scores of every head: {heads.model}"),
        "CSS": _asset("page.css"),
        "JS": _asset("page_reading.js") + _asset("page.js"),
        "DATA": text,
    }
    before, *rest = _asset("page.html").split("{{")
    pieces = [before]
    for piece in rest:  # one pass: inserted text is never searched for names
        name, _, after = piece.partition("}}")
        pieces += [parts[name], after]
    write_text(path, "".join(pieces))
    return path


def heads_table(heads: HeadSet) -> tuple[list[str], list[list[Any]]]:
    """Columns and one row per head, best first: value, low and high of every score; empty if not measured.

    `chosen` is the place of a chosen head among the chosen heads, from 1.
    """
    columns = _columns(heads)
    place = {s.head: i + 1 for i, s in enumerate(heads.chosen)}
    ends = [f"{column.name}{end}" for column in columns for end in ("", "_low", "_high")]
    rows: list[list[Any]] = []
    for rank, scored in enumerate(_merged(heads), start=1):
        scores = [scored.scores.get(column.name) for column in columns]
        values = [v for s in scores for v in (("", "", "") if s is None else (s.value, s.low, s.high))]
        n = next((s.n for s in scores if s is not None), "")
        given = " ".join(map(str, scored.given))
        head = scored.head
        rows.append(
            [head, head.layer, head.head, rank, scored.role, scored.reads or "", place.get(head, ""), given, n, *values]
        )
    return ["head", "layer", "index", "rank", "role", "reads", "chosen", "given", "n", *ends], rows


def write_csv(heads: HeadSet, path: Path) -> Path:
    """Write `heads_table` as CSV."""
    header, rows = heads_table(heads)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_text(path, text.getvalue())
    return path


def _asset(name: str) -> str:
    return files("surgery.report").joinpath(name).read_text(encoding="utf-8")


def _merged(heads: HeadSet) -> list[ScoredHead]:
    """All heads in order. Chosen heads get the scores that were measured when they were chosen."""
    chosen = {s.head: s for s in heads.chosen}
    return [
        ScoredHead(s.head, s.role, c.reads, {**s.scores, **c.scores}, c.given) if (c := chosen.get(s.head)) else s
        for s in heads.heads
    ]


def _columns(heads: HeadSet) -> list[Column]:
    """Columns of all scores: those with an effect first, then their accuracies, then others in order of appearance."""
    names = dict.fromkeys(name for s in _merged(heads) for name in s.scores)
    registered = all_columns()
    effects = [column for column in registered.values() if column.effect]
    accuracies = [Column(f"{c.name}_accuracy", c.note, "accuracy", c.effect) for c in effects]
    known = {column.name: column for column in (*effects, *accuracies)}
    first = [column for name, column in known.items() if name in names]
    unit = {True: "accuracy", False: "logits"}  # of columns whose method is not registered here
    rest = [registered.get(n, Column(n, "", unit[n.endswith("_accuracy")])) for n in names if n not in known]
    return first + rest


def _column_data(column: Column) -> dict[str, str]:
    """A column for the page: `caption` describes the coloured map, `heading` is short."""
    heading = column.label.removesuffix(" accuracy") if column.unit == "accuracy" else column.label
    unit = column.unit if column.effect else ""
    return {
        "key": column.name, "label": column.label, "heading": heading, "unit": column.unit, "unit_label": unit,
        "note": column.note, "caption": column.caption,
    }  # fmt: skip


def _head_data(heads: HeadSet) -> dict[str, Any]:
    columns = _columns(heads)
    place: dict[HeadId, int] = {s.head: i + 1 for i, s in enumerate(heads.chosen)}
    rows = [
        {
            "name": str(s.head),
            "mixer": s.head.mixer,
            "layer": s.head.layer,
            "index": s.head.head,
            "rank": rank,
            "role": s.role,
            "reads": s.reads,
            "place": place.get(s.head, 0),
            "given": [str(h) for h in s.given],
            "scores": [_rounded(s.scores.get(column.name)) for column in columns],
        }
        for rank, s in enumerate(_merged(heads), start=1)
    ]
    facts = {name: getattr(heads, name) for name in ("model", "revision", "method", "seed")}
    return {
        **facts,
        "selected": UNRANKED.get(heads.method),  # null for a ranking
        "clean": {name: _rounded(value) for name, value in heads.clean.items()},
        "columns": [_column_data(column) for column in columns],
        "units": {column.unit: asdict(unit_of(column.unit)) for column in columns},
        "first": _first(heads, [column.name for column in columns]),
        "heads": rows,
        "groups": [
            {
                "kind": group.kind,
                "heads": [str(h) for h in group.heads],
                "scores": {name: _rounded(value) for name, value in group.scores.items()},
            }
            for group in heads.groups
        ],
    }


def _first(heads: HeadSet, names: Sequence[str]) -> int:
    """Index of the column that the map shows when the page opens: the one that ranks the heads."""
    ranking = [column.name for column in RANKINGS[heads.method].columns] if heads.method in RANKINGS else []
    reads = next((s.reads for s in heads.chosen if s.reads in ranking), None)  # one of several, by what a head reads
    wanted = [*([reads] if reads else []), *ranking, _FIRST]
    return next((names.index(name) for name in wanted if name in names), 0)


def _rounded(interval: Interval | None) -> list[float] | None:
    """[value, low, high, n], rounded to six digits: the page rounds again."""
    if interval is None:
        return None
    return [float(f"{v:.6g}") for v in (interval.value, interval.low, interval.high)] + [interval.n]


def _prompt_data(prompt: Prompt) -> dict[str, Any]:
    return {
        "tokens": list(prompt.tokens),
        "marks": dict(prompt.marks),
        "rows": {name: _packed([row]) for name, row in prompt.rows.items()},
        "matrices": {
            name: _packed([row[: t + 1] for t, row in enumerate(matrix)]) for name, matrix in prompt.matrices.items()
        },
    }


def _packed(rows: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    """Pack shares into few characters: the largest share, and each share as an integer from 0 to 999 relative to it."""
    top = max((float(row.max()) for row in rows if row.size), default=0.0)
    scale = LEVELS / top if top > 0 else 0.0
    return {"top": float(f"{top:.6g}"), "rows": [np.rint(row * scale).astype(int).tolist() for row in rows]}
