"""Loops over cases: one test that names the case in which it fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import pytest


def each(names: str | tuple[str, ...], values: Iterable[Any], ids: Iterable[str] = ()) -> Callable[[Any], Any]:
    """Decorate a test, or each test of a class, to run for all these values, as one test.

    Each case has a `tmp_path` and a `monkeypatch` of its own; all cases share the other fixtures.

    Args:
        names: names of the arguments, separated by commas, or a tuple of them.
        values: a value for each case, as `pytest.mark.parametrize` takes them: a tuple where there are several
            arguments. A mapping has the names of the cases as keys.
        ids: names of the cases otherwise.
    """
    arguments = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    if isinstance(values, Mapping):
        ids, values = values.keys(), values.values()
    cases, labels = list(values), list(ids)

    def decorate(test: Any) -> Any:
        if isinstance(test, type):
            for name, function in list(vars(test).items()):
                if name.startswith("test"):
                    setattr(test, name, decorate(function))
            return test

        @functools.wraps(test)
        def run_all(*args: Any, **fixtures: Any) -> None:
            for number, case in enumerate(cases):
                given = dict(zip(arguments, case if len(arguments) > 1 else (case,), strict=True))
                with ExitStack() as stack:
                    if "tmp_path" in fixtures:
                        given["tmp_path"] = fixtures["tmp_path"] / str(number)
                        given["tmp_path"].mkdir()
                    if "monkeypatch" in fixtures:
                        given["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
                    try:
                        test(*args, **{**fixtures, **given})
                    except Exception as error:
                        error.add_note(f"case: {labels[number] if labels else given}")
                        raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        run_all.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run_all

    return decorate
