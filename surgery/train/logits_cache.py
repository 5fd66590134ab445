"""Cache of a teacher's top-k logits on disk.

Documents are identified by their token ids. So the cache is valid for any epoch, order and number of processes. The
teacher's logits of a document do not depend on the other documents of a batch.

A folder holds `cache.json`, which identifies the teacher, and shards, which are safetensors files:

    documents (D,16) uint8: hash of each document's token ids
    offsets (D+1): document d has the rows offsets[d] to offsets[d+1] - 1
    values (R,K) fp16: log-probabilities
    indices (R,K) int32: token ids

A row takes 6 K bytes. A shard is written to a temporary file and renamed, so an interrupted run leaves no damaged file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from surgery.data.encoding import EncodedBatch
from surgery.errors import RunError, reading
from surgery.files.atomic import leftover_of, new_file, read_mapping, sweep, write_json
from surgery.train.divergence import TopK

_HASH = 16  # bytes
Place = tuple[Path, int, int]  # shard, first row of a document, row after its last


class LogitsCache:
    """Top-k logits of one teacher, filled as they are needed.

    Args:
        folder: created if it does not exist.
        identity: what the logits depend on besides the document: the teacher's revision, the tokenizer, `top_k`.
        flush_every: number of batches after which a shard is written. An interrupted run loses at most these.
        main: True on one process only, which removes half-written files.

    Raises:
        RunError: the folder holds logits of another identity, other files, or a damaged shard.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], flush_every: int = 50, main: bool = True) -> None:
        self.folder, self._flush_every, self._batches = folder, flush_every, 0
        self._pending: dict[bytes, TopK] = {}
        self._places: dict[bytes, Place] = {}
        self._indexed: set[Path] = set()
        self._claim(dict(identity), main)
        self._index()

    def get(self, batch: EncodedBatch) -> TopK | None:
        """Read the logits of a batch.

        Returns:
            Rows of the batch's tokens without padding, document after document, on its device. None unless the cache
            holds every document of the batch. Log-probabilities in fp32: autocast to bf16 cannot join fp16.
        """
        names = [_hashed(ids) for ids in _documents(batch)]
        if any(name not in self._places and name not in self._pending for name in names):
            return None
        documents: dict[bytes, TopK] = {name: self._pending[name] for name in names if name in self._pending}
        by_file: dict[Path, list[bytes]] = {}
        for name in {*names} - documents.keys():
            by_file.setdefault(self._places[name][0], []).append(name)
        for path, stored in by_file.items():
            with _opened(path) as file:
                values, indices = file.get_slice("values"), file.get_slice("indices")
                for name in stored:
                    _, start, end = self._places[name]
                    documents[name] = TopK(values[start:end], indices[start:end])
        values = torch.cat([documents[n].values.float() for n in names])
        indices = torch.cat([documents[n].indices.long() for n in names])
        return TopK(values, indices).to(batch.input_ids.device)

    def put(self, batch: EncodedBatch, rows: TopK) -> None:
        """Add the logits of a batch: rows of its tokens without padding. Writes a shard every `flush_every` batches."""
        stored = TopK(rows.values.to("cpu", torch.float16), rows.indices.to("cpu", torch.int32))
        start = 0
        for ids in _documents(batch):
            self._pending[_hashed(ids)] = stored[start : start + len(ids)]
            start += len(ids)
        assert start == len(rows), "the rows are not those of the batch's tokens without padding"
        self._batches += 1
        if self._batches >= self._flush_every:
            self.flush()

    def flush(self) -> None:
        """Write pending documents as a shard, and index the shards of other processes.

        Raises:
            RunError: the shard cannot be written. Earlier shards are not affected.
        """
        if self._pending:
            names = sorted(self._pending)
            lengths = torch.tensor([0, *(len(self._pending[name]) for name in names)])
            tensors = {
                "documents": torch.tensor([list(name) for name in names], dtype=torch.uint8),
                "offsets": lengths.cumsum(0),
                "values": torch.cat([self._pending[name].values for name in names]),
                "indices": torch.cat([self._pending[name].indices for name in names]),
            }
            shard = self.folder / f"shard_{hashlib.sha256(b''.join(names)).hexdigest()[:16]}.safetensors"
            try:
                with new_file(shard) as new:
                    save_file(tensors, new)
            except (SafetensorError, OSError) as error:
                hint = f"A shard could not be written ({error}). Free some space, or remove `cache`."
                raise RunError("train.distil.cache", str(self.folder), hint) from None
        self._pending, self._batches = {}, 0
        self._index()

    def _claim(self, identity: dict[str, Any], main: bool) -> None:
        """Check that the folder is a cache of this identity, or make it one."""
        path = self.folder / "cache.json"
        if self.folder.exists() and not path.exists() and not all(map(leftover_of, self.folder.iterdir())):
            raise RunError("train.distil.cache", str(self.folder), "The folder holds other files. Delete or move it.")
        if path.exists():
            stored = read_mapping(path)
            if not stored:  # it is damaged
                raise RunError("train.distil.cache", str(path), f"It is damaged. Delete {self.folder}")
            different = sorted(k for k in stored.keys() | identity.keys() if stored.get(k) != identity.get(k))
            if different:
                hint = f"Its logits belong to another {', '.join(different)}. Delete it, or use another folder."
                raise RunError("train.distil.cache", str(self.folder), hint)
        else:
            write_json(path, identity)
        if main:
            sweep(self.folder)

    def _index(self) -> None:
        """Index the documents of new shards."""
        for path in sorted(set(self.folder.glob("shard_*.safetensors")) - self._indexed):
            with _opened(path) as file:
                names, offsets = file.get_tensor("documents").tolist(), file.get_tensor("offsets").tolist()
            for name, start, end in zip(names, offsets, offsets[1:], strict=False):
                self._places[bytes(name)] = (path, start, end)
            self._indexed.add(path)


def _documents(batch: EncodedBatch) -> list[Tensor]:
    """Token ids of each document without padding, row after row."""
    ids, real = batch.input_ids.cpu(), batch.attention_mask.bool().cpu()
    if batch.documents is None:
        return [row[there] for row, there in zip(ids, real, strict=True)]
    which = [row[there] for row, there in zip(batch.documents.cpu(), real, strict=True)]
    sizes = [torch.bincount(row).tolist() for row in which]
    return [part for row, there, size in zip(ids, real, sizes, strict=True) for part in row[there].split(size)]


def _hashed(ids: Tensor) -> bytes:
    return hashlib.sha256(ids.to(torch.int32).numpy().tobytes()).digest()[:_HASH]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a shard. Raises RunError if the file is damaged."""
    hint = "Delete it. Its documents will be computed again."
    with reading("train.distil.cache", str(path), hint, RunError), safe_open(path, "pt") as file:
        yield file
