"""Errors of YAML: file, line, what is wrong, and what to write. None of PyYAML's own wording."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgery.errors import RecipeError
from surgery.recipe.yaml import apply, read_mapping
from tests.support.cases import each

FAULTS = {
    "a:\n\tb: 1": ("line 2", "a tab", "Indent with spaces"),
    "a: 1\nb: [1, 2\nc: 3": ("line 2", "without a comma between its entries or `]`"),
    "a: {b: 1": ("line 1", "`}`"),
    "a: b: c": ("line 1", "a colon", "`key: value`", "quotes"),
    "a: 1\nb: 'x": ("line 2", "a quotation mark", "at the end"),
    "a: @x": ("line 1", "begins with @", "quotes"),
    "a: *x": ("line 1", "begins with *", "quotes"),
    "a: !x 3": ("line 1", "a tag", "Remove it"),
    'a: "\\q"': ("line 1", "a backslash", "single quotes"),
    "a: 'it's'": ("line 1", "text after the end", "quotes"),
    "a:\n  b: 1\n c: 2": ("line 3", "indented", "alike"),
    "a: 1\n---\nb: 2": ("line 2", "a second document", "Keep one"),
    "a: 1\nb: 0100": ("line 2", "0100", "another number", "Write a decimal number, or text in quotes"),
    "a: 1\na: 2": ("line 2", "duplicate key 'a'", "Keep one"),
    "a: \x00": ("U+0000", "Remove it"),
}


@each("text", list(FAULTS))
def test_the_error_names_file_and_line_and_what_to_write(tmp_path: Path, text: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_mapping(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and all(words in message for words in FAULTS[text])
    for leak in ("Error", "unicode string", "scanning", "parsing", "flow", "block"):
        assert leak not in message.removeprefix(str(path))


def test_an_override_has_no_line_and_keeps_its_value() -> None:
    with pytest.raises(RecipeError) as caught:
        apply({}, "seed=0100")
    number = "0100, which YAML reads as another number"
    assert str(caught.value) == f"override: 'seed=0100' ({number}). Write a decimal number, or text in quotes."
    with pytest.raises(RecipeError, match=r"\(a list or .*\)\. The part after = is not valid YAML\. Add it\."):
        apply({}, "train.stages=[1")
