"""YAML within limits: nothing nests, expands or grows without end, and every fault is one line that names the file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from surgery.errors import RecipeError
from surgery.recipe import AnalysisRecipe, PretrainRecipe, Recipe, check_recipe, to_yaml
from surgery.recipe.yaml import apply, load_yaml, read_mapping
from tests.support.cases import each


def laughs(levels: int, width: int = 10) -> str:
    """Billion laughs: every line is a list of aliases to the line before."""
    lines = ["a0: &a0 lol"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


HOSTILE = {
    "flow lists": "a: " + "[" * 100_000,
    "flow mappings": "a: " + "{b: " * 20_000,
    "closed lists": "a: " + "[" * 5_000 + "]" * 5_000,
    "block lists": "a:\n" + "- " * 20_000,
    "block mappings": "\n".join(" " * i + f"k{i}:" for i in range(1_000)),
    "laughs": laughs(30),
    "laughs in merges": "a: &a {x: 1}\n" + "\n".join(f"b{i}: &a {{<<: [{', '.join(['*a'] * 9)}]}}" for i in range(30)),
    "an alias in itself": "a: &a [*a]",
    "an alias in its mapping": "a: &a {b: *a}",
    "an unknown alias": "a: *b",
    "many values": "a: [" + "1, " * 30_000 + "]",
    "a long file": "a: " + "x" * 2**21,
    "digits": "a: " + "9" * 100_000,
    "hexadecimal digits": "seed: 0x" + "f" * 100_000,
    "sexagesimal digits": "seed: " + ":".join(["59"] * 10_000),
    "a tag that runs": "a: !!python/object/apply:os.system [echo]",
    "a tag of nobody": "a: !mine x",
    "an empty integer": 'a: !!int ""',
    "a boolean that is none": "a: !!bool perhaps",
    "a float that is none": "a: !!float x",
    "a time that is none": "a: !!timestamp x",
    "a date that is none": "a: 2020-99-99",
    "base64 that is none": "a: !!binary é",
    "a value token": "a: =",
    "a key that is a list": "? [a]\n: b",
    "a key that is a mapping": "{{a: b}: c}",
    "a merge of a number": "a: {<<: 3}",
    "a null byte": "a: \0",
    "a control character": "a: \x1b[31m",
    "two documents": "a: 1\n---\nb: 2",
    "a directive": "%YAML 9.9\n---\na: 1",
}
NO_MAPPING = ("", "\ufeff", "3", "- a", "null", "1e999", "!!set {a}", "!!binary aGk=")


def assert_refused(path: Path) -> RecipeError:
    began = time.perf_counter()
    with pytest.raises(RecipeError) as caught:
        check_recipe(read_mapping(path), Recipe)
    assert time.perf_counter() - began < 5
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return caught.value


@each("name", list(HOSTILE))
def test_a_hostile_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(HOSTILE[name], encoding="utf-8")
    assert_refused(path)


@each("name", sorted(set(HOSTILE) - {"two documents", "a directive"}))
def test_a_hostile_override_is_refused_at_once(name: str) -> None:
    text = (
        HOSTILE[name].partition(": ")[2] if "\n" not in HOSTILE[name] else "{" + HOSTILE[name].replace("\n", ",") + "}"
    )
    began = time.perf_counter()
    with pytest.raises(RecipeError):
        data = {"name": "x"}
        apply(data, f"seed={text}")
        check_recipe(data, Recipe)
    assert time.perf_counter() - began < 5


def test_what_yaml_reads_otherwise_than_it_looks_is_refused_and_quoted_is_text(tmp_path: Path) -> None:
    """Numbers of base 8 and 60, dates, and words for true and false."""
    path = tmp_path / "recipe.yaml"
    read_as = {"another number. Write a decimal number": ("0100", "-010", "1:30", "1:30.5", "0_7"),
               "a date. Put it in quotes": ("2026-01-01", "2026-1-1 10:00:00", "2026-99-99 10:00:00"),
               "true or false. Write true or false": ("yes", "No", "ON", "off")}  # fmt: skip
    for words, values in read_as.items():
        for value in values:
            path.write_text(f"name: x\nseed: {value}\n")
            assert f"line 2: {value}, which YAML reads as {words}" in str(assert_refused(path))
            with pytest.raises(RecipeError, match=f"which YAML reads as {words.replace('.', '[)].')}"):
                apply({"name": "x"}, f"name={value}")
            path.write_text(f"name: '{value}'\nseed: [0, 10, 0x10, 0.5, 00.5, 1e-3, 08, true, False]\n")
            assert read_mapping(path) == {"name": value, "seed": [0, 10, 16, 0.5, 0.5, 1e-3, "08", True, False]}
            assert load_yaml(to_yaml(Recipe(name="x", base={"model": value})))["base"]["model"] == value


@each("text", NO_MAPPING)
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    assert "mapping" in assert_refused(path).hint


@each(
    "content",
    ["name: é".encode("latin-1"), "name: x".encode("utf-16"), b"\xff\xfe\xfd", b"PK\x03\x04", bytes(range(256))],
)
def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert str(path) in str(assert_refused(path))


@each("key", ["1", "null", "true", "2020-01-01", "1.5", ".nan", "!!binary aGk="])
def test_keys_that_are_no_words_are_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{key}: 1\nname: x\n")
    assert_refused(path)


def test_a_key_of_many_parts_is_refused() -> None:
    with pytest.raises(RecipeError, match="parts"):
        apply({}, f"{'a.' * 100_000}b=1")
    with pytest.raises(RecipeError, match=r"is not an index of this list\. Use 0 to 0"):
        apply({"a": [1]}, f"a.{'9' * 5_000}=1")


@each("kind", [Recipe, PretrainRecipe, AnalysisRecipe])
@each("value", [None, [], 3, float("nan"), 10**400, "x" * 10**5, {1: {2: 3}}, [[[]]], True, "\ud800"])
def test_a_value_of_any_type_anywhere_is_one_line(kind: type[Recipe], value: object) -> None:
    shared = set(Recipe.model_fields) if kind is not Recipe else set()  # checked once
    for field in {*kind.model_fields, "unknown"} - shared:
        with pytest.raises(RecipeError) as caught:
            check_recipe({field: value}, kind)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


def integers(schema: object, name: str = "") -> list[tuple[str, dict[str, object]]]:
    """Every integer of a JSON schema, by the name of its field."""
    if isinstance(schema, list):
        return [found for part in schema for found in integers(part, name)]
    if not isinstance(schema, dict):
        return []
    own = [(name, schema)] if schema.get("type") == "integer" else []
    return own + [f for key, part in schema.items() for f in integers(part, name if key in _PARTS else str(key))]


_PARTS = ("anyOf", "items", "prefixItems", "properties", "additionalProperties")


@each("kind", [Recipe, PretrainRecipe, AnalysisRecipe])
def test_every_number_of_things_has_a_largest(kind: type[Recipe]) -> None:
    found = integers(kind.model_json_schema())
    assert len(found) > 20
    unbounded = {name for name, part in found if not {"maximum", "exclusiveMaximum", "enum", "const"} & set(part)}
    places = {"offsets", "layers", "layer", "drop", "keep_in", "teacher_layer"}  # checked against the model
    assert unbounded <= places
