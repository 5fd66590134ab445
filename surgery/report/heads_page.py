"""One page in which a reader explores a HeadSet, and the same as a table. Owns: `locate.html` and its data.

Must never know: models, torch, how a number was measured. The page is a single file that asks the network for nothing,
opened from anywhere: `page.html`, `page.css`, `page_reading.js` and `page.js` beside this module, with the data inside.
Its own policy forbids every request. Whatever comes from a tokenizer reaches the document as text, never as markup.

Shape legend: T tokens of a prompt.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgery.files.atomic import write_text
from surgery.report.figures.canvas import require
from surgery.report.figures.heatmaps import PANELS
from surgery.types import HeadId, HeadSet, Interval, ScoredHead

LEVELS = 999  # shares are kept as whole numbers of this part of the largest one
_NOTES = {
    "retrieval_score": "how often the head looks at the token to be copied most",
    "gather_score": "segments' ends on their own segment, beyond the decay",
    "aggregate_score": "the gold segment among all that the query reads",
    "segment_share": "all segments in the query's row",
    "entropy": "of the query's row; 1 is uniform",
    "sharpness": "largest step between neighbours in the query's row",
}


@dataclass(frozen=True)
class Prompt:
    """What heads read of one prompt.

    Attributes:
        tokens: T decoded tokens.
        marks: name (`segment end`) -> position in 0..T-1; `query` is the token whose rows these are.
        rows: head's name -> shares (T,) of the query, 0 to 1.
        matrices: for a few heads, (T,T): row t holds what token t reads; nothing above the diagonal.
    """

    tokens: tuple[str, ...]
    marks: Mapping[str, int]
    rows: Mapping[str, NDArray[Any]]
    matrices: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptAttention:
    """What heads read of a few prompts."""

    prompts: tuple[Prompt, ...] = ()


def write_page(heads: HeadSet, attention: PromptAttention, path: Path, title: str = "") -> Path:
    """Writes the page to `path` (`locate.html`) and returns it. Same values, same bytes.

    Args:
        attention: rows of all heads or of some; `PromptAttention()` leaves that part of the page out.
        title: heading and title of the page; names the model by default.

    Raises:
        SurgeryError: no heads or no scores, a row or matrix of another size than its prompt or not of shares, a mark
            outside the prompt, a name that is no head of the HeadSet.
    """
    require(bool(heads.heads), "heads.heads", "empty", "Give a HeadSet that holds every head; locate again.")
    require(bool(_columns(heads)), "heads.heads", "no scores", "Locate again.")
    names = {str(s.head) for s in heads.heads}
    data = {**_head_data(heads), "prompts": [_prompt_data(p, names) for p in attention.prompts]}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":  # nothing in the data can end the element that holds it
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    parts = {
        "TITLE": html.escape(title or f"Which heads retrieval hangs on: {heads.model}"),
        "CSS": _asset("page.css"),
        "JS": _asset("page_reading.js") + _asset("page.js"),
        "DATA": text,
    }
    before, *rest = _asset("page.html").split("{{")
    pieces = [before]
    for piece in rest:  # one pass: what is filled in is never looked into again
        name, _, after = piece.partition("}}")
        pieces += [parts[name], after]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(pieces))
    return path


def write_csv(heads: HeadSet, path: Path) -> Path:
    """Writes one row a head, best first: value, low and high of every score, empty where it was not measured."""
    columns = _columns(heads)
    place = {s.head: i + 1 for i, s in enumerate(heads.chosen)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ends = [f"{column}{end}" for column in columns for end in ("", "_low", "_high")]
    writer.writerow(["head", "layer", "index", "rank", "role", "reads", "chosen", "given", "n", *ends])
    for rank, scored in enumerate(_merged(heads), start=1):
        found = [scored.scores.get(column) for column in columns]
        values = [v for s in found for v in (("", "", "") if s is None else (s.value, s.low, s.high))]
        n = next((s.n for s in found if s is not None), "")
        given = " ".join(map(str, scored.given))
        head = scored.head
        writer.writerow(
            [head, head.layer, head.head, rank, scored.role, scored.reads or "", place.get(head, ""), given, n, *values]
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())
    return path


def _asset(name: str) -> str:
    return files("surgery.report").joinpath(name).read_text(encoding="utf-8")


def _merged(heads: HeadSet) -> list[ScoredHead]:
    """Every head in its order; a chosen one with what was measured when it was chosen."""
    chosen = {s.head: s for s in heads.chosen}
    return [
        ScoredHead(s.head, s.role, c.reads, {**s.scores, **c.scores}, c.given) if (c := chosen.get(s.head)) else s
        for s in heads.heads
    ]


def _columns(heads: HeadSet) -> list[str]:
    """Every score of any head: those of locating first, then their accuracies, then others as they come."""
    found = dict.fromkeys(name for s in _merged(heads) for name in s.scores)
    known = [*PANELS, *(f"{name}_accuracy" for name in PANELS)]
    return [name for name in known if name in found] + [name for name in found if name not in known]


def _unit(column: str) -> str:
    """Columns of one unit share a scale."""
    if column in ("effective_tokens", "layer_divergence"):
        return "tokens" if column == "effective_tokens" else "nats"
    if column in _NOTES:
        return "share"
    return "accuracy" if column.endswith("_accuracy") else "logits"


def _head_data(heads: HeadSet) -> dict[str, Any]:
    columns = _columns(heads)
    notes = {**PANELS, **{f"{name}_accuracy": note for name, note in PANELS.items()}, **_NOTES}
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
            "scores": [_rounded(s.scores.get(column)) for column in columns],
        }
        for rank, s in enumerate(_merged(heads), start=1)
    ]
    facts = {name: getattr(heads, name) for name in ("model", "revision", "method", "seed")}
    return {
        **facts,
        "clean": {name: _rounded(value) for name, value in heads.clean.items()},
        "columns": [{"key": c, "unit": _unit(c), "note": notes.get(c, "")} for c in columns],
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


def _rounded(interval: Interval | None) -> list[float] | None:
    """Value, low, high to four digits, and n."""
    if interval is None:
        return None
    return [float(f"{v:.4g}") for v in (interval.value, interval.low, interval.high)] + [interval.n]


def _prompt_data(prompt: Prompt, names: set[str]) -> dict[str, Any]:
    T = len(prompt.tokens)
    for name, position in prompt.marks.items():
        require(0 <= position < T, f"marks[{name!r}]", position, f"Give 0 to {T - 1}.")
    strangers = [name for name in (*prompt.rows, *prompt.matrices) if name not in names]
    require(not strangers, "prompt.rows", str(strangers[:1]), "Name heads of the HeadSet.")
    rows = {name: _checked(row, (T,), f"rows[{name!r}]") for name, row in prompt.rows.items()}
    matrices = {name: _checked(m, (T, T), f"matrices[{name!r}]") for name, m in prompt.matrices.items()}
    return {
        "tokens": list(prompt.tokens),
        "marks": dict(prompt.marks),
        "rows": {name: _packed([row]) for name, row in rows.items()},
        "matrices": {name: _packed([row[: t + 1] for t, row in enumerate(m)]) for name, m in matrices.items()},
    }


def _checked(shares: NDArray[Any], shape: tuple[int, ...], field: str) -> NDArray[np.float64]:
    values = np.asarray(shares, dtype=np.float64)
    require(values.shape == shape, field, values.shape, f"Give one share a token: {shape}.")
    fine = bool(np.isfinite(values).all()) and bool((values >= 0).all()) and bool((values <= 1 + 1e-6).all())
    require(fine, field, "not shares", "Shares are numbers from 0 to 1.")
    return values


def _packed(rows: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    """The largest share, and every share as a whole number of its 999th parts: three digits, small in the file."""
    top = max((float(row.max()) for row in rows if row.size), default=0.0)
    scale = LEVELS / top if top > 0 else 0.0
    return {"top": float(f"{top:.6g}"), "rows": [np.rint(row * scale).astype(int).tolist() for row in rows]}
