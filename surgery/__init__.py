"""Turn a pretrained Mamba into a hybrid: locate its retrieval heads, splice in attention, train briefly, export.

`import surgery` is light: torch and transformers are imported when a name that needs them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from surgery.deprecated import find_old_modules

__version__ = "0.2.0.dev0"

# The public API: each name with the module that defines it.
_API = {
    "Base": "recipe",
    "HeadId": "types",
    "HeadSet": "types",
    "Plan": "types",
    "Recipe": "recipe",
    "SurgeryError": "errors",
    "evaluate_model": "evaluate.evaluation",
    "export_model": "export.folder",
    "load_model": "models.loading",
    "load_recipe": "recipe",
    "load_tokenizer": "models.loading",
    "locate_heads": "locate.locating",
    "make_plan": "splice.plan",
    "publish": "export.publish",
    "run_pipeline": "run.pipeline",
    "splice_model": "splice.graft",
    "train_model": "train.training",
    "verify_folder": "export.verify",
}
# Packages that were functions of the same name in 0.1.0. `surgery.deprecated` keeps them callable.
_CALLABLE = ("evaluate", "export", "locate", "splice", "train")

__all__ = ["__version__", *_API]


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(f"surgery.{_API[name]}"), name)
    if name in _CALLABLE:
        return import_module(f"surgery.{name}")
    raise AttributeError(f"module 'surgery' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])


find_old_modules()
