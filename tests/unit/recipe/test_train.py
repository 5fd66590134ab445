"""The schema of training: what the documentation shows is valid, and what a section comes to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from surgery.recipe import Recipe, Source, Train, TrainStage, Weights
from surgery.recipe.optimizer import RATES, rates
from tests.support.cases import each

DOCS = Path(__file__).parents[3] / "docs" / "TRAINING.md"
KV: dict[str, Any] = {"task": "kv_retrieval", "rows": 2, "weights": {"answer": 1.0}}
OWN: dict[str, Any] = {"data": {"path": "x.jsonl"}, "tokens": 1000, "weights": {"answer": 1.0}}


def test_weights_between_first_and_last() -> None:
    weights = Weights(answer=2.0, attention=(1.0, 0.0), lm=(0.0, 3.0))
    assert weights.at(0.0) == {"answer": 2.0, "attention": 1.0, "lm": 0.0}
    assert weights.at(0.5) == {"answer": 2.0, "attention": 0.5, "lm": 1.5}
    assert weights.uses("lm") and weights.uses("base_kl", "attention") and not weights.uses("base_kl")


@each(("tokens", "steps"), [(1, 1), (1500, 1), (1501, 2), (15_000, 10)])
def test_tokens_in_all_make_steps(tokens: int, steps: int) -> None:
    stage = TrainStage.model_validate({"tokens": tokens, "sources": [OWN, {**OWN, "tokens": 500}]})
    assert stage.num_steps == steps


@each(("trainable", "control"), [(["new_heads"], False), (["new_heads", "lora"], True), (["all"], True)])
def test_a_control_is_trained_where_more_than_new_heads_trains(trainable: list[str], control: bool) -> None:
    stages = [{"name": f"s{i}", "sources": [KV], "trainable": what} for i, what in enumerate(trainable)]
    assert Train.model_validate({"stages": stages}).has_control == control
    assert not Train.model_validate({"stages": stages, "control": False}).has_control


def test_read_steps_are_a_stage_before() -> None:
    """It trains the attention of the sources that supervise it, at the full rate, with as many questions as fit."""
    own = {
        "data": {"path": "a.jsonl", "columns": {"answer_span": "auto"}},
        "rows": 2,
        "weights": {"answer": 1, "attention": 1},
    }
    sources = [
        KV | {"pairs": [8, 32], "questions": 4, "weights": {"attention": 1}},
        own,
        {"task": "sentence", "weights": {"base_kl": 1}},
    ]
    section = Train.model_validate(
        {
            "sources": sources,
            "steps": 20,
            "read_steps": 5,
            "optimizer": {"new_heads_lr_factor": 0.5, "weight_decay": 0.1},
        }
    )
    read, rest = section.at_size(10**6).sequence
    assert (read.name, read.num_steps, read.trainable, rest.num_steps) == ("read", 5, "reads", 20)
    assert [(source.name, source.questions) for source in read.sources] == [("kv_retrieval", 8), ("a.jsonl", 1)]
    assert read.objectives == ("attention",) and rest.sources == section.sources
    assert (read.optimizer.weight_decay, rest.optimizer.weight_decay) == (0, 0.1)
    assert read.optimizer.new_heads_lr == 2 * (rest.optimizer.new_heads_lr or 0)
    assert [stage.num_steps for stage in section.with_steps([2, 3]).sequence] == [2, 3]
    with pytest.raises(ValidationError, match=r"needs a source with `weights\.attention`"):
        Train.model_validate({"sources": sources[2:], "read_steps": 5})
    with pytest.raises(ValidationError, match="in place of `read_steps`"):
        Train.model_validate({"stages": [{"name": "a", "sources": sources}], "read_steps": 5})


def test_reads_train_on_attention_alone() -> None:
    reads: dict[str, Any] = {"trainable": "reads", "sources": [{**KV, "weights": {"attention": 1.0}}]}
    assert not Train.model_validate(reads).has_control
    for change, says in (
        ({"sources": [KV]}, "does not support the objective answer"),
        ({"compile": True}, "`compile` does not support `trainable: reads`"),
        ({"optimizer": {"weight_decay": 0.1}}, "would change the values"),
    ):
        with pytest.raises(ValueError, match=says):
            Train.model_validate({**reads, **change})


# Keys that change OWN, and what the error says.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": {"path": "x", "columns": {"text": "t"}}}, "plain text has no answers"),
    ({"data": {"path": "x", "columns": {"answer_span": "auto", "text": "t"}}}, "plain text has no answers"),
    ({"weights": {"attention": 1.0}}, "answer_span` to a column or to `auto`, or `weights.attention` to 0"),
    ({"task": "sentence", "data": None}, "no answers"),
    ({"task": "sentence", "data": None, "weights": {"attention_kl": 1.0}}, "`weights.attention_kl` to 0"),
    ({"data": {"path": "x", "columns": {"text": "a", "messages": "b"}}}, "not both"),
    ({"weights": {"answer": 0.0}}, "every weight is 0"),
    ({"rows": 3}, "either `rows` or `tokens`"),
    ({"data": None, "task": "kv_retrieval", "max_tokens": 5}, "kv_retrieval does not use `max_tokens`"),
    ({"data": None, "task": "needle_single"}, "needle_single needs `max_tokens`"),
    ({"data": None, "task": "needle_single", "max_tokens": 200, "pairs": [2, 2]}, "does not use `pairs`"),
    ({"data": None, "task": "needle_multi_key", "max_tokens": 300, "pairs": [2, 17]}, "takes 2 to 16 `pairs`"),
    ({"questions": 2}, "x.jsonl does not use `questions`"),
    ({"train_eos": True}, "x.jsonl does not use `train_eos`: remove it, or set `data.end`"),
    ({"data": None, "task": "json_kv", "groups": [2, 2]}, "at least 3 in the first"),
    ({"data": None, "task": "copying", "weights": {"attention": 1.0}}, "no gold position"),
]


@each(("change", "says"), REFUSED)
def test_sources_that_mean_nothing_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Source.model_validate({**OWN, **change})


@each("given", [{"sources": []}, {"stages": [{"name": "a"}]}, {"stages": []}])
def test_sources_that_are_set_but_empty_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="no `sources`"):
        Train.model_validate(given)


def test_the_documented_default_is_the_default() -> None:
    block = re.search(r"## Defaults\n.*?```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None and Train.model_validate(yaml.safe_load(block[1])) == Train()
    assert Recipe.model_validate({"name": "a", "base": {"model": "b"}}).train == Train()


def test_a_task_whose_answers_stand_in_the_prompt_needs_no_more() -> None:
    (source,) = Train.model_validate({"sources": [{"task": "records"}]}).sources
    assert (source.rows, source.weights.at(0.5)) == (8, {"answer": 2.0, "attention": 1.0})
    assert Source.model_validate(source.model_dump(mode="json")) == source
    by_tokens = Source.model_validate({"task": "records", "tokens": 500, "weights": {"answer": 1.0}})
    assert (by_tokens.rows, by_tokens.weights.at(0.5)) == (None, {"answer": 1.0})


@each(
    ("source", "weight"),
    [({"task": "sentence"}, "base_kl"), ({"task": "closed_book"}, "base_kl"), ({"task": "copying"}, "answer"),
     ({"data": {"path": "x.jsonl"}}, "answer"), ({"data": {"path": "x", "columns": {"text": "t"}}}, "base_kl")],
)  # fmt: skip
def test_other_sources_need_weights_and_the_error_has_an_example(source: dict[str, Any], weight: str) -> None:
    with pytest.raises(ValidationError, match=rf"needs `weights`, such as `weights: {{{weight}: 1.0}}`"):
        Source.model_validate(source)
    Source.model_validate({**source, "weights": {weight: 1.0}})


def test_rates_are_those_of_the_recipes_at_their_sizes_and_fall_between() -> None:
    assert [rates(size) for size, _, _ in RATES] == [(base, heads) for _, base, heads in RATES]
    values = [rates(10**n) for n in range(1, 13)]
    assert values[0] == RATES[0][1:] and values[-1] == RATES[-1][1:]
    assert values == sorted(values, reverse=True) and values[6] not in (values[5], values[9])


def test_every_stage_without_rates_gets_those_of_its_base() -> None:
    stages = [{"name": name, "sources": [KV], "optimizer": {"lr": lr}} for name, lr in (("a", None), ("b", 0.5))]
    sized = [train.at_size(130_000_000) for train in (Train.model_validate({"stages": stages}), Train())]
    found = [(stage.optimizer.lr, stage.optimizer.new_heads_lr) for train in sized for stage in train.sequence]
    assert found == [(2e-4, 2e-3), (0.5, 2e-3), (2e-4, 2e-3)]
    assert [train.at_size(100) for train in sized] == sized
