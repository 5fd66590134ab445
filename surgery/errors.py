"""Exceptions, and context managers that convert errors of other libraries into them.

Invalid input raises one `SurgeryError` that names the field, the value and a valid alternative. The command line prints
it without a traceback and exits with code 2.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class SurgeryError(ValueError):
    """Invalid input: a recipe, an option, a file or a model that cannot be used.

    Args:
        field: what is wrong, in the user's terms (`train.steps`, `--to`, a path).
        value: its present value. None if the field alone is clear.
        hint: what to set or do instead.
    """

    def __init__(self, field: str, value: object, hint: str) -> None:
        self.field, self.value, self.hint = field, value, hint
        super().__init__(f"{field}: {value}. {hint}" if value is not None else f"{field}: {hint}")

    def __reduce__(self) -> tuple[type[SurgeryError], tuple[str, str | None, str]]:
        return type(self), (self.field, None if self.value is None else str(self.value), self.hint)  # across processes


class RecipeError(SurgeryError):
    """The recipe is invalid: unknown key, wrong type, bad value or duplicate key."""


class ModelError(SurgeryError):
    """The model folder is missing, empty or damaged, or no family supports its model type."""


class PlanError(SurgeryError):
    """The heads do not fit the model: out of range, located in another model, or in a layer that cannot be spliced."""


class ProbeError(SurgeryError):
    """A probe cannot be generated: more pairs than values, or choices that share all their tokens."""


class DataError(SurgeryError):
    """User data cannot be used. The field names the file and line, or the row."""


class RunError(SurgeryError):
    """The run folder cannot be used: it belongs to another recipe, or the input of a stage is missing."""


class TrainingDiverged(SurgeryError):
    """The loss is NaN or infinite. The last good checkpoint is kept."""


@contextmanager
def reading(field: str, value: object, hint: str, kind: type[SurgeryError] = ModelError) -> Iterator[None]:
    """Convert any error that a library raises inside into one error that names the input.

    Use it around every read of files and values from outside. A `SurgeryError`, `SystemExit` or `KeyboardInterrupt`
    passes unchanged. The library's error stays available as the cause, which `surgery --debug` prints.

    Args:
        field: the recipe's field, or the file.
        value: what the user set there. None if the field alone is clear.
        hint: what to do instead.
        kind: the class of the error to raise.

    Raises:
        SurgeryError: a library raised an error inside.
    """
    try:
        yield
    except (SurgeryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust code is not an `Exception`
        what = summary(error)
        raise kind(field, what if value is None else f"{value} ({what})", _remedy(error) or hint) from error


def _remedy(error: BaseException | None) -> str:
    """Return what to do about an error that has its cause outside the input, or nothing.

    Libraries wrap such errors in others that blame the file, so the causes of an error are searched too.
    """
    while error is not None:
        if is_out_of_memory(error):
            return "There is not enough memory to load it."
        if isinstance(error, PermissionError):
            return f"Permission denied. Allow reading: chmod -R u+rX {error.filename or ''}".rstrip() + "."
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return "The disk is full. Free some space."
        if type(error).__name__ == "GatedRepoError":
            return "Accept its terms on its page on the Hub, then log in: hf auth login."
        if isinstance(error, ModuleNotFoundError) and error.name:
            return f"A package is missing. Install it: pip install {error.name.partition('.')[0]}."
        if isinstance(error, ImportError) and "pip install" in str(error):
            return "A package is missing. Install it as the message says."
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


@contextmanager
def naming(argument: str, field: str) -> Iterator[None]:
    """Name a command's argument in errors about the field of a recipe that it sets.

    Args:
        argument: metavar of the argument, such as MODEL.
        field: key of the recipe, such as `base.model`.

    Raises:
        SurgeryError: one with this field was raised inside.
    """
    try:
        yield
    except SurgeryError as error:
        if error.field != field:
            raise
        raise type(error)(argument, error.value, error.hint) from error


def summary(error: BaseException) -> str:
    """Describe an error in one line of at most 300 characters."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text = " ".join(str(error).split())[:300].rstrip(" .")
    if isinstance(error, (SurgeryError, OSError)) or type(error) is ValueError:
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """True if Python, torch on a CPU or torch on a GPU ran out of memory."""
    texts = ("can't allocate memory", "cannot allocate memory", "bad_alloc")
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or getattr(error, "errno", None) == errno.ENOMEM
        or any(text in str(error).lower() for text in texts)
    )


@contextmanager
def fitting(field: str, value: object, hint: str = "Lower it.") -> Iterator[None]:
    """Convert an out-of-memory error inside into a `RunError` that names the setting to lower.

    Args:
        field: the setting of the recipe that memory grows with.
        value: its present value.
        hint: what to set instead.

    Raises:
        RunError: memory ran out inside.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for both CPU and GPU memory
        if not is_out_of_memory(error):
            raise
        raise RunError(field, value, f"Out of memory. {hint}") from error


def short_repr(value: object) -> str:
    """Format a value for an error message, in at most 60 characters."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
