"""The GPU bench, at toy sizes on a CPU: every section, missing packages, crashes, carried wheels."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers.models.mamba2 import modeling_mamba2

from bench.gpu import build, command, env, families, runner, speed, training
from bench.gpu.models import base_of, hybrid_of, prompts, torch_only, watch
from bench.gpu.table import merged, shown, text
from tests.support.kernels import with_kernels

ITEMS = (
    "mamba2,sdpa | 8,sdpa flash | 16 | plain,flash_attention_2 | 8,toy | prefill 32,toy | decode 1,toy | train,"
    "toy | lora,toy | packing,toy | ddp"
)
TOY = ["--device", "cpu", "--toy", "--repeats", "1", "--items", ITEMS]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], int]]:
    """The report of one small run, and its exit code."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(out))
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        code = command.main([*TOY, "--wheels", str(out / "wheels")])
        yield json.loads((out / "gpu.json").read_text()), code


class TestToyRun:
    def test_every_section_has_something(self, finished: tuple[dict[str, Any], int]) -> None:
        report, code = finished
        empty = [name for name in command.TABLES if not report[name]["rows"] and not report[name]["lines"]]
        assert code == 0 and report["ok"] and empty == []
        assert report["seconds"] > 0 and report["options"]["toy"]

    def test_differences_are_finite_and_small(self, finished: tuple[dict[str, Any], int]) -> None:
        rows = finished[0]["correctness"]["rows"]
        assert {(row["mode"], row["dtype"]) for row in rows} == {
            (mode, dtype) for mode in ("add", "replace") for dtype in ("fp32", "bf16")
        }
        for row in rows:
            limit = 1e-5 if row["dtype"] == "fp32" else 0.3
            assert all(math.isfinite(row[what]) and row[what] < limit for what in ("forward", "decode", "tensor"))
        assert all(row["forward"] > 0 for row in rows if row["dtype"] == "bf16"), "bf16 was not compared with fp32"

    def test_attention_agrees_with_eager(self, finished: tuple[dict[str, Any], int]) -> None:
        rows = [row for row in finished[0]["attention"]["rows"] if row["implementation"] == "sdpa"]
        assert {row["prompts"] for row in rows} == {"plain", "left-padded"}
        assert all(row[what] < 1e-5 for row in rows for what in ("forward", "decode", "gradient"))

    def test_behaviour(self, finished: tuple[dict[str, Any], int]) -> None:
        rows = {row["family"]: row for row in finished[0]["behaviour"]["rows"]}
        row = rows["mamba2"]
        assert row["silenced head"] == "stays silent" and row["hooks, eval"] == "fire"
        assert row["packing"].startswith("training: ")
        assert "mamba2_chunk_scan" in row["ran"] and "mamba2_selective_state_update" in row["ran"]

    def test_speed_is_of_both_models(self, finished: tuple[dict[str, Any], int]) -> None:
        rows = finished[0]["speed"]["rows"]
        assert {row["task"].split()[0] for row in rows} == {"prefill", "decode", "train"}
        both = [row for row in rows if row["task"] != "train new heads"]
        assert all(row["base"] > 0 and row["hybrid"] > 0 and row["ratio"] > 0 for row in both)

    def test_training_is_that_of_the_loop(self, finished: tuple[dict[str, Any], int]) -> None:
        rows = {row["task"]: row for row in finished[0]["training"]["rows"]}
        assert set(rows) == {"lora", "packing", "padded", "ddp"} and all(row["ok"] for row in rows.values())
        assert rows["lora"]["ratio"] > 0 and rows["lora"]["kind"] == "plain"
        assert "mamba2_chunk_scan" in rows["lora"]["ran"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
    def test_a_launched_training_is_the_plain_one(self, finished: tuple[dict[str, Any], int]) -> None:
        (row,) = [row for row in finished[0]["training"]["rows"] if row["task"] == "ddp"]
        assert row["kind"] == "MULTI_CPU" and row["apart"] < 1e-6 and row["hybrid"] > 0

    @pytest.mark.skipif(env.installed("flash-attn") is not None, reason="flash-attn is here")
    def test_a_missing_package_is_a_line(self, finished: tuple[dict[str, Any], int]) -> None:
        report = finished[0]
        found = {row["what"]: row["found"] for row in report["environment"]["rows"]}
        assert found["flash_attn"].startswith("missing")
        said = [row["line"] for row in report["attention"]["lines"]]
        assert any("flash_attention_2" in line and "not available" in line for line in said)
        assert not any(row.get("failed") for row in report["attention"]["lines"])

    def test_the_tables_are_text(self, finished: tuple[dict[str, Any], int]) -> None:
        lines = text(finished[0]).splitlines()
        assert all(any(line.startswith(name) for line in lines) for name in command.TABLES)
        assert max(map(len, lines)) < 400


class TestRefusals:
    @pytest.fixture(autouse=True)
    def out(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.setenv("OUT", str(tmp_path))
        return tmp_path

    def test_old_transformers(
        self, monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(env, "installed", lambda name: Version("5.17.0"))
        assert command.main([*TOY, "--wheels", str(out)]) == 2
        assert "5.17.0 is too old" in capsys.readouterr().err
        report = json.loads((out / "gpu.json").read_text())
        assert not report["ok"] and "wheels/" in report["environment"]["lines"][0]["line"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
    def test_no_gpu(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--wheels", str(out)]) == 2
        assert "--device cpu --toy" in capsys.readouterr().err

    @pytest.mark.parametrize("words", [["--only", "speeed"], ["--build", "mamba"]])
    def test_unknown_names(self, words: list[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            command.main(words)
        assert stopped.value.code == 2


CHILD = """
import json, os, sys, time
log, work = (sys.argv[sys.argv.index(option) + 1] for option in ("--log", "--work"))
for item in json.loads(work)["items"]:
    with open(log, "a") as lines:
        lines.write(json.dumps({"begin": item}) + "\\n")
    if item == "dies":
        os._exit(9)
    if item == "hangs":
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
        return script

    def run(self, items: list[str], folder: Path, seconds: float = 30) -> list[dict[str, Any]]:
        return runner.supervised("speed", items, runner.Options("cpu", True), seconds, folder)

    def test_a_crash_costs_one_item(self, tmp_path: Path) -> None:
        rows = self.run(["first", "dies", "last"], tmp_path)
        assert [row["item"] for row in rows if "item" in row] == ["first", "last"]
        (line,) = [row for row in rows if "line" in row]
        assert line["failed"] and line["line"] == "dies: its process ended with code 9"

    def test_a_hang_ends_with_the_time(self, tmp_path: Path) -> None:
        start = time.monotonic()
        rows = self.run(["first", "hangs", "last"], tmp_path, seconds=2)
        assert time.monotonic() - start < 10
        assert rows[0]["item"] == "first"
        assert [row["line"] for row in rows[1:]] == ["hangs: stopped: out of time", "last: skipped: no time left"]

    def test_a_child_that_never_begins(self, entry: Path, tmp_path: Path) -> None:
        entry.write_text("raise SystemExit(5)")
        rows = self.run(["one", "two"], tmp_path)
        assert all(row["failed"] and "never began" in row["line"] for row in rows) and len(rows) == 2


class Broken:
    """A part whose items fail in different ways."""

    def items(self, options: runner.Options) -> list[str]:
        return ["memory", "kernel", "good"]

    def run(self, item: str, options: runner.Options) -> list[dict[str, Any]]:
        if item == "memory":
            raise torch.OutOfMemoryError("Tried to allocate 9 GiB")
        if item == "kernel":
            raise RuntimeError("strides must be multiples of 8\nmore")
        return [{"table": "speed", "item": item}]


class TestItems:
    def test_a_failure_is_a_line_and_the_rest_goes_on(self) -> None:
        part, options = Broken(), runner.Options("cpu")
        rows = runner.here("speed", part, part.items(options), options, 60)
        assert rows[0]["line"].startswith("memory: out of memory") and not rows[0]["failed"]
        assert rows[1]["line"] == "kernel: failed: RuntimeError: strides must be multiples of 8" and rows[1]["failed"]
        assert rows[2]["item"] == "good"

    def test_no_time_left(self) -> None:
        part, options = Broken(), runner.Options("cpu")
        rows = runner.here("speed", part, part.items(options), options, -1)
        assert all("skipped: no time left" in row["line"] for row in rows)


def kernel(function: Any) -> Any:
    """As transformers wraps a function that it found a package for."""

    def implementation(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(args[0], 7.0)[..., :32]

    implementation.__module__ = "mamba_ssm.ops.triton.ssd_combined"

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return implementation(*args, **kwargs)

    return wrapped


class TestImplementations:
    def test_kernels_are_seen_and_can_be_passed_by(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hybrid = hybrid_of(base_of("mamba2", toy=True), "add").train()
        ids, name = prompts(hybrid, 2, 13), "mamba2_split_conv1d_scan_combined"
        expected = hybrid(ids, use_cache=False).logits
        original = getattr(modeling_mamba2, name)
        monkeypatch.setattr(modeling_mamba2, name, kernel(original.__wrapped__))
        with watch(hybrid) as ran:
            fused = hybrid(ids, use_cache=False).logits
        assert ran[name] == "mamba_ssm" and not torch.allclose(fused, expected)
        with torch_only(hybrid):
            torch.testing.assert_close(hybrid(ids, use_cache=False).logits, expected)

    def test_fused_training_kernels_make_hooks_refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name, options = "mamba2_split_conv1d_scan_combined", runner.Options("cpu", True)
        monkeypatch.setattr(modeling_mamba2, name, kernel(getattr(modeling_mamba2, name).__wrapped__))
        assert families.hooked("mamba2", options, training=False) == "fire"
        assert families.hooked("mamba2", options, training=True) == "refuse"


class TestTraining:
    def test_every_task_is_asked_for_where_it_can_be(self) -> None:
        on = {device: training.items(runner.Options(device)) for device in ("cuda", "cpu")}
        assert set(on["cuda"]) - set(on["cpu"]) == {"mamba2-130m | compile"} and len(on["cpu"]) == 6

    def test_two_runs_that_differ_are_not_called_the_same(self) -> None:
        run = training.Run([4.0, 3.0], [1.0], None, "plain", 100.0, True, "")
        found = training.against(replace(run, losses=[4.0, 3.3]), run)
        assert found["apart"] == pytest.approx(0.1) and not found["ok"]
        assert not training.against(replace(run, checksum=90.0), run)["ok"]
        assert training.against(run, run) == {"apart": 0, "ok": True}

    def test_packed_documents_against_padded_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With kernels in plain torch, and without any."""
        options, found = runner.Options("cpu", True, 1), {}
        for kernels in (True, False):
            training.trained.cache_clear()
            with monkeypatch.context() as patch:
                if kernels:
                    with_kernels(patch)
                found[kernels] = training.run("toy | packing", options)
        training.trained.cache_clear()
        for padded, packed, line in found.values():
            assert padded["ok"] and packed["ok"] and not line["failed"] and packed["apart"] < 1e-3
        assert "of the padded step's time" in found[True][2]["line"] and "no kernels" in found[False][2]["line"]
        assert found[True][1]["apart"] > 0 == found[False][1]["apart"]


class TestPair:
    def test_both_models_share_their_weights_and_agree(self) -> None:
        models = speed.pair.__wrapped__("toy", runner.Options("cpu", True))
        ours, theirs = (dict(models[name].named_parameters()) for name in ("hybrid", "base"))
        assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in theirs)
        ids = prompts(models["base"], 2, 13)
        assert torch.equal(models["hybrid"](ids).logits, models["base"](ids).logits)


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

    def test_without_a_gpu_nothing_is_tried(self, tmp_path: Path) -> None:
        rows = build.build(build.PACKAGES, tmp_path, tmp_path, tmp_path, 1, "cpu")
        assert [row["package"] for row in rows] == list(build.PACKAGES)
        assert all(row["result"] == "not tried: no GPU to build for" for row in rows)

    def test_a_failed_build_says_why(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("ok\nOSError: CUDA_HOME is not set\nerror: subprocess-exited-with-error\nnote: see above\n")
        assert build.complaint(log) == "OSError: CUDA_HOME is not set"


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

    def test_no_folder_no_change(self, tmp_path: Path) -> None:
        before, site = list(sys.path), env.Site(tmp_path / "site")
        site.use(tmp_path / "wheels")
        assert sys.path == before and site.lines == []


class TestTable:
    def test_numbers(self) -> None:
        assert [shown(x) for x in (None, True, False, 0.00012345, 1.2345, 1234.5)] == [
            "-", "yes", "NO", "1.2e-04", "1.23", "1234",
        ]  # fmt: skip

    def test_lines_that_say_the_same_become_one(self) -> None:
        found = merged([{"line": "a: missing"}, {"line": "b: missing"}, {"line": "c: slow"}])
        assert found == ["- a, b: missing", "- c: slow"]
