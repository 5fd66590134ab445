"""Check the code that loading an export imports, in a private copy.

The code must equal this library's byte for byte. Modules of installed plugins are treated like this library's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from surgery.errors import ModelError
from surgery.export.files import AGAIN, read_json_file, read_object, shown, visible_files
from surgery.hybrid import CLASSES
from surgery.hybrid.configuration_hybrid import auto_map, outside_modules
from surgery.models.inserted import has_inserted

_TRUST = "Read it first, then pass --trust-remote-code to run it."
# JSON keys that name code to import, or files to load instead of the checked ones.
_CODE_KEYS = {
    "attribute_map",
    "auto_map",
    "configuration_files",
    "custom_generate",
    "custom_pipelines",
    "distributed_config",
    "fusion_config",
    "kernel_config",
    "quantization_config",
    "transformers_weights",
    "use_kernels",
}
# Keys that name an implementation. transformers may download a kernel from the Hub for an unknown one.
_IMPLEMENTATION_KEYS = {
    f"{prefix}{kind}_implementation{suffix}"
    for kind in ("attn", "experts")
    for prefix, suffix in (("", ""), ("_", ""), ("_", "_internal"))
}
_COPIED = (".py", ".json", ".jinja", ".model", ".txt", ".tiktoken")  # all that transformers reads besides weights
_BUILT_IN = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


def check_code(folder: Path, config: PreTrainedConfig, trust_remote_code: bool = False) -> None:
    """Compare the modules that loading the folder would import with this library's. Inserted layers need none.

    With `trust_remote_code` any modelling files are accepted.

    Raises:
        ModelError: a modelling file is missing; or, without `trust_remote_code`, the folder names or holds code that
            is not this library's.
    """
    maps, is_stock = read_object(folder, "config.json").get("auto_map"), has_inserted(config)
    maps = maps if isinstance(maps, Mapping) else {}
    for name in () if is_stock else ("AutoConfig", "AutoModelForCausalLM"):
        module = str(maps.get(name, "")).rpartition(".")[0]
        if not module or not (folder / f"{module}.py").is_file():
            value = f"auto_map.{name} names {maps.get(name) or 'nothing'}"
            raise ModelError("config.json", value, f"This modelling file is missing from the folder. {AGAIN}")
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            "adapter_config.json",
            "present",
            "transformers would load the adapter and its base instead. Merge it first.",
        )
    if trust_remote_code:
        return
    if not is_stock and not any(config_class is type(config) for config_class, _, _ in CLASSES):
        raise ModelError("config.json", f"model_type {config.model_type}", "This library has no hybrid of this type.")
    classes = {} if is_stock else auto_map(config)
    for name, target in maps.items():
        if target != classes.get(name):
            value = f"auto_map.{name} names {str(target)[:80]!r}, not {classes.get(name, 'a class of this library')}"
            raise ModelError("config.json", value, _TRUST)
    for path in visible_files(folder):
        if path.suffix == ".json":
            name = path.relative_to(folder).as_posix()
            _check_keys(name, read_json_file(folder, name), {"auto_map"} if name == "config.json" else set())
    expected = {} if is_stock else _modules_of(config)
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if expected.get(name) != path.read_bytes():
            hint = f"Export again if another version wrote it. Otherwise: {_TRUST[0].lower()}{_TRUST[1:]}"
            raise ModelError(shown(name), "not the module of this library, byte for byte", hint)


def _modules_of(config: PreTrainedConfig) -> dict[str, bytes]:
    """Return the modules that saving the config's model writes, by name."""
    file = sys.modules[type(config).__module__].__file__
    assert file is not None
    modules = {Path(path).name: Path(path).read_bytes() for path in (file, *get_relative_import_files(file))}
    return {**modules, **outside_modules(config)}


def _check_keys(name: str, data: Any, allowed: set[str]) -> None:
    """Raise ModelError for a key at any depth that makes a loader import code; those `allowed` pass at the top."""
    stack = [("", data, allowed)]
    while stack:
        place, value, skip = stack.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            at = f"{place}.{key}" if place else str(key)
            # A key with a number is an entry of a vocabulary.
            names_code = key in _CODE_KEYS and key not in skip and inner and not _is_number(inner)
            if names_code or (key in _IMPLEMENTATION_KEYS and not _is_built_in(inner)):
                value = shown(f"{at[:80]} is {json.dumps(inner)[:80]}")
                raise ModelError(shown(name), value, f"Loading it could run other code. {_TRUST}")
            if isinstance(inner, dict | list):  # not each of the thousands of numbers of a vocabulary
                stack.append((at, inner, set()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_built_in(implementation: Any) -> bool:
    """Return True if transformers itself has this implementation. A dict names one for each part of the model."""
    names = implementation.values() if isinstance(implementation, dict) else [implementation]
    return all(_is_number(name) or name in _BUILT_IN for name in names)


@contextmanager
def private_copy(folder: Path) -> Iterator[Path]:
    """Yield a temporary copy of a folder's code, config and tokenizer, with links to its weights.

    What is checked there does not change.
    """
    with TemporaryDirectory() as scratch:
        copy = Path(scratch, "export")
        for path in folder.rglob("*"):
            if path.suffix in _COPIED and path.is_file():
                place = copy / path.relative_to(folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(path.read_bytes())
        for path in folder.glob("*.safetensors"):
            (copy / path.name).symlink_to(path.resolve())
        yield copy
