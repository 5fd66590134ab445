"""The error tree, and the border that turns what libraries raise into it.

A user's mistake becomes one `SurgeryError`: it names the field, the value that was found and what would do.
The CLI prints it without a traceback and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SurgeryError(ValueError):
    """A request that cannot be carried out as it was made.

    Args:
        field: what was wrong, as the user wrote it (`train.steps`, `--to`, a path).
        value: what was found there.
        hint: what would do instead.
    """

    def __init__(self, field: str, value: object, hint: str) -> None:
        self.field, self.value, self.hint = field, value, hint
        super().__init__(f"{field}: {value}. {hint}" if value is not None else f"{field}: {hint}")


class RecipeError(SurgeryError):
    """The recipe is not valid: unknown key, wrong type, bad value, duplicate key."""


class ModelError(SurgeryError):
    """The model folder is missing, empty, damaged, or holds a model that the toolkit has no family for."""


class PlanError(SurgeryError):
    """The heads do not fit the model: out of range, another geometry, an unspliceable site."""


class ProbeError(SurgeryError):
    """A probe cannot be made as asked: more pairs than values, choices that no token tells apart."""


class DataError(SurgeryError):
    """Documents of the user's own cannot be used; the field names the file and its line, or the row."""


class RunError(SurgeryError):
    """The run folder is in the way: it belongs to another recipe, or a stage's input is missing."""


class TrainingDiverged(SurgeryError):
    """The loss is not a number any more. The last good step is kept."""


@contextmanager
def reading(field: str, value: object, hint: str, kind: type[SurgeryError] = ModelError) -> Iterator[None]:
    """The border of reading: whatever a library raises on a damaged file or value becomes one error that names it.

    Every reader of foreign material passes through here. A `SurgeryError` inside, an exit and an interrupt pass
    unchanged. The library's own error is kept as the cause, which `surgery --debug` prints.

    Args:
        field: the recipe's field, or the file.
        value: what the user set there; None if the field says it.
        hint: what to do instead.

    Raises:
        SurgeryError: of this `kind`.
    """
    try:
        yield
    except (SurgeryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # Rust's panics are no `Exception`
        what = summary(error)
        if is_out_of_memory(error):
            hint = "There is not enough memory to read it."
        raise kind(field, what if value is None else f"{value} ({what})", hint) from error


def summary(error: BaseException) -> str:
    """The error in one line of at most 300 characters."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text = " ".join(str(error).split())[:300].rstrip(" .")
    if isinstance(error, (SurgeryError, OSError)) or type(error) is ValueError:
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch on a CPU or torch on a GPU ran out of memory."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


@contextmanager
def fitting(field: str, value: object, hint: str = "Lower it.") -> Iterator[None]:
    """Raises RunError that names what to lower where memory does not suffice inside.

    Args:
        field: of the recipe, which memory grows with.
        value: what it is now.
        hint: what to set instead.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's errors of both kinds of memory are the latter
        if not is_out_of_memory(error):
            raise
        raise RunError(field, value, f"Out of memory. {hint}") from error
