"""The page about a run: its own numbers, nothing from outside, and nothing where nothing was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from surgery.report.results import label_of
from surgery.report.run_report import write_report
from tests.support.reports import ARMS as COSTS
from tests.support.reports import head_set, plan, spliced

HOSTILE = "<script>alert(1)</script>&'\""


def share(value: float) -> dict[str, float]:
    return {"accuracy": value, "low": value - 0.05, "high": value + 0.05, "n": 100}


def arm(value: float) -> dict[str, Any]:
    return {
        "kv_retrieval": {"8": share(value), "64": share(value / 2)},
        "closed_book": share(0.9),
        "perplexity": 2 + value,
    }


def inputs(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "evaluate").mkdir(parents=True, exist_ok=True)
    (folder / "evaluate" / "accuracy_by_pairs.svg").write_text("<svg/>")
    arms = {"base": arm(0.411), "no_splice": arm(0.422), "hybrid": arm(0.833)}
    better = {"difference": 0.411, "low": 0.3, "high": 0.5, "p_two_sided": 1e-9, "significant": True}
    comparisons = {"hybrid": {"no_splice": {"kv_retrieval/8": better, "closed_book": better}}}
    results = {"arms": arms, "seconds": {"train": 300.0}, "seed": 3, "versions": {"torch": "2.x"}}
    results |= {"comparisons": comparisons, **more}
    recipe = spliced("owner/base")
    return {"recipe": recipe, "plan": plan(), "heads": head_set(3, 4), "results": results, "figures": folder}


def written(folder: Path, given: dict[str, Any] | None = None, **more: Any) -> str:
    return write_report(folder / "report.html", **(given or inputs(folder / "figures", **more))).read_text()


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", "", page).split())


def test_it_says_what_was_done_and_what_came_of_it(tmp_path: Path) -> None:
    page = written(tmp_path)
    assert page == written(tmp_path / "again"), "equal inputs, equal bytes"
    story = text_of(page.split("</header>")[0].split("<header>")[1])
    for words in (
        "1 softmax-attention head was added to owner/base beside L1H2",
        "Selection: patching (activation patching) on 128 prompts of 24 pairs.",
        "7 steps, all weights (5 min)",
        "The control went through the same training",
        "KV-retrieval, 8 pairs",
        "The hybrid is better than the control: KV-retrieval, 8 pairs, 83.3% against 42.2%",
        "64 pairs, beyond training",  # training went up to 16
    ):
        assert words in story, words
    assert story.index("control 42.2%") < story.index("base 41.1%")
    for number in ("0.411", "0.422", "0.833", "2.411", "2.833", "torch 2.x", "Seed 3"):
        assert number in page, number
    for absent in ("Cost at inference", "Gap closed", "Attention of the new heads", "Your data", "answer_span"):
        assert absent not in page, "not measured"
    assert "<script" not in page and re.findall(r'src="(?!data:)|href="(?!#)|url\(', page) == []
    assert "default-src 'none'" in page


def test_contents_and_files_lead_somewhere(tmp_path: Path) -> None:
    given = {**inputs(tmp_path / "figures"), "files_beside": ("results.json", "report.html", "a b.json")}
    page = written(tmp_path, given)
    links = re.findall(r'href="([^"]*)"', page)
    inner = [link for link in links if link.startswith("#")]
    assert [link[1:] for link in inner] == re.findall(r'<section id="([^"]*)">', page) and len(inner) >= 6
    assert [link for link in links if link not in inner] == ["results.json", "a%20b.json"], "not to itself"


def test_hidden_rows_are_counted_or_named(tmp_path: Path) -> None:
    """A second score is hidden if it is that of its row in every arm."""
    given = inputs(tmp_path / "figures")
    for number, summary in enumerate(given["results"]["arms"].values()):
        for pairs, extra in (("8", 0.0), ("64", 0.001 * number)):
            summary["kv_retrieval"][pairs]["generated"] = share(summary["kv_retrieval"][pairs]["accuracy"] + extra)
        summary["closed_book"] = {"accuracy": 0.26, "low": 0.2, "high": 0.32, "n": 200, "chance": 0.25}
    page = written(tmp_path, given)
    rows = re.findall(r'<th scope="row">(.*?)</th>', page.split("<h2>All measurements</h2>")[1])
    assert "KV-retrieval, 64 pairs, generated" in rows and "KV-retrieval, 8 pairs, generated" not in rows
    facts = label_of(("closed_book",), {})
    assert facts not in rows and "Hidden: 1 row (generated" in page
    assert f"Hidden, since every model is at chance: {facts}. results.json" in text_of(page)


def test_costs_and_the_gap_to_a_teacher_are_shown(tmp_path: Path) -> None:
    gaps = {"kv_retrieval/8": {"value": 0.75, "low": 0.5, "high": 0.9, "n": 9}}
    gaps["kv_retrieval/64"] = {"value": None, "reason": "the teacher is not above the control"}
    costs = {"arms": {name: COSTS[name] for name in ("base", "hybrid")}, "where": "cpu, scans without kernels"}
    page = written(tmp_path, gap_closed=gaps, efficiency=costs)
    assert "minus control" in page and "+41.1 [+30.0, +50.0]" in page and "<td>1e-09 *</td>" in page
    assert "0.75 [0.50, 0.90]" in page and "not computed: the teacher is not above the control" in page
    assert "Cost at inference" in page and "1.00x" in page and "on cpu, scans without kernels" in page


def test_a_prompt_that_the_hybrid_answers_and_every_setting_are_shown(tmp_path: Path) -> None:
    """A row of the user's data comes first. Set keys are shown, and all keys are folded."""
    example = {"prompt": f"a: 1\n{HOSTILE}", "wanted": "42", "generated": {"base": "17", "hybrid": "42"}}
    for more in ({"example": example}, {"held_out_examples": {"rows": [{**example, "wanted": "no"}, example]}}):
        page = written(tmp_path, **more)
        section = page.split('<section id="example">')[1].split("</section>")[0]
        assert "<script" not in page and "<pre>a: 1\n&lt;script&gt;" in section and "<code>42</code>" in section
        assert re.findall(r'row">(.*?)</th><td>(.*?)</td>', section) == [("hybrid", "42"), ("base", "17")]
    shown, folded = page.split('<section id="recipe">')[1].split("<details>")
    assert "steps: 7" in shown and "batch_size" not in shown and "batch_size" in folded
    assert 'id="example"' not in written(tmp_path)


def test_the_users_rows_are_shown_first_escaped_and_cut(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{HOSTILE}\n" + "x" * 500 + "who?\n", "wanted": f" {HOSTILE}",
         "generated": {"base": "\x1b[31m\u202e", "hybrid_heads_off": "unseen", "hybrid": "y" * 500 + "end"}}
    ]  # fmt: skip
    spans = {
        HOSTILE: {"found": 11, "ambiguous": 22, "missing": 33, "marked": 44},
        "y": {"found": 0, "ambiguous": 5, "missing": 6, "first_rows": 1000},
    }
    given = inputs(tmp_path / "figures", held_out_examples={HOSTILE: rows}, answer_spans=spans)
    for value in given["results"]["arms"].values():
        loss = {"nats": 1.2345, "tokens": 99}
        value["held_out"] = {HOSTILE: {**share(0.0), "first_token": share(0.25), "loss": loss}}
    page = written(tmp_path, given)
    header = page.split("</header>")[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;&#39;&#34;, held-out rows, exact match" in header
    assert "no model generates any of the 100 held-out" in header and "first token</dt>" not in header
    section = page.split("<h2>Your data</h2>")[1].split("</section>")[0]
    assert "<script" not in page and "&lt;script&gt;alert(1)" in section
    assert "\x1b" not in page and "\u202e" not in page and "\\x1b[31m\\u202e" in section
    for words in ("xxx ... xxx", "who?\\n</th>", "yyy ... yyy", "yend</td>", '<th scope="col">hybrid</th>'):
        assert words in section, words
    assert all(len(cell) < 200 for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", section))
    assert "unseen" not in section
    assert "ambiguous: 22, missing: 33, found: 11, marked in the data: 44" in section
    assert "(first 1000 rows of the stream). No row supervises the attention" in section
    cells = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', page.split("<h2>All measurements</h2>")[1])
    assert [(name.rpartition("held-out rows, ")[2], value) for name, value in cells[:3]] == [
        ("exact match", "0.000 [-0.050, 0.050]"),
        ("first token", "0.250 [0.200, 0.300]"),
        ("loss in nats per answer token", "1.234"),
    ]
