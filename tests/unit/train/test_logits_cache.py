"""The cache gives back what was put in, and never anything else: other teachers, torn files, killed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from surgery.data.encoding import EncodedBatch, encode
from surgery.errors import RunError
from surgery.train import logits_cache as module
from surgery.train.divergence import TopK
from surgery.train.logits_cache import LogitsCache
from tests.support.pico import pico_tokenizer
from tests.support.processes import leftover
from tests.support.samples import several_questions

K = 3
IDENTITY = {"teacher": "abc", "top_k": K}


def batch_of(count: int = 3, side: Any = "right", seed: int = 0) -> EncodedBatch:
    return encode(several_questions(count, seed), pico_tokenizer(), side)


def rows_for(batch: EncodedBatch, seed: int = 0) -> TopK:
    """Numbers that fp16 holds exactly."""
    rng = torch.Generator().manual_seed(seed)
    count = int(batch.attention_mask.sum())
    values = -torch.randint(1, 512, (count, K), generator=rng) / 32
    return TopK(values, torch.randint(0, 200_000, (count, K), generator=rng))


def opened(folder: Path, **more: Any) -> LogitsCache:
    return LogitsCache(folder, IDENTITY, **more)


def filled(folder: Path, seed: int = 0, **more: Any) -> tuple[LogitsCache, EncodedBatch, TopK]:
    """A cache that holds one batch, not written yet."""
    cache, batch = opened(folder, **more), batch_of(seed=seed)
    cache.put(batch, rows_for(batch, seed))
    return cache, batch, rows_for(batch, seed)


def check_found(cache: LogitsCache, batch: EncodedBatch, rows: TopK) -> None:
    found = cache.get(batch)
    assert found is not None
    assert torch.equal(found.values, rows.values) and torch.equal(found.indices, rows.indices)
    assert found.values.dtype == torch.float32 and found.indices.dtype == torch.int64


def test_what_was_put_in_comes_out_before_and_after_it_is_written(tmp_path: Path) -> None:
    assert opened(tmp_path / "cache").get(batch_of()) is None
    cache, batch, rows = filled(tmp_path / "cache")
    check_found(cache, batch, rows)
    cache.flush()
    check_found(cache, batch, rows)
    check_found(opened(tmp_path / "cache"), batch, rows)
    again, *_ = filled(tmp_path / "cache")
    again.flush()
    assert len(list((tmp_path / "cache").glob("shard_*"))) == 1, "the same documents are one shard"


def test_a_document_is_found_in_another_order_padding_and_company(tmp_path: Path) -> None:
    cache, batch, rows = filled(tmp_path)
    other = batch_of(seed=1)
    cache.put(other, rows_for(other, 1))
    cache.flush()
    lengths = batch.attention_mask.sum(1).tolist()
    parts = [TopK(v, i) for v, i in zip(rows.values.split(lengths), rows.indices.split(lengths), strict=True)]
    documents = [several_questions()[2], several_questions(3, 1)[0], several_questions()[0]]
    expected = [parts[2], rows_for(other, 1)[: int(other.attention_mask[0].sum())], parts[0]]
    values, indices = (torch.cat([getattr(x, name) for x in expected]) for name in ("values", "indices"))
    check_found(cache, encode(documents, pico_tokenizer(), "left"), TopK(values, indices))


def test_another_document_is_not_found(tmp_path: Path) -> None:
    """The hash is of all tokens, so a prefix is another one. A batch that is known in part is not known."""
    cache, batch = opened(tmp_path), batch_of()
    cache.put(batch[:2], rows_for(batch[:2]))
    assert cache.get(batch[:2]) is not None and cache.get(batch) is None
    assert cache.get(encode(several_questions(1), pico_tokenizer(), until_answer=True)) is None


def test_shards_are_written_every_so_often(tmp_path: Path) -> None:
    cache, shards = opened(tmp_path, flush_every=2), list[int]()
    for seed in range(5):
        batch = batch_of(1, seed=seed)
        cache.put(batch, rows_for(batch, seed))
        shards.append(len(list(tmp_path.glob("shard_*"))))
    assert shards == [0, 1, 1, 2, 2]
    for seed in range(5):
        check_found(cache, batch_of(1, seed=seed), rows_for(batch_of(1, seed=seed), seed))


def test_processes_find_each_others_documents(tmp_path: Path) -> None:
    mine, *own = filled(tmp_path)
    other, *theirs = filled(tmp_path, seed=1, main=False)
    other.flush()
    mine.flush()
    check_found(mine, *theirs)
    check_found(opened(tmp_path), *own)


def test_a_folder_of_another_identity_or_of_something_else_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)[0].flush()
    for change in ({"teacher": "abd"}, {"tokenizer": "x"}):
        with pytest.raises(RunError, match=f"another {next(iter(change))}"):
            LogitsCache(tmp_path, {**IDENTITY, **change})
    for text in ("[]", "null", "7", "{", ""):
        (tmp_path / "cache.json").write_text(text)
        with pytest.raises(RunError, match=r"cache\.json.*Delete"):
            opened(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("all of it")
    with pytest.raises(RunError, match="other files"):
        opened(tmp_path / "other")
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    cache, batch, _ = filled(tmp_path)
    cache.flush()
    (shard,) = tmp_path.glob("shard_*")
    for damage in (lambda: shard.write_bytes(shard.read_bytes()[:-50]), lambda: save_file({"x": torch.ones(1)}, shard)):
        damage()
        with pytest.raises(RunError, match=rf"{shard.name}.*Delete it"):
            opened(tmp_path)
    shard.unlink()
    assert opened(tmp_path).get(batch) is None


def test_what_a_killed_run_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    opened(tmp_path)
    half = leftover(tmp_path / "shard_0123.safetensors")
    opened(tmp_path, main=False)
    assert half.exists()
    opened(tmp_path)
    assert not half.exists()


def test_a_full_disk_is_reported_and_what_was_written_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)[0].flush()
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}

    def half(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", half)
    with pytest.raises(RunError, match="No space left"):
        filled(tmp_path, seed=1)[0].flush()
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
