"""The border of reading: any library's error becomes one line that names what was read; what is no fault passes."""

from __future__ import annotations

import pytest

from surgery.errors import DataError, ModelError, RecipeError, is_out_of_memory, naming, reading, summary
from tests.support.cases import each


class PanicException(BaseException):
    """As pyo3's: no `Exception`."""


def read(error: BaseException, value: object = "7") -> str:
    with pytest.raises(DataError) as caught, reading("some.file", value, "Write it again.", DataError):
        raise error
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)
    return str(caught.value)


@each(
    "error",
    [
        RecursionError("maximum recursion depth exceeded"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ValueError("a\nb"),
        AttributeError(),
        ImportError("cannot import name 'x' from 'y'"),
        PanicException("index out of bounds"),
        FileNotFoundError(2, "No such file", "x"),
    ],
)
def test_whatever_a_library_raises_names_field_value_and_hint(error: BaseException) -> None:
    line = read(error)
    assert line.startswith("some.file: 7 (") and line.endswith("Write it again.")
    assert summary(error) and summary(error) in line
    assert read(error, None).startswith(f"some.file: {summary(error)}")


@each(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        ModelError("config.json", 1, "Correct it."),
        RecipeError("seed", -1, "Choose another."),
    ],
)
def test_interrupts_exits_and_refusals_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reading("some.file", 7, "Write it again.", DataError):
        raise error
    assert caught.value is error


def test_a_cause_outside_the_input_has_its_remedy() -> None:
    """Also where a library wraps it in an error that blames the file."""
    gated = type("GatedRepoError", (Exception,), {})("403")
    for cause, says in (
        (ModuleNotFoundError("No module named 'a'", name="a.b"), "pip install a."),
        (ImportError("It needs x: `pip install x`"), "as the message says."),
        (PermissionError(13, "Permission denied", "dir/x"), "chmod -R u+rX dir/x."),
        (OSError(28, "No space left on device"), "The disk is full. Free some space."),
        (OSError(12, "Cannot allocate memory"), "not enough memory to load it."),
        (RuntimeError("unable to mmap: Cannot allocate memory (12)"), "not enough memory to load it."),
        (gated, "hf auth login."),
    ):
        assert read(cause).endswith(says)
        wrapped = ValueError("The file is not valid")
        wrapped.__context__ = cause
        assert read(wrapped).endswith(says)


class OutOfMemoryError(RuntimeError):
    """As torch.cuda's."""


@each(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_too_little_memory_is_called_so(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert "not enough memory" in read(error)
    assert not is_out_of_memory(RuntimeError("shape"))


def test_a_commands_argument_is_named_instead_of_the_recipes_field() -> None:
    with pytest.raises(ModelError, match=r"^MODEL: x\. Set another\.$"), naming("MODEL", "base.model"):
        raise ModelError("base.model", "x", "Set another.")
    with pytest.raises(DataError, match=r"^data\.path: x"), naming("MODEL", "base.model"):
        raise DataError("data.path", "x", "Set another.")
