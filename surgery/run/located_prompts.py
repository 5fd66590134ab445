"""Evaluation prompts of the form that locating uses, for the stages of a run."""

from __future__ import annotations

from typing import Any

from surgery.data.encoding import encode
from surgery.probes.documents import Document
from surgery.probes.registry import prompts_of
from surgery.run.context import Run


def located_prompts(run: Run, purpose: str, count: int, pairs: int) -> list[Document]:
    """Generate evaluation prompts of the form that locating uses."""
    section = run.recipe.locate
    options = section.options(pairs, tokenizer=run.tokenizer())
    return prompts_of(section.probe, purpose, run.recipe.seed, count, options)


def sample_batch(run: Run, count: int, pairs: int = 0) -> Any:
    """Encode a few evaluation prompts of the size that locating uses, on the device."""
    documents = located_prompts(run, "sample", count, pairs or run.recipe.locate.pairs)
    return encode(documents, run.tokenizer(), until_answer=True).to(run.accelerator.device)
