"""Find, memory-map and write the weight files of checkpoints.

Pickles are loaded with `weights_only=True` and may hold tensors only.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor

from surgery.errors import ModelError, reading

# In the order in which transformers looks for them.
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # patterns of the names of weight files
_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _SAFETENSORS_DTYPES.items()}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by size in bytes
_LFS_POINTER = b"version https://git-lfs"
_CHUNK = 1 << 22  # elements to cast and write at once
_MAPPED_BYTES = 1 << 28  # mapped at once from a source, while shards are written
SHARD_BYTES = 10**9
_WHOLE_BYTES = 10**8  # tokenizers of 256,000 tokens have a third of it
_HEADER_BYTES = 2 * 10**7  # some 150,000 tensors. Five times as many take minutes to list


@dataclass(frozen=True)
class Stored:
    """A tensor in a file that has not been read."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of its values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def weight_files(find: Callable[[str], Path | None]) -> tuple[Path, ...]:
    """Return the weight files of a checkpoint, including all shards; empty if there are none.

    Args:
        find: function from a file name to its local path, or None if the checkpoint has no such file.

    Raises:
        ModelError: the index of the shards is damaged, or lists a missing shard.
    """
    for name in _NAMES:
        path = find(name)
        if path is None:
            continue
        if not name.endswith(".json"):
            return (path,)
        files = {shard: find(shard) for shard in _shards_of(path)}
        missing = [shard for shard, file in files.items() if file is None]
        if missing:
            raise ModelError("base.model", str(path), f"It lists {missing[0]}, which is missing. Download it again.")
        return tuple(file for file in files.values() if file is not None)
    return ()


def loose_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files of a folder under names that transformers does not look for; empty if there are none.

    These are all shards of one checkpoint without their index, or one file.

    Raises:
        ModelError: a shard is missing, or there are files of several checkpoints.
    """
    others = ("adapter_", "consolidated", "training_args", "optimizer")
    files = [f for p in WEIGHTS for f in folder.glob(p) if not f.name.startswith(others)]
    if len(files) <= 1:
        return tuple(files)
    shards = [re.fullmatch(r"(.*)-(\d+)-of-(\d+)(\.\w+)", file.name) for file in files]
    sets = {(shard[1], shard[3], shard[4]) for shard in shards if shard}
    if len(sets) > 1 or None in shards:
        names = ", ".join(sorted(file.name for file in files)[:4])
        raise ModelError("base.model", str(folder), f"It has several weight files and no index: {names}. Keep one.")
    [(stem, count, suffix)] = sets
    wanted = [folder / f"{stem}-{number:0{len(count)}}-of-{count}{suffix}" for number in range(1, len(files) + 1)]
    if int(count) != len(files) or set(wanted) != set(files):
        value = f"{folder}: {len(files)} of {int(count)} shards, and no {stem}{suffix}.index.json"
        raise ModelError("base.model", value, "Download the missing files.")
    return tuple(wanted)


def read_json(file: Path, field: str) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        ModelError: it is far larger than any such file. It is not read then.
        ValueError: it is not JSON in UTF-8.
    """
    check_small(file, field)
    return json.loads(file.read_text(encoding="utf-8"))


def check_small(file: Path, field: str) -> None:
    """Raise ModelError for a file that is read whole and is far larger than any tokenizer, config or index."""
    size = file.stat().st_size
    if size > _WHOLE_BYTES:
        hint = f"It has {size:,} bytes. At most {_WHOLE_BYTES:,} are read. Use the right file."
        raise ModelError(field, str(file), hint)


def _shards_of(index: Path) -> list[str]:
    """List the files in an index. Raises ModelError if one is outside the folder, before any is opened."""
    folder = index.parent
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":  # in the Hub's cache, files are links into `blobs`
        inside.append((folder.parent.parent / "blobs").resolve())
    with reading("base.model", str(index), "The index is damaged. Download it again."):
        data = read_json(index, "base.model")
        if not isinstance(data["metadata"], dict):
            raise TypeError("metadata is no object")
        shards = sorted(set(data["weight_map"].values()))
        for shard in shards:
            leaves = shard.startswith("/") or ".." in shard.split("/") or "\\" in shard
            if leaves or not any((folder / shard).resolve().is_relative_to(place) for place in inside):
                hint = f"It lists {shard!r}, which is outside its folder. Download it again."
                raise ModelError("base.model", str(index), hint)
    return shards


def inventory(files: Sequence[Path]) -> dict[str, Stored]:
    """Return the tensors of the files by name, without reading them.

    Raises:
        ModelError: a file is damaged; a pickle holds more than tensors; or the files hold no tensors, or one twice.
    """
    tensors: dict[str, Stored] = {}
    for file in files:
        if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
            raise ModelError("base.model", str(file), "It is not a regular file. Replace it with one.")
        with reading("base.model", str(file), "Download it again."), open(file, "rb") as handle:
            if handle.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelError("base.model", str(file), "It is a Git LFS pointer, not the file. Run `git lfs pull`.")
        if file.suffix == ".safetensors":
            of_file = _header_of(file)
        else:
            of_file = {n: Stored(file, n, tuple(t.shape), t.dtype) for n, t in _read_pickle(file).items()}
        twice = next(iter(tensors.keys() & of_file.keys()), None)
        if twice is not None:
            hint = f"{tensors[twice].file.name} has {twice} too. Keep the files of one checkpoint only."
            raise ModelError("base.model", str(file), hint)
        tensors |= of_file
    if not tensors:
        raise ModelError("base.model", ", ".join(map(str, files)), "It holds no tensors. Use a complete checkpoint.")
    return tensors


def read_tensors(wanted: Iterable[Stored], mapped_bytes: float = math.inf) -> Iterator[Tensor]:
    """Yield tensors in the given order, memory-mapped from their files.

    Args:
        wanted: tensors to read.
        mapped_bytes: map a file again after this many bytes, so that earlier tensors can leave memory.
    """
    opened: Path | None = None
    get: Callable[[str], Tensor] | None = None
    mapped = 0
    for stored in wanted:
        if get is None or stored.file != opened or (mapped > mapped_bytes and _can_map(stored.file)):
            get, opened, mapped = None, stored.file, 0  # the old mapping is freed first
            is_pickle = opened.suffix != ".safetensors"
            get = _read_pickle(opened).__getitem__ if is_pickle else safe_open(opened, "pt").get_tensor
        mapped += stored.bytes
        yield get(stored.name)


def _can_map(file: Path) -> bool:
    """Whether a file can be memory-mapped. Pickles in the old format (no zip file) cannot."""
    return file.suffix == ".safetensors" or zipfile.is_zipfile(file)


def _read_pickle(file: Path) -> Mapping[str, Tensor]:
    with reading("base.model", str(file), "It is broken. Download it again."):
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=_can_map(file))
        except UnpicklingError as error:
            imported = re.search(r"GLOBAL (\S+)", str(error))
            hint = "It is broken, or not a file of tensors that torch wrote. Download it again."
            if imported is not None:
                hint = f"It holds more than tensors ({imported[1]}) and could run code. Convert it to safetensors."
            raise ModelError("base.model", str(file), hint) from error
    if not isinstance(state, Mapping):
        hint = f"It holds a {type(state).__name__}, not tensors by name. Download it again."
        raise ModelError("base.model", str(file), hint)
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            hint = f"{name!r} is of type {type(value).__name__}. Only tensors by name can be loaded."
            raise ModelError("base.model", str(file), hint)
        fault = _fault_of(value)
        if fault:
            hint = f"{name} {fault}. Save it as a plain tensor: `.to_dense().clone()`."
            raise ModelError("base.model", str(file), hint)
    return state


def _fault_of(tensor: Tensor) -> str:
    """Say why a pickled tensor has no values of its own in its file, or nothing."""
    if tensor.is_meta:
        return "has no values (device meta)"
    if tensor.layout is not torch.strided:
        return f"is stored as {tensor.layout}"
    if tensor.dtype not in _DTYPE_NAMES:
        return f"has the type {tensor.dtype}"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return f"repeats a storage of {tensor.untyped_storage().nbytes()} bytes to shape {tuple(tensor.shape)}"
    return ""


def _header_of(file: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, after the library has checked their offsets.

    Raises:
        ModelError: the header is damaged, does not fit the file, or has an unsupported type.
    """
    with reading("base.model", str(file), "It is damaged. Download it again."):
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
        if _HEADER_BYTES < length <= file.stat().st_size:
            hint = f"Its header has {length:,} bytes. At most {_HEADER_BYTES:,} are read. Split the file into shards."
            raise ModelError("base.model", str(file), hint)
        tensors = {}
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                tensor = opened.get_slice(name)
                if (dtype := tensor.get_dtype()) not in _SAFETENSORS_DTYPES:
                    hint = f"The type {dtype} is not supported. Convert the file to another dtype."
                    raise ModelError("base.model", str(file), hint)
                tensors[name] = Stored(file, name, tuple(tensor.get_shape()), _SAFETENSORS_DTYPES[dtype])
        return tensors


def write_shards(
    folder: Path,
    tensors: Mapping[str, Stored],
    dtype_of: Callable[[str, torch.dtype], torch.dtype],
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write `model*.safetensors`, with an index if there are several.

    Memory use is about the largest tensor plus 256 MiB, for a checkpoint of any size.

    Args:
        folder: folder to write into.
        tensors: tensors by their new names.
        dtype_of: function from (new name, stored dtype) to the dtype to write.
        shard_bytes: maximum bytes of a shard with several tensors.

    Returns:
        The number of weight files.
    """
    tensors = {name: replace(stored, dtype=dtype_of(name, stored.dtype)) for name, stored in tensors.items()}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda stored: stored.bytes,
        get_storage_id=lambda stored: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        _write_safetensors(folder / file, {name: tensors[name] for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return len(split.filename_to_tensors)


def _write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write one file in the dtypes of `tensors`, wide ones first so that all are aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, tensors[name].file, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].bytes
        shape, dtype = list(tensors[name].shape), tensors[name].dtype
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        wanted = (tensors[name] for name in order)
        for name, tensor in zip(order, read_tensors(wanted, _MAPPED_BYTES), strict=True):
            for chunk in tensor.reshape(-1).split(_CHUNK):
                bits = chunk.to(tensors[name].dtype).view(_WORDS[tensors[name].dtype.itemsize])
                if bool(bits.any()):
                    file.write(bits.numpy().data)
                else:
                    file.seek(bits.numel() * bits.element_size(), 1)  # a hole in the file: zeros use no disk space
        file.truncate(8 + len(text) + end)
