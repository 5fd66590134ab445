"""The page about a run: its own numbers, nothing from outside, and nothing where nothing was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surgery.report.figures.curves import accuracy_by_pairs
from surgery.report.results import label_of, p_text, rows_of
from surgery.report.run_report import ReportInputs, write_report
from surgery.report.verdict import tiles_of
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


def inputs(folder: Path, **more: Any) -> ReportInputs:
    arms = {"base": arm(0.411), "no_splice": arm(0.422), "hybrid": arm(0.833)}
    accuracy_by_pairs({name: found["kv_retrieval"] for name, found in arms.items()}, folder / "evaluate")
    results = {"arms": arms, "seconds": {"train": 300.0}, "seed": 3, "versions": {"torch": "2.x"}, **more}
    return ReportInputs(spliced("owner/base"), plan(), head_set(3, 4), results, folder)


@pytest.fixture
def page(tmp_path: Path) -> str:
    return write_report(inputs(tmp_path / "figures"), tmp_path / "report.html").read_text()


def test_it_says_what_was_done_and_what_came_of_it(page: str) -> None:
    story = re.sub(r"<[^>]+>", "", page.split("</header>")[0].split("<header>")[1])
    for words in (
        "1 softmax-attention head was added to owner/base beside L1H2",
        "Selection: patching (activation patching) on 128 prompts of 24 pairs.",
        "7 steps, all weights (5 min)",
        "The control went through the same training",
        "KV-retrieval, 8 pairs",
    ):
        assert words in story
    assert "The hybrid is better than the control: KV-retrieval, 8 pairs, 83.3% against 42.2%" in story
    assert story.index("control 42.2%") < story.index("base 41.1%")
    assert "64 pairs, beyond training" in story, "training went up to 16"


@pytest.mark.parametrize(
    ("trained", "text", "tile"),
    [
        ({"steps": 6, "plateau": 5}, "6 steps (of at most 7; plateau at step 5)", "6 steps"),
        ({"steps": 7}, "7 steps (of at most 7; no plateau was found)", "7 steps"),
    ],
)
def test_it_says_where_a_plateau_was_found(tmp_path: Path, trained: dict[str, int], text: str, tile: str) -> None:
    ends = {"window": 1, "patience": 1, "min_steps": 1}
    recipe = spliced("owner/base", {"optimizer": {"schedule": "wsd", "warmup": 1}, "plateau": ends})
    given = replace(inputs(tmp_path / "figures", training={"finetune": trained}), recipe=recipe)
    page = write_report(given, tmp_path / "report.html").read_text()
    assert page.count(text) == 2, "in the story and in the limits"
    few = {"kv_retrieval": {}, "closed_book": share(0.9)}
    arms = {"arms": {"base": few, "hybrid": few}, "training": {"finetune": trained}}
    assert tile in [found.value for found in tiles_of(arms, recipe)]


def test_the_hybrid_is_the_first_column_and_p_values_are_the_last(tmp_path: Path) -> None:
    row = {"difference": 0.1, "low": 0.0, "high": 0.2, "p_two_sided": 0.25, "significant": False}
    tests = {"kv_retrieval/8": row, "kv_retrieval/64": row, "closed_book": row}
    more = {"comparisons": {"hybrid": {"base": tests, "no_splice": tests}}}
    page = write_report(inputs(tmp_path / "figures", **more), tmp_path / "report.html").read_text()
    columns = {}
    for heading in ("Retrieval", "All measurements"):
        head = page.split(f"<h2>{heading}</h2>")[1].split("</thead>")[0].split("<thead>")[1]
        columns[heading] = re.findall(r"<th[^>]*>(.*?)</th>", head)
    assert columns["Retrieval"] == ["", "minus control", "minus base", "p, control", "p, base"]
    assert columns["All measurements"] == [
        "", "hybrid", "control (trained, no splice)", "base", "prompts", "p, against the control",
    ]  # fmt: skip
    assert "+10.0 [+0.0, +20.0]</td>" in page and "<td>0.25</td>" in page


def test_contents_and_files_lead_somewhere(tmp_path: Path) -> None:
    given = replace(inputs(tmp_path / "figures"), files=("results.json", "report.html", "a b.json"))
    page = write_report(given, tmp_path / "report.html").read_text()
    links = re.findall(r'href="([^"]*)"', page)
    inner = [link for link in links if link.startswith("#")]
    assert [link[1:] for link in inner] == re.findall(r'<section id="([^"]*)">', page) and len(inner) >= 6
    assert [link for link in links if link not in inner] == ["results.json", "a%20b.json"], "not to itself"


def test_a_second_score_of_the_same_prompts_is_hidden_if_it_is_the_same_everywhere(tmp_path: Path) -> None:
    given = inputs(tmp_path / "figures")
    for number, summary in enumerate(given.results["arms"].values()):
        for pairs, extra in (("8", 0.0), ("64", 0.001 * number)):
            entry = summary["kv_retrieval"][pairs]
            entry["generated"] = share(entry["accuracy"] + extra)
    page = write_report(given, tmp_path / "report.html").read_text()
    rows = re.findall(r'<th scope="row">(.*?)</th>', page.split("<h2>All measurements</h2>")[1])
    assert "KV-retrieval, 64 pairs, generated" in rows and "KV-retrieval, 8 pairs, generated" not in rows
    assert "Hidden: 1 row (generated" in page


def test_a_task_at_chance_in_every_model_is_named_and_not_shown(tmp_path: Path) -> None:
    given = inputs(tmp_path / "figures")
    arms = given.results["arms"]
    for summary in arms.values():
        for task, accuracy in (("closed_book", 0.26), ("letter_choice", 0.27)):
            summary[task] = {"accuracy": accuracy, "low": 0.2, "high": 0.32, "n": 200, "chance": 0.25}
        summary["kv_retrieval"]["64"] |= {"low": 0.0, "high": 1.0, "chance": 0.5}
    arms["hybrid"]["letter_choice"] |= {"accuracy": 0.5, "low": 0.43}
    page = write_report(given, tmp_path / "report.html").read_text()
    rows = re.findall(r'<th scope="row">(.*?)</th>', page.split("<h2>All measurements</h2>")[1])
    assert {label_of(("letter_choice",), {}), "KV-retrieval, 64 pairs"} <= set(rows)
    assert label_of(("closed_book",), {}) not in rows
    text = " ".join(re.sub(r"<[^>]+>", "", page).split())
    assert f"Hidden, since every model is at chance: {label_of(('closed_book',), {})}. results.json" in text


@pytest.mark.parametrize(
    ("select", "says"),
    [
        ("sharpen", "sharpen (oracle read) on 128 prompts of 24 pairs."),
        ("ablation", "ablation on 128 prompts of 24 pairs."),
        ("random", "random (drawn at random)."),
    ],
)
def test_it_says_how_heads_were_selected(select: str, says: str, tmp_path: Path) -> None:
    given = inputs(tmp_path / "figures")
    assert given.recipe.splice is not None
    splice = given.recipe.splice.model_copy(update={"select": select})
    changed = replace(given, recipe=given.recipe.model_copy(update={"splice": splice}))
    text = re.sub(r"<[^>]+>", "", write_report(changed, tmp_path / "report.html").read_text())
    assert f"Selection: {says}" in text


@pytest.mark.parametrize(
    ("place", "hybrid"),
    [
        ("closed_book", {"accuracy": 0.1, "low": 0.06, "high": 0.15}),  # below chance, which the base is not
        ("closed_book", {"accuracy": 0.25, "low": 0.2, "high": 0.31, "generated": {"accuracy": 0.2, "n": 200}}),
        ("pairs", {"accuracy": 0.25, "low": 0.2, "high": 0.31}),  # KV-retrieval under a name of its own
    ],
)
def test_a_task_is_shown_if_an_arm_is_not_at_chance(place: str, hybrid: dict[str, Any]) -> None:
    base = {"accuracy": 0.25, "low": 0.2, "high": 0.31, "n": 200, "chance": 0.25}
    arms = {"hybrid": {place: {**base, **hybrid}}, "base": {place: base}}
    found = rows_of(arms, {"pairs": "kv_retrieval"})
    assert found.shown[0][0] == (place,) and not found.at_chance


def test_a_p_value_too_small_for_a_float_is_no_zero() -> None:
    assert (p_text(0.0), p_text(0.0123), p_text(1.0)) == ("below 1e-300", "0.012", "1")


@pytest.mark.parametrize("number", ["0.411", "0.422", "0.833", "2.411", "2.833", "torch 2.x", "Seed 3"])
def test_every_number_is_there(page: str, number: str) -> None:
    assert number in page


def test_nothing_is_asked_of_the_network_and_nothing_runs(page: str) -> None:
    assert "<script" not in page and "default-src &#x27;none&#x27;" not in page
    assert re.findall(r'src="(?!data:)|href="(?!#)|url\(', page) == []
    assert "default-src 'none'" in page


def test_what_was_not_measured_is_left_out(page: str, tmp_path: Path) -> None:
    assert "Cost at inference" not in page and "Gap closed" not in page and "Attention of the new heads" not in page
    more = {"efficiency": {"arms": {"base": COSTS["base"], "hybrid": COSTS["hybrid"]}}}
    with_costs = write_report(inputs(tmp_path / "figures", **more), tmp_path / "costs.html").read_text()
    assert "Cost at inference" in with_costs and "1.00x" in with_costs


def test_contrasts_and_the_gap_are_shown(tmp_path: Path) -> None:
    row = {"difference": 0.411, "low": 0.3, "high": 0.5, "p_two_sided": 1e-9, "significant": True}
    gaps = {"kv_retrieval/8": {"value": 0.75, "low": 0.5, "high": 0.9, "n": 9}}
    gaps["kv_retrieval/64"] = {"value": None, "reason": "the teacher is not above the control"}
    more = {"comparisons": {"hybrid": {"no_splice": {"kv_retrieval/8": row, "closed_book": row}}}, "gap_closed": gaps}
    page = write_report(inputs(tmp_path / "figures", **more), tmp_path / "report.html").read_text()
    assert "minus control" in page and "+41.1 [+30.0, +50.0]" in page and "<td>1e-09 *</td>" in page
    assert "0.75 [0.50, 0.90]" in page and "not computed: the teacher is not above the control" in page


def test_a_prompt_that_the_hybrid_answers_and_every_setting_are_shown(tmp_path: Path) -> None:
    """A row of the user's data comes first. Set keys are shown, and all keys are folded."""
    example = {"prompt": f"a: 1\n{HOSTILE}", "wanted": "42", "generated": {"base": "17", "hybrid": "42"}}
    for more in ({"example": example}, {"held_out_examples": {"rows": [{**example, "wanted": "no"}, example]}}):
        page = write_report(inputs(tmp_path / "figures", **more), tmp_path / "report.html").read_text()
        section = page.split('<section id="example">')[1].split("</section>")[0]
        assert "<script" not in page and "<pre>a: 1\n&lt;script&gt;" in section and "<code>42</code>" in section
        assert re.findall(r'row">(.*?)</th><td>(.*?)</td>', section) == [("hybrid", "42"), ("base", "17")]
    shown, folded = page.split('<section id="recipe">')[1].split("<details>")
    assert "steps: 7" in shown and "batch_size" not in shown and "batch_size" in folded
    assert 'id="example"' not in write_report(inputs(tmp_path / "figures"), tmp_path / "r.html").read_text()


def test_the_same_values_give_the_same_bytes(tmp_path: Path) -> None:
    pages = [write_report(inputs(tmp_path / "figures"), tmp_path / name) for name in ("a.html", "b.html")]
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    given = inputs(tmp_path / "figures")
    given.results["arms"]["hybrid"]["held_out"] = {HOSTILE: share(0.5)}
    given.results["arms"]["base"]["held_out"] = {HOSTILE: share(0.4)}
    page = write_report(given, tmp_path / "report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    header = page.split("</header>")[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;&#39;&#34;, held-out rows, exact match" in header


def with_own_data(folder: Path, **more: Any) -> ReportInputs:
    rows = [
        {"prompt": f"{HOSTILE}\n" + "x" * 500 + "who?\n", "wanted": f" {HOSTILE}",
         "generated": {"base": "\x1b[31m\u202e", "hybrid_heads_off": "unseen", "hybrid": "y" * 500 + "end"}}
    ]  # fmt: skip
    given = inputs(folder, held_out_examples={HOSTILE: rows}, **more)
    for value in given.results["arms"].values():
        value["held_out"] = {
            HOSTILE: {**share(0.0), "first_token": share(0.25), "loss": {"nats": 1.2345, "tokens": 99}}
        }
    return given


def test_wanted_and_generated_text_are_shown_side_by_side(tmp_path: Path) -> None:
    """Escaped, in one line, and cut in the middle."""
    page = write_report(with_own_data(tmp_path / "figures"), tmp_path / "report.html").read_text()
    section = page.split("<h2>Your data</h2>")[1].split("</section>")[0]
    assert "<script" not in page and "&lt;script&gt;alert(1)" in section
    assert "\x1b" not in page and "\u202e" not in page and "\\x1b[31m\\u202e" in section
    assert (
        "xxx ... xxx" in section and "who?\\n</th>" in section and "yyy ... yyy" in section and "yend</td>" in section
    )
    assert all(len(cell) < 200 for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", section))
    assert "unseen" not in section and '<th scope="col">hybrid</th>' in section


def test_first_token_and_loss_stand_beside_exact_match(tmp_path: Path) -> None:
    page = write_report(with_own_data(tmp_path / "figures"), tmp_path / "report.html").read_text()
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', page.split("<h2>All measurements</h2>")[1])
    cells = {name.split("held-out rows, ")[1]: value for name, value in rows if "held-out rows, " in name}
    assert rows[0][0].endswith("held-out rows, exact match"), "the user's data is the first row"
    assert cells == {
        "exact match": "0.000 [-0.050, 0.050]",
        "first token": "0.250 [0.200, 0.300]",
        "loss in nats per answer token": "1.234",
    }
    tiles = page.split("</dl>")[0]
    assert "held-out rows, exact match" in tiles and "first token" not in tiles


def test_advice_and_counts_are_shown_and_escaped(tmp_path: Path) -> None:
    more = {
        "answer_spans": {HOSTILE: {"found": 11, "ambiguous": 22, "missing": 33, "marked": 44}, "y": NONE},
    }
    page = write_report(with_own_data(tmp_path / "figures", **more), tmp_path / "report.html").read_text()
    assert "<script" not in page and "no model generates any of the 100 held-out" in page.split("</header>")[0]
    assert "ambiguous: 22, missing: 33, found: 11, marked in the data: 44" in page
    assert "(first 1000 rows of the stream). No row supervises the attention" in page


NONE = {"found": 0, "ambiguous": 5, "missing": 6, "first_rows": 1000}


def test_a_run_without_own_data_has_no_such_section(page: str) -> None:
    assert "Your data" not in page and "answer_span" not in page
