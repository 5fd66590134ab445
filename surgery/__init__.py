"""Locate the retrieval heads of a pretrained Mamba, splice attention in there, train briefly, export a hybrid.

`import surgery` is light: torch and transformers are imported when a name that needs them is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# The public API, and the module that each name is in.
_HOMES = {
    "Base": "recipe",
    "HeadId": "types",
    "HeadSet": "types",
    "Plan": "types",
    "Recipe": "recipe",
    "SurgeryError": "errors",
    "evaluate": "evaluate",
    "export": "export",
    "load_model": "models.loading",
    "load_recipe": "recipe",
    "load_tokenizer": "models.loading",
    "locate": "locate.locating",
    "make_plan": "plan",
    "publish": "hub",
    "run_pipeline": "pipeline",
    "splice": "splice",
    "train": "train",
    "verify_folder": "verify",
}

__all__ = ["__version__", *_HOMES]


def _lazy(name: str) -> property:
    def get(package: ModuleType) -> Any:
        return getattr(import_module(f"surgery.{_HOMES[name]}"), name)

    def keep(package: ModuleType, value: Any) -> None:
        """Importing the submodule `surgery.locate` must not hide the function `surgery.locate`."""
        if not isinstance(value, ModuleType):
            raise AttributeError(f"surgery.{name} is part of the API and cannot be set")

    return property(get, keep)


class _Package(ModuleType):
    """This package with its API as properties: several functions are named like the module that they are in."""


for _name in _HOMES:
    setattr(_Package, _name, _lazy(_name))
sys.modules[__name__].__class__ = _Package
