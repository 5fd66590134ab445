"""Write a HeadSet as an interactive page (`locate.html`) and as a table (`heads.csv`).

The page is a single file with the data inside. Its content security policy forbids network requests. Text of
tokens is inserted as text, never as markup.

Shape legend: T tokens of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgery.recipe.methods import RANKINGS, UNRANKED, Column, all_columns, unit_of
from surgery.report.templates import asset, write_html
from surgery.report.text import write_rows
from surgery.types import HeadSet, Interval, PromptAttention, ScoredHead

LEVELS = 999  # shares are stored as integers from 0 to 999, relative to the largest one


def write_page(heads: HeadSet, prompts: Sequence[PromptAttention], path: Path) -> Path:
    """Write the page to `path` (`locate.html`), with a part on `prompts` if there are any. Same values, same bytes."""
    data = {**_head_data(heads), "prompts": [_prompt_data(prompt) for prompt in prompts]}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":  # nothing in the data can end the element that holds it
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    script = asset("page_reading.js") + asset("page.js")
    values = {"title": f"Retrieval scores of every head: {heads.model}", "script": script, "data": text}
    return write_html(path, "locate.html.j2", values, "page.css")


def heads_table(heads: HeadSet) -> tuple[list[str], list[list[Any]]]:
    """Columns and one row per head, best first: value, low and high of every score; empty if not measured.

    `chosen` is the place of a chosen head among the chosen heads, from 1.
    """
    names = [column.name for column in _columns(heads)]
    place = {s.head: i + 1 for i, s in enumerate(heads.chosen)}
    rows: list[list[Any]] = []
    for rank, s in enumerate(scored_heads(heads), start=1):
        scores = [s.scores.get(name) for name in names]
        values = [
            v for score in scores for v in (("", "", "") if score is None else (score.value, score.low, score.high))
        ]
        n = next((score.n for score in scores if score is not None), "")
        chosen, given = place.get(s.head, ""), " ".join(map(str, s.given))
        rows.append([s.head, s.head.layer, s.head.head, rank, s.role, s.reads or "", chosen, given, n, *values])
    ends = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    return ["head", "layer", "index", "rank", "role", "reads", "chosen", "given", "n", *ends], rows


def write_csv(heads: HeadSet, path: Path) -> Path:
    """Write `heads_table` as CSV."""
    return write_rows(path, *heads_table(heads))


def scored_heads(heads: HeadSet) -> list[ScoredHead]:
    """All heads in order. Chosen heads get the scores that were measured when they were chosen."""
    chosen = {s.head: s for s in heads.chosen}
    return [
        ScoredHead(s.head, s.role, c.reads, {**s.scores, **c.scores}, c.given) if (c := chosen.get(s.head)) else s
        for s in heads.heads
    ]


def _columns(heads: HeadSet) -> list[Column]:
    """Columns of all scores: those with an effect first, then their accuracies, then others in order of appearance."""
    names = dict.fromkeys(name for s in scored_heads(heads) for name in s.scores)
    registered = all_columns()
    effects = [column for column in registered.values() if column.effect]
    accuracies = [Column(f"{c.name}_accuracy", c.note, "accuracy", c.effect) for c in effects]
    known = {column.name: column for column in (*effects, *accuracies)}
    first = [column for name, column in known.items() if name in names]
    unit = {True: "accuracy", False: "logits"}  # of columns whose method is not registered here
    rest = [registered.get(n, Column(n, "", unit[n.endswith("_accuracy")])) for n in names if n not in known]
    return first + rest


def _head_data(heads: HeadSet) -> dict[str, Any]:
    """Everything about the heads, as `page.js` reads it."""
    columns = _columns(heads)
    place = {s.head: i + 1 for i, s in enumerate(heads.chosen)}
    ranking = [column.name for column in RANKINGS[heads.method].columns] if heads.method in RANKINGS else []
    reads = [s.reads for s in heads.chosen if s.reads in ranking][:1]  # one of several, by what a head reads
    names = [column.name for column in columns]
    return {
        **{name: getattr(heads, name) for name in ("model", "revision", "method", "seed")},
        "selected": UNRANKED.get(heads.method),  # null for a ranking
        "clean": _rounded(heads.clean),
        "columns": [
            {
                "key": column.name,
                "label": column.label,
                "heading": column.label.removesuffix(" accuracy") if column.unit == "accuracy" else column.label,
                "unit": column.unit,
                "unit_label": column.unit if column.effect else "",
                "note": column.note,
                "caption": column.caption,
            }
            for column in columns
        ],
        "units": {column.unit: asdict(unit_of(column.unit)) for column in columns},
        # The column that the map shows when the page opens: the one that ranks the heads.
        "first": next((names.index(name) for name in [*reads, *ranking, "query"] if name in names), 0),
        "heads": [
            {
                "name": str(s.head),
                "mixer": s.head.mixer,
                "layer": s.head.layer,
                "index": s.head.head,
                "rank": rank,
                "role": s.role,
                "reads": s.reads,
                "place": place.get(s.head, 0),
                "given": list(map(str, s.given)),
                "scores": list(map(_rounded(s.scores).get, names)),
            }
            for rank, s in enumerate(scored_heads(heads), start=1)
        ],
        "groups": [
            {"kind": group.kind, "heads": list(map(str, group.heads)), "scores": _rounded(group.scores)}
            for group in heads.groups
        ],
    }


def _rounded(scores: Mapping[str, Interval]) -> dict[str, list[float]]:
    """[value, low, high, n] by name, rounded to six digits: the page rounds again."""
    return {name: [*(float(f"{v:.6g}") for v in (s.value, s.low, s.high)), s.n] for name, s in scores.items()}


def _prompt_data(prompt: PromptAttention) -> dict[str, Any]:
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
    top = max(float(row.max()) for row in rows)
    scale = LEVELS / top if top > 0 else 0.0
    return {"top": float(f"{top:.6g}"), "rows": [np.rint(row * scale).astype(int).tolist() for row in rows]}
