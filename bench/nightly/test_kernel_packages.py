"""With mamba_ssm and causal_conv1d importable, what runs on a CPU gives the bits that it gives without them.

Stand-ins for the packages raise for every tensor that is not on a CUDA device (`bench/nightly/kernel_packages`).
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from surgery.export import reload
from surgery.export.transformers_folder import compare_with_model
from tests.integration.conftest import RECIPE, ROOT, SMALL, with_path
from tests.support.pico import pico_family, pico_tokenizer

STAND_INS = ROOT / "bench" / "nightly" / "kernel_packages"
TIMED = ("efficiency", "seconds", "versions", "machine")
ANSWER = """
import hashlib, sys
import torch
from transformers import AutoModelForCausalLM
folder, remote_code = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=remote_code == "yes").eval()
assert "surgery" not in sys.modules
ids = torch.arange(40)[None] + 5
with torch.no_grad():
    logits = [model(ids, use_cache=False).logits, model.train()(ids, use_cache=False).logits]
    text = model.eval().generate(ids[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=0)
bits = b"".join(tensor.numpy().tobytes() for tensor in (*logits, text))
print(hashlib.sha256(bits).hexdigest())
"""

# The quick search of tests/integration/test_init.py. Batch size and hardware depend on the time that prompts take.
INIT = """
import json, sys
from surgery.run import measuring
from surgery.run.initial_recipe import write_recipe
from surgery.run.probing import ADJACENT, screen
from surgery.recipe.yaml import load_yaml
measuring.screen = lambda prober, count: screen(prober, count, (ADJACENT,))
measuring.PROMPTS_OF_SMALL, measuring._KNOWLEDGE = 24, ()
text = write_recipe(measuring.measure_base(sys.argv[1], None, None, False, lambda line: None), lambda line: None)
recipe = load_yaml(text)
for section in recipe.values():
    if isinstance(section, dict):
        section.pop("batch_size", None)
print(json.dumps({key: value for key, value in recipe.items() if key != "hardware"}))
"""


def run(command: Sequence[str], cwd: Path, packages: bool) -> str:
    """Standard output of `python COMMAND` in a new process, in which the packages are importable or not."""
    environment = with_path(*([STAND_INS] if packages else []), HF_MODULES_CACHE=str(cwd / "modules"))
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_same(command: Sequence[str], cwd: Path) -> str:
    """With the packages and without them, it prints the same."""
    with_packages, without = (run(command, cwd, packages) for packages in (True, False))
    assert with_packages == without
    return without


def saved(name: str, folder: Path) -> Path:
    """A tiny model of a family with a tokenizer, in a folder."""
    pico_family(name, vocab_size=1024).save_pretrained(folder / name)
    copy.deepcopy(pico_tokenizer()).save_pretrained(folder / name)
    return folder / name


def results_of(folder: Path) -> Any:
    """The results of a run, without what is timed."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(inner) for key, inner in value.items() if key not in TIMED}
        return value

    return kept(json.loads((folder / "results.json").read_text()))


def test_a_run(finished: Path, tmp_path: Path) -> None:
    """Locating, splicing, training of both arms, evaluation, export, and its reload without this library."""
    run(["-m", "surgery", "run", str(RECIPE), *SMALL], tmp_path, packages=True)
    folder = tmp_path / "runs" / "quickstart"
    weights = [path.relative_to(finished) for path in finished.rglob("*.safetensors")]
    assert len(weights) >= 4
    for name in ("heads.json", "plan.json", *weights):
        assert (folder / name).read_bytes() == (finished / name).read_bytes(), name
    assert results_of(folder) == results_of(finished)


def test_commands_on_an_export_and_on_plain_bases(finished: Path, tmp_path: Path) -> None:
    """Also on a base without a hybrid class, whose modelling file nothing else imports."""
    export = str(finished / "export")
    for words in (("inspect", export), ("verify", export), ("generate", export, "The value of key1 is")):
        assert_same(["-m", "surgery", *words], tmp_path)
    for name in ("mamba", "zamba2", "falcon_h1"):
        assert_same(["-m", "surgery", "generate", str(saved(name, tmp_path)), "The value of"], tmp_path)


def test_init(tmp_path: Path) -> None:
    """Its prompts run on the CPU, and its estimates on the meta device."""
    assert "splice" in assert_same(["-c", INIT, str(saved("mamba2", tmp_path))], tmp_path)


def test_an_export_without_this_library(finished: Path, tmp_path: Path) -> None:
    """Stock transformers answers and trains on a CPU, since the export's code chooses by device."""
    assert_same(["-c", ANSWER, str(finished / "export"), "yes"], tmp_path)


def test_an_export_that_holds_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reload chooses by device too, and takes the chunks that this process takes, not the published ones."""
    monkeypatch.setattr(reload, "subprocess", subprocess)
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS), prepend=os.pathsep)
    for name, more in (("nemotron_h", {"chunk_size": 256}), ("mamba", {})):
        model = pico_family(name, vocab_size=1024, **more)
        model.save_pretrained(tmp_path / name)
        pico_tokenizer().save_pretrained(tmp_path / name)
        report = compare_with_model(tmp_path / name, model, pico_tokenizer(), remote_code=False)
        assert report["max_logit_difference"] == 0, name


def test_the_stand_ins_are_what_transformers_would_call(tmp_path: Path) -> None:
    """Without our choice, transformers' own Mamba-2 fails on this CPU."""
    with pytest.raises(AssertionError, match=r"Expected x\.is_cuda\(\) to be true"):
        run(["-c", ANSWER, str(saved("mamba2", tmp_path)), "no"], tmp_path, packages=True)
