"""Old import paths of 0.1.0 work, warn, and name the new ones."""

from __future__ import annotations

import importlib
import sys
from importlib import import_module
from pathlib import Path

import pytest

import surgery
from surgery.deprecated import MOVED
from tests.support.processes import stock

PACKAGE = Path(surgery.__file__).parent


def renamed(path: Path) -> str:
    """`surgery/locate/scores.py` -> `surgery.locate.scores`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_warns_and_leads_to_the_new_module(old: str) -> None:
    sys.modules.pop(f"surgery.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"surgery\.{old} has moved to surgery\.{MOVED[old]}; .* removed in"):
        stand_in = import_module(f"surgery.{old}")
    new = import_module(f"surgery.{MOVED[old]}")
    names = [name for name in vars(new) if not name.startswith("__")]
    assert names and all(getattr(stand_in, name) is getattr(new, name) for name in names)
    assert new.__spec__ is not None and new.__spec__.name == f"surgery.{MOVED[old]}"  # the new module is left as it is


def test_no_old_path_hides_a_module() -> None:
    modules = {renamed(path).removeprefix("surgery.") for path in PACKAGE.rglob("*.py")}
    assert not modules & set(MOVED) and set(MOVED.values()) <= modules


@pytest.mark.parametrize(
    ("old", "module", "new"),
    [
        ("locate", "locating", "locate_heads"),
        ("splice", "graft", "splice_model"),
        ("train", "training", "train_model"),
        ("evaluate", "evaluation", "evaluate_model"),
        ("export", "folder", "export_model"),
    ],
)
class TestPackagesThatWereFunctions:
    def test_calling_one_warns_and_calls_the_function(
        self, monkeypatch: pytest.MonkeyPatch, old: str, module: str, new: str
    ) -> None:
        home = import_module(f"surgery.{old}.{module}")
        monkeypatch.setattr(home, new, lambda *args, **kwargs: (args, kwargs))
        with pytest.warns(DeprecationWarning, match=rf"surgery\.{old}\(\) has moved to surgery\.{new}\(\)"):
            assert getattr(surgery, old)(1, two=2) == ((1,), {"two": 2})

    def test_the_old_name_is_found_in_the_package(self, old: str, module: str, new: str) -> None:
        home = import_module(f"surgery.{old}.{module}")
        with pytest.warns(DeprecationWarning, match=rf"surgery\.{old}\.{old} has moved"):
            assert getattr(import_module(f"surgery.{old}"), old) is getattr(home, new)

    def test_the_new_name_is_public(self, recwarn: pytest.WarningsRecorder, old: str, module: str, new: str) -> None:
        assert getattr(surgery, new) is getattr(import_module(f"surgery.{old}.{module}"), new)
        assert not [w for w in recwarn if issubclass(w.category, DeprecationWarning) and "surgery" in str(w.message)]

    def test_what_is_nowhere_is_an_error(self, old: str, module: str, new: str) -> None:
        with pytest.raises(AttributeError, match=f"surgery.{old}.* has no attribute 'nothing_of_the_sort'"):
            _ = import_module(f"surgery.{old}").nothing_of_the_sort


def test_a_submodule_comes_before_an_old_attribute() -> None:
    """`evaluate.compare` was a function and is a module now."""
    assert importlib.import_module("surgery.evaluate.compare").__name__ == "surgery.evaluate.compare"


def test_every_name_of_the_api_exists() -> None:
    for name in surgery.__all__:
        assert getattr(surgery, name) is not None
    assert set(surgery.__all__) <= set(dir(surgery))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = surgery.nothing


def test_every_module_can_be_imported_under_another_name() -> None:
    """In one process, and without a warning of ours."""
    modules = [renamed(path) for path in PACKAGE.rglob("*.py") if path.name != "__main__.py"]
    code = "import warnings; warnings.filterwarnings('error', 'surgery', DeprecationWarning)\n"
    code += "".join(f"import {name} as m; assert m.__name__ == {name!r}\n" for name in sorted(modules))
    run = stock().run(["-c"], PACKAGE.parent, script=code)
    assert run.returncode == 0, run.stderr
