"""Evaluation prompts of the form that locating uses, for the stages of a run."""

from __future__ import annotations

from typing import Any

from surgery.data.encoding import encode
from surgery.data.own_prompts import own_prompts
from surgery.probes.documents import Document
from surgery.probes.registry import prompts_of
from surgery.run.context import Run

_PAGE_PROMPTS = 3  # on the page of the heads


def located_prompts(run: Run, purpose: str, count: int, pairs: int) -> list[Document]:
    """Generate evaluation prompts of the form that locating uses."""
    section = run.recipe.locate
    options = section.options(pairs, tokenizer=run.tokenizer())
    return prompts_of(section.probe, purpose, run.recipe.seed, count, options)


def page_prompts(run: Run) -> list[Document]:
    """Return a few short prompts for the page of the heads: the shortest of `locate.data`, or generated ones."""
    section = run.recipe.locate
    if section.data is None:
        return located_prompts(run, "sample", _PAGE_PROMPTS, min(16, section.pairs))
    config = run.base().config
    context = getattr(config, "max_position_embeddings", None)
    own = own_prompts(section.data, run.tokenizer(), section.examples, context, config.vocab_size)
    return sorted(own, key=lambda document: len(document.text))[:_PAGE_PROMPTS]


def sample_batch(run: Run, count: int, pairs: int = 0) -> Any:
    """Encode a few evaluation prompts of the size that locating uses, on the device."""
    documents = located_prompts(run, "sample", count, pairs or run.recipe.locate.pairs)
    return encode(documents, run.tokenizer(), until_answer=True).to(run.accelerator.device)
