"""Prepare the steps of training ahead, in worker processes.

A step depends on its number alone, so the steps are the same for any number of workers and after a resume.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from surgery.errors import RunError, SurgeryError

Prepare = Callable[[int], Any]


class _Steps(Dataset[Any]):
    """The prepared steps, by number."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    def __getitem__(self, step: int) -> Any:
        try:
            return self.prepare(step)
        except SurgeryError as error:  # the loader would raise its traceback as text
            return error


def steps_of(prepare: Prepare, steps: range, workers: int = 0, pin: bool = False) -> Generator[Any, None, None]:
    """Yield the prepared steps in order. Close the iterator to stop early: its workers end.

    Workers are forked. They have the plugins and data of this process, start at once, and do not use the GPU.

    Args:
        prepare: makes one step, on the CPU.
        steps: numbers of the steps; after a resume they start later.
        workers: number of processes; with 0 each step is prepared in this process when it is needed.
        pin: put the tensors into pinned memory, by the method `pin_memory` of what `prepare` makes.

    Raises:
        RunError: a worker was killed.
        SurgeryError: the one that `prepare` raised.
    """
    if workers == 0 or not steps:
        yield from map(prepare, steps)
        return
    loader = DataLoader(
        _Steps(prepare),
        batch_size=None,
        sampler=steps,
        num_workers=min(workers, len(steps)),
        pin_memory=pin,
        worker_init_fn=_start,
        multiprocessing_context=multiprocessing.get_context("fork"),
    )
    batches = iter(loader)
    try:
        for step in batches:
            if isinstance(step, SurgeryError):
                raise step
            yield step
    except RuntimeError as error:
        if "DataLoader worker" not in str(error) or "exited unexpectedly" not in str(error):
            raise
        hint = "A process that prepares steps was killed, often for lack of memory. Set fewer, or 0."
        raise RunError("train.workers", workers, hint) from error
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]  # the DataLoader has no public way


def _start(worker: int) -> None:
    """Leave messages to the first process. The DataLoader computes on one thread in a worker."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.disable(logging.WARNING)


def workers_by_default(device: torch.device | str, processes: int = 1) -> int:
    """Number of workers if `train.workers` is not set: none on a CPU, else this process's free cores less one, to 8."""
    if torch.device(device).type != "cuda":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(8, cores // processes - 1))
