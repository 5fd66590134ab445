"""Both pages in a real browser, at two widths: they ask the network for nothing, and the page of the heads sorts,
filters and opens heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surgery.report.figures.heatmaps import panel_columns
from surgery.report.heads_page import write_page
from surgery.types import HeadSet, ScoredGroup
from tests.support.reports import HOSTILE, head_set, prompt

WIDTHS = {"narrow": 400, "wide": 1400}


def heads() -> HeadSet:
    """Twelve heads, of which two are chosen; one was hardly measured."""
    found = head_set(3, 4)
    dropped = replace(found.heads[-1], role="unmeasured", reads=None, scores={"query": found.heads[0].scores["query"]})
    pair = ScoredGroup("pair", (found.heads[0].head, found.heads[5].head), {"ablation": found.heads[0].scores["query"]})
    return replace(found, heads=(*found.heads[:-1], dropped), groups=(pair,))


@contextmanager
def opened_at(browser: Any, width: str, path: Path) -> Iterator[Any]:
    """A page opened from a file; whatever it complains of, and whatever it asks for, is kept beside it."""
    page = browser.new_page(viewport={"width": WIDTHS[width], "height": 900})
    page.complaints, page.requests = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (page.complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda asked: page.requests.append(asked.url))
    page.goto(path.as_uri())
    yield page
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith("data:")] == [path.as_uri()]
    page.close()


@pytest.fixture(params=WIDTHS, scope="module")
def opened(request: pytest.FixtureRequest, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = heads()
    rows = tuple(prompt(found, (*HOSTILE, *("key", ":", "7", "\n") * 20, tail), 2, i) for i, tail in enumerate("ab"))
    path = write_page(found, rows, tmp_path_factory.mktemp("page") / "locate.html")
    with opened_at(browser, request.param, path) as page:
        yield page


@pytest.fixture
def page(opened: Any) -> Any:
    """The page without the last test's head."""
    opened.evaluate("history.replaceState(null, '', location.pathname)")
    opened.reload()
    opened.requests[:] = opened.requests[:1]  # but for the reload itself
    return opened


def names(page: Any) -> list[str]:
    """The heads of the table, from above."""
    found: list[str] = page.locator("#table tbody tr").evaluate_all("rows => rows.map(row => row.dataset.head)")
    return found


def by_score(column: str, down: bool) -> list[str]:
    """As the table has to stand; heads without the score at the end."""
    sign = -1 if down else 1
    measured = [s for s in heads().heads if column in s.scores]
    rest = [str(s.head) for s in heads().heads if column not in s.scores]
    return [str(s.head) for s in sorted(measured, key=lambda s: sign * s.scores[column].value)] + rest


def inked(page: Any, canvas: str) -> int:
    """How many different colours a canvas shows."""
    code = "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    found: int = page.locator(canvas).evaluate(code)
    return found


def test_opens_with_the_chosen_head_and_fits_its_width(page: Any) -> None:
    assert page.locator("#head-title").inner_text() == str(heads().chosen[0].head)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("#map button").count() == 12 and page.locator("#map button.chosen").count() == 2
    assert page.locator("#map button[aria-current=true]").get_attribute("data-head") == str(heads().chosen[0].head)
    assert names(page) == [str(s.head) for s in heads().heads]
    assert page.locator("#group-table tbody tr").count() == 1


@pytest.mark.parametrize("column", ["query", "segment_end"])
def test_a_column_sorts_and_a_second_press_reverses(page: Any, column: str) -> None:
    header = page.locator(f"#table th:has([data-key={column}])")
    assert header.get_attribute("aria-sort") == "none"
    for order in ("descending", "ascending", "descending"):
        page.locator(f"#table [data-key={column}]").click()
        assert header.get_attribute("aria-sort") == order
        assert names(page) == by_score(column, down=order == "descending")
    assert page.locator("#column").evaluate("s => s.selectedOptions[0].textContent") == column.replace("_", " ")
    page.locator("#table [data-key=name]").click()
    assert names(page) == sorted(names(page)) and page.locator("#table th[aria-sort=ascending]").count() == 1


def test_filters_by_role_and_by_name(page: Any) -> None:
    for role in ("gather", "aggregate", "both", "neither", "unmeasured"):
        page.locator(f"#roles [data-role={role}]").click()
        assert names(page) == [str(s.head) for s in heads().heads if s.role == role] != []
        assert page.locator("#roles [aria-pressed=true]").get_attribute("data-role") == role
    page.locator("#roles [data-role=chosen]").click()
    assert set(names(page)) == {str(s.head) for s in heads().chosen}
    page.locator("#roles [data-role=all]").click()
    page.locator("#find").fill("l1")
    assert names(page) == [str(s.head) for s in heads().heads if s.head.layer == 1]
    assert page.locator("#count").inner_text() == "4 of 12 heads"


@pytest.mark.parametrize("where", ["#map [data-head=L0H0]", "#table tr[data-head=L0H0] button"])
def test_opens_a_head(page: Any, where: str) -> None:
    page.locator(where).click()
    assert page.locator("#head-title").inner_text() == "L0H0" and page.url.endswith("#L0H0")
    assert page.locator("#table tr.open").get_attribute("data-head") == "L0H0"
    assert page.locator("#head-scores .dot").count() == len(panel_columns(heads())), "one for each score"
    said = page.locator("#head-scores").inner_text()
    score = heads().heads[0].scores["query"]
    assert f"{score.value:.2f} [{score.low:.2f}, {score.high:.2f}]" in said.replace("−", "-").replace("\n", " ")
    boxes = page.locator("#head-scores .dot").evaluate_all(
        "dots => dots.map(d => [d.offsetLeft, d.parentElement.offsetWidth])"
    )
    assert all(-6 <= left <= width for left, width in boxes), "every dot lies in its plot"
    assert inked(page, "#bars") > 5 and inked(page, "#matrix") > 20
    page.locator("#map [data-head=L2H2]").click()
    assert not page.locator("#matrix").is_visible() and "L0H0" in page.locator("#matrix-note").inner_text()


def test_shows_the_prompt_as_text_with_its_marks(page: Any) -> None:
    tokens = page.locator("#tokens > span")
    assert tokens.count() == len(HOSTILE) + 81
    assert tokens.all_inner_texts()[:2] == list(HOSTILE[:2]) and page.locator("#tokens script").count() == 0
    assert page.locator("#tokens .mark").count() == 3
    tints = tokens.evaluate_all(
        "spans => spans.map(s => Number(getComputedStyle(s).backgroundColor.match(/[\\d.]+\\)$/)[0].slice(0, -1)))"
    )
    row = prompt(heads(), (*HOSTILE, *("key", ":", "7", "\n") * 20, "a"), 2, 0).rows[str(heads().chosen[0].head)]
    assert max(range(len(tints)), key=tints.__getitem__) == row.argmax(), "the darkest token is read most"
    first = page.locator("#most").inner_text()
    page.get_by_role("button", name="Prompt 2").click()
    assert page.locator("#most").inner_text() != first


def test_goes_by_keyboard(page: Any) -> None:
    page.locator("#map [data-head=L0H0]").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert page.locator("#head-title").inner_text() == "L1H1"
    assert page.locator("#map button[tabindex='0']").count() == 1, "one stop for the tab key"
    page.locator("#table [data-key=query]").focus()
    page.keyboard.press("Enter")
    assert names(page) == by_score("query", down=True)
    assert page.evaluate("document.activeElement.dataset.key") == "query"
    page.locator("#map [data-head=L0H0]").click()
    page.locator("#matrix").focus()
    before = page.locator("#matrix-at").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("#matrix-at").inner_text() != before


@pytest.mark.parametrize("width", WIDTHS)
def test_a_finished_run_is_told_on_one_page(browser: Any, finished: Path, width: str) -> None:
    with opened_at(browser, width, finished / "report.html") as page:
        drawn = page.locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
        assert len(drawn) >= 4 and min(drawn) > 100
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
        assert page.locator(".verdict").count() == 1 and page.locator(".tiles > div").count() == 4
        tops = page.locator(".tiles > div").evaluate_all("d => d.map(x => x.getBoundingClientRect().y)")
        assert len(set(tops)) == (2 if width == "narrow" else 1), "rows of tiles"
        scrolled = page.locator("#measurements .scroll").evaluate("d => (d.scrollLeft = 50, d.scrollLeft)")
        assert scrolled == (50 if width == "narrow" else 0), "wide tables scroll inside their box"
        page.locator("nav a", has_text="All measurements").click()
        assert page.url.endswith("#measurements")
        linked = page.locator("nav a:not([href^='#'])").evaluate_all("links => links.map(a => a.getAttribute('href'))")
        assert "locate.html" in linked and all((finished / name).is_file() for name in linked)
        headings = page.locator("h2").all_inner_texts()
        assert [h for h in headings if h != "One prompt"][:3] == ["Retrieval", "All measurements", "Spliced heads"]
