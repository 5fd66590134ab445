"""Files of tensors: shards of the right size, bits unchanged, zeros as holes, nothing read that is not asked for."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgery.errors import ModelError
from surgery.weights import Stored, inventory, read_tensors, weight_files, write_shards


def sample() -> dict[str, Tensor]:
    """Tensors of several types, one of them not in memory order, one empty, one a single number."""
    rng = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(300, 7, generator=rng),
        "a": torch.randn(5, 4, generator=rng).T,
        "half": torch.randn(33, generator=rng).bfloat16(),
        "count": torch.arange(9),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(3.5),
        "minus zero": torch.full((4,), -0.0),
        "not a number": torch.tensor([float("nan"), float("inf")]),
    }


def stored(folder: Path, tensors: dict[str, Tensor], suffix: str) -> dict[str, Stored]:
    file = folder / f"source{suffix}"
    if suffix == ".bin":
        torch.save(tensors, file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return inventory([file])


def load_folder(folder: Path) -> dict[str, Tensor]:
    """All shards, as safetensors reads them."""
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [bytes(x.contiguous().reshape(-1).view(torch.uint8).numpy()) for x in (found[name], tensor)]
        assert bits[0] == bits[1], name


def keep(name: str, dtype: torch.dtype) -> torch.dtype:
    return dtype


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize("shard_bytes", [10**9, 3000, 1])
def test_what_is_written_is_what_was_read(tmp_path: Path, suffix: str, shard_bytes: int) -> None:
    tensors = sample()
    shards = write_shards(tmp_path, stored(tmp_path, tensors, suffix), keep, shard_bytes)
    assert_same_bits(load_folder(tmp_path), tensors)
    assert len(list(tmp_path.glob("model*.safetensors"))) == shards
    assert (shards == 1) == (shard_bytes == 10**9)


def test_the_index_finds_every_tensor_and_shards_keep_their_size(tmp_path: Path) -> None:
    tensors = {f"t{i:02}": torch.full((100,), float(i + 1)) for i in range(20)}
    shards = write_shards(tmp_path, stored(tmp_path, tensors, ".bin"), keep, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 20 * 400
    assert shards == 10
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118  (safe_open is no mapping)
            assert len(opened.keys()) <= 2
    found = weight_files(lambda name: tmp_path / name if (tmp_path / name).is_file() else None)
    assert [file.name for file in found] == sorted(set(index["weight_map"].values()))


def test_numbers_are_cast_as_torch_casts_them(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(1000, 3), "i": torch.arange(4)}
    source = stored(tmp_path, tensors, ".safetensors")
    write_shards(tmp_path, source, lambda name, dtype: torch.bfloat16 if name == "x" else dtype)
    assert_same_bits(load_folder(tmp_path), {**tensors, "x": tensors["x"].bfloat16()})


def test_zeros_take_no_room_on_the_disk(tmp_path: Path) -> None:
    tensors = {"zeros": torch.zeros(4_000_000), "ones": torch.ones(1000), "more zeros": torch.zeros(4_000_000)}
    write_shards(tmp_path, stored(tmp_path, tensors, ".bin"), keep)
    status = (tmp_path / "model.safetensors").stat()
    assert status.st_size > 32_000_000
    assert status.st_blocks * 512 < 2_000_000
    assert_same_bits(load_folder(tmp_path), tensors)


def test_tensors_are_aligned(tmp_path: Path) -> None:
    write_shards(tmp_path, stored(tmp_path, sample(), ".bin"), keep)
    raw = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = {name: entry for name, entry in json.loads(raw[8 : 8 + length]).items() if name != "__metadata__"}
    assert length % 8 == 0
    for name, tensor in sample().items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def test_reading_several_files_keeps_the_order(tmp_path: Path) -> None:
    files = [tmp_path / "0.safetensors", tmp_path / "1.bin"]
    save_file({"a": torch.zeros(2), "c": torch.full((2,), 2.0)}, files[0])
    torch.save({"b": torch.ones(2), "d": torch.full((2,), 3.0)}, files[1])
    found = inventory(files)
    values = [tensor[0].item() for tensor in read_tensors(found[name] for name in "abcd")]
    assert values == [0.0, 1.0, 2.0, 3.0]


def test_a_broken_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ModelError, match="index is broken"):
        weight_files(lambda name: tmp_path / name if (tmp_path / name).is_file() else None)
