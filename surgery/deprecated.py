"""Import paths of 0.1.0. They keep working for one more release, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MOVED = {
    "analyse": "reproduce.analysis",
    "capture": "interventions.hooks",
    "card": "export.model_card",
    "checkpoint": "models.loading",
    "comparison": "evaluate.compare",
    "convert": "models.convert",
    "dryrun": "run.dry_run",
    "estimate": "run.memory_estimate",
    "evaluate.lm_tasks": "evaluate.lm_eval_files",
    "families": "models.lookup",
    "formats": "models.mamba_ssm_format",
    "heads": "types",
    "hub": "export.publish",
    "locate.hidden": "locate.hidden_attention",
    "measures": "recipe.locate",
    "pipeline": "run.pipeline",
    "plan": "splice.plan",
    "rundir": "files.atomic",
    "sizes": "models.sizes",
    "stages": "run.stages",
    "train.pretrain": "run.pretrain",
    "training": "recipe.train",
    "verify": "export.verify",
    "weights": "models.tensor_files",
}


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} has moved to {new}; the old path will be removed in 0.3.", DeprecationWarning, stacklevel=3)


class _Finder(MetaPathFinder, Loader):
    """Find the modules of `MOVED` under their old names, as proxies that forward every attribute."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        moved = name.startswith("surgery.") and name.removeprefix("surgery.") in MOVED
        return ModuleSpec(name, self) if moved else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        new = f"surgery.{MOVED[module.__name__.removeprefix('surgery.')]}"
        _warn(module.__name__, new)
        moved = import_module(new)
        module.__dict__["__getattr__"] = lambda name: getattr(moved, name)


class _CallablePackage(ModuleType):
    """Package that was a function in 0.1.0. Forwards calls and old attributes to its module, with a warning."""

    _implementation: str
    _renamed: Mapping[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        [(_, new)] = self._renamed.items()
        _warn(f"{self.__name__}()", f"surgery.{new}()")
        return getattr(import_module(self._implementation), new)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and find_spec(f"{self.__name__}.{name}") is None:  # its submodules come first
            new = self._renamed.get(name, name)
            moved = import_module(self._implementation)
            if hasattr(moved, new):
                _warn(f"{self.__name__}.{name}", f"{self._implementation}.{new}")
                return getattr(moved, new)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def callable_package(name: str, module: str, function: str) -> None:
    """Keep the package `name` callable. A call runs `function` of its `module`.

    Args:
        name: full name of the package, such as `surgery.locate`.
        module: module of the package that defines the function, such as `locating`.
        function: current name of the function. The old one is the last part of `name`.
    """
    package = sys.modules[name]
    package.__class__ = _CallablePackage
    vars(package).update(_implementation=f"{name}.{module}", _renamed={name.rpartition(".")[2]: function})


def find_old_modules() -> None:
    """Make the keys of `MOVED`, such as `surgery.hub`, importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
