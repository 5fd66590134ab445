"""Bad input: one clear line, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from surgery import cli
from tests.integration.conftest import BASE, RECIPE, SMALL, run_small, surgery, surgery_cold
from tests.support.errors import assert_refused


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=3", ("train.stepz", "Unknown key", "Did you mean train.steps?")),
        ("train.steps=many", ("train.steps", "many")),
        ("splice.mode=subtract", ("splice.mode", "subtract", "add")),
        ("locate.pairs=200", ("locate.pairs", "200", "100")),
        ("train.optimizer.betas=[1.5, 0.9]", ("betas", "1.5")),
        ("train.steps=true", ("train.steps", "True")),
        ("splice.num_heads=99", ("splice.num_heads", "99", "32 heads")),
        ("evaluate.tasks=[kv_retrieval, {task: needle_single, tokens: [9]}]", ("tokens", "9")),
        ("nonsense", ("nonsense", "key.path=value")),
        ("export.chat_template=chat.jinja", ("export.chat_template", "chat.jinja", "No such template. Use plain")),
        ("base.model=no/such/folder", ("base.model", "no/such/folder", "no such folder")),
    ],
)
def test_bad_values(tmp_path: Path, override: str, words: tuple[str, ...]) -> None:
    assert_refused(run_small(tmp_path, override), *words)
    assert not (tmp_path / "runs").exists()


def test_a_duplicate_key(tmp_path: Path) -> None:
    recipe = tmp_path / "twice.yaml"
    recipe.write_text(RECIPE.read_text() + "\nseed: 1\n")
    assert_refused(surgery("validate", str(recipe), cwd=tmp_path), "duplicate key", "seed")


def test_an_empty_model_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(surgery("inspect", "./empty", cwd=tmp_path), "config.json")
    assert_refused(run_small(tmp_path, "base.model=./empty"), "config.json")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("kind", "nearest"), [("bert", "mamba2"), ("jamba", "Did you mean mamba?"), ("zamba9", "zamba2")]
)
def test_a_model_of_another_kind(tmp_path: Path, kind: str, nearest: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 32}))
    assert_refused(surgery("inspect", "./other", cwd=tmp_path), kind, nearest, "docs/EXTENDING.md")


@pytest.fixture
def base_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BASE, tmp_path / "base"))


def test_truncated_weights(base_copy: Path, tmp_path: Path) -> None:
    file = base_copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert_refused(run_small(tmp_path, "base.model=./base"), "model.safetensors", "header describes")
    assert not (tmp_path / "runs").exists()


def test_renamed_and_misshapen_tensors(base_copy: Path, tmp_path: Path) -> None:
    file = base_copy / "model.safetensors"
    weights = load_file(file)
    weights["backbone.layers.0.mixer.in_projection.weight"] = weights.pop("backbone.layers.0.mixer.in_proj.weight")
    weights["backbone.layers.1.mixer.D"] = weights["backbone.layers.1.mixer.D"][:3].clone()
    save_file(weights, file, metadata={"format": "pt"})
    done = run_small(tmp_path, "base.model=./base")
    assert_refused(done, "missing", "in_proj.weight", "unexpected", "in_projection", "misshapen", "(3,)")


def test_a_head_out_of_range(tmp_path: Path) -> None:
    assert_refused(run_small(tmp_path, "splice.select=list", "splice.heads=[L9H0]"), "L9H0", "L0H0 to L3H7")
    assert not (tmp_path / "runs").exists()


def test_heads_of_another_geometry(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs")
    file = tmp_path / "runs" / "quickstart" / "heads.json"
    heads = json.loads(file.read_text())
    file.write_text(json.dumps({**heads, "geometry": "0123456789abcdef"}))
    assert_refused(surgery("plan", str(RECIPE), *SMALL, cwd=tmp_path), "geometry", "0123456789abcdef", "Locate again")


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    done = run_small(
        tmp_path,
        "train.optimizer.lr=1.0",
        "train.optimizer.new_heads_lr=1.0",
        "train.sources.0.weights.answer=1e38",
        "train.optimizer.warmup=0",
        "train.save_every=1",
        options=("--to", "train"),
    )
    assert_refused(done, "train step", "lr")
    assert not (tmp_path / "runs" / "quickstart" / "trained").exists()


def test_compiling_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before anything is measured, whatever the compiler has in its cache."""
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done = surgery_cold("run", str(RECIPE), *SMALL, "train.compile=true", cwd=tmp_path)
    assert_refused(done, "train.compile", "C++ compiler", "/nonexistent", "set train.compile to false")
    assert not (tmp_path / "runs").exists()


def test_a_base_without_a_tokenizer(base_copy: Path, tmp_path: Path) -> None:
    for file in base_copy.glob("tokenizer*"):
        file.unlink()
    assert_refused(run_small(tmp_path, "base.model=./base"), "base.tokenizer", "no tokenizer")
    assert not (tmp_path / "runs").exists()


def test_stages_in_the_wrong_order(tmp_path: Path) -> None:
    assert_refused(run_small(tmp_path, options=("--from", "train", "--to", "splice")), "--to", "splice", "before train")


def test_an_unknown_stage(tmp_path: Path) -> None:
    assert_refused(run_small(tmp_path, options=("--to", "lunch")), "--to", "lunch", "locate")


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def commands_on(model: str) -> tuple[tuple[str, ...], ...]:
    """Every command that loads a base."""
    return (
        ("inspect", model),
        ("generate", model, "one 7"),
        ("convert", model, "new"),
        ("compare", model),
        ("run", str(RECIPE), *SMALL, f"base.model={model}"),
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_groups": 0}, ("n_groups", "0")),
        ({"chunk_size": None}, ("chunk_size", "null")),
        ({"dtype": "float99"}, ("config.json", "float99")),
        ({"quantization_config": {"quant_method": "nope"}}, ("quant_method", "nope")),
        ({"num_hidden_layers": 10**7}, ("num_hidden_layers", "10000000")),
        ({"vocab_size": 10**12}, ("vocab_size", "1000000000000")),
        ({"num_heads": 3}, ("config.json",)),
        ({"hidden_size": "128"}, ("hidden_size",)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_no_model_has_in_every_command(
    base_copy: Path, tmp_path: Path, fields: dict[str, object], words: tuple[str, ...]
) -> None:
    change(base_copy / "config.json", **fields)
    for command in commands_on("./base"):
        assert_refused(surgery(*command, cwd=tmp_path), *words)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[1, 2]"),
        ("config.json", b"\xff\xfe"),
        ("config.json", b"[" * 100_000),
        ("adapter_config.json", b'{"peft_type": "LORA"}'),
        ("model.safetensors", b"\xff" * 100),
    ],
    ids=["list", "not UTF-8", "deep", "adapter", "header"],
)
def test_a_file_of_another_form_in_every_command(base_copy: Path, tmp_path: Path, name: str, content: bytes) -> None:
    (base_copy / name).write_bytes(content)
    for command in commands_on("./base")[int(name == "model.safetensors") :]:  # inspect reads the config alone
        assert_refused(surgery(*command, cwd=tmp_path), name)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"[3]", b'{"version": "1.0"', b"\xff\xfe"], ids=["list", "cut", "not UTF-8"])
def test_a_tokenizer_of_another_form(base_copy: Path, tmp_path: Path, name: str, content: bytes) -> None:
    (base_copy / name).write_bytes(content)
    for command in commands_on("./base"):
        field = {"generate": "CHECKPOINT", "compare": "MODEL", "run": "base.tokenizer"}.get(command[0])
        if field is not None:
            assert_refused(surgery(*command, cwd=tmp_path), field, "tokenizer files are damaged")
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_larger_than_the_vocabulary(base_copy: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((base_copy / "tokenizer.json").read_text())
    added = {**tokenizer["added_tokens"][0], "id": 5000, "content": "<|more|>"}
    vocabulary = {**tokenizer["model"]["vocab"], "<|more|>": 5000}
    change(base_copy / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], added],
           model={**tokenizer["model"], "vocab": vocabulary})  # fmt: skip
    for command in commands_on("./base"):
        if command[0] in ("generate", "compare", "run"):
            assert_refused(surgery(*command, cwd=tmp_path), "base.tokenizer", "5000")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["../base/model.safetensors", "link.safetensors"])
def test_an_index_that_leaves_its_folder(base_copy: Path, tmp_path: Path, name: str) -> None:
    model = tmp_path / "other"
    shutil.copytree(base_copy, model, ignore=lambda *_: ["model.safetensors"])
    (model / "link.safetensors").symlink_to(base_copy / "model.safetensors")
    names = dict.fromkeys(load_file(base_copy / "model.safetensors"), name)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for command in commands_on("./other")[1:]:
        assert_refused(surgery(*command, cwd=tmp_path), "model.safetensors.index.json", name, "folder")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (".", "current directory"),
        ("..", "FOLDER"),
        ("/", "FOLDER"),
        ("./base", "MODEL (./base)"),
        ("base/config.json", "file"),
    ],
)
def test_convert_onto_what_is_there(base_copy: Path, tmp_path: Path, target: str, word: str) -> None:
    (tmp_path / "empty").mkdir()
    cwd, model = (tmp_path / "empty", "../base") if target == "." else (tmp_path, "./base")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for options in ((), ("--overwrite",)):
        assert_refused(surgery("convert", model, target, *options, cwd=cwd), "FOLDER", word)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_convert_of_misshapen_tensors(base_copy: Path, tmp_path: Path) -> None:
    file = base_copy / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "backbone.layers.1.mixer.D": weights["backbone.layers.1.mixer.D"][:3].clone()}, file)
    done = surgery("convert", "./base", "new", cwd=tmp_path)
    assert_refused(done, "misshapen", "backbone.layers.1.mixer.D", "(3,)", "expected (8,)")
    assert not (tmp_path / "new").exists()


class TestArguments:
    """Names of any characters, overrides of any form."""

    def test_a_model_whose_path_holds_an_equals_sign(self, base_copy: Path, tmp_path: Path) -> None:
        base_copy.rename(tmp_path / "lr=0.1")
        small = ("evaluate.examples=2", "evaluate.sentences=2", "evaluate.tasks=[kv_retrieval]", "evaluate.pairs=[4]")
        done = surgery("compare", "lr=0.1", *small, cwd=tmp_path)
        assert done.returncode == 0 and "lr=0.1" in done.stdout, done.stderr
        assert_refused(surgery("compare", "./lr=0.2", cwd=tmp_path), "./lr=0.2", "no such folder")

    def test_names_beyond_ascii(self, base_copy: Path, tmp_path: Path) -> None:
        base_copy.rename(tmp_path / "módèl 😀")
        assert "módèl 😀: mamba2" in surgery("inspect", "./módèl 😀", cwd=tmp_path).stdout
        done = surgery("finetune", "./módèl 😀", "données 😀.jsonl", cwd=tmp_path)
        assert_refused(done, "./módèl 😀", "Nothing is spliced")

    @pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
    def test_any_name_is_printed_whatever_the_encoding(self, base_copy: Path, tmp_path: Path, locale: str) -> None:
        base_copy.rename(tmp_path / "😀")
        environment = {**os.environ, "LC_ALL": locale, "PYTHONIOENCODING": "ascii"}
        command = [sys.executable, "-m", "surgery", "inspect", "./😀"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and "\\U0001f600: mamba2" in done.stdout, done.stderr

    def test_empty_data_is_not_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
        assert_refused(surgery("finetune", str(BASE), "", cwd=tmp_path), "DATA", "''")

    def test_bytes_that_are_no_utf8(self, tmp_path: Path) -> None:
        for command in (("inspect", "\udcff"), ("run", "\udcff.yaml"), ("validate", str(RECIPE), "base.model=\udcff")):
            assert_refused(surgery(*command, cwd=tmp_path), "argument", "\\udcff", "UTF-8")

    def test_missing_and_unknown_commands(self, tmp_path: Path) -> None:
        for words in (("--debug",), ("cut",), ("inspect",), ("inspect", "a", "b")):
            done = surgery(*words, cwd=tmp_path)
            assert done.returncode == 2 and "Traceback" not in done.stderr


class TestErrorsOfOurOwn:
    """An error that is no refusal is one line with exit code 1, and its traceback is a flag away."""

    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("a\nbug")

        monkeypatch.setattr("surgery.commands.validate.load_any", fail)
        monkeypatch.delenv("SURGERY_DEBUG", raising=False)

    def end(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["surgery", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, capsys.readouterr().err

    def test_one_line_or_a_traceback(
        self, broken: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, text = self.end(capsys, monkeypatch, "validate", "quickstart")
        assert code == 1 and text.count("\n") == 1
        assert text.startswith("internal error: ZeroDivisionError: a bug") and "--debug" in text
        monkeypatch.setenv("SURGERY_DEBUG", "1")
        code, text = self.end(capsys, monkeypatch, "validate", "quickstart")
        assert code == 1 and "Traceback" in text and 'raise ZeroDivisionError("a\\nbug")' in text

    def test_a_full_disk_is_no_error_of_our_own(self) -> None:
        for words in ("Error while serializing: No space left on device (os error 28)", "unexpected pos 576 vs 534"):
            code, line = cli._verdict(RuntimeError(words))
            assert code == 2 and line.startswith("error: the disk is full") and "Free some space" in line

    def test_the_flag_shows_the_librarys_error_behind_a_refusal(self, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_text("a: [")
        assert_refused(surgery("validate", "x.yaml", cwd=tmp_path), "x.yaml")
        done = surgery("--debug", "validate", "x.yaml", cwd=tmp_path)
        assert done.returncode == 2 and "yaml.parser.ParserError" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: x.yaml")

    @pytest.mark.parametrize(
        "error",
        [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")],
    )
    def test_too_little_memory_says_what_to_reduce(
        self, error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("surgery.commands.validate.load_any", fail)
        code, text = self.end(capsys, monkeypatch, "validate", "quickstart")
        assert code == 2 and text.startswith("error: out of memory") and "locate.batch_size" in text


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGINT, 0.15), (signal.SIGINT, 0.4), (signal.SIGINT, 2.5), (signal.SIGTERM, 2.5)]
)
def test_an_interrupt_in_the_first_seconds_ends_without_a_traceback(
    tmp_path: Path, number: signal.Signals, seconds: float
) -> None:
    begin = "print('begun', flush=True); from surgery.__main__ import main; main()"
    command = [sys.executable, "-c", begin, "run", str(RECIPE), *SMALL]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"  # Python itself has started
    time.sleep(seconds)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and len(errors.splitlines()) <= 1, errors
    assert errors in ("", "stopped; run the same command to go on\n")
