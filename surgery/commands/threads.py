"""Set up the CPU for a command: its number of threads, from the cores that are free, and its memory pages."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from surgery.commands.progress import say

SAMPLE = 0.2  # seconds over which the use of the cores is measured


def set_up_cpu() -> None:
    """Let torch use huge pages, and as many threads as cores are free. Prints this number if it is not that of all.

    OpenMP threads wait for each other, so a thread without a core of its own delays all others. Call it before torch is
    imported: OpenMP, MKL and the processes that a command starts read the number from OMP_NUM_THREADS. Changes nothing
    that the user has set, and no number of threads if torch is imported, since its number is then the caller's.
    """
    # malloc maps tensors above 32 MiB anew each time. Their pages took a third of a long pass (paper/BENCHMARKS.md).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "torch" in sys.modules or {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return
    cores, ranks = psutil.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    # The average over a minute counts neither the other ranks, which start now too, nor a job that has just begun. It
    # still counts one that has just ended, such as the command before this one.
    busy = psutil.getloadavg()[0] if ranks > 1 else psutil.cpu_percent(SAMPLE) / 100 * cores
    threads = free_threads(cores, allowed, cpu_quota(), busy, ranks)
    if threads >= (psutil.cpu_count(logical=False) or cores):  # torch starts at most one thread for each core
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if os.environ.get("RANK", "0") == "0":
        say("threads", f"{threads} on {cores} cores, of which others use {busy:.1f}. Set OMP_NUM_THREADS to change it.")


def free_threads(cores: int, allowed: int, quota: float | None, busy: float, ranks: int) -> int:
    """Return the number of threads of one of `ranks` processes, at least 1.

    Of the machine's `cores` it may run on `allowed`, and others use `busy`. `quota` is None if there is no limit.
    """
    free = min(allowed, round(cores - busy), cores if quota is None else int(quota))
    return max(1, free // ranks)


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the CPU seconds a second that the control groups of this process may use, or None if there is no limit."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    quotas = []
    for line in lines:
        controllers, path = line.split(":", 2)[1:]
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / "cpu" if controllers else root  # version 1 of control groups, else version 2
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        group = folder / path.strip("/")
        # A group and those that contain it. A container may see the outermost one alone, at `root`.
        for place in [group, *(parent for parent in group.parents if parent.is_relative_to(folder))]:
            with suppress(OSError, ValueError):  # it has no limit of its own ("max"), or is not visible here
                quota, period = (int(word) for file in files for word in (place / file).read_text("ascii").split())
                quotas += [quota / period] if quota > 0 else []
    return min(quotas, default=None)
