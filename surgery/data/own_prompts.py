"""Prompts for locating from the user's own data: questions whose answers stand in the prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.offsets import tokenized
from surgery.data.user import read_documents
from surgery.errors import DataError
from surgery.probes.documents import Document
from surgery.recipe import Data

_LOG = logging.getLogger(__name__)


def own_prompts(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    context: int | None = None,
    vocab_size: int | None = None,
) -> list[Document]:
    """Read rows whose answer has a place in the prompt. Rows that `data.holdout` holds out are not read.

    Args:
        count: maximum number of rows. If there are more, they are taken evenly from all; from streamed data, the first.
        context, vocab_size: as of `read_documents`.

    Raises:
        DataError: as `read_documents`, or no row has a place.
    """
    limit = count if data.streaming else None
    documents, skipped = read_documents(data, tokenizer, None, limit, context, vocab_size)
    if skipped:
        _LOG.warning("locate.data: %d rows cannot be used and are skipped", skipped)
    asked = ((document, document.questions[-1]) for document in documents)
    placed = [document for document, q in asked if q.value and q.value[1] < q.answer[0]]  # the prompt goes on behind it
    if not placed:
        hint = "Mark the place of each answer (`answer_span`), or use answers that occur once in their prompts."
        raise DataError(f"locate.data {data.path}", "no row has the place of its answer", hint)
    if len(placed) < len(documents):
        text = "locate.data: %d of %d rows have no place of the answer and are not used"
        _LOG.warning(text, len(documents) - len(placed), len(documents))
    taken = min(count, len(placed))
    return [placed[i * len(placed) // taken] for i in range(taken)]


def own_batches(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, size: int
) -> list[tuple[list[Document], EncodedBatch]]:
    """Encode prompts up to the query. The choices of each are tokens.

    The first token of the answer competes with all other tokens of its prompt, and with the first tokens of the other
    answers. So an answer of several tokens is scored by its first one. Spaces before it that are tokens of their own
    belong to the prompt.

    Returns:
        The documents of each batch, at most `size`, and the batch: left-padded, on the CPU, choices of shape (B,1,K,1).
    """
    documents = [_from_first_word(document, tokenizer) for document in documents]
    chunks = [documents[i : i + size] for i in range(0, len(documents), size)]
    batches = [encode(chunk, tokenizer, padding_side="left", until_answer=True) for chunk in chunks]
    answers = torch.cat([batch.target[:, 0] for batch in batches])
    return [(chunk, _with_choices(batch, answers)) for chunk, batch in zip(chunks, batches, strict=True)]


def _from_first_word(document: Document, tokenizer: PreTrainedTokenizerBase) -> Document:
    """Move the start of the answer behind its first spaces, if a token starts there."""
    *before, question = document.questions
    start, end = question.answer
    answer = document.text[start:end]
    word = start + len(answer) - len(answer.lstrip())
    if word == start or word not in tokenized(tokenizer, [document.text])[0].starts:
        return document
    return replace(document, questions=(*before, replace(question, answer=(word, end))))


def _with_choices(batch: EncodedBatch, answers: torch.Tensor) -> EncodedBatch:
    """Set the choices of each row: its answer's first token, then the tokens that it competes with."""
    rows = []
    for ids, mask, target in zip(batch.input_ids, batch.attention_mask.bool(), batch.target[:, 0], strict=True):
        others = torch.cat([ids[mask], answers]).unique()
        rows.append(torch.cat([target[None], others[others != target]]))
    choices = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)[:, None]
    no_more = choices[..., None][..., :0]
    return replace(batch, choice_ids=choices, choice_rest=no_more, gold=torch.zeros_like(batch.gold))
