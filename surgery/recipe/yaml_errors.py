"""Errors of PyYAML in the words of a recipe: the line, what is wrong, and what to write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from surgery.errors import RecipeError, reading

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
    (r"constructor for the tag|tag handle", "a tag, such as `!name`", "Remove it, or put text that begins with ! in "
     "quotes."),
    (r"found another document", "a second document, after `---`", "Keep one."),
)  # fmt: skip
_FROM_ITS_BEGINNING = re.compile("flow|quoted|simple key")  # contexts whose first line is the one to correct


def fault(mark: yaml.Mark, problem: str, hint: str) -> yaml.MarkedYAMLError:
    """Return an error of the loader.

    Args:
        mark: place in the text.
        problem: what is wrong.
        hint: what to write instead.
    """
    return yaml.MarkedYAMLError(None, None, problem, mark, hint)


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
        except yaml.MarkedYAMLError as error:
            what, instead = _explain(error, hint)
            mark = error.context_mark if _FROM_ITS_BEGINNING.search(error.context or "") else error.problem_mark
            if value is None and mark is not None:
                field = f"{field}, line {mark.line + 1}"
            value = what if value is None else f"{value} ({what})"
            raise RecipeError(field, value, instead) from error
        except yaml.reader.ReaderError as error:
            what = f"the character U+{error.character:04X}"
            raise RecipeError(field, what if value is None else f"{value} ({what})", f"{hint} Remove it.") from error


def _explain(error: yaml.MarkedYAMLError, hint: str) -> tuple[str, str]:
    """Return what is wrong and what to write. Unknown errors keep PyYAML's description."""
    problem = error.problem or ""
    if error.note is not None:  # of `fault`: valid YAML, but refused
        return problem, error.note
    for pattern, what, instead in _FAULTS:
        match = re.search(pattern, problem)
        if match is not None:
            return what.format(*match.groups()), f"{hint} {instead}"
    return problem, hint
