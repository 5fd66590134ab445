"""Check that the documents of an export (plan.json, heads.json, the model card's table) name the same splice."""

from __future__ import annotations

import re
from pathlib import Path

from surgery.errors import ModelError, PlanError, reading
from surgery.export.files import AGAIN, read_object
from surgery.recipe.public import public_name
from surgery.types import Plan, head_set_from_json, plan_from_json

WHOLE = ", the whole layer"  # after the name of a layer
_ROW = re.compile(rf"\| *L\d+(H\d+|{WHOLE}) *\|")  # of a model card's table of spliced heads


def check_documents(folder: Path, stated: tuple[str, Plan] | None) -> tuple[list[str], list[str]]:
    """Compare plan.json, heads.json and the table in README.md with the splice.

    `stated` is the file of the export format that states the splice, and its plan. If None, plan.json is the reference.
    Returns the names of the files that agree, and a sentence for each absent file.

    Raises:
        ModelError: names the file that has another splice, and the difference.
    """
    agree = [stated[0]] if stated else list[str]()
    plan = stated[1] if stated else None
    try:
        if (folder / "plan.json").is_file():
            with reading("plan.json", None, AGAIN):
                written = plan_from_json(read_object(folder, "plan.json"))
                plan = plan or written
                _check_plan(written, plan)
            agree.append("plan.json")
        if plan is None:
            return [], ["plan.json: not in the folder, so heads.json and README.md were not compared"]
        if (folder / "heads.json").is_file():
            with reading("heads.json", None, AGAIN):
                _check_heads(folder, plan)
            agree.append("heads.json")
    except PlanError as error:
        raise ModelError(error.field, str(error.value), error.hint) from None
    absent = [f"{name}: not in the folder" for name in ("plan.json", "heads.json") if name not in agree]
    card = folder / "README.md"
    with reading("README.md", None, AGAIN):
        rows = _rows_in(card.read_text(encoding="utf-8")) if card.is_file() else []
    if not rows:
        return agree, [*absent, "README.md: no table of spliced heads"]
    found, expected = _compared(rows), _compared(card_rows(plan))
    if found != expected:
        raise ModelError("README.md", f"its table has {found}", f"The splice has {expected}.")
    return [*agree, "README.md"], absent


def _check_plan(written: Plan, plan: Plan) -> None:
    if written.geometry != plan.geometry:
        value = f"geometry {written.geometry}, but the config has {plan.geometry}"
        raise ModelError("plan.json", value, "This plan belongs to another model.")
    if written.grafts != plan.grafts:
        value = f"{_grafts(written)}, but config.splice has {_grafts(plan)}"
        raise ModelError("plan.json", value, f"They name different grafts. {AGAIN}")


def _grafts(plan: Plan) -> str:
    grafts = (f"{g.site.name} heads {list(g.heads)} {g.how} {g.init} {g.unit} {list(g.reads)}" for g in plan.grafts)
    return "; ".join(grafts)


def _check_heads(folder: Path, plan: Plan) -> None:
    """Check that the chosen heads are the spliced ones. A replaced layer must hold at least one chosen head."""
    heads = head_set_from_json(read_object(folder, "heads.json"))
    if heads.geometry != plan.geometry:
        raise ModelError("heads.json", f"geometry {heads.geometry}", "The heads were located in another model.")
    whole = {graft.site.layer for graft in plan.grafts if graft.unit == "layer"}
    # A block has a position of its own to read, whatever locating has found for the SSM head.
    own = "answer_token" if any(graft.form == "block" for graft in plan.grafts) else None
    chosen = {(s.head.layer, s.head.head, own or s.reads) for s in heads.chosen if s.head.layer not in whole}
    spliced = {
        (graft.site.layer, head, reads)
        for graft in plan.grafts
        for head, reads in zip(graft.heads, graft.reads, strict=True)
        if graft.site.layer not in whole
    }
    if chosen != spliced or not whole <= {s.head.layer for s in heads.chosen}:
        value = f"chosen heads {', '.join(str(s.head) for s in heads.chosen)}, but the splice is {_grafts(plan)}"
        raise ModelError("heads.json", value, f"They name different heads. {AGAIN}")


def card_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Rows of the model card's table of spliced heads, without roles: head or layer, mode, init or donor, reads."""
    rows: list[tuple[str, ...]] = []
    for graft in plan.grafts:
        layer = graft.site.layer
        if graft.unit == "layer":
            teacher = public_name(plan.teacher) if plan.teacher else "a teacher"
            rows.append((f"L{layer}{WHOLE}", graft.mode, f"{graft.donors[0]} of {teacher}", ""))
            continue
        for head, reads in zip(graft.heads, graft.reads, strict=True):
            rows.append((f"L{layer}H{head}", graft.how, graft.init, reads.replace("_", " ")))
    return rows


def _rows_in(card: str) -> list[tuple[str, ...]]:
    """The same rows in the text of a card; none if it has no such table."""
    lines = [line.strip().strip("|").split("|") for line in card.splitlines() if _ROW.match(line)]
    return [tuple(cell.strip() for cell in cells) for cells in lines]


def _compared(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Cells that config and plan state. A config does not name the teacher of a layer."""
    return sorted(row[:2] if row[0].endswith(WHOLE) else row[:4] for row in rows)
