"""One test for many cases: a loop whose failure names the case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def for_each(field: str, cases: Iterable[Any]) -> Callable[[Any], Any]:
    """Run a test, or each test of a class, once for every value of an argument, as one test.

    Args:
        cases: values, or values by name. Each gets a `tmp_path` and a `monkeypatch` of its own.
    """
    named = cases if isinstance(cases, Mapping) else {str(case): case for case in cases}

    def decorate(test: Any) -> Any:
        if isinstance(test, type):
            for name, function in list(vars(test).items()):
                if name.startswith("test"):
                    setattr(test, name, decorate(function))
            return test
        signature = inspect.signature(test)

        @functools.wraps(test)
        def loop(*args: Any, **given: Any) -> None:
            for number, (name, case) in enumerate(named.items()):
                more = {**given, field: case}
                if "tmp_path" in given:
                    more["tmp_path"] = given["tmp_path"] / str(number)
                    more["tmp_path"].mkdir()
                try:
                    if "monkeypatch" in given:
                        with given["monkeypatch"].context() as more["monkeypatch"]:
                            test(*args, **more)
                    else:
                        test(*args, **more)
                except BaseException as error:
                    error.add_note(f"{field}: {name}")
                    raise

        kept = [p for name, p in signature.parameters.items() if name != field]
        loop.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return loop

    return decorate
