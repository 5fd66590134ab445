"""The summary of a sweep: pooled accuracies, the teacher's share, seeds, and the same numbers in every form."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surgery.report.sweep_report import group_of, point_of, summarize, table_of, write_sweep_page
from surgery.stats import wilson


def share(right: int, n: int) -> dict[str, float]:
    found = wilson(right, n)
    return {"accuracy": found.value, "low": found.low, "high": found.high, "n": n}


def arm(right: int, facts: int = 90) -> dict[str, Any]:
    """100 prompts of 8 pairs, 50 of 32 pairs with 10 right, 100 facts."""
    kv = {"8": {**share(right, 100), "generated": share(1, 100)}, "32": share(10, 50)}
    return {"kv_retrieval": kv, "closed_book": share(facts, 100), "perplexity": 2.5}


def point(values: dict[str, Any], right: int, which: str = "hybrid", **more: Any) -> dict[str, Any]:
    arms = {"base": arm(20), "no_splice": arm(30), "hybrid": arm(right), **more.pop("arms", {})}
    heads = values.get("splice.num_heads", 1)
    given = {"kv_bytes_per_token": 64 * heads, "state_bytes": 4096 + 8 * heads, "new_parameters": 1000 * heads, **more}
    given = {"origins": {}, "probes": {}, "steps": None, **given}
    return point_of(values=values, run=f"run-{heads}", arm=which, arms=arms, heads=["L0H1"] * heads, **given)


def by_heads(*numbers: int, **more: Any) -> dict[str, Any]:
    points = [point({"splice.num_heads": n}, 50 + 10 * n, "hybrid" if n else "no_splice", **more) for n in numbers]
    return summarize("tiny", {"splice.num_heads": list(numbers)}, points)


def test_groups_follow_the_registered_probes() -> None:
    for place, group in (
        (("kv_retrieval", "8"), "retrieval"),
        (("kv_retrieval", "8", "generated"), None),
        (("letter_choice",), "retrieval"),
        (("option_text",), "knowledge"),
        (("held_out", "tickets.jsonl"), "held_out"),
        (("held_out", "tickets.jsonl", "first_token"), None),
        (("lm_eval", "piqa"), None),
        (("far_facts",), "knowledge"),
        (("far_pairs", "8"), "retrieval"),
    ):
        assert group_of(place, {"far_facts": "closed_book", "far_pairs": "kv_retrieval"}) == group, place


def test_one_row_for_each_value_with_the_control_for_no_heads() -> None:
    summary = by_heads(0, 1, 4)
    columns, rows = table_of(summary)
    numbers = ["retrieval", "knowledge", "perplexity", "KV bytes a token", "state bytes", "new weights"]
    assert columns == ["splice.num_heads", *numbers]
    assert [row[0] for row in rows] == ["0 (control)", "1", "4"]
    assert [row[1].split()[0] for row in rows] == ["0.267", "0.467", "0.667"]
    assert [row[3:] for row in rows] == [
        ["2.500", "0", "4,096", "0"],
        ["2.500", "64", "4,104", "1,000"],
        ["2.500", "256", "4,128", "4,000"],
    ]
    low, high = wilson(70, 150).low, wilson(70, 150).high
    assert rows[1][1] == f"0.467 [{low:.3f}, {high:.3f}]"
    json.dumps(summary, allow_nan=False)


def test_the_teacher_s_share_where_it_was_evaluated() -> None:
    summary = by_heads(1, 2, arms={"teacher": arm(90)})
    columns, rows = table_of(summary)
    at = columns.index("share of teacher, retrieval")
    assert [row[at] for row in rows] == ["0.700", "0.800"]  # 70 and 80 of 100
    assert columns[at + 1] == "share of teacher, knowledge" and rows[0][at + 1] == "1.000"
    assert not any("teacher" in column for column in table_of(by_heads(1, 2))[0])


def test_seeds_are_combined_to_mean_and_range() -> None:
    keys = {"splice.num_heads": [1, 2], "seed": [0, 1, 2]}
    points = [
        point({"splice.num_heads": n, "seed": seed}, 40 + 10 * n + 15 * seed) for n in (1, 2) for seed in range(3)
    ]
    summary = summarize("tiny", keys, points)
    columns, rows = table_of(summary)
    assert columns[:3] == ["splice.num_heads", "seeds", "retrieval"]
    assert [row[:3] for row in rows] == [["1", "3", "0.500 [0.400, 0.600]"], ["2", "3", "0.567 [0.467, 0.667]"]]
    assert summary["rows"][0]["seeds"] == [0, 1, 2] and len(summary["points"]) == 6


def test_the_page_has_table_figure_tasks_and_runs(tmp_path: Path) -> None:
    summary = by_heads(0, 1, origins={"control": "copied from <b>"})
    (tmp_path / "sweep.svg").write_text("<svg/>")
    text = write_sweep_page(summary, tmp_path, tmp_path / "sweep.html").read_text()
    shown = ("0 (control)", "0.467", "data:image/svg+xml", "KV-retrieval, 32 pairs", "control copied from &lt;b&gt;")
    assert [words for words in shown if words not in text] == []
    assert "Diverged" not in text and "<b>" not in text and "<script" not in text


def test_every_kind_of_number_and_diverged_runs_are_listed(tmp_path: Path) -> None:
    rows = {**share(3, 4), "first_token": share(4, 4), "loss": {"nats": 0.512, "tokens": 9}}
    hybrid = {**arm(50), "held_out": {"data/mine.jsonl": rows}, "lm_eval": {"piqa": {"acc,none": 0.625, "n": 8}}}
    points = [point({"seed": s}, 50, arms={"hybrid": hybrid}) for s in (0, 1)]
    summary = summarize("tiny", {"seed": [0, 1]}, points, {"tiny-lr-1.0": "loss is NaN"})
    columns, (first, _) = table_of(summary)
    assert [cell[:5] for cell in first[1:4]] == ["0.400", "0.900", "0.750"] and columns[3] == "held-out rows"
    assert summary["points"][0]["accuracy"]["held_out"] == asdict(wilson(3, 4))
    text = write_sweep_page(summary, tmp_path, tmp_path / "sweep.html").read_text()
    assert "data/mine.jsonl, held-out rows, loss in nats per answer token" in text and "0.512" in text
    assert "piqa (lm-eval), acc" in text and "0.625" in text
    assert "Diverged" in text and "tiny-lr-1.0" in text and "loss is NaN" in text
