"""YAML within limits: nothing nests or expands without end, and every fault names file, line and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgery.errors import RecipeError
from surgery.recipe import AnalysisRecipe, PretrainRecipe, Recipe, check_recipe, to_yaml
from surgery.recipe.yaml import apply, load_yaml, read_mapping
from tests.support.cases import each

LAUGHS = "a0: &a0 lol\n" + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30))
HOSTILE = {
    "flow lists": "a: " + "[" * 400,
    "block lists": "a:\n" + "- " * 1_500,
    "closed lists": "a: " + "[" * 80 + "]" * 80,
    "laughs": LAUGHS,
    "an alias in itself": "a: &a [*a]",
    "an alias in its mapping": "a: &a {b: *a}",
    "a long file": "a: " + "x" * 2**21,
    "a long file of two bytes a character": "a: 12\n#" + "é" * 2**20 + "\nb: 2",
    "digits": "a: " + "9" * 100_000,
    "hexadecimal digits": "seed: 0x" + "f" * 100_000,
    "half a character": 'a: "\\ud800"',
    "a boolean that is none": "a: !!bool perhaps",
    "a float that is none": "a: !!float x",
    "a date that is none": "a: 2020-99-99",
    "a value token": "a: =",
    "a key that is a list": "? [a]\n: b",
    "a merge of a number": "a: {<<: 3}",
    "a control character": "a: \x1b[31m",
    "a directive": "%YAML 9.9\n---\na: 1",
    "no mapping": "- a",
    "nothing": "",
    "a set": "a: !!set {b}",
    "bytes": "a: !!binary aGY=",
}
# What is wrong, by line, and what to write.
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


def assert_refused(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        read_mapping(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000 and str(path) in str(caught.value)
    return str(caught.value)


@each("text", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    assert_refused(tmp_path / "recipe.yaml")
    if "\n" not in text and ": " in text:
        with pytest.raises(RecipeError):
            apply({}, f"seed={text.partition(': ')[2]}")


@each("content", ["name: é".encode("latin-1"), "name: x".encode("utf-16"), b"PK\x03\x04", bytes(range(256))])
def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "recipe.yaml").write_bytes(content)
    assert_refused(tmp_path / "recipe.yaml")


@each("text", list(FAULTS))
def test_the_error_names_file_and_line_and_what_to_write(tmp_path: Path, text: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    message = assert_refused(path)
    assert message.startswith(str(path)) and all(words in message for words in FAULTS[text])
    for leak in ("Error", "unicode string", "scanning", "parsing", "flow", "block"):
        assert leak not in message.removeprefix(str(path))


def test_what_yaml_reads_otherwise_than_it_looks_is_refused_and_quoted_is_text(tmp_path: Path) -> None:
    """Numbers of base 8 and 60, dates, and words for true and false."""
    path = tmp_path / "recipe.yaml"
    read_as = {"another number. Write a decimal number": ("0100", "1:30", "1:30.5", "0_7"),
               "a date. Put it in quotes": ("2026-01-01", "2026-99-99 10:00:00"),
               "true or false. Write true or false": ("yes", "No", "ON", "off")}  # fmt: skip
    for words, values in read_as.items():
        for value in values:
            path.write_text(f"name: x\nseed: {value}\n")
            assert f"line 2: {value}, which YAML reads as {words}" in assert_refused(path)
            path.write_text(f"name: '{value}'\nseed: [0, 10, 0x10, 0.5, 00.5, 1e-3, 08, true, False]\n")
            assert read_mapping(path) == {"name": value, "seed": [0, 10, 16, 0.5, 0.5, 1e-3, "08", True, False]}
            assert load_yaml(to_yaml(Recipe(name="x", base={"model": value})))["base"]["model"] == value


def test_an_override_has_no_line_and_keeps_its_value() -> None:
    with pytest.raises(RecipeError) as caught:
        apply({}, "seed=0100")
    number = "0100, which YAML reads as another number"
    assert str(caught.value) == f"override: 'seed=0100' ({number}). Write a decimal number, or text in quotes."
    with pytest.raises(RecipeError, match=r"\(a list or .*\)\. The part after = is not valid YAML\. Add it\."):
        apply({}, "train.stages=[1")
    with pytest.raises(RecipeError, match="parts"):
        apply({}, f"{'a.' * 100_000}b=1")


@each("kind", [Recipe, PretrainRecipe, AnalysisRecipe])
@each("value", [None, [], 3, float("nan"), 10**400, {1: {2: 3}}, [[[]]], True, "\ud800"])
def test_a_value_of_any_type_anywhere_is_one_line(kind: type[Recipe], value: object) -> None:
    shared = set(Recipe.model_fields) if kind is not Recipe else set()  # checked once
    for field in {*kind.model_fields, "unknown"} - shared:
        with pytest.raises(RecipeError) as caught:
            check_recipe({field: value}, kind)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
