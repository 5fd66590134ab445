"""Read rows from files, folders and the Hub. Each row knows its file and line for error messages.

No text stays in memory: JSONL files are indexed by line and parsed on access, and Parquet files and Hub data sets are
Arrow tables on disk (`datasets`). Only a .json list is held as bytes. Lines and rows are counted from 1.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from surgery.data.columns import Row, column_names, not_json, parsed
from surgery.errors import DataError, reading
from surgery.recipe import Columns, Data
from surgery.recipe.sources import DATA_FORMATS

_SPLITS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}
_TOKEN = re.compile(r"hf_\w+")
_DAMAGED = "The file has a Parquet header, but its rows cannot be read. Write it again."
_LINE, _WHOLE = 2**26, 2**30  # largest line, and largest file that is parsed at once, in bytes
_BATCH = 256  # rows of a streamed Parquet file to hold in memory


class Rows(Protocol):
    """Rows with random access, in the order of the files."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]: ...


class JsonLines:
    """A JSONL file, indexed by line at the first access. Raises DataError if the file changes while it is in use."""

    def __init__(self, path: Path) -> None:
        self.path, self._stamp = path, _stamp(path)

    @cached_property
    def _places_N3(self) -> np.ndarray:
        """Number, byte offset and bytes of each line that is not blank."""
        places = array("q")
        for line, start, text in _lines(self.path):
            places.extend((line, start, len(text)))
        return np.array(places, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._places_N3)

    def __getitem__(self, i: int) -> Row:
        line, start, length = self._places_N3[i].tolist()
        if _stamp(self.path) != self._stamp:
            hint = "Start again with a copy that does not change."
            raise DataError(str(self.path), "the file changed while it was in use", hint)
        with open(self.path, "rb") as file:
            file.seek(start)
            return Row(f"{self.path}:{line}", file.read(length))

    def __iter__(self) -> Iterator[Row]:
        return (Row(f"{self.path}:{line}", text) for line, _, text in _lines(self.path))


class ArrowRows:
    """An Arrow table, or a sequence of rows, with a name for error messages."""

    def __init__(self, table: Any, name: str) -> None:
        self.table, self.name = table, name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> Row:
        return Row(f"{self.name}: row {i + 1}", self.table[i])

    def __iter__(self) -> Iterator[Row]:
        return (Row(f"{self.name}: row {i}", fields) for i, fields in enumerate(self.table, 1))


class JoinedRows:
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts, self._ends = parts, list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> Row:
        part = bisect_right(self._ends, i)
        return self.parts[part][i - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[Row]:
        return (row for part in self.parts for row in part)


class ShuffledEpochs:
    """Epochs of streamed rows, shuffled within a buffer. The order of files or Hub shards is shuffled too."""

    def __init__(self, data: Data, seed: int) -> None:
        import datasets

        files = local_files(data)
        self.data, self.local = data, bool(files)
        if files:  # `datasets` takes a list in `gen_kwargs` as shards, and a tuple as one value
            arguments = {"files": files, "columns": data.columns}
            stream = datasets.IterableDataset.from_generator(_as_items, gen_kwargs=arguments)
        else:
            stream = _from_hub(data)
        self._stream = stream.shuffle(seed=seed, buffer_size=data.buffer)

    def rows(self, epoch: int) -> Iterator[Row]:
        """Stream the rows of an epoch, counted from 0. Every call yields the same order."""
        self._stream.set_epoch(epoch)
        if self.local:
            return (Row(item["where"], item["raw"]) for item in self._stream)
        return _streamed(self._stream, self.data)


def open_rows(data: Data) -> Rows:
    """Open all rows for random access.

    Raises:
        DataError: no file can be read, a column is missing, or loading from the Hub failed.
    """
    files = local_files(data)
    if not files:
        return ArrowRows(_from_hub(data), f"{data.path} ({data.split})")
    parts = [_open_file(path, data.columns) for path in files]
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def rows_in_order(data: Data) -> Iterator[Row]:
    """Stream all rows once, in the order of the files."""
    files = local_files(data)
    if files:
        return (row for path in files for row in _read_file(path, data.columns))
    return _streamed(_from_hub(data), data) if data.streaming else iter(open_rows(data))


def local_files(data: Data) -> list[Path]:
    """List the files of `data.path`, sorted by name; none for a Hub id.

    Files and folders whose names begin with a dot, such as `.ipynb_checkpoints`, are left out of a folder.

    Raises:
        DataError: there is no file, a folder has several formats or lacks the split, or an entry is no file.
    """
    if data.is_on_hub:
        return []
    path = Path(os.path.expanduser(data.path))
    if not path.exists():
        hint = "Use a JSONL or Parquet file, a folder of them, or a data set's id on the Hub (owner/name)."
        raise DataError("data.path", data.path, f"No such file or folder. {hint}")
    if data.name is not None or data.revision is not None:
        hint = "It is a local path. Remove `name` and `revision`, which apply to Hub data sets."
        raise DataError("data.path", data.path, hint)
    inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    shown = [f for f in inside if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    files = [f for f in shown if f.suffix.lower() in DATA_FORMATS and not f.is_dir()]
    for file in files:
        if file.is_symlink() and not file.exists():
            hint = f"It is a link to {os.readlink(file)}, which does not exist. Restore that file, or remove the link."
            raise DataError("data.path", file, hint)
        if not file.is_file():
            raise DataError("data.path", file, "It is no regular file, but a pipe or a device. Remove it.")
    if not files:
        hint = f"It has no {', '.join(DATA_FORMATS)} file. Set another path."
        if path.is_file() and path.suffix.lower() not in DATA_FORMATS:
            instead = "Write one JSON object per line into a .jsonl file, or use a .json or .parquet file."
            hint = f"A {path.suffix or 'file without a suffix'} is not read. {instead}"
        raise DataError("data.path", data.path, hint)
    formats = sorted({f.suffix.lower() for f in files})
    if len(formats) > 1:
        hint = f"The folder has {' and '.join(formats)} files. Set one file, or use one folder per format."
        raise DataError("data.path", data.path, hint)
    return _of_split(files, path, data.split)


def _of_split(files: list[Path], root: Path, split: str) -> list[Path]:
    """Select the files whose names contain the split; all files if no name contains any split."""
    words = [set(re.split(r"[^a-z0-9]+", str(f.relative_to(root)).lower())) for f in files] if root.is_dir() else []
    splits = [w & (_SPLITS | {split}) for w in words]
    if not any(splits):
        if split != "train":
            raise DataError("data.split", split, f"No file name at {root} contains it. Remove `split`.")
        return files
    for file, names in zip(files, splits, strict=True):
        if not names:
            hint = f"Some file names contain a split, but {file.name} does not. Rename it, or set one file."
            raise DataError("data.path", root, hint)
    chosen = [f for f, names in zip(files, splits, strict=True) if split in names]
    if not chosen:
        hint = f"{root} has the splits {', '.join(sorted(set().union(*splits)))}. Use one of them."
        raise DataError("data.split", split, hint)
    return chosen


def _stamp(path: Path) -> tuple[int, int]:
    """Size and modification time of a file, to detect changes."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, byte offset and text of every line that is not blank. Raise DataError for UTF-16."""
    start = 0
    with open(path, "rb") as file:
        for line in count(1):
            text = file.readline(_LINE + 1)
            if not text:
                return
            if line == 1 and text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(str(path), "UTF-16, not UTF-8", "Save the file in UTF-8.")
            if len(text) > _LINE:
                hint = "Write one JSON object per line, and cut long texts into several rows."
                raise DataError(f"{path}:{line}", f"a line of more than {_LINE >> 20} MiB", hint)
            if text.strip():
                yield line, start, text
            start += len(text)


def _json_rows(path: Path) -> Rows:
    """Open a JSON file: one list of objects (.json only), or one object per line."""
    with open(path, "rb") as file:
        first = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    return _listed(path) if first == b"[" and path.suffix.lower() == ".json" else JsonLines(path)


def _listed(path: Path) -> ArrowRows:
    """Read a .json file that is one list. Parsing needs the whole file in memory; bytes of rows stay there."""
    if path.stat().st_size > _WHOLE:
        hint = "Write one JSON object per line into a .jsonl file, which is not read at once."
        raise DataError(str(path), f"a JSON list of more than {_WHOLE >> 20} MiB", hint)
    try:
        rows = parsed(path.read_bytes(), str(path), str(path))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise not_json(f"{path}{line}", error, "Write a list of objects, or one object per line.") from None
    return ArrowRows([json.dumps(row).encode() for row in rows], str(path))


def _open_file(path: Path, columns: Columns) -> Rows:
    """Open one file for random access. Parquet becomes an Arrow table in the cache of `datasets`."""
    if path.suffix.lower() != ".parquet":
        return _json_rows(path)
    import datasets
    from pyarrow.parquet import read_metadata

    names = _parquet_columns(path, columns)
    with reading(str(path), None, _DAMAGED, DataError):
        if not read_metadata(path).num_rows:  # `datasets` refuses such a file, also beside others
            return ArrowRows([], str(path))
        table = datasets.load_dataset("parquet", data_files=glob.escape(str(path)), columns=names, split="train")
    return ArrowRows(table, str(path))


def _read_file(path: Path, columns: Columns) -> Iterator[Row]:
    """Stream the rows of one file."""
    if path.suffix.lower() != ".parquet":
        yield from _json_rows(path)
        return
    from pyarrow.parquet import ParquetFile

    names = _parquet_columns(path, columns)
    with reading(str(path), None, _DAMAGED, DataError):
        batches = ParquetFile(path).iter_batches(_BATCH, columns=names)
        yield from ArrowRows((row for batch in batches for row in batch.to_pylist()), str(path))


def _as_items(files: list[Path], columns: Columns) -> Iterator[dict[str, Any]]:
    """Yield rows in the form that `datasets` expects from a generator."""
    for path in files:
        for row in _read_file(path, columns):
            yield {"where": row.where, "raw": row.raw}


def _parquet_columns(path: Path, columns: Columns) -> list[str]:
    """List the columns to read. Raise DataError for a damaged file, or a file without one of them."""
    import pyarrow
    from pyarrow.parquet import read_schema

    try:
        names = read_schema(path).names
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(str(path), "not a Parquet file", str(error).split("\n")[0]) from None
    return column_names(columns, names, str(path))


def _from_hub(data: Data) -> Any:
    """Load a Hub data set, limited to the columns to read. Its code is never run."""
    import datasets

    try:
        dataset = datasets.load_dataset(
            data.path, data.name, split=data.split, revision=data.revision, streaming=data.streaming
        )
    except Exception as error:  # of the library, the network or the files
        raise _hub_error(data, error) from None
    if dataset.column_names is None:  # a stream whose first rows have not been read
        return dataset
    return dataset.select_columns(column_names(data.columns, dataset.column_names, data.path))


def _streamed(stream: Any, data: Data) -> Iterator[Row]:
    """Stream the rows of a Hub data set, numbered in stream order, since shards have no common numbering."""
    try:
        for number, fields in enumerate(stream, 1):
            yield Row(f"{data.path} ({data.split}): row {number} of the stream", fields)
    except Exception as error:
        raise _hub_error(data, error) from None


def _hub_error(data: Data, error: Exception) -> DataError:
    """Convert an error of loading. Access tokens are removed from its message."""
    text = _TOKEN.sub("hf_...", str(error)).strip().split("\n")[0][:300]
    hint = "Check its id, `name`, `split` and `revision`, and the connection. Log in for a gated data set."
    return DataError(data.path, f"loading from the Hub failed ({type(error).__name__}: {text})", hint)
