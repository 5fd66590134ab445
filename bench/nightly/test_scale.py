"""bench/studies/scale: the shared contexts and the arms."""

from __future__ import annotations

import pytest

from bench.common import CHECKPOINTS, FAR, load
from bench.studies.scale.arms import first_round, reading_head
from bench.studies.scale.prompts import Context, Kind, answers
from bench.studies.scale.study import built
from surgery.data.generation import answer_batches, generate_answers
from surgery.files.atomic import read_json
from surgery.probes.documents import Document, Question
from surgery.types import head_set_from_json

HEADS = head_set_from_json(read_json(CHECKPOINTS / "quickstart" / "heads.json"))


@pytest.mark.parametrize("kind", [Kind("a", "kv_retrieval", 12, (0, 5)), Kind("b", "records", 4, None, (3, 3))])
def test_questions_of_a_shared_context_are_answered_as_if_each_were_alone(kind: Kind) -> None:
    model, tokenizer = load(FAR)
    context = Context(kind.documents(1, 4, tokenizer)[0], tokenizer)
    alone = []
    for asked in context.asked:
        text = context.text + str(tokenizer.decode(asked.tokens))
        question = Question((len(text) - len(asked.text), len(text)), asked.question.choices, asked.question.gold)
        alone.append(Document(kind.probe, text + "\n", (question,)))
    given = generate_answers(model, tokenizer, alone, answer_batches(alone, tokenizer, 4))
    assert [answer.exact for answer in answers(model, context)] == given.correct.tolist()
    assert any(answer.first for answer in answers(model, context))


def test_every_arm_has_a_name_of_its_own_and_can_be_built() -> None:
    arms = list(first_round(HEADS, 2))
    assert len({arm.file for arm in arms}) == len({arm.identity() for arm in arms}) == len(arms)
    model, _ = load(FAR)
    for arm in arms:
        hybrid, plan = built(arm, model, HEADS)
        assert (plan is None) == (arm.form == "none")
        assert arm.train(None).sequence[-1].steps == 2
        assert hybrid is not model
    assert reading_head(HEADS) == "L3H2"
