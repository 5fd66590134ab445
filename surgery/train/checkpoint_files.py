"""Detect damaged checkpoints without loading them into a model.

Pickles may contain tensors and their metadata only. Other objects are never constructed.
"""

from __future__ import annotations

import json
import pickle
from io import SEEK_END
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

WEIGHTS, OPTIMIZER, STATE, SHARDS = "model.safetensors", "optimizer.pt", "state.json", "shards"
_ZIP = b"PK\x03\x04"  # first bytes of every tensor written by torch.save


def fault_of(step: Path) -> str | None:
    """Describe what is wrong with the files of a `step_*` folder; None if they are intact.

    Reads headers, indexes and sizes, not the tensors. A truncated file is always detected.
    """
    checks = {STATE: _check_state}
    checks |= (
        {SHARDS: _check_shards} if (step / SHARDS).is_dir() else {WEIGHTS: _check_weights, OPTIMIZER: _check_moments}
    )
    for name, check in checks.items():
        try:
            check(step / name)
        except FileNotFoundError as error:
            return f"{Path(error.filename or name).name} is missing"
        except (MemoryError, PermissionError):
            raise
        except Exception as error:  # json, safetensors, torch and pickle raise many types for a damaged file
            return f"{name}: {' '.join(str(error).split())[:100] or type(error).__name__}"
    return None


def _check_state(path: Path) -> None:
    state = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError(f"a {type(state).__name__}, not an object")
    kinds: dict[str, type] = {"of": str, "step": int, "history": list}
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind):
            raise ValueError(f"`{key}` is {state.get(key)!r:.30}")
    if path.parent.name != f"step_{state['step']:06d}":
        raise ValueError(f"it belongs to step {state['step']}")
    if not all(isinstance(entry, dict) and "step" in entry for entry in state["history"]):
        raise ValueError("an entry of `history` has no `step`")


def _check_weights(path: Path) -> None:
    with safe_open(path, "pt"):  # checks that the header accounts for every byte
        pass


def _check_moments(path: Path) -> None:
    state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    if not (isinstance(state, dict) and isinstance(state.get("state"), dict) and "param_groups" in state):
        raise ValueError("it holds no optimizer state")


def _check_shards(path: Path) -> None:
    for part in ShardReader(path).read_metadata().storage_data.values():
        with open(path / part.relative_path, "rb") as file:
            size = file.seek(0, SEEK_END)
            if size < part.offset + part.length:
                raise ValueError(f"{part.relative_path} has {size} bytes of {part.offset + part.length}")
            file.seek(part.offset)
            if file.read(len(_ZIP)) != _ZIP:
                raise ValueError(f"{part.relative_path} holds no tensor at {part.offset}")


class ShardReader(FileSystemReader):
    """torch's reader of sharded checkpoints with a restricted unpickler for the index."""

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        """Read the index, which may contain metadata of tensors only."""
        with open(self._get_metadata_path(), "rb") as file:
            metadata = _Descriptions(file).load()
        if not isinstance(metadata, Metadata) or metadata.storage_data is None or metadata.storage_meta is None:
            raise pickle.UnpicklingError("it is not an index of shards")
        metadata.storage_meta.load_id = self.load_id
        return metadata


_METADATA = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_DESCRIBES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class _Descriptions(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # where Python 3.13 keeps PosixPath
        if (module, name) in _DESCRIBES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")
