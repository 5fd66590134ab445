"""Generate answers greedily, and compare them with the expected ones.

A generated text matches an answer if it begins with it and does not continue within the same number or word. Several
answers in one list match if each occurs in the text (RULER's rule). The rule is about text, so it is the same for every
tokenizer; `lm_eval_tasks/data.py` has it too.

Greedy text begins with the answer if and only if each token of the answer is the most likely one after the tokens
before it. So one pass over prompt and answer decides nearly every prompt, and ranks the choices as well. Text is
generated only for the other prompts: the same text in other tokens, or a list.

Ranking alone can mislead: students within 0.2 points of a teacher by likelihood were 21 points behind in generation
(arXiv 2603.26556).

Shape legend: B prompts, T tokens, N positions from the first query on, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.positions import encode_each
from surgery.data.ranking import ChoiceScores, check_logits, choice_scores, query_batches, ranked
from surgery.probes.documents import Document, answer_list, expected_answers, max_answer_tokens


@dataclass(frozen=True)
class GeneratedAnswers:
    """Generated answers of B prompts.

    Attributes:
        correct: (B,) bool: the text matches the answer.
        begun: (B,) bool: the text begins with the answer, whatever follows.
        token_accuracy: (B,) fraction of the answer's tokens that are the most likely ones after the correct prefix.
        ranked: scores of the last question's choices; None if it has none.
    """

    correct: Tensor
    begun: Tensor
    token_accuracy: Tensor
    ranked: ChoiceScores | None


@dataclass(frozen=True)
class ExactAnswers:
    """Generated answers of N prompts, compared as whole texts.

    Attributes:
        correct: (N,) bool: the text equals the answer, without spaces at the ends.
        first_token: (N,) bool: the first generated token is the answer's first token.
        wanted: the N answers, without the end token.
        generated: the N texts, up to the end token.
    """

    correct: Tensor
    first_token: Tensor
    wanted: Sequence[str]
    generated: Sequence[str]


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    batches: Sequence[EncodedBatch],
) -> GeneratedAnswers:
    """Generate the last answer of each document, or the list that its last answers form, and rank its choices.

    Args:
        documents: all with choices, or all without.
        batches: the same documents, from `answer_batches`.

    Raises:
        ProbeError: as in `encode`.
        ModelError: a logit is NaN or infinite.
    """
    matches: list[tuple[bool, bool]] = []
    accuracies, scores = [], []
    for cpu_batch in batches:
        batch, chunk = cpu_batch.to(model.device), documents[len(matches) : len(matches) + len(cpu_batch)]
        first_B = torch.tensor([len(d.questions) - len(answer_list(d)) for d in chunk], device=batch.query.device)
        query_B = batch.query.gather(1, first_B[:, None])[:, 0]
        start_B, N = query_B - query_B.min(), batch.input_ids.shape[1] - int(query_B.min())
        arguments = {"attention_mask": batch.attention_mask, "use_cache": False, "logits_to_keep": N}
        logits_BNV = model(batch.input_ids, **arguments).logits
        check_logits(model, logits_BNV[:, -1])
        likeliest_BN = logits_BNV.argmax(-1)
        right_BN = likeliest_BN[:, :-1] == batch.input_ids[:, 1 - N :]
        answer_BN = torch.arange(N - 1, device=start_B.device) >= start_B[:, None]
        accuracies.append(((right_BN & answer_BN).sum(1) / answer_BN.sum(1)).cpu())
        followed_B = (right_BN | ~answer_BN).long().cumprod(1).sum(1)  # columns before the first wrong one
        texts = _greedy_beginnings(batch.input_ids[:, -N:], likeliest_BN, start_B, followed_B, tokenizer)
        undecided = [b for b, (d, text) in enumerate(zip(chunk, texts, strict=True)) if _is_undecided(d, text)]
        for b, text in zip(undecided, _generated(model, tokenizer, [chunk[b] for b in undecided]), strict=True):
            texts[b] = text
        for document, text in zip(chunk, texts, strict=True):
            answers, bounded = expected_answers(document)
            matches.append((is_match(text, answers, bounded), is_match(text, answers, bounded=False)))
        if chunk[0].questions[-1].choices:
            scores.append(_choice_scores(model, tokenizer, chunk, batch, logits_BNV))
    correct, begun = torch.tensor(matches).unbind(1)
    joined = ChoiceScores(*(torch.cat(parts) for parts in zip(*scores, strict=True))) if scores else None
    return GeneratedAnswers(correct, begun, torch.cat(accuracies), joined)


def answer_batches(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> list[EncodedBatch]:
    """Left-padded batches of the documents, up to the end of their last answers."""
    cut = [Document(d.task, d.text[: d.questions[-1].answer[1]], d.questions) for d in documents]
    chunks = [cut[start : start + batch_size] for start in range(0, len(cut), batch_size)]
    return [encode(chunk, tokenizer, padding_side="left") for chunk in chunks]


def is_match(text: str, answers: Sequence[str], bounded: bool) -> bool:
    """True if a generated text begins with the answer, or holds all of several answers.

    Args:
        bounded: a digit after a digit, or a letter after a letter, continues the answer, and does not match.
    """
    if len(answers) > 1:
        return all(answer in text for answer in answers)
    text, answer = text.lstrip(), answers[0]
    if not text.startswith(answer):
        return False
    last, after = answer[-1], text[len(answer) : len(answer) + 1]
    continues = (last.isdigit() and after.isdigit()) or (last.isalpha() and after.isalpha())
    return not (bounded and continues)


def exact_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], batch_size: int
) -> ExactAnswers:
    """Generate the last answer of each document and compare it exactly, without spaces at the ends.

    A text ends at the end token, or one token after the number of tokens that the answer has. For documents without an
    end token, it ends after that number. A tokenizer may normalise characters, so the decoded tokens of the answer are
    correct too.

    Raises:
        ProbeError: a document has no question.
    """
    correct, first_token, wanted, generated = [], [], [], []
    end, decode = tokenizer.eos_token_id, tokenizer.decode
    for start in range(0, len(documents), batch_size):
        chunk = documents[start : start + batch_size]
        prompts = encode(chunk, tokenizer, padding_side="left", until_answer=True).to(model.device)
        answers = []
        for row in encode_each(chunk, tokenizer, choices=False):
            first, last = row.questions[-1].answer
            answers.append(list(row.ids[first : last + (row.ids[last] != end)]))
        new_BN = generate_greedy(model, prompts, max(map(len, answers)) + 1, end)
        for document, ids, answer in zip(chunk, new_BN.tolist(), answers, strict=True):
            first_token.append(ids[:1] == answer[:1])
            text = document.text[slice(*document.questions[-1].answer)]
            if end in ids:
                ids = ids[: ids.index(end)]
            if end is not None and text.endswith(str(tokenizer.eos_token)):
                text = text.removesuffix(str(tokenizer.eos_token))
            else:
                ids = ids[: len(answer)]
            wanted.append(text)
            generated.append(str(decode(ids)))
            compared = str(decode(ids[: len(answer) + 1])).strip()  # not what only a longer answer asked for
            correct.append(compared in (text.strip(), str(decode(answer)).strip()))
    return ExactAnswers(torch.tensor(correct), torch.tensor(first_token), wanted, generated)


def generate_greedy(model: PreTrainedModel, prompts: EncodedBatch, max_tokens: int, end: int | None = None) -> Tensor:
    """Decode greedily: (B,`max_tokens`) token ids, filled up with `end` after the first `end`.

    Args:
        prompts: left-padded.
        end: id of the end token; generation never stops if None.
    """
    fill = end if end is not None else 0
    length: dict[str, Any] = {"max_new_tokens": max_tokens, "eos_token_id": end, "pad_token_id": fill}
    settings = GenerationConfig(do_sample=False, num_beams=1, repetition_penalty=1.0, **length)
    new_BN = generate_with(model, settings, prompts.input_ids, prompts.attention_mask)
    return torch.nn.functional.pad(new_BN, (0, max_tokens - new_BN.shape[1]), value=fill)


@torch.no_grad()
def generate_with(model: PreTrainedModel, settings: GenerationConfig, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Generate with these settings and none of the model's own: (B,N) token ids after the prompt."""
    own = getattr(model, "generation_config", None)
    model.generation_config = settings  # `generate` would take what `settings` leaves open from the model's own
    try:
        ids = model.generate(ids_BT, attention_mask=mask_BT, generation_config=settings)
    finally:
        model.generation_config = own
    return ids[:, ids_BT.shape[1] :]


def _greedy_beginnings(
    ids_BN: Tensor, likeliest_BN: Tensor, start_B: Tensor, followed_B: Tensor, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Beginning of each greedy text: the answer's tokens while they are the most likely, then the most likely one."""
    rows = zip(*(column.tolist() for column in (ids_BN, likeliest_BN, start_B, followed_B)), strict=True)
    return list(tokenizer.batch_decode([[*ids[start + 1 : end + 1], top[end]] for ids, top, start, end in rows]))


def _is_undecided(document: Document, beginning: str) -> bool:
    """True if a text that starts with `beginning` may or may not match, depending on the rest."""
    answers, bounded = expected_answers(document)
    if len(answers) > 1:
        return not is_match(beginning, answers, bounded)
    text, (answer,) = beginning.lstrip(), answers
    return "\ufffd" in text or (answer.startswith(text) and (bounded or text != answer))


def _generated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[str]:
    """Greedy texts after the prompts."""
    if not documents:
        return []
    firsts = [len(d.questions) - len(answer_list(d)) for d in documents]
    cut = [Document(d.task, d.text, d.questions[: first + 1]) for d, first in zip(documents, firsts, strict=True)]
    prompts = encode(cut, tokenizer, padding_side="left", until_answer=True).to(model.device)
    new_BN = generate_greedy(model, prompts, max(map(max_answer_tokens, documents)), tokenizer.eos_token_id)
    ids = [row[: max_answer_tokens(d)] for row, d in zip(new_BN.tolist(), documents, strict=True)]
    return list(tokenizer.batch_decode(ids, skip_special_tokens=True))


def _choice_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chunk: Sequence[Document],
    batch: EncodedBatch,
    logits_BNV: Tensor,
) -> ChoiceScores:
    """Rank the choices from the logits of the same pass. Choices of several tokens need a separate pass."""
    if bool((batch.choice_rest >= 0).any()):
        return ranked(model, query_batches(chunk, tokenizer, len(chunk)))
    column_B = batch.of_last_question(batch.query) - (batch.input_ids.shape[1] - logits_BNV.shape[1])
    scores = choice_scores(logits_BNV[torch.arange(len(chunk), device=column_B.device), column_B], batch)
    return ChoiceScores(*(values.cpu() for values in scores))
