"""Files of tensors: shards of the right size, bits unchanged, zeros as holes, nothing read that is not asked for."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgery.errors import ModelError
from surgery.models.tensor_files import Stored, inventory, read_tensors, weight_files, write_shards
from tests.support.cases import each
from tests.support.errors import refused


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


@each("suffix", [".bin", ".safetensors"])
@each("shard_bytes", [10**9, 3000, 1])
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


def find_in(folder: Path) -> Any:
    return lambda name: folder / name if (folder / name).is_file() else None


def test_tensors_without_values_of_their_own_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    for tensor in (torch.zeros(1).expand(10**6, 10**6), torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(),
                   torch.empty(9, device="meta"), torch.zeros(3, dtype=torch.complex64)):  # fmt: skip
        torch.save({"fine": torch.ones(2), "odd": tensor}, file)
        with refused(ModelError, "x.bin", "odd", "plain tensor"):
            inventory([file])


def test_what_cannot_be_a_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    """No tensors, one tensor in two files, and a header of a million tensors."""
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    save_file({}, files[0])
    with refused(ModelError, "1.safetensors", "no tensors"):
        inventory(files[:1])
    for file in files:
        save_file({"a": torch.ones(1)}, file)
    with refused(ModelError, "2.safetensors", "1.safetensors has a too"):
        inventory(files)
    header_file(files[0], b" " * (2 * 10**7 + 1))
    with refused(ModelError, "20,000,001 bytes", "shards"):
        inventory(files)


class TestIndexes:
    """An index is data of a stranger: its form is checked, and it names files of its own folder alone."""

    @each(
        "text",
        ["", "[]", "{", "{}", "[" * 100_000, '{"metadata": {}, "weight_map": ["a.safetensors"]}',
         '{"metadata": {}, "weight_map": {"a": 3}}', '{"metadata": {}, "weight_map": {"a": null, "b": "c"}}',
         '{"weight_map": {"a": "part.safetensors"}}', '{"metadata": 3, "weight_map": {"a": "part.safetensors"}}',
         '{"metadata": {}, "weight_map": {"a": "x\\u0000y"}}', "\ud800"],
    )  # fmt: skip
    def test_a_malformed_index_is_named(self, tmp_path: Path, text: str) -> None:
        save_file({"a": torch.ones(1)}, tmp_path / "part.safetensors")
        (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with refused(ModelError, "model.safetensors.index.json"):
            weight_files(find_in(tmp_path))

    @each("kind", ["model.safetensors", "pytorch_model.bin"])
    @each("form", ["above", "absolute", "around", "link", "folder link", "backslash"])
    def test_a_file_outside_the_folder_is_refused_before_it_is_opened(
        self, tmp_path: Path, form: str, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, outside = tmp_path / "model", tmp_path / "secret"
        folder.mkdir()
        outside.mkdir()
        save_file({"a": torch.ones(1)}, outside / "x.safetensors")
        (folder / "link.safetensors").symlink_to(outside / "x.safetensors")
        (folder / "sub").symlink_to(outside)
        name = {
            "above": "../secret/x.safetensors",
            "absolute": str(outside / "x.safetensors"),
            "around": "sub/../../secret/x.safetensors",
            "link": "link.safetensors",
            "folder link": "sub/x.safetensors",
            "backslash": "..\\secret\\x.safetensors",
        }[form]
        (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
        opened: list[str] = []
        with refused(ModelError, "index.json", "folder"):
            weight_files(lambda name: opened.append(name) or find_in(folder)(name))
        assert name not in opened

    def test_a_file_in_a_folder_below_and_links_of_the_hubs_cache_are_read(self, tmp_path: Path) -> None:
        repository = tmp_path / "models--org--tiny"
        commit, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
        commit.mkdir(parents=True)
        blobs.mkdir()
        save_file({"a": torch.ones(1)}, blobs / "1234")
        (commit / "part.safetensors").symlink_to(Path("..", "..", "blobs", "1234"))
        (commit / "below").mkdir()
        save_file({"b": torch.ones(1)}, commit / "below" / "part.safetensors")
        names = {"a": "part.safetensors", "b": "below/part.safetensors"}
        (commit / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        assert set(inventory(weight_files(find_in(commit)))) == {"a", "b"}


def header_file(path: Path, header: Any) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)
    return path


def entry(begin: int = 0, end: int = 8, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


class TestHeaders:
    """A header that does not fit its file is refused before a tensor is mapped."""

    @each(
        "header",
        [[], {"a": 3}, {"a": entry(dtype="F33")}, {"a": entry(shape=(3,))}, {"a": entry(shape=(2**62, 2**62))},
         {"a": entry(-8, 8)}, {"a": entry(0, 2**70)}, {"a": entry(), "b": entry()}, b"", b"\xff" * 9, b"[" * 100_000],
    )  # fmt: skip
    def test_a_malformed_header_is_named(self, tmp_path: Path, header: Any) -> None:
        file = header_file(tmp_path / "model.safetensors", header)
        with refused(ModelError, "model.safetensors"):
            inventory([file])

    @each("name", ["model.safetensors", "pytorch_model.bin"])
    @each("content", [b"", b"PK\x03\x04", b"\x80\x02.", b"<html>"])
    def test_a_file_of_something_else_is_named(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with refused(ModelError, name):
            inventory([tmp_path / name])


@each("length", [1, 64])
@each("suffix", [".bin", ".safetensors"])
def test_a_file_cut_or_changed_anywhere_is_named_or_read(tmp_path: Path, suffix: str, length: int) -> None:
    stored(tmp_path, sample(), suffix)
    file = tmp_path / f"source{suffix}"
    content = file.read_bytes()
    for begin in range(0, len(content), max(1, len(content) // 40)):
        for changed in (content[:begin], content[:begin] + b"\xff" * length + content[begin + length :]):
            file.write_bytes(changed)
            try:
                list(read_tensors(inventory([file]).values()))
            except ModelError as error:
                assert file.name in str(error) and "\n" not in str(error)


@each("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pipe_in_the_place_of_weights_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="not a regular file"):
        inventory([tmp_path / name])
