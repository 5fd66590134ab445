"""Code from outside this package adds one of each: a test runs the example of every section of docs/EXTENDING.md."""

from __future__ import annotations

import re

import pytest

from tests.integration.conftest import ROOT

HEADINGS = (
    "A probe",
    "An objective",
    "A locating method",
    "A model family",
    "An attention branch",
    "An export format",
)


def block(heading: str, language: str = "python") -> str:
    """The only code block of `language` in a section of docs/EXTENDING.md, without its fences.

    Args:
        heading: the section's title, such as `A probe`.
        language: what stands behind the opening fence.
    """
    return block_in((ROOT / "docs" / "EXTENDING.md").read_text(encoding="utf-8"), heading, language)


def block_in(text: str, heading: str, language: str) -> str:
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.S | re.M))
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", sections[heading], re.S | re.M)
    assert len(blocks) == 1, f"the section '{heading}' has {len(blocks)} blocks of {language}, not one"
    return blocks[0]


def test_the_sections_stand_in_their_order() -> None:
    text = (ROOT / "docs" / "EXTENDING.md").read_text(encoding="utf-8")
    assert [heading for heading in re.findall(r"^## (.+)$", text, re.M) if heading in HEADINGS] == list(HEADINGS)


def test_a_block_is_the_one_under_its_heading() -> None:
    text = "# T\n\n## One\n```python\na = 1\n```\n```yaml\nb: 2\n```\n\n## Two\n```python\nc = 3\n```\n"
    assert block_in(text, "One", "python") == "a = 1\n"
    assert block_in(text, "One", "yaml") == "b: 2\n"
    assert block_in(text, "Two", "python") == "c = 3\n"
    with pytest.raises(AssertionError, match="'Two' has 0 blocks of yaml"):
        block_in(text, "Two", "yaml")
