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


def check_found(cache: LogitsCache, batch: EncodedBatch, rows: TopK) -> None:
    found = cache.get(batch)
    assert found is not None
    assert torch.equal(found.values, rows.values) and torch.equal(found.indices, rows.indices)
    assert found.values.dtype == torch.float32 and found.indices.dtype == torch.int64


def test_what_was_put_in_comes_out_before_and_after_it_is_written(tmp_path: Path) -> None:
    cache, batch = opened(tmp_path / "cache"), batch_of()
    rows = rows_for(batch)
    assert cache.get(batch) is None
    cache.put(batch, rows)
    check_found(cache, batch, rows)
    assert cache.get(batch_of(seed=1)) is None
    cache.flush()
    check_found(cache, batch, rows)
    check_found(opened(tmp_path / "cache"), batch, rows)
    assert len(opened(tmp_path / "cache")) == 3


def test_a_document_is_found_in_another_order_padding_and_company(tmp_path: Path) -> None:
    cache, batch = opened(tmp_path), batch_of()
    rows = rows_for(batch)
    cache.put(batch, rows)
    other = batch_of(seed=1)
    cache.put(other, rows_for(other, 1))
    cache.flush()
    lengths = batch.attention_mask.sum(1).tolist()
    parts = [TopK(v, i) for v, i in zip(rows.values.split(lengths), rows.indices.split(lengths), strict=True)]
    mixed = encode(
        [several_questions()[2], several_questions(3, 1)[0], several_questions()[0]], pico_tokenizer(), "left"
    )
    first = int(other.attention_mask[0].sum())
    expected = [parts[2], rows_for(other, 1)[:first], parts[0]]
    values, indices = (torch.cat([getattr(x, name) for x in expected]) for name in ("values", "indices"))
    check_found(cache, mixed, TopK(values, indices))


def test_a_batch_that_is_known_in_part_is_not_known(tmp_path: Path) -> None:
    cache, batch = opened(tmp_path), batch_of()
    part = batch[:2]
    cache.put(part, rows_for(part))
    assert cache.get(part) is not None
    assert cache.get(batch) is None


def test_a_document_that_goes_on_is_another(tmp_path: Path) -> None:
    """The hash is of all tokens: neither a prefix nor the padding token behind it is the same document."""
    cache, batch = opened(tmp_path), batch_of(1)
    cache.put(batch, rows_for(batch))
    shorter = encode(several_questions(1), pico_tokenizer(), until_answer=True)
    assert cache.get(shorter) is None


def test_shards_are_written_every_so_often(tmp_path: Path) -> None:
    cache = opened(tmp_path, flush_every=2)
    shards = []
    for seed in range(5):
        batch = batch_of(1, seed=seed)
        cache.put(batch, rows_for(batch, seed))
        shards.append(len(list(tmp_path.glob("shard_*"))))
    assert shards == [0, 1, 1, 2, 2]
    for seed in range(5):
        batch = batch_of(1, seed=seed)
        check_found(cache, batch, rows_for(batch, seed))


def test_processes_find_each_others_documents(tmp_path: Path) -> None:
    mine, other = opened(tmp_path), opened(tmp_path, main=False)
    batch, theirs = batch_of(seed=0), batch_of(seed=1)
    mine.put(batch, rows_for(batch))
    other.put(theirs, rows_for(theirs, 1))
    other.flush()
    mine.flush()
    check_found(mine, theirs, rows_for(theirs, 1))
    check_found(opened(tmp_path), batch, rows_for(batch))


def test_the_same_documents_twice_are_one_shard(tmp_path: Path) -> None:
    batch = batch_of()
    for cache in (opened(tmp_path), opened(tmp_path)):
        cache.put(batch, rows_for(batch))
    cache.flush()
    opened(tmp_path)
    assert len(list(tmp_path.glob("shard_*"))) == 1


def test_a_folder_of_another_identity_is_refused_and_says_why(tmp_path: Path) -> None:
    cache, batch = opened(tmp_path), batch_of()
    cache.put(batch, rows_for(batch))
    cache.flush()
    with pytest.raises(RunError, match="another teacher"):
        LogitsCache(tmp_path, {**IDENTITY, "teacher": "abd"})
    with pytest.raises(RunError, match="another tokenizer"):
        LogitsCache(tmp_path, {**IDENTITY, "tokenizer": "x"})


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(RunError, match="other files"):
        opened(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_torn_shard_is_named(tmp_path: Path) -> None:
    cache, batch = opened(tmp_path), batch_of()
    cache.put(batch, rows_for(batch))
    cache.flush()
    (shard,) = tmp_path.glob("shard_*")
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(RunError, match=rf"{shard.name}.*Delete it"):
        opened(tmp_path)
    shard.unlink()
    assert opened(tmp_path).get(batch) is None


def test_a_shard_of_something_else_is_named(tmp_path: Path) -> None:
    opened(tmp_path)
    save_file({"documents": torch.zeros(1, 16, dtype=torch.uint8)}, tmp_path / "shard_0.safetensors")
    with pytest.raises(RunError, match=r"shard_0\.safetensors.*Delete it"):
        opened(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "7", "{", ""])
def test_an_identity_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    opened(tmp_path)
    (tmp_path / "cache.json").write_text(text)
    with pytest.raises(RunError, match=r"cache\.json.*Delete"):
        opened(tmp_path)


def test_what_a_killed_run_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    opened(tmp_path)
    half = leftover(tmp_path / "shard_0123.safetensors")
    opened(tmp_path, main=False)
    assert half.exists()
    assert len(opened(tmp_path)) == 0
    assert not half.exists()


def test_a_full_disk_is_reported_and_what_was_written_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, batch, more = opened(tmp_path), batch_of(), batch_of(seed=1)
    cache.put(batch, rows_for(batch))
    cache.flush()
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}

    def half(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", half)
    cache.put(more, rows_for(more, 1))
    with pytest.raises(RunError, match="No space left"):
        cache.flush()
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_rows_of_another_batch_are_our_own_mistake(tmp_path: Path) -> None:
    batch = batch_of()
    rows = rows_for(batch)
    with pytest.raises(AssertionError):
        opened(tmp_path).put(batch, rows[: len(rows) - 1])
