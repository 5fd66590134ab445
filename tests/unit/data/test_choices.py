"""Choices of several tokens: what is decoded, and that it scores them as one whole pass for each does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from surgery.data.choice_scores import Paths, paths_of, scored_choices
from surgery.data.encoding import encode
from surgery.data.ranking import answer_choices, choice_scores
from surgery.errors import ProbeError
from surgery.probes.documents import Document, rng_of
from surgery.probes.kv_retrieval import kv_document
from tests.support.long_choices import digit_tokenizer, long_prompts, margins, whole_passes
from tests.support.pico import FAMILY_NAMES, pico_base, pico_family, pico_hybrid, pico_site

MODELS = {name: partial(pico_family, name) for name in FAMILY_NAMES}
MODELS["hybrid"] = lambda: pico_hybrid([pico_site(0, [1, 3])])


def dictionaries(count: int = 6) -> list[Document]:
    """Of different lengths; the last ones ask three questions each."""
    return [kv_document(rng_of("long", i), 6 + 5 * i, questions=1 + 2 * (i > 3)) for i in range(count)]


def paths(most: int) -> Paths:
    found = paths_of(long_prompts(most))
    assert found is not None
    return found


def test_every_choice_has_a_path_and_nothing_is_decoded_twice() -> None:
    """No path of a prompt begins another, and each is the beginning of some choice."""
    for most in (2, 3, 4):
        found = paths(most)
        for b, choices in enumerate(found.choices):
            for k, choice in enumerate(choices):
                begun = choice[choice >= 0][:-1]
                if len(begun):
                    path = int(found.of_choice[b, k])
                    assert found.owner[path] == b and found.real[path, : len(begun)].all()
                    assert torch.equal(found.ids[path, : len(begun)], begun)
        rows = [(int(o), *row[real].tolist()) for o, row, real in zip(found.owner, found.ids, found.real, strict=True)]
        assert all(a[: len(b)] != b for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j)
        for b, *path in rows:
            assert any(choice[: len(path)].tolist() == path for choice in found.choices[b])
        assert set(found.owner.tolist()) == {0, 2, 3}, "one prompt's choices are single tokens"


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_one_whole_pass_for_each_choice(name: str) -> None:
    """Left-padded, all paths together or one at a time."""
    model, batch = MODELS[name](), long_prompts(3)
    expected = whole_passes(model, batch)
    for memory in (2**29, 1):
        torch.testing.assert_close(scored_choices(model, batch, paths(3), memory), expected, atol=1e-4, rtol=0)
    assert expected[expected > -torch.inf].std() > 0.1


def test_answers_are_those_of_the_whole_text() -> None:
    """Whatever the batch size."""
    model, documents = pico_base(vocab_size=1024, layers=2), dictionaries()
    found, alone = (answer_choices(model, digit_tokenizer(), documents, size) for size in (4, 1))
    assert torch.equal(alone.correct, found.correct)
    for row, document in enumerate(documents):
        batch = encode([document], digit_tokenizer(), "left", until_answer=True)
        expected = margins(whole_passes(model, batch), batch)
        for scores in (found, alone):
            torch.testing.assert_close(scores.margin[row : row + 1], expected, atol=1e-4, rtol=0)


def test_one_step_does_not_score_them() -> None:
    batch = long_prompts()
    with pytest.raises(ProbeError, match="several tokens"):
        choice_scores(torch.zeros(len(batch), 61), batch)
