"""Greedy answers: with a cache as without, padded as alone, decided in one pass as generated; what counts as right."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from surgery.data.encoding import encode
from surgery.data.generation import (
    ExactAnswers,
    answer_batches,
    exact_answers,
    generate_answers,
    generate_greedy,
    is_match,
)
from surgery.data.ranking import answer_nats, perplexity
from surgery.errors import ProbeError
from surgery.evaluate.evaluation import evaluate_model
from surgery.evaluate.prompts import PromptSet
from surgery.lm_eval_tasks.data import said as said_in_lm_eval
from surgery.probes.documents import Document, Question
from surgery.recipe import Evaluate
from surgery.stats import wilson
from tests.support.oracles import naive_generate_answers, naive_generate_greedy
from tests.support.pico import pico_base, pico_family, pico_hybrid, pico_site, pico_tokenizer, prompts, randomise
from tests.support.samples import TEXT_PROMPTS, document_of, sample

END = "<|endoftext|>"
FAMILIES = ("mamba2", "mamba", "falcon_mamba", "llamba", "zamba2", "bamba", "hybrid")


@cache
def model_of(name: str) -> PreTrainedModel:
    """Its next token depends on more than the last one."""
    model = pico_hybrid([pico_site(1, [1, 3])], layers=2) if name == "hybrid" else pico_family(name)
    with torch.no_grad():
        randomise(model, 5).get_input_embeddings().weight.mul_(0.1)
    return model.eval()


def document(prompt: str, answer: str, end: str = END) -> Document:
    text = prompt + answer + end
    return Document("own", text, (Question((len(prompt), len(text)), (), -1),))


@torch.no_grad()
def said(model: PreTrainedModel, prompt: str, count: int) -> str:
    """The model's own greedy text, from whole passes."""
    row = pico_tokenizer()(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    for _ in range(count):
        row = torch.cat([row, model(row, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return pico_tokenizer().decode(row[0, -count:])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_generates_what_whole_passes_generate(name: str) -> None:
    """Left-padded together, or each prompt alone; with a token that ends two of the rows, and without."""
    model, batch = model_of(name), prompts()
    free = naive_generate_greedy(model, batch, 4)
    assert torch.equal(generate_greedy(model, batch, 4), free) and len(free.unique()) > 2
    end = int(free[0, 1])
    ended = generate_greedy(model, batch, 4, end)
    assert torch.equal(ended, naive_generate_greedy(model, batch, 4, end))
    assert ended[0].tolist() == [int(free[0, 0]), end, end, end]


def test_settings_of_the_model_s_own_do_not_count() -> None:
    model, batch = pico_hybrid([pico_site(1, [1, 3])], layers=2), prompts()
    free = generate_greedy(model, batch, 4)
    own = model.generation_config = GenerationConfig(suppress_tokens=[int(free[0, 0])], no_repeat_ngram_size=1)
    assert torch.equal(generate_greedy(model, batch, 4), free)
    assert model.generation_config is own


class Parrot(torch.nn.Module):
    """Stands in for a model: goes on with these tokens, whatever it is asked."""

    device = torch.device("cpu")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids = pico_tokenizer()(text, add_special_tokens=False)["input_ids"]

    def generate(self, ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: object) -> torch.Tensor:
        most = generation_config.max_new_tokens  # type: ignore[attr-defined]
        new = torch.tensor([*self.ids, *[5] * most])[:most]
        return torch.cat([ids, new.expand(len(ids), -1)], 1)


def exact(text: str, documents: list[Document], size: int = 64, tokenizer: Any = None) -> ExactAnswers:
    """Of a model that says this text."""
    return exact_answers(Parrot(text), tokenizer or pico_tokenizer(), documents, size)  # type: ignore[arg-type]


def test_right_is_the_whole_answer_and_no_more() -> None:
    """A long answer beside it leaves room for more tokens than this one has."""
    documents = [document("Who?\n", "42"), document("Who?\n", "the old baker of the market")]
    for says, right in (
        (f"42{END}", True),
        (f" 42{END}", True),
        (f"4{END}", False),
        (f"42 and more{END}", False),
        (f"42{END} and more", True),
        (END, False),
    ):
        for size in (1, 2):
            assert exact(says, documents, size).correct.tolist() == [right, False], says


def test_texts_and_first_tokens_are_kept() -> None:
    tokenizer = pico_tokenizer()
    documents = [document("Who?\n", answer) for answer in ("42", "421", "the old baker")]
    first = [tokenizer(f"Who?\n{a}")["input_ids"][len(tokenizer("Who?\n")["input_ids"])] for a in ("42", "421", "the")]
    found = exact(f" 42\n{END} and", documents)
    assert found.wanted == ["42", "421", "the old baker"] and found.generated == [" 42\n"] * 3
    assert found.correct.tolist() == [True, False, False]
    assert found.first_token.tolist() == [False] * 3, "it begins with a space"
    assert exact(f"42{END}", documents).first_token.tolist() == [token == first[0] for token in first]


def test_the_loss_is_that_of_the_answers_tokens_alone() -> None:
    """From whole unpadded passes, over the answer with its end."""
    model, tokenizer = pico_hybrid([pico_site(1, [1, 3])], vocab_size=1024, layers=2).eval(), pico_tokenizer()
    documents = [document("Who?\n", "42"), document("the old baker went to the market\n", "the miller", end="")]
    losses = []
    for d in documents:
        ids = tokenizer(d.text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        begin = len(tokenizer(d.text[: d.questions[0].answer[0]], add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            log_p = model(ids, use_cache=False).logits[0].log_softmax(-1)
        losses += [-float(log_p[t - 1, ids[0, t]]) for t in range(begin, ids.shape[1])]
    for size in (1, 2):
        nats, tokens = answer_nats(model, tokenizer, documents, size)
        assert tokens == len(losses) and nats == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    with pytest.raises(ProbeError, match="no answers"):
        answer_nats(pico_base(vocab_size=1024, layers=1), pico_tokenizer(), [Document("texts", "one two")], 2)


def test_held_out_documents_stand_in_the_summary_beside_the_rest() -> None:
    model, tokenizer = pico_base(vocab_size=1024, layers=1), pico_tokenizer()
    asked = [document(p, said(model, p, 1), end="") for p in TEXT_PROMPTS]
    asked[0] = replace(document(TEXT_PROMPTS[0], " nothing of the kind", end=""))
    plain = [Document("texts", p) for p in TEXT_PROMPTS]
    held_out = {"rows.jsonl": asked, "texts.jsonl": plain}
    calls: list[tuple[int, int]] = []
    arm = evaluate_model(
        model,
        tokenizer,
        Evaluate(),
        prompts=PromptSet({}, {}, held_out),
        progress=lambda done, total: calls.append((done, total)),
    )
    correct = exact_answers(model, tokenizer, asked, 64).correct
    interval = wilson(int(correct.sum()), len(asked))
    entry = {"accuracy": interval.value, "low": interval.low, "high": interval.high, "n": len(asked)}
    found = arm.summary["held_out"]["rows.jsonl"]
    assert {key: found[key] for key in entry} == entry and found.keys() - entry.keys() == {"first_token", "loss"}
    assert not correct[0]
    nats, tokens = answer_nats(model, tokenizer, asked, 64)
    assert found["loss"] == {"nats": nats, "tokens": tokens} and found["first_token"]["n"] == len(asked)
    (examples,) = arm.examples.values()
    assert [e["wanted"].strip() == e["generated"].strip() for e in examples] == correct.tolist()
    expected = {"perplexity": perplexity(model, tokenizer, plain, 64), "n": len(plain)}
    assert arm.summary["held_out"]["texts.jsonl"] == expected
    assert torch.equal(arm.correct["held_out/rows.jsonl"], correct) and len(arm.correct) == 1
    assert calls == [(1, 2), (2, 2)]


@cache
def small(name: str) -> PreTrainedModel:
    shape: dict[str, Any] = {"vocab_size": 1024, "layers": 2}
    return pico_base(**shape) if name == "base" else pico_hybrid([pico_site(1)], **shape)


def own_answer(name: str, prompt: str, count: int, bounded: bool) -> Document:
    """Its answer is what the model says, with choices beside it."""
    answer = said(small(name), prompt, count)
    text, span = prompt + answer, (len(prompt), len(prompt) + len(answer))
    place = None if bounded else (0, len(prompt))
    return Document("own", text, (Question(span, (answer, "!", "?"), 0, segment=place, value=place),))


def mixed(name: str) -> list[Document]:
    """What it says, in one token or several, and what it does not say."""
    own = [own_answer(name, p, n, b) for p in TEXT_PROMPTS for n in (1, 2) for b in (True, False)]
    tasks = ("kv_retrieval", "letter_choice", "closed_book")
    several_tokens = [document_of("json_kv", i, pairs=12, groups=(4,)) for i in range(2)]
    return [*own, *several_tokens, *(d for task in tasks for d in sample(task, 2))]


@pytest.mark.parametrize("name", ["base", "hybrid"])
def test_one_pass_decides_what_generation_decides(name: str) -> None:
    documents, tokenizer = mixed(name), pico_tokenizer()
    fast = generate_answers(small(name), tokenizer, documents, answer_batches(documents, tokenizer, 16))
    slow = naive_generate_answers(small(name), tokenizer, documents)
    assert torch.equal(fast.correct, slow.correct) and torch.equal(fast.begun, slow.begun)
    assert fast.ranked is not None and slow.ranked is not None
    assert torch.equal(fast.ranked.correct, slow.ranked.correct)
    torch.testing.assert_close(fast.ranked.margin, slow.ranked.margin, rtol=1e-3, atol=1e-4)
    assert fast.begun[: 4 * len(TEXT_PROMPTS)].all() and not fast.begun.all()
    assert not (fast.correct & ~fast.begun).any()
    alone = generate_answers(small(name), tokenizer, documents, answer_batches(documents, tokenizer, 1))
    assert torch.equal(alone.correct, fast.correct)


def test_tokens_are_counted_behind_the_right_ones() -> None:
    tokenizer, model = pico_tokenizer(), small("base")
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
    for text, answers, bounded, right in (
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
        assert is_match(text, answers, bounded) == right, text
        row = {"answers": answers, "bounded": bounded}
        begun = float(is_match(text, answers, bounded=False))
        assert said_in_lm_eval(row, [text]) == {"exact_match": float(right), "begun": begun}, text
