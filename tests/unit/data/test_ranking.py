"""Choice accuracy and perplexity against naive loops; padding and batch size do not matter."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel

from surgery.data.encoding import encode
from surgery.data.generation import answer_batches, generate_answers
from surgery.data.ranking import LARGEST, answer_choices, choice_scores, perplexity
from surgery.errors import ModelError
from surgery.probes.documents import Document
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer
from tests.support.samples import ASKING, sample, several_questions

V = 1024
ASKED: list[Document] = [*several_questions(), *(d for task in ASKING for d in sample(task, 1))]
PLAIN: list[Document] = [*sample("sentence", 5), *sample("statement", 3)]


@pytest.fixture(scope="module", params=["base", "hybrid"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "base":
        return pico_base(vocab_size=V, layers=2)
    return pico_hybrid([pico_site(1)], vocab_size=V, layers=2)


def test_only_choices_compete_and_a_tie_is_not_correct() -> None:
    batch = encode(ASKED, pico_tokenizer(), "left", until_answer=True)
    logits = torch.full((len(ASKED), V), 100.0)
    for row, document in enumerate(ASKED):
        last = len(document.questions) - 1
        ids = batch.choice_ids[row, last, : len(document.questions[last].choices)]
        logits[row, ids] = 0.0
        logits[row, batch.target[row, last]] = 1.0
    scores = choice_scores(logits, batch)
    assert scores.correct.all()
    assert torch.allclose(scores.margin, torch.ones(len(ASKED)))
    assert not choice_scores(torch.zeros(len(ASKED), V), batch).correct.any()


def test_answers_are_those_of_the_whole_text_at_the_query(model: PreTrainedModel) -> None:
    found = answer_choices(model, pico_tokenizer(), ASKED, 8)
    for row, document in enumerate(ASKED):
        batch = encode([document], pico_tokenizer())
        with torch.no_grad():
            logits = model(batch.input_ids, use_cache=False).logits[0]
        last = len(document.questions) - 1
        ids = batch.choice_ids[0, last]
        values = logits[batch.query[0, last], ids]
        gold = int(batch.gold[0, last])
        others = torch.cat([values[:gold], values[gold + 1 :]])
        assert float(found.margin[row]) == pytest.approx(float(values[gold] - others.max()), abs=1e-4)


def naive_perplexity(model: PreTrainedModel, documents: list[Document]) -> float:
    found: list[float] = []
    for document in documents:
        ids = torch.tensor(pico_tokenizer()(document.text)["input_ids"])
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0].double()
        for t in range(1, len(ids)):
            found.append(float(torch.logsumexp(logits[t - 1], 0) - logits[t - 1, ids[t]]))
    return math.exp(sum(found) / len(found))


def test_perplexity_is_that_of_every_document_alone(model: PreTrainedModel) -> None:
    expected = naive_perplexity(model, PLAIN)
    for batch_size in (1, 3, 64):
        assert perplexity(model, pico_tokenizer(), PLAIN, batch_size) == pytest.approx(expected, rel=1e-4)


def test_a_diverged_model_has_the_largest_perplexity() -> None:
    """Losses of 709 and more have no perplexity that a number holds, infinite ones neither."""
    for factor in (1e3, 1e30):
        model = pico_base(vocab_size=V, layers=1)
        model.lm_head.weight.data.mul_(factor)
        assert perplexity(model, pico_tokenizer(), PLAIN, 4) == LARGEST


@pytest.mark.parametrize("broken", ["weight", "overflow"])
def test_logits_that_are_no_numbers_are_refused(broken: str) -> None:
    """Whether a weight is NaN, or finite ones overflow: no answer is called wrong, no loss a number."""
    model = pico_base(vocab_size=V, layers=2)
    if broken == "weight":
        model.backbone.layers[1].mixer.norm.weight.data[3] = math.nan
    else:
        model.backbone.norm_f.weight.data.mul_(1e20)
        model.lm_head.weight.data.mul_(1e30)
    batches = answer_batches(ASKED, pico_tokenizer(), 4)
    scores = [
        lambda: answer_choices(model, pico_tokenizer(), ASKED, 4),
        lambda: generate_answers(model, pico_tokenizer(), ASKED, batches),
    ]
    if broken == "weight":  # an infinite loss is the largest
        scores.append(lambda: perplexity(model, pico_tokenizer(), PLAIN, 4))
    for score in scores:
        with pytest.raises(ModelError, match=r"base\.model: the logits of .* are NaN or infinite"):
            score()
