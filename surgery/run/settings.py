"""Choose the settings of a recipe that follow from the size of the base."""

from __future__ import annotations

import time
from collections.abc import Callable

from surgery.errors import SurgeryError, is_out_of_memory
from surgery.locate.locating import peak_bytes

SMALL = 10_000_000  # weights: below, everything trains and is measured in minutes on a CPU
_LARGE = 3_000_000_000  # weights: from here on, half precision and new heads alone

# Steps by weights: for small bases as measured here (docs/your-model.md), otherwise of the shipped recipes.
STEPS = ((SMALL, 500), (1_000_000_000, 400), (_LARGE, 800))
STEPS_OF_NEW_HEADS = 400


def num_steps(parameters: int, new_heads_only: bool = False) -> int:
    """Training steps of the recipe for this size."""
    if new_heads_only:
        return STEPS_OF_NEW_HEADS
    return next((steps for size, steps in STEPS if parameters <= size), STEPS[-1][1])


def is_large(parameters: int) -> bool:
    """Whether the base is kept in half precision, and only new heads train."""
    return parameters >= _LARGE


def try_batch_sizes(run: Callable[[int], None], room: int, largest: int = 64) -> tuple[int, dict[int, float]]:
    """Find the batch size with the most prompts a second that fits the memory.

    Doubles the size from 4. Stops where memory runs out, where the next size would take more than `room` by the growth
    so far, or where the rate grows by less than a tenth.

    Args:
        run: runs one batch of this size.
        room: bytes that may be used in addition.
        largest: largest size to try.

    Returns:
        The size, and prompts a second by size.

    Raises:
        SurgeryError: not even the smallest batch fits.
    """
    speeds: dict[int, float] = {}
    size, before = 4, peak_bytes()
    run(1)  # the first pass also initialises libraries
    while size <= largest:
        began = time.perf_counter()
        try:
            run(size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            break
        speeds[size] = size / (time.perf_counter() - began)
        slower = len(speeds) > 1 and speeds[size] < 1.1 * speeds[size // 2]
        if slower or 2 * (peak_bytes() - before) > room:
            break
        size *= 2
    if not speeds:
        raise SurgeryError("MODEL", "out of memory", "Not even 4 prompts fit. Use a larger machine or a smaller model.")
    return max(speeds, key=lambda n: speeds[n]), speeds
