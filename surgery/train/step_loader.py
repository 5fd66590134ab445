"""Prepare the steps of training ahead, in worker processes.

A step depends on its number alone, so the steps are the same for any number of workers and after a resume.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from surgery.errors import RunError, SurgeryError

Prepare = Callable[[int], Any]
_AHEAD = 2  # steps that each worker prepares ahead


class _Failed(NamedTuple):
    """An error of a worker: it crosses processes as what it was made of."""

    kind: type[SurgeryError]
    field: str
    value: str | None
    hint: str


class _Steps(Dataset[Any]):
    """The prepared steps, by number."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    def __getitem__(self, step: int) -> Any:
        try:
            return self.prepare(step)
        except SurgeryError as error:  # the loader would raise its traceback as text
            value = None if error.value is None else str(error.value)
            return _Failed(type(error), error.field, value, error.hint)


def steps_of(prepare: Prepare, steps: range, workers: int = 0, pin: bool = False) -> Iterator[Any]:
    """Yield the prepared steps in order. Close the iterator to stop early: its workers end.

    Workers are started by `spawn`, since a process that uses CUDA must not be forked. They never touch the GPU.

    Args:
        prepare: makes one step, on the CPU. It and what it returns must pickle, unless `workers` is 0.
        steps: numbers of the steps; after a resume they start later.
        workers: number of processes; with 0 each step is prepared in this process when it is needed.
        pin: put the tensors into pinned memory, for a CUDA device. Objects of other classes need a method `pin_memory`.

    Raises:
        RunError: a worker was killed, or `prepare` does not pickle.
        SurgeryError: the one that `prepare` raised.
    """
    if workers == 0 or not steps:
        yield from map(prepare, steps)
        return
    try:
        pickle.dumps(prepare)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        hint = f"Its data cannot be sent to other processes ({error}). Set it to 0."
        raise RunError("train.workers", workers, hint) from error
    loader = DataLoader(
        _Steps(prepare),
        batch_size=None,
        sampler=steps,
        num_workers=min(workers, len(steps)),
        prefetch_factor=_AHEAD,
        pin_memory=pin,
        worker_init_fn=_start,
        multiprocessing_context=multiprocessing.get_context("spawn"),
    )
    batches = iter(loader)
    try:
        while True:
            try:
                step = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error) or "exited unexpectedly" not in str(error):
                    raise
                hint = "A process that prepares steps was killed, often for lack of memory. Set fewer, or 0."
                raise RunError("train.workers", workers, hint) from error
            if isinstance(step, _Failed):
                raise step.kind(step.field, step.value, step.hint)
            yield step
    finally:
        shut_down = getattr(batches, "_shutdown_workers", None)  # the DataLoader has no public way
        if shut_down is not None:
            shut_down()


def _start(worker: int) -> None:
    """Compute on one thread, and leave messages to the first process."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.disable(logging.WARNING)


def workers_by_default(device: torch.device | str, processes: int = 1) -> int:
    """Number of workers if `train.workers` is not set: none on a CPU, else this process's free cores less one, to 8."""
    if torch.device(device).type != "cuda":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(8, cores // processes - 1))
