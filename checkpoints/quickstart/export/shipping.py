"""The modules that a saved hybrid needs besides the siblings of its modelling file.

Shipped with every exported checkpoint, so it imports the standard library and transformers only. transformers copies a
modelling file and what it imports relatively. A class from outside this package imports it by name, `from
surgery.hybrid.attention import ...`, which a folder cannot resolve: its file is saved with relative imports. Branches
from outside are imported by one more module, which `auto_map` then names.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from .branches import BRANCHES, BUILT_IN

ENTRY = "hybrid_with_branches"
_HERE = Path(__file__).parent
_RELATIVE = re.compile(rb"^[ \t]*from[ \t]+\.(\w+)[ \t]+import\b", re.MULTILINE)
_ABSOLUTE = re.compile(rb"^([ \t]*from[ \t]+)surgery\.hybrid(\.\w+[ \t]+import\b)", re.MULTILINE)


def auto_map(config: Any) -> dict[str, str]:
    """Return the config's `auto_map`: the module and class of config, model and causal language model.

    `AutoModelForDecision` names the causal language model too: `transformers serve` 5.23 finds a folder's code by that
    entry only.
    """
    module, stem = type(config).__module__.rsplit(".", 1)[-1], type(config).__name__.removesuffix("Config")
    if _outside_branches(config):
        module = ENTRY
    names = {"AutoConfig": "Config", "AutoModel": "Model"}
    names |= dict.fromkeys(("AutoModelForCausalLM", "AutoModelForDecision"), "ForCausalLM")
    return {auto: f"{module}.{stem}{suffix}" for auto, suffix in names.items()}


def outside_modules(config: Any) -> dict[str, bytes]:
    """Return the files that transformers does not copy, by name: none where all classes are of this package.

    Raises:
        ValueError: a class cannot travel: it has no file, its file has the name of one of ours, or imports more than
            modules of `surgery.hybrid` and installed packages.
    """
    branches = _outside_branches(config)
    classes = [cls for cls in (type(config), *branches) if branches or _is_outside(cls)]
    modules = dict(module_of(cls) for cls in classes)
    if branches:
        stem = type(config).__name__.removesuffix("Config")
        names = ", ".join(f"{stem}{suffix}" for suffix in ("Config", "ForCausalLM", "Model"))
        lines = ['"""Register the attention branches of this checkpoint, and import its classes."""', ""]
        lines += sorted(f"from .{cls.__module__.rsplit('.', 1)[-1]} import {cls.__name__}  # noqa: F401"
                        for cls in branches)  # fmt: skip
        lines += [f"from .{type(config).__module__.rsplit('.', 1)[-1]} import {names}  # noqa: F401", ""]
        modules[f"{ENTRY}.py"] = "\n".join(lines).encode()
    needed = {name.decode() for text in modules.values() for name in _RELATIVE.findall(text)}
    siblings = [_HERE / f"{name}.py" for name in sorted(needed) if f"{name}.py" not in modules]
    for sibling in siblings:
        for file in (sibling, *map(Path, get_relative_import_files(sibling))):
            modules.setdefault(file.name, file.read_bytes())
    return modules


def module_of(cls: type[Any]) -> tuple[str, bytes]:
    """Return the name and the text of the file that a class travels in, with relative imports.

    Raises:
        ValueError: as `outside_modules`.
    """
    source = getattr(sys.modules[cls.__module__], "__file__", None)
    if source is None or not Path(source).is_file():
        raise _stays(cls, "it is in no file. Move it to a module")
    file = Path(source)
    if not _is_outside(cls):
        return file.name, file.read_bytes()
    if (_HERE / file.name).is_file():
        raise _stays(cls, f"a file of this name travels already. Rename {file.name}")
    text = _ABSOLUTE.sub(rb"\1\2", file.read_bytes())
    for node in ast.walk(ast.parse(text)):
        module = getattr(node, "module", None) or ""
        if isinstance(node, ast.ImportFrom) and node.level and not (_HERE / f"{module}.py").is_file():
            raise _stays(cls, f"{file.name} imports a sibling, line {node.lineno}. Put both into one file")
        absolute = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [module]
        if not getattr(node, "level", 0) and any(name.split(".")[0] == "surgery" for name in absolute):
            hint = "It may use `from surgery.hybrid.MODULE import NAME`, and no other import of surgery"
            raise _stays(cls, f"{file.name} imports {', '.join(absolute)}, line {node.lineno}. {hint}")
    return file.name, text


def _outside_branches(config: Any) -> list[type[Any]]:
    names = sorted({site["init"] for site in config.splice or ()} - set(BUILT_IN))
    return [BRANCHES[name] for name in names]


def _is_outside(cls: type[Any]) -> bool:
    return cls.__module__.rpartition(".")[0] != __package__


def _stays(cls: type[Any], reason: str) -> ValueError:
    return ValueError(f"{cls.__name__} cannot travel with a checkpoint: {reason}.")
