"""The GPU bench, at toy sizes on a CPU: parts, resuming, crashes, carried wheels, cut sources."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from bench.gpu import build, command, env, families, runner, sources, training
from bench.gpu.store import Store
from tests.support.kernels import with_kernels

TOY = ["--device", "cpu", "--toy", "--repeats", "1"]
ITEMS = "mamba2attn,sdpa | 8 | plain,flash_attention_2 | 8 | plain,toy | prefill 32,toy | decode 1,toy | lora,toy | ddp"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The table that two commands fill, the second in a folder with the results of the first."""
    folder, out = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(out))
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        common = [*TOY, "--folder", str(folder), "--wheels", str(folder)]
        assert command.main([*common, "--only", "families,attention,speed,training", "--items", ITEMS]) == 0
        first = json.loads((folder / "results" / "speed.json").read_text())
        assert command.main([*common, "--only", "loop,locate,speed", "--items", "toy"]) == 0
        then = json.loads((out / "results" / "speed.json").read_text())
        assert len(first) < len(then) and first.items() <= then.items(), "a finished item ran again"
        assert (out / "gpu.json").read_text() == (folder / "gpu.json").read_text()
        yield json.loads((folder / "gpu.json").read_text())


def rows(found: dict[str, Any], table: str) -> list[dict[str, Any]]:
    return [row for row in found[table] if "line" not in row]


class TestToyRun:
    def test_differences_are_finite_and_small(self, finished: dict[str, Any]) -> None:
        found = rows(finished, "correctness")
        assert {(row["mode"], row["dtype"]) for row in found} == {
            (mode, dtype) for mode in ("add", "replace") for dtype in ("fp32", "bf16")
        }
        for row in found:
            limit = 1e-5 if row["dtype"] == "fp32" else 0.3
            assert all(math.isfinite(row[what]) and row[what] < limit for what in ("forward", "decode", "tensor"))
        assert all(row["forward"] > 0 for row in found if row["dtype"] == "bf16"), "bf16 was not compared with fp32"

    def test_attention_agrees_with_eager(self, finished: dict[str, Any]) -> None:
        (row,) = [row for row in rows(finished, "attention") if row["implementation"] == "sdpa"]
        assert all(row[what] < 1e-5 for what in ("forward", "decode", "gradient"))

    def test_behaviour(self, finished: dict[str, Any]) -> None:
        (row,) = rows(finished, "behaviour")
        assert row["silenced head"] == "stays silent" and row["hooks, eval"] == "fire"
        assert "mamba2_chunk_scan" in row["ran"] and "mamba2_selective_state_update" in row["ran"]

    def test_speed_is_of_both_models_with_and_without_a_graph(self, finished: dict[str, Any]) -> None:
        found = {row["task"]: row for row in rows(finished, "speed") if row["shape"] == "toy"}
        assert {"prefill 32", "decode 1 x 32", "decode 1 x 32 graph"} < set(found)
        assert all(row["base"] > 0 and row["hybrid"] > 0 and row["ratio"] > 0 for row in found.values())

    def test_training_is_that_of_the_loop(self, finished: dict[str, Any]) -> None:
        found = {row["task"]: row for row in rows(finished, "training")}
        assert set(found) == {"lora", "ddp"} and all(row["ok"] for row in found.values())
        assert found["lora"]["ratio"] > 0 and found["lora"]["kind"] == "plain"
        assert found["lora"]["ran"] == "torch: causal_conv1d_fn", "the scan is that of the library"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
    def test_a_launched_training_is_the_plain_one(self, finished: dict[str, Any]) -> None:
        (row,) = [row for row in rows(finished, "training") if row["task"] == "ddp"]
        assert row["kind"] == "MULTI_CPU" and row["apart"] < 1e-6 and row["hybrid"] > 0

    @pytest.mark.skipif(env.installed("flash-attn") is not None, reason="flash-attn is here")
    def test_a_missing_package_is_a_line(self, finished: dict[str, Any]) -> None:
        versions = {row["what"]: row["found"] for row in rows(finished, "environment")}
        assert versions["flash_attn"].startswith("missing")
        (line,) = [row for row in finished["attention"] if "line" in row and "flash_attention_2" in row["line"]]
        assert "not available" in line["line"] and not line.get("failed")


class TestRefusals:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
    def test_no_gpu(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--folder", str(tmp_path), "--wheels", str(tmp_path)]) == 2
        assert "--device cpu --toy" in capsys.readouterr().err


CHILD = """
import json, os, sys, time
log, work = (sys.argv[sys.argv.index(option) + 1] for option in ("--log", "--work"))
with open(os.environ["SEEN"], "a") as seen:
    seen.write(os.environ.get("TRITON_CACHE_AUTOTUNING", "-") + " " + ",".join(json.loads(work)["items"]) + "\\n")
for item in json.loads(work)["items"]:
    with open(log, "a") as lines:
        lines.write(json.dumps({"begin": item}) + "\\n")
    if "dies" in item:
        os._exit(9)
    if "hangs" in item:
        time.sleep(60)
    with open(log, "a") as lines:
        lines.write(json.dumps({"end": item, "rows": [{"table": "speed", "item": item}], "seconds": 0.0}) + "\\n")
"""


class TestChildren:
    @pytest.fixture(autouse=True)
    def entry(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        script = tmp_path / "child.py"
        script.write_text(CHILD)
        monkeypatch.setattr(runner, "ENTRY", script)
        monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
        return script

    def run(self, work: list[list[str]], folder: Path, seconds: float = 30, at_once: int = 1) -> dict[str, Any]:
        """Item -> its rows."""
        found: dict[str, Any] = {}

        def keep(name: str, item: str, result: list[dict[str, Any]], _: float) -> None:
            assert name == "speed" and item not in found
            found[item] = result

        options = runner.Options("cpu", True)
        runner.supervised([("speed", items) for items in work], options, seconds, folder, keep, at_once)
        return found

    @pytest.mark.parametrize("at_once", [1, 3])
    def test_a_crash_costs_one_item(self, tmp_path: Path, at_once: int) -> None:
        found = self.run([["first", "dies", "last"], ["other"]], tmp_path, at_once=at_once)
        assert set(found) == {"first", "dies", "last", "other"}
        (line,) = found["dies"]
        assert line["failed"] and line["line"] == "dies: its process ended with code 9"
        assert found["last"] == [{"table": "speed", "item": "last"}]

    def test_what_the_time_ended_has_no_result(self, tmp_path: Path) -> None:
        start = time.monotonic()
        found = self.run([["first", "hangs", "last"], ["other"]], tmp_path, seconds=2)
        assert time.monotonic() - start < 10 and set(found) == {"first"}

    def test_kernels_are_compiled_side_by_side_and_tuned_alone(self, tmp_path: Path) -> None:
        words = [*TOY, "--warm", "--only", "attention", "--items", "sdpa | 8", "--wheels", str(tmp_path)]
        assert command.main([*words, "--folder", str(tmp_path)]) == 0
        names = ["sdpa | 8 | plain", "sdpa | 8 | left-padded"]
        seen = (tmp_path / "seen").read_text().splitlines()
        assert sorted(seen[:2]) == sorted(f"0 {name}" for name in names)
        assert seen[2:] == [f"1 {','.join(sorted(names, reverse=True))}"]
        assert command.main([*words, "--folder", str(tmp_path)]) == 0
        assert len((tmp_path / "seen").read_text().splitlines()) == 3, "it did the same again"


class Broken:
    """A part whose items fail in different ways."""

    def items(self, options: runner.Options) -> list[str]:
        return ["memory", "kernel", "good"]

    warm = items

    def run(self, item: str, options: runner.Options) -> list[dict[str, Any]]:
        if item == "memory":
            raise torch.OutOfMemoryError("Tried to allocate 9 GiB")
        if item == "kernel":
            torch.zeros(2).split("x")  # raises in torch
        return [{"table": "speed", "item": item}]


class TestItems:
    def run(self, seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        part, options = Broken(), runner.Options("cpu")
        runner.here(
            "speed", part, part.items(options), options, seconds, lambda _, item, r, __: found.update({item: r})
        )
        return found

    def test_a_failure_says_where_and_the_rest_goes_on(self) -> None:
        found = self.run(60)
        ((memory,), (failed,), (good,)) = found.values()
        assert memory["line"].startswith("memory: out of memory") and not memory["failed"]
        assert failed["failed"] and good["item"] == "good"
        assert "bench/nightly/test_gpu_bench.py:" in failed["line"] and "torch/_tensor.py:" in failed["line"]


class TestStore:
    def test_failed_results_are_dropped_alone(self, tmp_path: Path) -> None:
        store = Store(tmp_path, "a card")
        store.keep("speed", "fine", [{"ratio": 1.0}], 1.0)
        store.keep("speed", "broken", [runner.note("broken", "failed", failed=True)], 1.0)
        store.keep("speed", "other", [runner.note("other", "failed", failed=True)], 1.0)
        assert store.left("speed", ["fine", "broken", "new"]) == ["new"]
        store.forget("speed", ["fine", "broken"], only_failed=True)
        assert list(Store(tmp_path, "another card").entries("speed")) == ["fine", "other"]


class TestTraining:
    def test_packed_documents_against_padded_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the library's own scan, and with a convolution that reads the document before."""
        options, found = runner.Options("cpu", True, 1), {}
        for leaks in (False, True):
            training.trained.cache_clear()
            with monkeypatch.context() as patch:
                if leaks:
                    with_kernels(patch, reset_convolution=False)
                found[leaks] = training.run("toy | packing", options)
                assert families.behaviour("mamba2", options, {})["ok"] is not leaks
        training.trained.cache_clear()
        for padded, packed, _ in found.values():
            assert padded["ok"] and packed["ok"] and packed["apart"] < 1e-3
        assert found[False][1]["apart"] > 0 == found[True][1]["apart"]
        assert "of the padded step's time" in found[False][2]["line"] and not found[False][2]["failed"]
        assert "refused" in found[True][2]["line"] and found[True][2]["failed"]


class TestBuild:
    @pytest.mark.parametrize(
        ("capability", "kept"),
        [((9, 0), "arch=compute_90,code=sm_90"), ((8, 9), "arch=compute_80,code=sm_80"), ((12, 1), None)],
    )
    def test_only_the_chip_at_hand(self, capability: tuple[int, int], kept: str | None) -> None:
        chips = [f"arch=compute_{chip},code=sm_{chip}" for chip in ("75", "80", "90")]
        offered = [word for chip in chips for word in ("-gencode", chip)]
        found = build.chip_flags(["-O3", *offered, "-lineinfo", "-c", "x.cu"], capability)
        assert found == ["-O3", *(["-gencode", kept] if kept else offered), "-c", "x.cu"]


class TestSources:
    DTYPES = ("float", "at::Half", "at::BFloat16")

    @pytest.fixture()
    def folder(self, tmp_path: Path) -> Path:
        """A source with the places that the cut of causal_conv1d changes."""
        csrc, names = tmp_path / "csrc", ("fwd", "bwd", "update")
        csrc.mkdir()
        for name in names:
            functions = [name] if name == "update" else [name, f"channellast_{name}"]
            (csrc / f"causal_conv1d_{name}.cu").write_text(
                "".join(map(self.function, functions)) + self.instances(functions)
            )
        macro = "#define DISPATCH_WTYPE_FLOAT_AND_HALF_AND_BF16(WTYPE, NAME, ...) \\\n    if (a) { \\\n    }\n"
        check = 'TORCH_CHECK(width >= 2 && width <= 4, "between 2 and 4");\n'
        (csrc / "causal_conv1d.cpp").write_text(macro + 3 * check)
        (tmp_path / "setup.py").write_text(
            "sources=[\n" + "".join(f'"csrc/causal_conv1d_{n}.cu",\n' for n in names) + "]"
        )
        return tmp_path

    @staticmethod
    def function(name: str) -> str:
        branches = "} else ".join(f"if (params.width == {w}) {{\n launch_{name}<128, {w}>();\n    " for w in (2, 3, 4))
        return f"void {name}() {{\n    {branches}}}\n}}\n"

    def instances(self, names: list[str]) -> str:
        pairs = [(n, one, other) for n in names for other in self.DTYPES for one in self.DTYPES]
        return "".join(
            f"template void {n}<{one}, {other}>(ConvParams &params, cudaStream_t stream);\n" for n, one, other in pairs
        )

    def test_each_function_and_pair_of_dtypes_in_use_has_a_file_that_setup_names(self, folder: Path) -> None:
        sources.cut("causal_conv1d", folder)
        named: list[str] = []
        exec((folder / "setup.py").read_text().replace("sources=", "named += "), {"named": named})
        texts = [(folder / name).read_text() for name in named]
        kept = sorted(line for text in texts for line in text.splitlines() if line.startswith("template"))
        wanted = self.instances(["fwd", "channellast_fwd", "bwd", "channellast_bwd", "update"]).splitlines()
        mixed = ("float, at::", "Half, at::BFloat16", "BFloat16, at::Half")
        assert kept == sorted(line for line in wanted if not any(pair in line for pair in mixed)) and len(kept) == 25
        assert all("128, 4>" in text and "128, 2>" not in text and "128, 3>" not in text for text in texts)


class TestWheels:
    def wheel(self, folder: Path, name: str, tag: str = "py3-none-any") -> None:
        stem = f"{name}-1.0"
        with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as archive:
            archive.writestr(f"{name}.py", "value = 42\n")
            archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")

    def test_what_fits_and_is_newer_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", list(sys.path))
        self.wheel(tmp_path, "gpu_bench_probe")
        self.wheel(tmp_path, "torch")  # older than the one that is installed
        self.wheel(tmp_path, "other_machine", "cp27-cp27m-win32")
        site = env.Site(tmp_path / "site")
        site.use(tmp_path)
        assert sys.path[0] == str(site.folder) and (site.folder / "gpu_bench_probe.py").is_file()
        assert not (site.folder / "torch.py").exists()
        assert env.installed("gpu-bench-probe") == Version("1.0")
        assert any("other_machine" in line and "another" in line for line in site.lines)
