"""Check that the documents of an export (plan.json, heads.json, the model card's table) name the same splice."""

from __future__ import annotations

from pathlib import Path

from surgery.errors import ModelError, PlanError, reading
from surgery.export.files import AGAIN, read_object
from surgery.types import Plan, head_set_from_json, plan_from_json


def check_documents(folder: Path, stated: tuple[str, Plan] | None) -> tuple[list[str], list[str]]:
    """Compare plan.json, heads.json and the table in README.md with the splice.

    `stated` is the file of the export format that states the splice, and its plan. If None, plan.json is the reference.
    Returns the names of the files that agree, and a sentence for each absent file.

    Raises:
        ModelError: names the file that has another splice, and the difference.
    """
    agree, absent = [stated[0]] if stated else list[str](), list[str]()
    plan = stated[1] if stated else None
    try:
        if (folder / "plan.json").is_file():
            with reading("plan.json", None, AGAIN):
                written = plan_from_json(read_object(folder, "plan.json"))
                plan = plan or written
                _check_plan(written, plan)
            agree.append("plan.json")
        if plan is not None and (folder / "heads.json").is_file():
            with reading("heads.json", None, AGAIN):
                _check_heads(folder, plan)
            agree.append("heads.json")
    except PlanError as error:
        raise ModelError(error.field, str(error.value), error.hint) from None
    absent += [f"{name}: not in the folder" for name in ("plan.json", "heads.json") if name not in agree]
    card = folder / "README.md"
    with reading("README.md", None, AGAIN):
        rows = card_table(card.read_text(encoding="utf-8")) if card.is_file() else []
        if rows and plan is not None:
            check_card(rows, plan)
            return [*agree, "README.md"], absent
    return agree, [*absent, "README.md: no table of spliced heads"]


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


def card_table(text: str) -> list[dict[str, str]]:
    """Parse a model card's table of spliced heads. Returns its rows by column name; empty if there is no such table."""
    rows: list[dict[str, str]] = []
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif cells[0] == "spliced head":
            header = cells
        elif header and set(line) - set("|-: "):
            rows.append(dict(zip(header, cells, strict=False)))
    return rows


def check_card(rows: list[dict[str, str]], plan: Plan) -> None:
    """Raise ModelError if the rows of a card's table name another splice than the plan."""
    expected: list[tuple[str, ...]] = []
    for graft in plan.grafts:
        if graft.unit == "layer":
            expected.append((f"L{graft.site.layer}, the whole layer", graft.mode))
            continue
        for head, reads in zip(graft.heads, graft.reads, strict=True):
            expected.append((f"L{graft.site.layer}H{head}", graft.how, graft.init, reads.replace("_", " ")))
    listed: list[tuple[str, ...]] = []
    for cells in rows:
        columns = ("mode",) if "whole layer" in cells["spliced head"] else ("mode", "init", "reads")
        listed.append((cells["spliced head"], *(cells.get(column, "") for column in columns)))
    if sorted(listed) != sorted(expected):
        raise ModelError("README.md", f"its table has {sorted(listed)}", f"The splice has {sorted(expected)}.")
