"""Summarize the runs of a sweep: accuracy by group of tasks, memory and new weights, as JSON, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from surgery.probes.registry import PROBES
from surgery.recipe.grid import NUM_HEADS, SEED, has_seeds, label_of_values, text_of
from surgery.report.results import Place, entries, label_of, perplexity_text
from surgery.report.templates import embedded_svg, write_html
from surgery.stats import wilson

Estimate = dict[str, float]  # value, low, high

# Groups of tasks with their column labels.
GROUPS = {"retrieval": "retrieval", "knowledge": "knowledge", "held_out": "held-out rows"}
_ARMS = {"no_splice": "control", "base": "base"}
_SHARE, _COUNT = "{:.3f}", "{:,.0f}"


def point_of(arms: Mapping[str, Any], arm: str, probes: Mapping[str, str], **given: Any) -> dict[str, Any]:
    """Return the entry of sweep.json for one combination of values.

    Args:
        arms: `arms` of the run's results.json.
        arm: the arm that the numbers are from.
        probes: name of the probe by `name` of a task of the recipe, for tasks with another name.
        given: other keys of the entry: `values`, `run`, `heads`, bytes of the cache in fp32, `new_parameters`,
            `origins` of stages that were copied, and `steps`, if they depend on a plateau in a run of the sweep.
    """
    accuracy, of_teacher = (accuracy_by_group(found, probes) for found in (arms[arm], arms.get("teacher", {})))
    tasks = {  # every task and size with its accuracy, perplexity or loss
        "/".join(place): {
            "label": label_of(place, entry),
            **{name: value for name, value in entry.items() if not isinstance(value, Mapping)},
        }
        for place, entry in entries(arms[arm])
    }
    share = {g: accuracy[g]["value"] / x["value"] for g, x in of_teacher.items() if g in accuracy and x["value"] > 0}
    found = {"accuracy": accuracy, "share_of_teacher": share, "perplexity": arms[arm].get("perplexity"), "tasks": tasks}
    return {"arm": arm, **given, **found}


def group_of(place: Place, probes: Mapping[str, str]) -> str | None:
    """Group of a task: `retrieval`, `knowledge` (`Probe.knowledge`) or `held_out` (the user's rows), or None."""
    if place[0] == "held_out":
        return "held_out" if len(place) == 2 else None
    probe = probes.get(place[0], place[0])
    if probe not in PROBES or place[-1] == "generated":  # the same prompts are ranked too
        return None
    return "knowledge" if PROBES[probe].knowledge else "retrieval"


def accuracy_by_group(arm: Mapping[str, Any], probes: Mapping[str, str]) -> dict[str, Estimate]:
    """Accuracy over all prompts of a group, with its 95% Wilson interval. `probes` as in `point_of`."""
    counts: dict[str, list[int]] = {}
    for place, entry in entries(arm):
        group = group_of(place, probes) if "accuracy" in entry else None
        if group is not None:
            right, n = counts.setdefault(group, [0, 0])
            counts[group] = [right + round(entry["accuracy"] * entry["n"]), n + int(entry["n"])]
    return {group: asdict(wilson(*counts[group])) for group in GROUPS if group in counts}


def summarize(
    name: str,
    keys: Mapping[str, Sequence[Any]],
    points: Sequence[dict[str, Any]],
    diverged: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the content of sweep.json from every finished point (`point_of`).

    A row has the results of all seeds of the same other values: each is `value`, `low` and `high`. In a sweep over
    seeds that is the mean with the smallest and the largest value, otherwise an accuracy with its Wilson interval.
    `diverged` has the error by name of each run whose training diverged.
    """
    by_row: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        values = {key: value for key, value in point["values"].items() if key != SEED or len(keys) == 1}
        by_row.setdefault(label_of_values(values), []).append({**point, "values": values, "all": point["values"]})
    return {
        "name": name,
        "keys": {key: list(values) for key, values in keys.items()},
        "points": list(points),
        "rows": [_row(group, over_seeds=has_seeds(keys)) for group in by_row.values()],
        "diverged": dict(diverged or {}),
    }


def _row(points: Sequence[Mapping[str, Any]], over_seeds: bool) -> dict[str, Any]:
    """Combine the points that differ in the seed only."""

    def over(results: Iterable[Mapping[str, float] | float]) -> Estimate:
        """Mean and range over seeds; in a sweep without seeds the result itself, with its interval."""
        found = [r if isinstance(r, Mapping) else {"value": r, "low": r, "high": r} for r in results]
        values = [result["value"] for result in found]
        if over_seeds:
            return {"value": fmean(values), "low": min(values), "high": max(values)}
        return {name: float(found[0][name]) for name in ("value", "low", "high")}

    def names(key: str) -> dict[str, Any]:
        """Keys in any of the points."""
        return {name: value for point in reversed(points) for name, value in point[key].items()}

    return {
        "values": points[0]["values"],
        "arm": points[0]["arm"],
        "seeds": [point["all"].get(SEED) for point in points],
        "runs": [point["run"] for point in points],
        **{
            key: {group: over(p[key][group] for p in points if group in p[key]) for group in names(key)}
            for key in ("accuracy", "share_of_teacher")
        },
        **{
            name: over(point[name] for point in points)
            for name in ("perplexity", "kv_bytes_per_token", "state_bytes", "new_parameters", "steps")
            if all(point.get(name) is not None for point in points)
        },
        "tasks": {
            task: over(_estimate(point["tasks"][task]) for point in points if task in point["tasks"])
            | {"label": entry["label"]}
            for task, entry in names("tasks").items()
        },
    }


def _estimate(entry: Mapping[str, float]) -> Estimate | float:
    """An accuracy with its interval, or a perplexity, loss or score of lm-eval."""
    if "accuracy" not in entry:
        return next(entry[unit] for unit in ("perplexity", "nats", "score") if unit in entry)
    return {"value": entry["accuracy"], "low": entry["low"], "high": entry["high"]}


def table_of(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table: one row for each combination of values, seeds combined."""
    rows = summary["rows"]
    columns = [
        ("steps", _COUNT, [row.get("steps") for row in rows]),
        *((label, _SHARE, [row["accuracy"].get(group) for row in rows]) for group, label in GROUPS.items()),
        ("perplexity", _SHARE, [row.get("perplexity") for row in rows]),
        *(
            (f"share of teacher, {label}", _SHARE, [row["share_of_teacher"].get(group) for row in rows])
            for group, label in GROUPS.items()
        ),
        ("KV bytes a token", _COUNT, [row["kv_bytes_per_token"] for row in rows]),
        ("state bytes", _COUNT, [row["state_bytes"] for row in rows]),
        ("new weights", _COUNT, [row["new_parameters"] for row in rows]),
    ]
    measured = [column for column in columns if any(column[2])]
    several = has_seeds(summary["keys"])
    names = [*rows[0]["values"], *["seeds"] * several, *(label for label, _, _ in measured)]
    cells = [
        [
            *_value_cells(row),
            *[str(len(row["seeds"]))] * several,
            *(_cell(results[i], form) for _, form, results in measured),
        ]
        for i, row in enumerate(rows)
    ]
    return names, cells


def caption_of(summary: Mapping[str, Any]) -> str:
    """Describe the numbers of the table."""
    rows = summary["rows"]
    several = has_seeds(summary["keys"])
    parts = ["Mean over seeds [smallest, largest]." if several else "Accuracy with 95% Wilson intervals."]
    parts.append("Each group is the accuracy over all prompts of its tasks. Keys, values and states are in fp32.")
    control = next((row for row in rows if row["arm"] == "no_splice"), None)
    if control is not None:
        parts.append("0 heads: the control, which is trained in the same way without a splice.")
        if any("steps" in row for row in rows):
            run = control["runs"][0]
            heads = [row["values"][NUM_HEADS] for row in rows if row["arm"] == "hybrid" and run in row["runs"]]
            of_run = f" with {NUM_HEADS}={heads[0]}" if heads else f" in {run}"
            parts.append(f"Its stages have as many steps as those of the hybrid{of_run}.")
    if any(row["arm"] == "base" for row in rows):
        parts.append("0 heads: the base, since only new heads are trained.")
    return " ".join(parts)


def markdown_of(summary: Mapping[str, Any]) -> str:
    """Return the table in Markdown."""
    columns, rows = table_of(summary)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _value_cells(row: Mapping[str, Any]) -> list[str]:
    """The values of a row. 0 heads also names the arm."""
    texts = {key: text_of(value) for key, value in row["values"].items()}
    if row["arm"] in _ARMS:
        texts[NUM_HEADS] += f" ({_ARMS[row['arm']]})"
    return list(texts.values())


def _cell(result: Mapping[str, float] | None, form: str) -> str:
    if result is None:
        return "not measured"
    if result["value"] >= 1e6 and form != _COUNT:
        return perplexity_text(result["value"])
    value, low, high = (form.format(result[name]) for name in ("value", "low", "high"))
    return value if result["low"] == result["high"] else f"{value} [{low}, {high}]"


def write_sweep_page(summary: Mapping[str, Any], figures: Path, path: Path) -> Path:
    """Write `sweep.html`: the table, the figure, every task, and the runs with the stages that they share."""
    columns, rows = table_of(summary)
    labels = {task: result["label"] for row in summary["rows"] for task, result in row["tasks"].items()}
    values = {
        "name": summary["name"],
        "keys": list(summary["keys"]),
        "summary": {"columns": columns, "rows": rows},
        "caption": caption_of(summary),
        "image": embedded_svg(figures / "sweep.svg", "Results by value"),
        "tasks": {
            "columns": ["", *(", ".join(_value_cells(row)) for row in summary["rows"])],
            "rows": [
                [label, *(_cell(row["tasks"].get(task), _SHARE) for row in summary["rows"])]
                for task, label in labels.items()
            ],
        },
        "runs": [  # the heads of each run, and the stages that it took from other runs
            [
                point["run"],
                ", ".join(point["heads"]),
                "; ".join(f"{stage} {origin}" for stage, origin in point["origins"].items()) or "none",
            ]
            for point in summary["points"]
            if point["arm"] == "hybrid"
        ],
        "diverged": [[name, error] for name, error in summary["diverged"].items()],
    }
    return write_html(path, "sweep.html.j2", values)
