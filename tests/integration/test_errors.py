"""Bad input: one clear line, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import BASE, EXPORT, PICO_MAMBA2, RECIPE, ROOT, SMALL, assert_all_refused, surgery
from tests.support.exports import edit

RUN = ("run", str(RECIPE), *SMALL)
LINE = {"prompt": "fox:12\nowl:34\nWhere is the owl?\n", "answer": "34"}


@pytest.fixture
def base_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BASE, tmp_path / "base"))


def commands_on(model: str) -> tuple[tuple[str, ...], ...]:
    """Every command that loads a base."""
    run = (*RUN, f"base.model={model}")
    return ("inspect", model), ("generate", model, "one 7"), ("convert", model, "new"), ("compare", model), run


def test_a_fault_of_a_base_in_every_command(tmp_path: Path) -> None:
    faults: list[tuple[str, dict[str, object] | bytes, tuple[str, ...]]] = [
        ("config.json", {"n_groups": 0}, ("n_groups", "0")),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, ("gptq", "not quantized", "Remove the key")),
        ("config.json", b"[" * 100_000, ("config.json", "Download it again")),
        ("adapter_config.json", b'{"peft_type": "LORA"}', ("adapter_config.json", "merge_and_unload")),
        ("model.safetensors", b"\xff" * 100, ("model.safetensors", "damaged")),
    ]
    for number, (name, content, words) in enumerate(faults):
        folder = Path(shutil.copytree(BASE, tmp_path / str(number)))
        if isinstance(content, dict):
            edit(folder, name, lambda config: config.update(content))  # noqa: B023
        else:
            (folder / name).write_bytes(content)
        commands = commands_on(f"./{number}")
        assert_all_refused(
            dict.fromkeys(commands if number == 0 else commands[number :: len(faults) - 1], words), tmp_path
        )


def test_a_fault_of_a_tokenizer_in_every_command_that_reads_it(base_copy: Path, tmp_path: Path) -> None:
    fields = {"generate": "CHECKPOINT", "compare": "MODEL", "run": "base.tokenizer"}
    readers = {command: fields[command[0]] for command in commands_on("./base") if command[0] in fields}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base_copy / name).write_bytes(b'{"version": "1.0"')
        cases = {command: (field, "tokenizer files are damaged") for command, field in readers.items()}
        assert_all_refused(cases, tmp_path)
        shutil.copy(BASE / name, base_copy)

    def add_token(tokenizer: Any) -> None:
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 5000, "content": "<|more|>"})
        tokenizer["model"]["vocab"]["<|more|>"] = 5000

    edit(base_copy, "tokenizer.json", add_token)
    assert_all_refused(dict.fromkeys(readers, ("base.tokenizer", "5000")), tmp_path)
    for file in base_copy.glob("tokenizer*"):
        file.unlink()
    assert_all_refused({(*RUN, "base.model=./base"): ("base.tokenizer", "no tokenizer")}, tmp_path)


def test_convert_onto_what_is_there(base_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target, word in {
        ".": "current directory", "..": "FOLDER", "/": "FOLDER", "../base": "MODEL (../base)",
        "../base/config.json": "file",
    }.items():  # fmt: skip
        cases = {("convert", "../base", target, *options): ("FOLDER", word) for options in ((), ("--overwrite",))}
        assert_all_refused(cases, tmp_path / "empty")
    assert {p.name for p in base_copy.iterdir()} == {p.name for p in BASE.iterdir()}


def test_validate_finds_what_a_run_would_refuse(tmp_path: Path) -> None:
    """And prints a good recipe in full, with what it could not check."""
    (tmp_path / "empty").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BASE / name, tmp_path / "empty" / name)
    for name, rows in {"bad": [LINE, {"prompt": "Who?\n"}], "one": [LINE]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = {("validate", str(RECIPE), *given): words for given, words in {
        ("base.model=./empty",): ("base.model", "no weights"),
        ("export.chat_template=nowhere.jinja",): ("export.chat_template", "nowhere.jinja"),
    }.items()}  # fmt: skip
    for data, words in {
        "no": ("no.jsonl", "No such file"), "bad": ("bad.jsonl:2", "answer"),
        "one": ("one.jsonl", "no row is", "holdout"),
    }.items():  # fmt: skip
        given = (f"base.model={EXPORT}", f"train.sources.0.data.path={data}.jsonl")
        cases["validate", "finetune", *given] = words
    for teacher, objective, words in (
        ("pico-english", "distil", ("its tokenizer differs", "Set a teacher with the base's tokenizer")),
        ("pico-mamba2", "attention_kl", ("mamba2", "attention")),
    ):
        given = (f"train.teacher.model={ROOT / 'checkpoints' / teacher}", f"train.sources.0.weights.{objective}=1.0")
        for command in ("validate", "run"):
            cases[command, str(RECIPE), *given] = ("train.teacher.model", *words)
    cases["validate", "pico-reproduce", "changes=[{name: x, disable: [L77H0]}]"] = ("L77H0",)
    assert_all_refused(cases, tmp_path)

    done = surgery("validate", str(RECIPE), "train.steps=37", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and yaml.safe_load(done.stdout)["train"]["steps"] == 37
    assert surgery("validate", "pico-reproduce", cwd=tmp_path).stderr == ""
    for given, said in (
        ((), "not checked: tokens of data and prompts (tokenizer "),
        (("base.model=owner/name",), "not checked: base, heads and tokens (base.model owner/name"),
    ):
        done = surgery("validate", "mamba2-130m", *given, cwd=tmp_path)
        assert done.returncode == 0 and said in done.stderr, "what is on the Hub is not requested"


def test_init_refuses_what_is_no_base(tmp_path: Path) -> None:
    cases = {
        ("init", "nowhere"): ("MODEL: nowhere. There is no such folder",),
        ("run", "--base", "nowhere"): ("--base: nowhere. There is no such folder",),
        ("init", str(ROOT / "checkpoints" / "pico-transformer")): ("not spliced",),
        ("init", str(PICO_MAMBA2), "--data", "nowhere.jsonl"): ("--data: nowhere.jsonl. No such file",),
        ("run", "--base", str(PICO_MAMBA2), "--tokenizer", "no"): ("--tokenizer: no. There is no such folder",),
        ("run",): ("--base",),
        ("run", "quickstart", "--base", "x"): ("Remove RECIPE",),
        ("run", "quickstart", "--data", "x"): ("needs --base",),
    }
    assert_all_refused(cases, tmp_path)


class TestArguments:
    """Names of any characters, overrides of any form."""

    def test_names_beyond_ascii_and_with_an_equals_sign(self, base_copy: Path, tmp_path: Path) -> None:
        base_copy.rename(tmp_path / "lr=0.1")
        assert "lr=0.1: mamba2" in surgery("inspect", "./lr=0.1", cwd=tmp_path).stdout
        (tmp_path / "lr=0.1").rename(tmp_path / "módèl 😀")
        environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
        command = [sys.executable, "-m", "surgery", "inspect", "./módèl 😀"]
        printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert printed.returncode == 0 and "\\U0001f600: mamba2" in printed.stdout, printed.stderr

    def test_what_no_command_takes(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
        generate = ("generate", str(EXPORT), "The value of", "--max-new-tokens", "3")
        cases = {
            ("compare", "./lr=0.2"): ("./lr=0.2", "no such folder"),
            ("compare", "https://huggingface.co/a/b"): ("MODEL", "Use the id in it: a/b."),
            ("finetune", str(BASE), "données 😀.jsonl"): (str(BASE), "Nothing is spliced"),
            ("finetune", str(BASE), ""): ("DATA", "''"),
            ("-q", "-v", *generate): ("--quiet", "--verbose"),
            ("generate", "none", "-5 + 3"): ("Before a prompt with a dash write --: generate CHECKPOINT -- PROMPT",),
        }
        for option in ("-q", "--verbose", "--debug"):
            cases[*generate, option] = (f"{option}: Put it before the command: surgery {option} generate",)
        for words in (("inspect", "\udcff"), ("run", "\udcff.yaml"), ("validate", str(RECIPE), "base.model=\udcff")):
            cases[words] = ("argument", "\\udcff", "UTF-8")
        assert_all_refused(cases, tmp_path)


def test_the_traceback_of_an_error_is_a_flag_away(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: [")
    done = surgery("--debug", "validate", "x.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "yaml.parser.ParserError" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: x.yaml")
