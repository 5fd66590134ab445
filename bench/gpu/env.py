"""Environment of the GPU bench: wheels to use, installed packages, the name of the device.

This module must not import transformers, since a wheel of it must be put on the import path first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

OLDEST = Version("5.24")  # of transformers; the hybrids' own file says why
KERNELS = ("mamba_ssm", "causal_conv1d", "flash_attn")

Row = dict[str, Any]


class Unready(Exception):
    """The bench cannot run on this machine. The message says what to install or set."""


@dataclass
class Site:
    """Folder of unpacked wheels, first on the import path.

    Attributes:
        lines: messages about wheels that were used and wheels that do not fit.
    """

    folder: Path
    lines: list[str] = field(default_factory=list)

    def use(self, wheels: Path) -> None:
        """Unpack every wheel that fits this Python and is newer than the installed package."""
        found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
        used = [wheel for wheel in found if self._take(wheel)]
        if used:
            self.folder.mkdir(parents=True, exist_ok=True)
            for wheel in used:
                zipfile.ZipFile(wheel).extractall(self.folder)
            sys.path.insert(0, str(self.folder))
            importlib.invalidate_caches()
            self.lines.append(f"from {wheels.name}/: {', '.join(wheel.name.split('-')[0] for wheel in used)}")

    def _take(self, wheel: Path) -> bool:
        try:
            name, version, _, tags = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename:
            self.lines.append(f"{wheel.name}: not a wheel's name")
            return False
        if not tags & frozenset(sys_tags()):
            self.lines.append(f"{wheel.name}: for another Python or machine")
            return False
        have = installed(name)
        return have is None or have < version


def installed(name: str) -> Version | None:
    """Version that an import would find; None if not installed."""
    try:
        return Version(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return None


def check_transformers() -> None:
    """Raise Unready if transformers is missing or too old."""
    have = installed("transformers")
    if have is None or have < OLDEST:
        what = "is not installed" if have is None else f"{have} is too old"
        raise Unready(
            f"transformers {what}: the hybrids need {OLDEST} or newer. Install it, or put a wheel of it into "
            "wheels/ (paper/BENCHMARKS.md has the command)."
        )


def check_device(device: str) -> None:
    """Raise Unready if there is no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Unready("No GPU that torch can use. To try the script itself: make gpu GPU='--device cpu --toy'")


def importable(package: str) -> str:
    """Version of a package, or the reason why it cannot be imported."""
    try:
        module = importlib.import_module(package)
    except Exception as error:  # a broken build raises anything
        return f"missing ({type(error).__name__}: {first_line(error)})"
    return str(getattr(module, "__version__", "version unknown"))


def environment(device: str) -> list[Row]:
    """Rows of `what` and `found`."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["GPU"] = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        found["GPU memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["driver"] = _driver()
    else:
        found["GPU"] = "none: this run is of the script, not of a GPU"
    for package in ("triton", "transformers", *KERNELS):
        found[package] = importable(package)
    return [{"what": what, "found": value} for what, value in found.items()]


def machine(found: list[Row]) -> str:
    """GPU and versions in one line, to know which results belong together."""
    values = {row["what"]: row["found"] for row in found}
    packages = [
        f"{name} {values[name]}" for name in ("torch", "transformers", *KERNELS) if "missing" not in values[name]
    ]
    return ", ".join([values["GPU"].split(",")[0], *packages])


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown (no nvidia-smi)"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return done.stdout.strip().split("\n")[0] or "unknown"


def first_line(error: BaseException, width: int = 160) -> str:
    """First line of an error's message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:width]
