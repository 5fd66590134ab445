"""With mamba_ssm and causal_conv1d importable, what runs on a CPU gives the bits that it gives without them.

Stand-ins for the packages raise for every tensor that is not on a CUDA device (`tests/support/kernel_packages`).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surgery.export import reload
from surgery.export.transformers_folder import compare_with_model
from tests.integration.conftest import RECIPE, ROOT, SMALL
from tests.support.pico import pico_family, pico_tokenizer
from tests.support.processes import Reloads, Server, library, stock

STAND_INS = ROOT / "tests" / "support" / "kernel_packages"
TIMED = ("efficiency", "seconds", "versions", "machine")
ANSWER = """
import hashlib, importlib.util, sys
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
print("packages", importlib.util.find_spec("mamba_ssm") is not None, file=sys.stderr)
print(hashlib.sha256(bits).hexdigest())
"""

# The quick search of tests/integration/test_init.py. Batch size and hardware depend on the time that prompts take.
INIT = """
import json, sys
from surgery.init import measuring
from surgery.init.initial_recipe import write_recipe
from surgery.init.probing import ADJACENT, screen
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


@pytest.fixture(scope="module")
def with_packages() -> Iterator[tuple[Server, Server]]:
    """Servers with and without this library, in which the packages are importable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (STAND_INS, ROOT))))
        plain = Server("stock")
        ours = Server("library", plain)
    yield ours, plain
    ours.stop()
    plain.stop()


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


def test_a_run(finished: Path, with_packages: tuple[Server, Server], tmp_path: Path) -> None:
    """Locating, splicing, training of both arms, evaluation, export, and its reload without this library."""
    done = with_packages[0].run(("surgery", "run", str(RECIPE), *SMALL), tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "quickstart"
    weights = [path.relative_to(finished) for path in finished.rglob("*.safetensors")]
    assert len(weights) >= 4
    for name in ("heads.json", "plan.json", *weights):
        assert (folder / name).read_bytes() == (finished / name).read_bytes(), name
    assert results_of(folder) == results_of(finished)


@pytest.mark.parametrize("command", ["inspect", "generate", "verify"])
def test_a_command_on_an_export(
    command: str, finished: Path, with_packages: tuple[Server, Server], tmp_path: Path
) -> None:
    more = ("The value of key1 is", "--max-new-tokens", "8") if command == "generate" else ()
    given = ("surgery", command, str(finished / "export"), *more)
    there, without = with_packages[0].run(given, tmp_path), library().run(given, tmp_path)
    assert there.returncode == 0, there.stderr
    assert there.stdout == without.stdout


def test_init(with_packages: tuple[Server, Server], tmp_path: Path) -> None:
    """Its prompts run on the CPU, and its estimates on the meta device."""
    base = saved("mamba2", tmp_path)
    given = (("-c", str(base)), tmp_path, None, INIT)
    there, without = with_packages[0].run(*given), library().run(*given)
    assert there.returncode == 0, there.stderr
    assert there.stdout == without.stdout and "splice" in there.stdout


@pytest.mark.parametrize("name", ["mamba", "zamba2", "falcon_h1"])
def test_a_plain_base(name: str, with_packages: tuple[Server, Server], tmp_path: Path) -> None:
    """Also one without a hybrid class, whose modelling file nothing else imports."""
    given = ("surgery", "generate", str(saved(name, tmp_path)), "The value of", "--max-new-tokens", "4")
    there, without = with_packages[0].run(given, tmp_path), library().run(given, tmp_path)
    assert there.returncode == 0, there.stderr
    assert there.stdout == without.stdout


def test_an_export_without_this_library(finished: Path, with_packages: tuple[Server, Server], tmp_path: Path) -> None:
    """Stock transformers answers and trains on a CPU, since the export's code chooses by device."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = [
        server.run(("-c", str(finished / "export"), "yes"), tmp_path, environment, ANSWER)
        for server in (with_packages[1], stock())
    ]
    for done, there in zip(found, (True, False), strict=True):
        assert done.returncode == 0 and f"packages {there}" in done.stderr, done.stderr
    assert found[0].stdout == found[1].stdout


@pytest.mark.parametrize("name", ["nemotron_h", "mamba"])
def test_an_export_that_holds_no_code(
    name: str, with_packages: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reload chooses by device too, and takes the chunks that this process takes, not the published ones."""
    monkeypatch.setattr(reload, "subprocess", Reloads(with_packages[1].address))
    model = pico_family(name, vocab_size=1024, **({} if name == "mamba" else {"chunk_size": 256}))
    model.save_pretrained(tmp_path / name)
    pico_tokenizer().save_pretrained(tmp_path / name)
    report = compare_with_model(tmp_path / name, model, pico_tokenizer(), remote_code=False)
    assert report["max_logit_difference"] == 0


def test_the_stand_ins_are_what_transformers_would_call(with_packages: tuple[Server, Server], tmp_path: Path) -> None:
    """Without our choice, transformers' own Mamba-2 fails on this CPU."""
    done = with_packages[1].run(("-c", str(saved("mamba2", tmp_path)), "no"), tmp_path, None, ANSWER)
    assert done.returncode != 0 and "Expected x.is_cuda() to be true" in done.stderr
