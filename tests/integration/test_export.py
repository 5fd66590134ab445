"""The exported folder, as a stranger with stock transformers would use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

import surgery.hybrid
from surgery import export
from surgery.checkpoint import load_model
from surgery.errors import RunError
from surgery.recipe import Base

LIBRARY = Path(surgery.hybrid.__file__).parent
PROMPT = "Memorize the following dictionary:\nbalo:12\nmiku:7\nThe value of the key 'miku' is"


@pytest.fixture(scope="module")
def folder(finished: Path) -> Path:
    return finished / "export"


def test_shipped_modules_are_the_librarys_own_byte_for_byte(folder: Path) -> None:
    shipped = sorted(p.name for p in folder.glob("*.py"))
    assert shipped == ["attention.py", "donor.py", "mixins.py", "modeling_mamba2_hybrid.py"]
    for name in shipped:
        assert (folder / name).read_bytes() == (LIBRARY / name).read_bytes()


def test_it_loads_without_surgery_and_gives_the_trained_logits(folder: Path, finished: Path, tmp_path: Path) -> None:
    script = """
import sys, torch
sys.modules["surgery"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt")["input_ids"]
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[3])
"""
    out = tmp_path / "logits.pt"
    subprocess.run([sys.executable, "-c", script, str(folder), PROMPT, str(out)], check=True, cwd=tmp_path, timeout=120)
    trained = AutoModelForCausalLM.from_pretrained(finished / "trained").eval()
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(torch.load(out, weights_only=True), trained(ids).logits)


def test_registered_classes_need_no_remote_code(folder: Path) -> None:
    assert type(load_model(Base(model=str(folder)))).__module__ == "surgery.hybrid.modeling_mamba2_hybrid"


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
    with pytest.raises(RunError, match="no export"):
        export(model, tokenizer, tmp_path)
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
