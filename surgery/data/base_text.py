"""Text that the base writes itself, for the objective `base_kl`.

A model that trains on one kind of document loses others. Texts sampled from the base are of the kinds that it was
trained on, in the same shares, whatever they were: the KL divergence on them is that from the base as a distribution
over texts (sequence-level distillation, arXiv 1606.07947; LLM-QAT, arXiv 2305.17888, trains quantized models so).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.generation import generate_with
from surgery.data.offsets import tokenized
from surgery.files.atomic import write_text
from surgery.probes.documents import Document

_TOGETHER = 8  # texts that are sampled at once. The texts depend on it


def write_texts(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    tokens: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Sample texts at temperature 1, each after the token that begins a text, or after any token if there is none.

    An end of text does not end a text: another one follows, as in pretraining.

    Args:
        path: JSONL file to write, with the column `text`.
        count: number of texts.
        tokens: number of tokens of each.
        progress: called with the number of finished texts, and `count`.
    """
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    length: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
    settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **length)
    texts: list[str] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        while len(texts) < count:
            shape = (min(_TOGETHER, count - len(texts)), 1)
            first = torch.randint(len(tokenizer), shape) if begin is None else torch.full(shape, begin)
            first = first.to(model.device)
            texts += tokenizer.batch_decode(generate_with(model, settings, first, torch.ones_like(first)))
            if progress is not None:
                progress(len(texts), count)
    save_texts(path, texts)


def save_texts(path: Path, texts: Sequence[str]) -> None:
    """Write texts as the JSONL file that sources with `base_text` read."""
    write_text(path, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))


def stand_in(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Document:
    """Text of as many tokens, for estimates before the base has written one."""
    text = " 7" * tokens
    starts = [*tokenized(tokenizer, [text])[0].starts, len(text)]
    return Document("base_text", text[: starts[tokens]])
