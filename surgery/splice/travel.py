"""Check that the code of a plugin's class can travel with a checkpoint."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

from surgery.hybrid import configuration_hybrid

_HYBRID = Path(configuration_hybrid.__file__).parent


def check_travels(cls: type[Any]) -> None:
    """Check the file of a config's or a branch's class, which is saved beside the modules of `surgery.hybrid`.

    Raises:
        ValueError: the class is in no file, its file has the name of one that travels already, or imports more than
            modules of `surgery.hybrid` and installed packages.
    """
    if cls.__module__.rpartition(".")[0] == configuration_hybrid.__package__:
        return
    source = getattr(sys.modules[cls.__module__], "__file__", None)
    if source is None or not Path(source).is_file():
        raise _stays(cls, "it is in no file. Move it to a module")
    file = Path(source)
    if (_HYBRID / file.name).is_file():
        raise _stays(cls, f"a file of this name travels already. Rename {file.name}")
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level and not (_HYBRID / f"{node.module}.py").is_file():
                raise _stays(cls, f"{file.name} imports a sibling, line {node.lineno}. Put both into one file")
            package, _, module = (node.module or "").rpartition(".")
            travels = node.level or (package == "surgery.hybrid" and (_HYBRID / f"{module}.py").is_file())
            names = [] if travels else [node.module or ""]
        else:
            continue
        if any(name.split(".")[0] == "surgery" for name in names):
            hint = "It may use `from surgery.hybrid.MODULE import NAME`, and no other import of surgery"
            raise _stays(cls, f"{file.name} imports {', '.join(names)}, line {node.lineno}. {hint}")


def _stays(cls: type[Any], reason: str) -> ValueError:
    return ValueError(f"{cls.__name__} cannot travel with a checkpoint: {reason}.")
