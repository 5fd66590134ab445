"""Read YAML mappings and `key.path=value` overrides, with limits on size, depth and alias expansion."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import RecipeError, reading

_BYTES = 2**20  # of a file or an override
_DEPTH = 50  # of lists and mappings, and parts of a dotted key
_NODES = 20_000  # values and keys, with aliases expanded
_SURROGATES = re.compile("[\ud800-\udfff]")
_CORE = "tag:yaml.org,2002:"
_KINDS = {"null", "bool", "int", "float", "str", "timestamp", "seq", "map", "merge"}
_TAG = ("a tag, such as `!name`", "Remove it, or put text that begins with ! in quotes.")
# Values that YAML 1.1 reads otherwise than most users mean them: 0100 is 64, 1:30 is 90, `on` is true.
_READ_OTHERWISE = {
    "int": (re.compile(r"[-+]?0[0-9_]|.*:"), "another number", "Write a decimal number, or text in quotes."),
    "float": (re.compile(".*:"), "another number", "Write a decimal number, or text in quotes."),
    "bool": (re.compile("(?!(?i:true|false)$)"), "true or false", "Write true or false, or text in quotes."),
    "timestamp": (re.compile(""), "a date", "Put it in quotes."),
}
# Patterns in PyYAML's messages, what is wrong, and what to write. `{0}` is the first group.
_FAULTS = (
    (r"character '\\t'", "a tab before or between keys and values", "Indent with spaces."),
    (r"character '(.+)' that cannot start", "a value that begins with {0}", "Put it in quotes."),
    (r"mapping values are not allowed", "a colon that does not follow a key", "Write one `key: value` on a line, and "
     "text with a colon in quotes."),
    (r"expected ',' or '(.)'", "a list or section in brackets without a comma between its entries or `{0}` at its end",
     "Add it."),
    (r"found unexpected end of stream", "a quotation mark without a second one", "Add it at the end of the text."),
    (r"could not find expected ':'", "a line without a colon", "Write `key: value`."),
    (r"unknown escape character", "a backslash in double quotes", "Use single quotes."),
    (r"expected <block end>, but found '(.scalar.|[]}}])'", "text after the end of a value", "Remove it, or put the "
     "whole value in quotes."),
    (r"expected <block end>", "a line that is indented neither like the others of its section nor as their value",
     "Indent all keys of a section, and all entries of a list, alike."),
    (r"undefined alias", "a value that begins with *", "Put it in quotes."),
    (r"tag handle", *_TAG),
    (r"found another document", "a second document, after `---`", "Keep one."),
)  # fmt: skip
_FROM_ITS_BEGINNING = re.compile("flow|quoted|simple key")  # contexts whose first line is the one to correct


class _RecipeLoader(yaml.SafeLoader):
    """YAML's safe loader, within the limits. Refuses duplicate keys, tags, and what is read otherwise than meant."""

    def construct_document(self, node: yaml.Node) -> Any:
        self._check(node)
        return super().construct_document(node)  # type: ignore[no-untyped-call]

    def _check(self, node: yaml.Node, depth: int = 0) -> int:
        """Return the number of values and keys in a node, with aliases expanded."""
        if depth > _DEPTH:
            raise ValueError(f"more than {_DEPTH} levels")
        kind = node.tag.removeprefix(_CORE)
        if kind not in _KINDS:
            raise _fault(node, *_TAG)
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node, kind)
            return 1
        number, keys = 1, set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise _fault(key, "a key that is a list or a section", "Use a word as the key.")
            if (key.tag, key.value) in keys and key.tag != f"{_CORE}merge":
                raise _fault(key, f"duplicate key {key.value!r}", "Keep one of them.")
            keys.add((key.tag, key.value))
        for part in node.value:
            for inner in part if isinstance(part, tuple) else (part,):
                number += self._check(inner, depth + 1)
                if number > _NODES:
                    raise ValueError(f"more than {_NODES} values after expanding aliases")
        return number

    def _check_scalar(self, node: yaml.ScalarNode, kind: str) -> None:
        pattern, what, instead = _READ_OTHERWISE.get(kind, (None, "", ""))
        if pattern is not None and pattern.match(node.value):
            raise _fault(node, f"{node.value[:40]}, which YAML reads as {what}", instead)
        if kind == "int" and self.construct_yaml_int(node).bit_length() > 64:  # type: ignore[no-untyped-call]
            raise ValueError("an integer of more than 64 bits")
        if _SURROGATES.search(node.value):
            raise ValueError("an unpaired surrogate, which is not text")


# YAML 1.1 reads 1e-3 as a string. Read it as a number.
_RecipeLoader.add_implicit_resolver(
    f"{_CORE}float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _fault(node: yaml.Node, problem: str, instead: str) -> yaml.MarkedYAMLError:
    """Error for valid YAML that a recipe does not take. `_explained` keeps its words."""
    return yaml.MarkedYAMLError(None, None, problem, node.start_mark, instead)


def read_mapping(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a file and apply the overrides. Values of overrides are YAML.

    Raises:
        RecipeError: the file is missing, not YAML or not a mapping, a key is duplicate, or an override does not fit.
    """
    with reading_yaml(str(path), None, "It is not valid YAML."), open(path, "rb") as file:
        data = load_yaml(file.read(_BYTES + 1).decode("utf-8"))
    if not isinstance(data, dict):
        raise RecipeError(str(path), type(data).__name__, "A recipe must be a mapping of keys to values.")
    for override in overrides:
        apply(data, override)
    return data


def apply(data: dict[str, Any], override: str) -> None:
    """Set one `key.path=value` in plain data, in place.

    Raises:
        RecipeError: the override is malformed or its path does not exist.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError("override", repr(override), "Use key.path=value, such as train.steps=100.")
    if not text.strip():
        raise RecipeError(key, "no value", f"Write a value after =, or {key}=null for none.")
    with reading_yaml("override", repr(override)[:200], "The part after = is not valid YAML."):
        value = load_yaml(text)
    *parents, last = key.split(".")
    if len(parents) >= _DEPTH:
        raise RecipeError("override", repr(override)[:200], f"A key can have at most {_DEPTH} parts.")
    node: Any = data
    for part in parents:
        place = _place(node, part, key)
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[place]
    node[_place(node, last, key)] = value


def _place(node: Any, part: str, key: str) -> Any:
    """Resolve one part of a dotted key to the key of a mapping or the index of a list."""
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise RecipeError("override", key, f"{part!r} is inside a scalar. Use a key that exists.")
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(node):
        raise RecipeError("override", key, f"{part!r} is not an index of this list. Use 0 to {len(node) - 1}.")
    return int(part)


def load_yaml(text: str) -> Any:
    """Parse YAML within the limits. Raises the YAML library's errors, so call it inside `reading_yaml`."""
    if len(text.encode(errors="surrogatepass")) > _BYTES:
        raise ValueError(f"more than {_BYTES} bytes")
    return yaml.load(text, _RecipeLoader)  # noqa: S506  (a SafeLoader)


@contextmanager
def reading_yaml(field: str, value: object, hint: str) -> Iterator[None]:
    """Convert any error of parsing YAML inside, as `errors.reading` does. Errors in a file name the line.

    Args:
        field: the file, or the recipe's field.
        value: what the user set there. None for a file.
        hint: what kind of text is required.

    Raises:
        RecipeError: the text inside is not valid.
    """
    with reading(field, value, hint, RecipeError):
        try:
            yield
        except (yaml.MarkedYAMLError, yaml.reader.ReaderError) as error:
            if isinstance(error, yaml.MarkedYAMLError):
                what, instead = _explained(error, hint)
                mark = error.context_mark if _FROM_ITS_BEGINNING.search(error.context or "") else error.problem_mark
                if value is None and mark is not None:
                    field = f"{field}, line {mark.line + 1}"
            else:
                what, instead = f"the character U+{error.character:04X}", f"{hint} Remove it."
            raise RecipeError(field, what if value is None else f"{value} ({what})", instead) from error


def _explained(error: yaml.MarkedYAMLError, hint: str) -> tuple[str, str]:
    """Return what is wrong and what to write. Unknown errors keep PyYAML's description."""
    problem = error.problem or ""
    if error.note is not None:
        return problem, error.note
    for pattern, what, instead in _FAULTS:
        match = re.search(pattern, problem)
        if match is not None:
            return what.format(*match.groups()), f"{hint} {instead}"
    return problem, hint
