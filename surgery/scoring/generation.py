"""What a model says by itself: greedy answers to a user's own prompts. Owns: the answers, what counts as right.

A choice among candidates is not asked for: students within 0.2 points of a teacher by likelihood were 21 points behind
when generating (arXiv 2603.26556). Must never know: arms, files, which documents were held out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.probes.documents import Document


def exact_matches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], batch_size: int
) -> Tensor:
    """(N,) bool: whether the text that the model goes on with is the answer, spaces at its ends aside.

    It may use as many tokens as the batch's longest answer. What comes behind its end token does not count; where the
    documents themselves have none behind their answers, what comes behind as many tokens as the answer has.

    Args:
        documents: with an answer each; only that of the last question is asked for.

    Raises:
        ProbeError: a document has no question.
    """
    found = []
    for start in range(0, len(documents), batch_size):
        chunk = documents[start : start + batch_size]
        prompts = encode(chunk, tokenizer, padding_side="left", until_answer=True).to(model.device)
        lengths = _answer_lengths(chunk, tokenizer, prompts)
        new_BN = greedy(model, prompts, max(lengths), tokenizer.eos_token_id)
        for document, ids, length in zip(chunk, new_BN.tolist(), lengths, strict=True):
            found.append(_said(ids, tokenizer, document, length) == _answer(document, tokenizer))
    return torch.tensor(found)


def greedy(
    model: PreTrainedModel, prompts: EncodedBatch, most: int, end: int | None = None, naive: bool = False
) -> Tensor:
    """(B,`most`) the likeliest tokens, one after the other; behind the token `end` nothing but `end`.

    Args:
        prompts: left-padded.
        naive: every token from a whole pass over an unpadded row, without a cache.
    """
    if naive:
        return _naive(model, prompts, most, end)
    fill = end if end is not None else 0
    settings = GenerationConfig(
        max_new_tokens=most, do_sample=False, num_beams=1, repetition_penalty=1.0, eos_token_id=end, pad_token_id=fill
    )
    ids = model.generate(prompts.input_ids, attention_mask=prompts.attention_mask, generation_config=settings)
    new_BN = ids[:, prompts.input_ids.shape[1] :]
    return torch.nn.functional.pad(new_BN, (0, most - new_BN.shape[1]), value=fill)


@torch.no_grad()
def _naive(model: PreTrainedModel, prompts: EncodedBatch, most: int, end: int | None) -> Tensor:
    rows = []
    for ids_T, mask_T in zip(prompts.input_ids, prompts.attention_mask, strict=True):
        row, ended = ids_T[mask_T.bool()][None], False
        for _ in range(most):
            token = model(row, use_cache=False).logits[:, -1:].argmax(-1)
            token = torch.full_like(token, end) if ended and end is not None else token
            ended = ended or token.item() == end
            row = torch.cat([row, token], 1)
        rows.append(row[0, -most:])
    return torch.stack(rows)


def _ends(document: Document, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the end token follows its answer."""
    return tokenizer.eos_token is not None and document.text.endswith(str(tokenizer.eos_token))


def _answer(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    text = document.text[slice(*document.questions[-1].answer)]
    return (text.removesuffix(str(tokenizer.eos_token)) if _ends(document, tokenizer) else text).strip()


def _answer_lengths(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, prompts: EncodedBatch
) -> list[int]:
    """Tokens of each answer, the end token left out."""
    asked = [Document(d.task, d.text[: d.questions[-1].answer[1]]) for d in documents]
    whole = encode(asked, tokenizer).attention_mask.sum(1).tolist()
    before = prompts.attention_mask.sum(1).tolist()
    return [w - b - _ends(d, tokenizer) for w, b, d in zip(whole, before, documents, strict=True)]


def _said(ids: list[int], tokenizer: PreTrainedTokenizerBase, document: Document, length: int) -> str:
    if not _ends(document, tokenizer):
        ids = ids[:length]
    elif tokenizer.eos_token_id in ids:
        ids = ids[: ids.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(ids)).strip()
