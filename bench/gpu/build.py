"""Build mamba-ssm, causal-conv1d and flash-attn from their source archives, for the installed GPU only.

The packages' `setup.py` have fixed lists of GPU architectures, and building for all of them takes hours. torch can call
another compiler (`PYTORCH_NVCC`). So this file also acts as a compiler: it removes the flags of other architectures and
calls nvcc. Before that, `sources.py` cuts what no model uses, and splits what one core would compile alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu.env import Row
from bench.gpu.sources import UnknownSource, cut

# Those of one group are built at the same time.
GROUPS = (("causal_conv1d", "mamba_ssm"), ("flash_attn",))
PACKAGES = tuple(name for group in GROUPS for name in group)
# Without these, their `setup.py` first looks for a wheel on the network.
FORCE = {
    "causal_conv1d": "CAUSAL_CONV1D_FORCE_BUILD",
    "mamba_ssm": "MAMBA_FORCE_BUILD",
    "flash_attn": "FLASH_ATTENTION_FORCE_BUILD",
}
_FLASH_ARCHS = {8: "80", 9: "90", 10: "100", 12: "120"}
_TARGET = re.compile(r"code=sm_(\d+)(\d)")


def chip_flags(arguments: Sequence[str], capability: tuple[int, int]) -> list[str]:
    """nvcc's arguments with only the `-gencode` that fits the GPU best; unchanged if none fits.

    Machine code of an older chip runs on a newer one of the same major number. Line tables go too: they are half of
    the size of what comes out.
    """
    pairs = list(_pairs(arguments))
    offered = [(int(m[1]), int(m[2])) for _, value in pairs if value and (m := _TARGET.search(value))]
    fitting = [chip for chip in offered if chip[0] == capability[0] and chip <= capability]
    kept: list[str] = []
    for argument, value in pairs:
        target = _TARGET.search(value) if value else None
        if argument == "-lineinfo" or (target and fitting and (int(target[1]), int(target[2])) != max(fitting)):
            continue
        kept += [argument] if value is None or argument == value else [argument, value]
    return kept


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """`-gencode VALUE` and `-gencode=VALUE` with their value; every other argument alone."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-gencode":
            yield argument, next(rest, "")
        else:
            yield argument, argument if argument.startswith("-gencode=") else None


def obstacle(device: str) -> str | None:
    """Reason why nothing can be built on this machine; None if it can."""
    if device != "cuda":
        return "no GPU to build for"
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None or not Path(CUDA_HOME, "bin", "nvcc").is_file():
        return "no nvcc found; set CUDA_HOME"
    return None


def build(
    names: Sequence[str], archives: Path, out: Path, scratch: Path, seconds: float, device: str = "cuda"
) -> list[Row]:
    """Build wheels into `out` within the time limit, with a log for each. A package with a wheel there is not built.

    Args:
        names: of `PACKAGES`; an archive of each is looked for in `archives`.
        scratch: a folder for what only the build needs.

    Returns:
        A row for each: `package`, `result`, `seconds`, `ok`.
    """
    why = obstacle(device)
    if why is not None:
        return [_row(name, f"not tried: {why}", 0.0, False) for name in names]
    import torch

    out.mkdir(parents=True, exist_ok=True)
    environment = settings(torch.cuda.get_device_capability(0), scratch)
    deadline, rows = time.monotonic() + seconds, []
    for group in GROUPS:
        chosen = [name for name in group if name in names]
        rows += [_row(name, f"kept: {wheel.name}", 0.0) for name in chosen if (wheel := _wheel(name, out))]
        jobs = [_Job(name, _archive(name, archives), out) for name in chosen if not _wheel(name, out)]
        rows += run_jobs(jobs, environment, deadline, scratch)
    return rows


def _row(name: str, result: str, seconds: float, ok: bool = True) -> Row:
    return {"package": name, "result": result, "seconds": seconds, "ok": ok}


def _wheel(name: str, folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"{name}-*.whl"), reverse=True)), None)


def settings(capability: tuple[int, int], scratch: Path) -> dict[str, str]:
    """The environment of the builds; writes the compiler that they call."""
    from torch.utils.cpp_extension import CUDA_HOME

    compiler, (major, minor) = scratch / "nvcc-for-this-chip", capability
    call = f'"{sys.executable}" "{Path(__file__).resolve()}" {major} {minor} "{CUDA_HOME}/bin/nvcc"'
    root = Path(__file__).resolve().parents[2]
    compiler.write_text(f'#!/bin/sh\nPYTHONPATH="{root}" exec {call} "$@"\n')
    compiler.chmod(0o755)
    return {
        **os.environ,
        **dict.fromkeys(FORCE.values(), "TRUE"),
        "PYTORCH_NVCC": str(compiler),
        "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}",
        "FLASH_ATTN_CUDA_ARCHS": _FLASH_ARCHS.get(major, "80"),
        "MAX_JOBS": str(os.cpu_count() or 1),
        "NVCC_THREADS": "1",
    }


def _archive(name: str, folder: Path) -> Path | None:
    found = sorted([*folder.glob(f"{name}-*.tar.gz"), *folder.glob(f"{name.replace('_', '-')}-*.tar.gz")])
    return found[-1] if found else None


@dataclass
class _Job:
    """The build of one archive."""

    name: str
    archive: Path | None
    out: Path
    started: float = field(default_factory=time.monotonic)
    process: subprocess.Popen | None = None

    @property
    def log(self) -> Path:
        return self.out / f"build-{self.name}.log"

    def start(self, environment: dict[str, str], scratch: Path) -> None:
        """Unpack and cut the source, and start pip. Raises UnknownSource."""
        assert self.archive is not None
        folder = unpacked(self.archive, scratch / self.name)
        cut(self.name, folder)
        pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*pip, "-v", "-w", str(self.out), str(folder)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, deadline: float) -> Row:
        """Wait for the build, and stop it at the time limit."""
        assert self.process is not None
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
            wheel = _wheel(self.name, self.out)
            result = f"failed: {complaint(self.log)} (see {self.log.name})"
            if code == 0 and wheel is not None:
                result = f"{wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB"
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # the session that `start` began
            self.process.wait()
            wheel, result = None, "out of time"
        return _row(self.name, result, time.monotonic() - self.started, wheel is not None)


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack a source archive; returns the folder with its `setup.py`."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return next(path.parent for path in sorted(folder.glob("*/setup.py")))


def run_jobs(jobs: Sequence[_Job], environment: dict[str, str], deadline: float, scratch: Path) -> list[Row]:
    """Start all builds, then wait for each."""
    rows: list[Row] = []
    started: list[_Job] = []
    for job in jobs:
        if job.archive is None:
            rows.append(_row(job.name, "not tried: no source archive in wheels/", 0.0, False))
            continue
        try:
            job.start(environment, scratch)
            started.append(job)
        except UnknownSource as error:
            rows.append(_row(job.name, f"failed: {error}. The cut in bench/gpu/sources.py needs a change", 0.0, False))
    return [*rows, *(job.end(deadline) for job in started)]


def complaint(log: Path) -> str:
    """Most informative line of a log: the last exception, or the first error of a compiler."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    errors = [line for line in lines if "error: " in line and not re.fullmatch(r"error: [\w-]+", line)]
    return (errors[:1] or exceptions[-1:] or lines[-1:] or ["no output"])[0][:160]


if __name__ == "__main__":  # as the compiler: MAJOR MINOR NVCC ARGUMENTS...
    chip, nvcc = (int(sys.argv[1]), int(sys.argv[2])), sys.argv[3]
    os.execv(nvcc, [nvcc, *chip_flags(sys.argv[4:], chip)])
