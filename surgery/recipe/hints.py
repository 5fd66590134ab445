"""Hints for errors of recipes: known keys for an unknown one, and an example where a list or a section is required."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from surgery.recipe.section import Section, section_of

Place = Sequence[str | int]  # parts of a dotted key
Key = tuple[str, ...]  # of the schema, with the index 0 for an entry of a list

# Keys that other tools have, and names that several sections have: the keys that are most likely meant.
_USUAL = {
    "batch_size": ("train.sources.0.rows", "locate.batch_size", "evaluate.batch_size"),
    "data": ("train.sources.0.data", "locate.data"),
    "heads": ("splice.num_heads", "splice.heads"),
    "learning_rate": ("train.optimizer.lr",),
    "lr": ("train.optimizer.lr",),
    "max_steps": ("train.steps",),
    "model": ("base.model",),
    "num_steps": ("train.steps",),
    "warmup_steps": ("train.optimizer.warmup",),
}
_MOST = 3  # proposals
_LONGEST = 100  # characters of a value in an example


def meant(kind: type[Section], place: Place) -> str:
    """Return a question with the known keys for an unknown one, or nothing.

    Besides keys of the same section that differ by a letter or so, a key of the same name anywhere is preferred to one
    that resembles it.

    Args:
        kind: class of the recipe.
        place: of the unknown key.
    """
    *above, last = map(str, place)
    keys = sorted(_keys(kind), key=len)
    section = _without_indices(above)
    siblings = {key[-1]: key for key in keys if _without_indices(key[:-1]) == section}
    close = [siblings[name] for name in get_close_matches(last, siblings, 1, cutoff=0.85)]
    close += _of_this_name(keys, section, last)
    if not close:
        close = [siblings[name] for name in get_close_matches(last, siblings, 2)]
    if not close:
        names = {key[-1]: key for key in reversed(keys)}
        close = [names[name] for name in get_close_matches(last, names, 1, cutoff=0.8)]
    proposals = [".".join(_with_indices(key, above)) for key in close[:_MOST]]
    return f" Did you mean {' or '.join(proposals)}?" if proposals else ""


def _of_this_name(keys: Sequence[Key], section: Key, last: str) -> list[Key]:
    """Return the keys with the name `last`, or that are usually meant by it, in the nearest section that has one."""
    usual = [key for key in (tuple(dotted.split(".")) for dotted in _USUAL.get(last, ())) if key in keys]
    named = [key for key in keys if key[-1] == last]
    shared = {}  # sections above the key that are those of the unknown one
    for key in (*usual, *named):
        pairs = zip(_without_indices(key), section, strict=False)
        shared[key] = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    nearest = [[key for key in group if shared[key] == max(shared.values())] for group in (usual, named)]
    return nearest[0] or [key for key in nearest[1] if len(key) == len(nearest[1][0])]


def _keys(section: type[Section], above: Key = ()) -> Iterator[Key]:
    """List all keys of a section and of those inside it. The index of an entry of a list is 0."""
    for name, field in section.model_fields.items():
        yield (*above, name)
        inner = section_of(section, name)
        if inner is not None:
            yield from _keys(inner, (*above, name, "0") if get_origin(field.annotation) is tuple else (*above, name))


def _without_indices(key: Sequence[str]) -> Key:
    return tuple(part for part in key if not part.isdecimal())


def _with_indices(key: Key, above: Sequence[str]) -> list[str]:
    """Give a key the indices of `above`, as far as both lie in the same sections."""
    parts = list(key)
    for number, (part, other) in enumerate(zip(key, above, strict=False)):
        if part != other and not (part.isdecimal() and other.isdecimal()):
            break
        parts[number] = other
    return parts


def _field_at(kind: type[Section], place: Place) -> tuple[FieldInfo | None, type[Section] | None]:
    """The field at a place or above it, and the class of the section that it holds."""
    field: FieldInfo | None = None
    section: type[Section] | None = kind
    for part in place:
        if isinstance(part, str) and section is not None and part in section.model_fields:
            field, section = section.model_fields[part], section_of(section, part)
    return field, section


def null_at(kind: type[Section], place: Place) -> str:
    """Return `, or null` for a key that may be left out so."""
    field, _ = _field_at(kind, place)
    is_entry = isinstance(place[-1], int)  # of a list, which itself may be null
    return ", or null" if field and not is_entry and type(None) in get_args(field.annotation) else ""


def example_at(kind: type[Section], place: Place, value: Any) -> str:
    """Return an example as `, such as [4, 8]`, or nothing if the schema has none.

    Args:
        kind: class of the recipe.
        place: of a key, or an entry of a list, that requires a list or a section.
        value: its present value. A section that requires one key gets it as the value of that key.
    """
    field, section = _field_at(kind, place)
    if field is None:
        return ""
    example = _example(field, None)
    if section is not None and not _examples(field, field.annotation):
        example = _section_example(section, value)
        example = [example] if get_origin(field.annotation) is tuple else example
    if isinstance(example, list) and isinstance(place[-1], int):
        example = example[0]
    if not isinstance(example, dict | list) or not example:
        return ""
    text = yaml.safe_dump(example, default_flow_style=True, sort_keys=False, width=10**6)
    return f", such as {text.strip()}"


def _section_example(section: type[Section], value: Any) -> dict[str, Any]:
    """The required keys of a section, or its first one. A text is the value of the only required key."""
    required = {name: field for name, field in section.model_fields.items() if field.is_required()}
    if len(required) == 1 and isinstance(value, str) and len(value) <= _LONGEST:
        return dict.fromkeys(required, value)
    optional = {name: field for name, field in section.model_fields.items() if name != "name"}
    fields = required or dict([next(iter(optional.items()))])
    return {name: _example(field, "NAME") for name, field in fields.items()}


def _example(field: FieldInfo, otherwise: Any) -> Any:
    """An example of a key, or its default as plain data; `otherwise` for a required one."""
    examples = _examples(field, field.annotation)
    if examples:
        return examples[0]
    return otherwise if field.is_required() else _plain(field.get_default(call_default_factory=True))


def _examples(*annotations: Any) -> list[Any]:
    """The examples of a field, or of a type inside its annotation."""
    for annotation in annotations:
        found = annotation.examples if isinstance(annotation, FieldInfo) else _examples(*get_args(annotation))
        if found:
            return list(found)
    return []


def _plain(value: Any) -> Any:
    """A default as plain data, of a list the first two entries."""
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_defaults=True)
    return [_plain(entry) for entry in value[:2]] if isinstance(value, tuple) else value
