"""The exported folder, as a stranger with stock transformers would use it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surgery.hybrid
from surgery.errors import RunError
from surgery.export import reload as reloading
from surgery.export import transformers_folder
from surgery.export.files import REFERENCE
from surgery.export.folder import export_model
from surgery.export.reload import TOLERANCE, make_reference, read_reference, reload
from surgery.export.verify import verify_folder
from surgery.recipe import Export
from tests.integration.conftest import ran, refused
from tests.support.battery import logits, stays_fp32, trained
from tests.support.exports import edit, in_this_process, list_again, refusal, written
from tests.support.pico import pico_tokenizer
from tests.support.processes import alone

LIBRARY = Path(surgery.hybrid.__file__).parent


@pytest.fixture(scope="module")
def folder(finished: Path) -> Path:
    return finished / "export"


def test_the_folder_holds_nothing_of_this_machine(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".md", ".yaml", ".py"):
            text = path.read_text()
            own = (str(Path.home()), str(folder.parent), str(LIBRARY.parents[1]))
            assert [place for place in own if place in text] == [], path.name


def test_the_cards_snippet_runs_as_written(folder: Path, tmp_path: Path) -> None:
    """Without this library and without anyone at the prompt: it generates, and transformers has nothing to ask."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.S)
    done = alone(code, cwd=folder, HF_MODULES_CACHE=str(tmp_path))
    assert done.stdout.startswith("The value of")
    assert "trust_remote_code" not in done.stdout + done.stderr


def test_a_folder_that_is_no_export_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="holds no export"):
        export_model(trained("mamba2"), pico_tokenizer(), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_clean_process_computes_what_was_trained(
    folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reload`, in a new interpreter, gives the trained logits, and all that its twin in the unit tests does."""
    monkeypatch.setattr(reloading, "subprocess", subprocess)
    ids = read_reference(folder / REFERENCE, 973)["ids"]
    trained_model = AutoModelForCausalLM.from_pretrained(finished / "trained").eval()
    found, twin = reload(folder, ids, ("auto", "float32")), in_this_process(folder, ids, ("auto", "float32"))
    assert found.keys() == twin.keys() and all(torch.equal(found[k], twin[k]) for k in found)
    assert torch.equal(found["auto.logits"], logits(trained_model, ids))
    reference = make_reference(ids, found, "float32")
    stored = read_reference(folder / REFERENCE, 973)
    assert all(torch.equal(reference[k], stored[k]) for k in stored)


def test_verify_tells_a_copy_from_another_model(folder: Path, tmp_path: Path) -> None:
    """A real process tells: every file is listed anew."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    done = ran("verify", str(copy), cwd=tmp_path)
    files = sum(p.is_file() for p in copy.rglob("*")) - 1
    assert f"{files} files match the export record" in done.stdout and "not checked" not in done.stdout
    assert "config.json, plan.json, heads.json, README.md agree" in done.stdout
    assert "generated tokens" in done.stdout
    name = next(n for n in load_file(copy / "model.safetensors") if n.endswith("attention.o_proj.weight"))
    edit(copy, "model.safetensors", lambda tensors: tensors[name].zero_())
    assert "model.safetensors" in refused("verify", str(copy), cwd=tmp_path)
    list_again(copy)
    assert "logits differ from the stored reference" in refused("verify", str(copy), cwd=tmp_path)
    edit(copy, "tokenizer.json", lambda data: data["model"].update(type="none of them"))
    list_again(copy)
    assert "the tokenizer does not load" in refusal(copy)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads here in the place of a clean process, for many small folders."""
    monkeypatch.setattr(transformers_folder, "reload", in_this_process)


def test_bf16_keeps_what_has_to_be_exact(tmp_path: Path, in_process: None) -> None:
    """And the reference is computed in fp32 all the same, so that the tolerance is that of fp32."""
    folder = written(tmp_path / "export", "add", "nemotron_h", Export(dtype="bfloat16"))
    for key, tensor in load_file(folder / "model.safetensors").items():
        assert tensor.dtype == (torch.float32 if stays_fp32(key) else torch.bfloat16), key
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[k], v) for k, v in reloaded.state_dict().items() if k in stored)
    assert verify_folder(folder)["max_logit_difference"] < TOLERANCE


def test_shards(tmp_path: Path, in_process: None) -> None:
    """By size, each tensor in one of them; the same model; a wrong index is found."""
    folder = written(tmp_path / "export", "add", "zamba2", Export(max_shard_size="30KB"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1 and {p.name for p in shards} == set(index["weight_map"].values())
    assert verify_folder(folder)["tensors"] == len(index["weight_map"])
    key = min(index["weight_map"])
    edit(folder, "model.safetensors.index.json", lambda data: data["weight_map"].pop(key))
    list_again(folder)
    assert f"{key} is not in the index" in refusal(folder)
