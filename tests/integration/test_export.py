"""The exported folder, as a stranger with stock transformers would use it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

import surgery.hybrid
from surgery.errors import RunError
from surgery.export import transformers_folder
from surgery.export.files import RECORD, REFERENCE, fingerprints
from surgery.export.folder import export_model
from surgery.export.reload import TOLERANCE, make_reference, read_reference, reload
from surgery.export.verify import verify_folder
from surgery.models.loading import load_model
from surgery.recipe import Base, Export
from tests.integration.conftest import RECIPE, SMALL
from tests.integration.conftest import surgery as command
from tests.support.battery import every_spliced, logits, stays_fp32, trained
from tests.support.exports import edit, in_this_process, list_again, refusal, written
from tests.support.pico import tokens
from tests.support.processes import stock

LIBRARY = Path(surgery.hybrid.__file__).parent
PROMPT = "Memorize the following dictionary:\nbalo:12\nmiku:7\nThe value of the key 'miku' is"


@pytest.fixture(scope="module")
def folder(finished: Path) -> Path:
    return finished / "export"


def test_shipped_modules_are_the_librarys_own_byte_for_byte(folder: Path) -> None:
    shipped = sorted(p.name for p in folder.glob("*.py"))
    assert shipped == ["configuration_hybrid.py", "modeling_hybrid.py", "modeling_mamba2_hybrid.py"]
    for name in shipped:
        assert (folder / name).read_bytes() == (LIBRARY / name).read_bytes()


def test_registered_classes_need_no_remote_code(folder: Path) -> None:
    assert type(load_model(Base(model=str(folder)))).__module__ == "surgery.hybrid.modeling_mamba2_hybrid"


def test_the_cards_snippet_runs_as_written(folder: Path, tmp_path: Path) -> None:
    """Without this library and without anyone at the prompt: it generates, and transformers has nothing to ask."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.S)
    script = f"import sys\nsys.modules['surgery'] = None\n{code}"
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path)}
    done = stock().run(["-c"], folder, environment, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The value of")
    assert "trust_remote_code" not in done.stdout + done.stderr


def test_stock_pipeline_generates(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    alone = [generator(p, max_new_tokens=4, do_sample=False)[0]["generated_text"] for p in (PROMPT, "In the winter")]
    together = generator([PROMPT, "In the winter"], max_new_tokens=4, do_sample=False, batch_size=2)
    assert [t[0]["generated_text"] for t in together] == alone


def test_the_tokenizer_pads_left(folder: Path) -> None:
    """Batched generation from a right-padded batch would go on from padding."""
    assert AutoTokenizer.from_pretrained(folder).padding_side == "left"


def test_a_folder_that_holds_something_else_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with pytest.raises(RunError, match="not an export"):
        export_model(model, tokenizer, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_automodel_finds_the_model_without_its_head(folder: Path) -> None:
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == "Mamba2HybridModel"


def test_saving_and_loading_again_changes_nothing(folder: Path, tmp_path: Path) -> None:
    first = AutoModelForCausalLM.from_pretrained(folder).eval()
    first.save_pretrained(tmp_path)
    second = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(3, 900, (1, 30))
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)
    assert json.loads((tmp_path / "config.json").read_text())["splice"] == first.config.splice


def test_nothing_of_this_machine_is_in_the_folder(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".md", ".yaml", ".py"):
            text = path.read_text()
            assert (
                str(Path.home()) not in text and str(folder.parent) not in text and str(LIBRARY.parents[1]) not in text
            ), path.name


def test_the_card_holds_the_measured_numbers(folder: Path) -> None:
    card, results = (folder / "README.md").read_text(), json.loads((folder / "results.json").read_text())
    for arm in results["arms"].values():
        assert f"{arm['kv_retrieval']['8']['accuracy']:.3f}" in card
        assert f"{arm['perplexity']:.3f}" in card


def test_a_clean_process_computes_what_was_trained(folder: Path, finished: Path, new_process: None) -> None:
    """`reload` gives the trained model's logits, and all that its twin in the unit tests does; the reference is made of
    it."""
    ids = read_reference(folder / REFERENCE, 973)["ids"]
    trained_model = AutoModelForCausalLM.from_pretrained(finished / "trained").eval()
    found, twin = reload(folder, ids, ("auto", "float32")), in_this_process(folder, ids, ("auto", "float32"))
    assert found.keys() == twin.keys() and all(torch.equal(found[k], twin[k]) for k in found)
    assert torch.equal(found["auto.logits"], logits(trained_model, ids))
    reference = make_reference(ids, found, "float32")
    stored = read_reference(folder / REFERENCE, 973)
    assert all(torch.equal(reference[k], stored[k]) for k in stored)


def test_a_copy_verifies_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    done = command("verify", str(copy), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = sum(p.is_file() for p in copy.rglob("*")) - 1
    assert f"{files} files match the export record" in done.stdout and "not checked" not in done.stdout
    assert "config.json, plan.json, heads.json, README.md agree" in done.stdout
    assert "8 generated tokens" in done.stdout or "generated tokens are equal" in done.stdout


def test_another_model_does_not_verify(folder: Path, tmp_path: Path) -> None:
    """The new head off, every file listed anew: a real process tells. Exit code 2, one line."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    name = next(n for n in load_file(copy / "model.safetensors") if n.endswith("attention.o_proj.weight"))
    edit(copy, "model.safetensors", lambda tensors: tensors[name].zero_())
    assert "model.safetensors" in command("verify", str(copy), cwd=tmp_path).stderr
    list_again(copy)
    done = command("verify", str(copy), cwd=tmp_path)
    assert done.returncode == 2 and "logits differ from the stored reference" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_tokenizer_that_does_not_load_is_found(folder: Path, tmp_path: Path) -> None:
    """In the process that reloads. One that needs code of its own is not loaded, with trust neither."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    edit(copy, "tokenizer.json", lambda data: data["model"].update(type="none of them"))
    list_again(copy)
    assert "the tokenizer does not load" in refusal(copy)
    edit(copy, "tokenizer_config.json", lambda data: data.update(auto_map={"AutoTokenizer": ["a.B", None]}))
    list_again(copy)
    assert "auto_map" in refusal(copy)
    assert "tokenizer: it is absent or needs code of its own" in verify_folder(copy, True)["not_checked"]


def test_an_edited_module_runs_with_trust_alone(folder: Path, tmp_path: Path) -> None:
    copy, mark = Path(shutil.copytree(folder, tmp_path / "copy")), tmp_path / "it ran"
    with open(copy / "modeling_hybrid.py", "a") as file:
        file.write(f"\nopen({str(mark)!r}, 'w').close()\n")
    list_again(copy)
    assert "modeling_hybrid.py" in refusal(copy) and not mark.exists()
    assert verify_folder(copy, trust_remote_code=True)["max_logit_difference"] < TOLERANCE
    assert mark.exists()


def test_the_same_run_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    """The stage again, elsewhere, in a process that hashes strings in another order."""
    shutil.copytree(finished, tmp_path / "runs" / finished.name)
    shutil.rmtree(tmp_path / "runs" / finished.name / "export")
    again = [sys.executable, "-m", "surgery", "run", str(RECIPE), *SMALL, "--from", "export"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(again, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = finished / "export", tmp_path / "runs" / finished.name / "export"
    assert fingerprints(second) == fingerprints(first)
    assert (second / RECORD).read_bytes() == (first / RECORD).read_bytes()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads here in the place of a clean process, for many small folders."""
    monkeypatch.setattr(transformers_folder, "reload", in_this_process)


@every_spliced
def test_bf16_keeps_what_has_to_be_exact(name: str, tmp_path: Path, in_process: None) -> None:
    """And the reference is computed in fp32 all the same, so that the tolerance is that of fp32."""
    folder = written(tmp_path / "export", "add", name, Export(dtype="bfloat16"))
    for key, tensor in load_file(folder / "model.safetensors").items():
        assert tensor.dtype == (torch.float32 if stays_fp32(key) else torch.bfloat16), key
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[k], v) for k, v in reloaded.state_dict().items() if k in stored)
    assert verify_folder(folder)["max_logit_difference"] < TOLERANCE


@every_spliced
def test_shards(name: str, tmp_path: Path, in_process: None) -> None:
    """By size, each tensor in one of them; the same model; a wrong index is found."""
    folder = written(tmp_path / "export", "add", name, Export(max_shard_size="30KB"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1 and {p.name for p in shards} == set(index["weight_map"].values())
    model = trained(name, "add")
    unique = {v.data_ptr(): v.nbytes for v in model.state_dict(keep_vars=True).values()}
    assert index["metadata"]["total_size"] == sum(unique.values())  # what is tied is stored once
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder), tokens()), logits(model, tokens()))
    assert verify_folder(folder)["tensors"] == len(unique)
    key = min(index["weight_map"])
    edit(folder, "model.safetensors.index.json", lambda data: data["weight_map"].pop(key))
    list_again(folder)
    assert f"{key} is not in the index" in refusal(folder)
