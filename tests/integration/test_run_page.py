"""The page about a finished run in a real browser, at two widths: every figure is drawn, and nothing is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

WIDTHS = {"narrow": 400, "wide": 1400}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_finished_run_is_told_on_one_page(browser: Any, finished: Path, width: str) -> None:
    path = finished / "report.html"
    page = browser.new_page(viewport={"width": WIDTHS[width], "height": 900})
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url[:40]))
    page.goto(path.as_uri())
    assert complaints == [] and [url for url in asked if not url.startswith("data:")] == [path.as_uri()[:40]]
    drawn = page.locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
    assert len(drawn) >= 4 and min(drawn) > 100
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
    assert page.locator(".verdict").count() == 1 and page.locator(".tiles > div").count() == 4
    columns = len(
        {
            box["y"]
            for box in page.locator(".tiles > div").evaluate_all("d => d.map(x => x.getBoundingClientRect().toJSON())")
        }
    )
    assert columns == (2 if width == "narrow" else 1), "rows of tiles"
    scrolled = page.locator("#measurements .scroll").evaluate("d => (d.scrollLeft = 50, d.scrollLeft)")
    assert scrolled == (50 if width == "narrow" else 0), "wide tables scroll inside their box"
    page.locator("nav a", has_text="All measurements").click()
    assert page.url.endswith("#measurements")
    linked = page.locator("nav a:not([href^='#'])").evaluate_all("links => links.map(a => a.getAttribute('href'))")
    assert "locate.html" in linked and all((finished / name).is_file() for name in linked)
    headings = page.locator("h2").all_inner_texts()
    assert [h for h in headings if h != "One prompt"][:3] == ["Retrieval", "All measurements", "Spliced heads"]
    page.close()
