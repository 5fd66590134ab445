"""Turn a pretrained Mamba into a hybrid: locate its retrieval heads, splice in attention, train briefly, export.

`import surgery` is light: torch and transformers are imported when a name that needs them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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

__all__ = ["__version__", *_API]


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(f"surgery.{_API[name]}"), name)
    raise AttributeError(f"module 'surgery' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
