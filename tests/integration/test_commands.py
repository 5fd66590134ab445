"""Commands beside `run`: what they print, what they import, and how they read checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from surgery.errors import ModelError
from surgery.models.convert import convert
from surgery.models.loading import load_model, revision_of
from surgery.recipe import Base
from tests.integration.conftest import BASE, EXPORT, PICO_MAMBA2, RECIPE, ROOT, SMALL, ran, refused, surgery, with_path
from tests.support.mamba2attn import attn_model
from tests.support.mamba_ssm_files import PADDED, tiny, write
from tests.support.processes import alone

PROMPT = "Question: What is the job of"


def test_inspect_generate_and_schema(tmp_path: Path) -> None:
    base, hybrid = (surgery("inspect", str(folder), cwd=tmp_path).stdout for folder in (BASE, EXPORT))
    assert "backbone.layers.3.mixer" in base and "spliced heads" in hybrid
    command = ("generate", str(EXPORT), PROMPT, "--max-new-tokens", "3")
    quiet, verbose = (surgery(option, *command, cwd=tmp_path).stdout for option in ("-q", "-v"))
    assert quiet == verbose and quiet.startswith(PROMPT) and len(quiet) > len(PROMPT) + 1
    schema = json.loads(surgery("schema", cwd=tmp_path).stdout)
    assert {"name", "base", "locate", "splice", "train", "evaluate", "export"} <= set(schema["properties"])
    # The text under a field of a section, and of the class that a section extends.
    assert schema["$defs"]["Locate"]["properties"]["layers"]["description"] == "Also measure each layer as a whole."
    for name in ("tokens", "compile"):
        assert schema["$defs"]["Train"]["properties"][name]["description"]


def test_pretrain_writes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "pretrain-pico.yaml"
    small = ["train.steps=2", "evaluate.examples=4", "evaluate.sentences=4", "evaluate.pairs=[4]"]
    ran("pretrain", str(recipe), *small, "--to", "made", cwd=tmp_path)
    assert surgery("inspect", "./made", cwd=tmp_path).returncode == 0
    assert "surgery pretrain" in (tmp_path / "made" / "README.md").read_text()
    assert not (tmp_path / "made.steps").exists()


def test_locate_alone_says_what_it_found(tmp_path: Path) -> None:
    """Any method by itself; nothing beyond what was asked for."""
    given = (str(RECIPE), *SMALL, "locate.methods=[ablation]", "splice.select=ablation")
    done = ran("locate", *given, cwd=tmp_path)
    folder = tmp_path / "runs" / "quickstart"
    first = json.loads((folder / "heads.json").read_text())["heads"][0]
    assert set(first["scores"]) == {"ablation", "ablation_accuracy"}
    assert first["role"] == "unmeasured" and first["head"] in done.stdout
    assert all(text in done.stdout for text in ("locate.html", "forward passes", "held on a device"))
    assert (folder / "locate.html").stat().st_size > 10_000 and (folder / "heads.csv").read_text().count("\n") == 33
    again = surgery("--quiet", "locate", *given, cwd=tmp_path)
    assert again.returncode == 0 and "locate.html" in again.stdout and "measuring" not in again.stdout
    assert (folder / "run.log").read_text().count("locate  measuring every head") == 2
    assert "Add sharpen to locate.methods" in refused("plan", *given, cwd=tmp_path)


def test_a_closed_or_broken_output_follows_the_conventions_of_the_shell(tmp_path: Path) -> None:
    """Nobody reads: 141 without a word. Closed: as /dev/null, and no file of the command takes the number."""
    command = f"{sys.executable} -m surgery"
    for words, code in (
        (f"{command} schema | true; exit ${{PIPESTATUS[0]}}", 141),
        (f"{command} show nothing 2>&1 | true; exit ${{PIPESTATUS[0]}}", 141),
        (f"{command} recipes <&- >&-", 0),
        (f"{command} show nothing <&- >&- 2>&-", 2),
    ):
        done = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", ""), words


# Runs several command lines in one process, then prints which of some modules are imported.
IMPORTED = """
import json, sys
from typer.testing import CliRunner
from surgery.cli import app
commands, watched = json.loads(sys.argv[1])
for words in commands:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (words, result.output, result.exception)
print(json.dumps(sorted(set(watched) & sys.modules.keys())))
"""
LIGHT = [["--version"], ["--help"], ["recipes"], ["recipes", "show", "quickstart"], ["schema"],
         ["schema", "--pretrain"], ["schema", "--analysis"], ["show", "checkpoints/quickstart"],
         ["validate", "pretrain-pico"], ["validate", "quickstart", "base.model=owner/not-in-the-cache"]]  # fmt: skip
HELP = ["run", "finetune", "sweep", "locate", "train", "analyse", "pretrain", "validate", "show", "inspect", "generate",
        "convert", "compare", "verify", "publish", "examples", "init", "recipes"]  # fmt: skip
DRAWING_AND_DATA = ["matplotlib", "peft", "datasets", "pandas", "pyarrow", "lm_eval", "scipy.stats", "bitsandbytes"]


def test_commands_import_no_library_that_they_do_not_need() -> None:
    """Those that compute nothing start without torch; those that draw nothing without libraries of figures and data."""
    light = [*LIGHT, *([name, "--help"] for name in HELP)]
    for commands, watched in (
        (light, ["torch", "transformers", "accelerate", *DRAWING_AND_DATA]),
        ([["inspect", "checkpoints/pico-far"], ["validate", "quickstart"]], DRAWING_AND_DATA),
    ):
        command = [sys.executable, "-c", IMPORTED, json.dumps([commands, watched])]
        environment = with_path(HF_HUB_OFFLINE="1")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == []


def test_convert_then_inspect_and_a_stranger(tmp_path: Path) -> None:
    """A checkpoint of mamba_ssm with attention layers: transformers loads what is written, without this library."""
    model = attn_model("mlp", vocab_size=PADDED)
    write(tmp_path / "own", model)
    for file in PICO_MAMBA2.glob("tokenizer*"):
        (tmp_path / "own" / file.name).write_bytes(file.read_bytes())
    done = surgery("convert", "./own", "new", "--dtype", "float32", cwd=tmp_path)
    assert done.returncode == 0 and "in 1 file" in done.stdout, done.stderr
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    assert surgery("inspect", "./new", cwd=tmp_path).returncode == 0
    code = (
        "import torch; from transformers import AutoModelForCausalLM\n"
        "m = AutoModelForCausalLM.from_pretrained('./new', trust_remote_code=True).eval()\n"
        "print(m(torch.arange(9)[None]).logits.double().sum().item())"
    )
    done = alone(code, cwd=tmp_path, HF_MODULES_CACHE=str(tmp_path / "modules"))
    with torch.no_grad():
        expected = model(torch.arange(9)[None]).logits.double().sum().item()
    assert float(done.stdout.split()[-1]) == pytest.approx(expected, abs=1e-3)


def test_ids_of_the_hub_come_from_its_cache_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"main": tiny("Mamba2"), "v1": tiny("Mamba1")}
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    for number, (revision, model) in enumerate(models.items(), start=1):
        (repository / "refs" / revision).write_text(f"{number:040x}")
        (repository / "snapshots" / f"{number:040x}").parent.mkdir(exist_ok=True)
        if revision == "main":
            (repository / "snapshots" / f"{number:040x}").symlink_to(write(tmp_path / "a", model, "sharded bin"))
        else:
            model.save_pretrained(repository / "snapshots" / f"{number:040x}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, model, commit in (("org/tiny", models["main"], 1), ("org/tiny@v1", models["v1"], 2)):
        base = Base(model=name)
        loaded = load_model(base)
        assert (type(loaded), revision_of(base)) == (type(model), f"{commit:040x}")
        with torch.no_grad():
            found, expected = (m(torch.arange(9)[None]).logits for m in (loaded, model))
        torch.testing.assert_close(found, expected)
    for name in ("tokenizer.json", "added_tokens.json", "spiece.model", "chat_template.jinja"):
        (tmp_path / "a" / name).write_text("{}")
    assert convert(Base(model="org/tiny"), tmp_path / "new").tokenizer
    assert {"added_tokens.json", "spiece.model", "chat_template.jinja"} < {p.name for p in (tmp_path / "new").iterdir()}
    for name, said in (("org/tiny@v2", "org/tiny"), ("org/other", "org/other")):
        with pytest.raises(ModelError, match=said):
            load_model(Base(model=name))
