"""What is committed is what it is said to be: sizes, hashes, and the claims of the README, measured again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import surgery.hybrid
from surgery.models.loading import load_model, load_tokenizer
from surgery.probes.documents import rng_of
from surgery.probes.knowledge import fact_question, facts
from surgery.probes.kv_retrieval import kv_document
from surgery.recipe import Base
from surgery.scoring.ranking import answer_choices
from tests.integration.conftest import BASE, ROOT

EXAMPLE = ROOT / "checkpoints" / "quickstart"


def kv_accuracy(folder: Path, pairs: int, prompts: int) -> float:
    """On prompts that no recipe uses."""
    base = Base(model=str(folder))
    documents = [kv_document(rng_of("committed", pairs, i), pairs, split="eval") for i in range(prompts)]
    return float(answer_choices(load_model(base), load_tokenizer(base), documents, 64).correct.float().mean())


def test_the_base_is_small_and_reads_and_writes() -> None:
    assert sum(p.stat().st_size for p in BASE.rglob("*")) < 8_000_000
    tokenizer = load_tokenizer(Base(model=str(BASE)))
    assert len(tokenizer) <= 2000 and tokenizer.padding_side == "left"


def test_the_base_retrieves_from_few_pairs_and_not_from_many() -> None:
    assert kv_accuracy(BASE, 4, 200) >= 0.90
    assert kv_accuracy(BASE, 32, 128) <= 0.65, "0.60 on the 400 prompts of its card; 128 here"


def test_the_base_knows_its_facts() -> None:
    base = Base(model=str(BASE))
    assert len(facts()) >= 300
    scores = answer_choices(load_model(base), load_tokenizer(base), [fact_question(f) for f in facts()], 128)
    assert float(scores.correct.float().mean()) >= 0.95


def test_the_example_retrieves_from_many() -> None:
    assert kv_accuracy(EXAMPLE / "export", 32, 128) >= 0.90


@pytest.mark.parametrize("name", ["attention.py", "donor.py", "mixins.py", "modeling_mamba2_hybrid.py", "packing.py"])
def test_the_example_ships_the_librarys_modules(name: str) -> None:
    library = Path(surgery.hybrid.__file__).parent
    assert (EXAMPLE / "export" / name).read_bytes() == (library / name).read_bytes(), "make demo, and commit it again"


def test_hashes() -> None:
    for line in (ROOT / "checkpoints" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((ROOT / "checkpoints" / name).read_bytes()).hexdigest() == digest


def test_the_readme_quotes_the_results() -> None:
    readme = (ROOT / "README.md").read_text()
    arms = json.loads((EXAMPLE / "results.json").read_text())["arms"]
    for pairs in ("8", "16", "32", "64"):
        for arm in arms.values():
            entry = arm["kv_retrieval"][pairs]
            quoted = [f"{entry[k]:.3f}"[1:] if entry[k] < 1 else "1.000" for k in ("accuracy", "low", "high")]
            assert all(number in readme for number in quoted), (pairs, quoted)
