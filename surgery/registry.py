"""Registries of the extension points.

Users may add probes, objectives, locating methods, model families, attention branches and export formats. A registry
maps the name in a recipe to a class or function. Schemas, labels and pages are derived from the registered entries.
Code outside this package adds an entry with the registry's decorator. The recipe lists its module under `plugins`, or
an installed package declares it as an entry point of the group `surgery.plugins`.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from surgery.errors import RecipeError, SurgeryError, is_out_of_memory, summary

T = TypeVar("T")
GROUP = "surgery.plugins"


class Registry(Generic[T]):
    """Map names to registered classes or functions, in the order of registration.

    Args:
        kind: noun for an entry in error messages, such as `probe`.
        modules: our own modules that register entries. They are imported when the registry is first read.
        plugins: further names, each with the plugin in the repository that registers it.
    """

    def __init__(self, kind: str, modules: Sequence[str] = (), plugins: Mapping[str, str] | None = None) -> None:
        self.kind, self._plugins = kind, plugins or {}
        self._modules = tuple(modules)
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Add an entry. Registering the same class or function again, as a reload does, replaces it.

        Raises:
            RecipeError: another entry has this name.
        """
        self.check_free(name, entry)
        self._entries[name] = entry
        return entry

    def check_free(self, name: str, entry: T) -> None:
        """Check that `register` would accept an entry. Changes nothing.

        Raises:
            RecipeError: another entry has this name.
        """
        if _named(entry).__module__ not in self._modules:  # from a plugin: our own entries come first
            self._loaded()
        present = self._entries.get(name)
        if present is not None and _identity(present) != _identity(entry):
            hint = f"{_identity(present)} has this name already. Register {_identity(entry)} under another name."
            raise RecipeError(self.kind, name, hint)

    def __getitem__(self, name: str) -> T:
        """Look up an entry.

        Raises:
            RecipeError: nothing is registered under `name`. The error lists the names and the nearest one.
        """
        entries = self._loaded()
        if name not in entries:
            raise RecipeError(self.kind, name, self.hint(name))
        return entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded()

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._loaded()))

    def __len__(self) -> int:
        return len(self._loaded())

    def items(self) -> tuple[tuple[str, T], ...]:
        """Names with their entries, in the order of registration."""
        return tuple(self._loaded().items())

    def hint(self, name: str) -> str:
        """Suggest replacements for an unknown name."""
        if name in self._plugins:
            return f"Add {self._plugins[name]} to `plugins`, and set PYTHONPATH to a checkout of this project."
        near = difflib.get_close_matches(name, self, n=1, cutoff=0.5)
        nearest = f"Did you mean {near[0]}? " if near else ""
        return f"{nearest}Known: {', '.join(self)}. If a plugin registers it, add the plugin's module to `plugins`."

    def is_of_plugin(self, name: str) -> bool:
        """Whether a plugin in the repository registers this name, and is not loaded."""
        return name in self._plugins and name not in self

    def registered(self) -> tuple[tuple[str, T], ...]:
        """Names with the entries so far, without importing our modules that are not imported yet."""
        return tuple(self._entries.items())

    def _loaded(self) -> dict[str, T]:
        modules, self._modules = self._modules, ()
        try:
            for module in modules:
                import_module(module)
        except BaseException:
            self._modules = modules
            raise
        return self._entries


class NameOf:
    """Annotation of a field that holds a name of a registry: `Annotated[str, NameOf(PROBES)]`.

    Validation looks the name up when a recipe is read, so a plugin's entries count. `surgery schema` lists the names.

    Args:
        registry: its names are accepted.
        extra: further names that are accepted, such as `list` among the ways to select heads.
        keep: entries for which it returns False are not accepted.
    """

    def __init__(self, registry: Registry[Any], extra: Sequence[str] = (), keep: Callable[[Any], bool] = bool) -> None:
        self.registry, self.extra, self.keep = registry, tuple(extra), keep

    def names(self) -> tuple[str, ...]:
        """All names that are accepted now."""
        return (*(name for name, entry in self.registry.items() if self.keep(entry)), *self.extra)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def check(name: str) -> str:
            names = self.names()
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
                hint = f"{f'Did you mean {near[0]}? ' if near else ''}Use one of: {', '.join(names)}."
                if self.registry.is_of_plugin(name):
                    hint = self.registry.hint(name)
                raise PydanticCustomError(
                    "unknown_name", "Unknown {kind}. {hint}", {"kind": self.registry.kind, "hint": hint}
                )
            return name

        return core_schema.no_info_after_validator_function(check, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {"type": "string", "enum": list(self.names())}


def load_plugins(modules: Sequence[str] = ()) -> None:
    """Import plugins: the entry points of installed packages, and the modules that a recipe names. Each is run once.

    Args:
        modules: names of modules on the import path, as `plugins` in a recipe lists them. Importing a module runs it.

    Raises:
        RecipeError: a module cannot be found or fails when it is imported.
    """
    for point in _plugin_entry_points(tuple(map(_changed, sys.path))):
        if point.value not in _LOADED:
            _import(f"entry point {point.name}", point.value)
    for module in modules:
        if module not in _LOADED:
            _import("plugins", module)


_LOADED: set[str] = set()


@lru_cache(maxsize=1)
def _plugin_entry_points(folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Search installed packages again only if `folders` changed: it reads a file of each package."""
    return entry_points(group=GROUP)


def _changed(folder: str) -> tuple[str, int]:
    """A folder of the import path with the time at which its entries last changed, or 0 if there is no such folder."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, 0


def _import(field: str, module: str) -> None:
    try:
        import_module(module.partition(":")[0])
    except (RecipeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a module may call sys.exit
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = f"Importing it failed: {type(error).__name__}: {error}"
        if missing is not None:
            hint = f"It imports {missing}, which is not installed. Install it."
        if missing is not None and f"{module.partition(':')[0]}.".startswith(f"{missing}."):
            hint = "No module of this name is on the import path. Install its package, or set PYTHONPATH to its folder."
        raise RecipeError(field, module, hint) from error
    _LOADED.add(module)


@contextmanager
def plugin_errors(what: str, entry: object) -> Iterator[None]:
    """Convert an error that a plugin's code raises inside into one that names its file and line.

    Errors of this package's own entries pass unchanged. So do a `SurgeryError`, an `OSError` and a lack of memory.

    Args:
        what: kind and name of the entry, such as `probe reversal`.
        entry: the class, function or instance that is registered.

    Raises:
        SurgeryError: the plugin's code raised another error.
    """
    try:
        yield
    except (SurgeryError, OSError):
        raise
    except Exception as error:
        module = _named(entry).__module__
        if module.partition(".")[0] == "surgery" or is_out_of_memory(error):
            raise
        frames = traceback.walk_tb(error.__traceback__)
        places = [(f.f_code.co_filename, line) for f, line in frames if f.f_globals.get("__name__") == module]
        place = f"{places[-1][0]}, line {places[-1][1]}" if places else _identity(entry)
        hint = f"It comes from the plugin: {place}. `surgery --debug` prints the traceback."
        raise SurgeryError(what, summary(error), hint) from error


def _identity(entry: Any) -> str:
    """Qualified name of a class or function, or of the class of an instance."""
    return f"{_named(entry).__module__}.{_named(entry).__qualname__}"


def _named(entry: Any) -> Any:
    return entry if hasattr(entry, "__qualname__") else type(entry)
