"""Generated answers: one pass decides what generation decides; ranks are those of the prompt; the rule about text."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from surgery.data.encoding import encode
from surgery.data.generation import (
    answer_batches,
    generate_answers,
    is_match,
)
from surgery.data.ranking import answer_choices
from surgery.lm_eval_tasks.data import said as said_in_lm_eval
from surgery.probes.documents import Document, Question
from tests.support.oracles import naive_generate_answers
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer
from tests.support.samples import TEXT_PROMPTS, document_of, sample

V = 1024


@cache
def model_of(name: str) -> PreTrainedModel:
    return pico_base(vocab_size=V, layers=2) if name == "base" else pico_hybrid([pico_site(1)], vocab_size=V, layers=2)


@cache
@torch.no_grad()
def goes_on(name: str, prompt: str, count: int) -> list[int]:
    """The model's own greedy tokens, from whole passes."""
    row = pico_tokenizer()(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    for _ in range(count):
        row = torch.cat([row, model_of(name)(row, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return row[0, -count:].tolist()


def own_answer(name: str, prompt: str, count: int, bounded: bool) -> Document:
    """Its answer is what the model says, with choices beside it."""
    answer = pico_tokenizer().decode(goes_on(name, prompt, count))
    text, span = prompt + answer, (len(prompt), len(prompt) + len(answer))
    place = None if bounded else (0, len(prompt))
    return Document("own", text, (Question(span, (answer, "!", "?"), 0, segment=place, value=place),))


def mixed(name: str) -> list[Document]:
    """What it says, in one token or several, and what it does not say."""
    own = [own_answer(name, p, n, b) for p in TEXT_PROMPTS for n in (1, 2) for b in (True, False)]
    return [*own, *(d for task in ("kv_retrieval", "letter_choice", "closed_book") for d in sample(task, 2))]


@pytest.mark.parametrize("name", ["base", "hybrid"])
def test_one_pass_decides_what_generation_decides(name: str) -> None:
    documents, tokenizer = mixed(name), pico_tokenizer()
    fast = generate_answers(model_of(name), tokenizer, documents, answer_batches(documents, tokenizer, 16))
    slow = naive_generate_answers(model_of(name), tokenizer, documents)
    assert torch.equal(fast.correct, slow.correct) and torch.equal(fast.begun, slow.begun)
    assert fast.ranked is not None and slow.ranked is not None
    assert torch.equal(fast.ranked.correct, slow.ranked.correct)
    assert fast.begun[: 4 * len(TEXT_PROMPTS)].all() and not fast.begun.all()
    assert not (fast.correct & ~fast.begun).any()
    alone = generate_answers(model_of(name), tokenizer, documents, answer_batches(documents, tokenizer, 1))
    assert torch.equal(alone.correct, fast.correct)


def test_ranks_are_those_of_the_prompt_alone() -> None:
    tokenizer, model = pico_tokenizer(), model_of("hybrid")
    for documents in ([*sample("kv_retrieval", 4), *sample("letter_choice", 2)],
                      [document_of("json_kv", i, pairs=12, groups=(4,)) for i in range(3)]):  # fmt: skip
        expected = answer_choices(model, tokenizer, documents, 8)
        found = generate_answers(model, tokenizer, documents, answer_batches(documents, tokenizer, 8)).ranked
        assert found is not None and torch.equal(found.correct, expected.correct)
        torch.testing.assert_close(found.margin, expected.margin, rtol=1e-3, atol=1e-4)


def test_tokens_are_counted_behind_the_right_ones() -> None:
    tokenizer, model = pico_tokenizer(), model_of("base")
    documents = [document_of("copying", i, pairs=3 + i) for i in range(4)]
    found = generate_answers(model, tokenizer, documents, answer_batches(documents, tokenizer, 4))
    assert found.ranked is None
    for share, document in zip(found.token_accuracy.tolist(), documents, strict=True):
        batch = encode([document], tokenizer)
        with torch.no_grad():
            likeliest = model(batch.input_ids, use_cache=False).logits[0].argmax(-1)
        places = batch.answers[0].nonzero()[:, 0]
        right = (likeliest[places - 1] == batch.input_ids[0, places]).double().mean()
        assert share == pytest.approx(float(right), abs=1e-6)


def test_what_counts_as_said_here_and_in_lm_eval() -> None:
    for text, answers, bounded, said in (
        (" 42\nThe", ["42"], True, True),
        ("42and", ["42"], True, True),
        ("421", ["42"], True, False),
        ("421", ["42"], False, True),
        ("4", ["42"], True, False),
        ("", ["42"], True, False),
        ("so 42", ["42"], True, False),
        ("foxes", ["fox"], True, False),
        ("fox.", ["fox"], True, True),
        ("17, then 42", ["42", "17"], True, True),
        ("17 and 4", ["42", "17"], True, False),
    ):
        assert is_match(text, answers, bounded) == said, text
        row = {"answers": answers, "bounded": bounded}
        begun = float(is_match(text, answers, bounded=False))
        assert said_in_lm_eval(row, [text]) == {"exact_match": float(said), "begun": begun}, text
