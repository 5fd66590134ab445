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
    headings = page.locator("h2").all_inner_texts()
    assert headings[:3] == ["Retrieval", "All measurements", "Spliced heads"]
    page.close()
