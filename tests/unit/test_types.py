"""Values that travel between stages: names, invariants, JSON round trips."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from typing import Any

import pytest

from surgery.errors import PlanError
from surgery.types import (
    Graft,
    HeadId,
    HeadSet,
    Interval,
    MixerSpec,
    Plan,
    ScoredHead,
    geometry_hash,
    head_set_from_json,
    plan_from_json,
    to_json,
)
from tests.support.cases import each


def mixers(count: int = 2) -> tuple[MixerSpec, ...]:
    return tuple(MixerSpec(i, f"backbone.layers.{i}.mixer", "mamba2", 8, 4, 2, 16) for i in range(count))


def head_set() -> HeadSet:
    scores = {"ablation": Interval(0.25, 0.125, 0.5, 64), "segment_end": Interval(1 / 3, -0.1, 0.7, 64)}
    first = ScoredHead(HeadId(1, 2), "gather", "answer_token", scores)
    second = ScoredHead(HeadId(0, 7), "neither", "segment_end", {}, given=(HeadId(1, 2),))
    geometry = geometry_hash("mamba2", mixers(), 64, 1000)
    return HeadSet(
        "m", "main", geometry, (first, second), (first,), "sharpen", 3, {"accuracy": Interval(0.8, 0.7, 0.9, 64)}
    )


def plan() -> Plan:
    sites = mixers()
    first = Graft(sites[0], (7, 1), "add", "ssm", ("segment_end", "answer_token"))
    second = Graft(sites[1], (2,), "replace", "random", ("answer_token",))
    return Plan("m", geometry_hash("mamba2", sites, 64, 1000), (first, second), seed=5)


def test_str_and_parse_are_inverse() -> None:
    for head in product((0, 1, 9, 10, 123), (0, 7, 31, 1024), ("H", "A")):
        assert HeadId.parse(str(HeadId(*head))) == HeadId(*head), head


def test_heads_and_their_mixer_go_by_one_name() -> None:
    for letter in ("H", "A"):
        spec = dataclasses.replace(mixers()[1], letter=letter)
        assert {head.mixer for head in spec.heads} == {spec.name} == {f"L1{letter}"}
        assert [head.head for head in spec.heads] == list(range(8))


def test_attention_is_no_ssm() -> None:
    for kind in ("mamba2", "mamba1", "llamba", "attention", "neox_attention", "mamba_ssm_attention"):
        assert dataclasses.replace(mixers()[0], kind=kind).is_ssm == ("attention" not in kind), kind


def test_bad_name_is_refused_with_what_would_do() -> None:
    for name in ("", "L1", "H2", "l1h2", "L1H", "LH2", "L-1H2", " L1H2", "L1H2\n", "L1H2x", "L1B2", "L1AH2", "1.2"):
        with pytest.raises(PlanError) as caught:
            HeadId.parse(name)
        assert repr(name) in str(caught.value) and "L1H2" in caught.value.hint


def test_round_trip_through_json() -> None:
    for read, value in ((head_set_from_json, head_set()), (plan_from_json, plan())):
        assert read(json.loads(json.dumps(to_json(value)))) == value


CHANGES = {
    "layer": 5,
    "path": "elsewhere",
    "kind": "mamba1",
    "num_heads": 16,
    "head_dim": 8,
    "num_groups": 4,
    "state_size": 32,
    "native_heads": False,
    "conv_kernel": 3,
    "letter": "A",
}


def test_geometry_hash_changes_with_every_field() -> None:
    assert set(CHANGES) == {f.name for f in dataclasses.fields(MixerSpec)}
    first, second = mixers()
    for name, value in CHANGES.items():
        changed = (first, dataclasses.replace(second, **{name: value}))
        assert geometry_hash("mamba2", changed, 64, 1000) != geometry_hash("mamba2", mixers(), 64, 1000), name


def test_a_missing_field_is_named() -> None:
    for read, value in ((head_set_from_json, head_set()), (plan_from_json, plan())):
        for missing in to_json(value).keys() - {"clean", "groups", "teacher"}:  # these have defaults
            with pytest.raises(PlanError, match=missing):
                read({k: v for k, v in to_json(value).items() if k != missing})


def damaged(data: Any, *path: str | int, value: Any) -> Any:
    """A copy of plain data with one place changed."""
    data = json.loads(json.dumps(data))
    node = data
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return data


def test_malformed_files_are_refused() -> None:
    """What the test of a value of any type, below, does not reach."""
    interval = {"value": 1.0, "low": 0, "high": 2, "n": 1}
    for path, value in (
        (("heads", 0, "head"), "L1"),
        (("heads", 0, "role"), "boss"),
        (("heads", 0, "scores"), {"ablation": {"value": 1.0}}),
        (("heads", 0, "scores"), {"ablation": {**interval, "odd": 1}}),
    ):
        with pytest.raises(PlanError):
            head_set_from_json(damaged(to_json(head_set()), *path, value=value))
    for path, value in (
        (("grafts", 0, "site"), {"layer": 0}),
        (("grafts", 0, "site", "colour"), "red"),
        (("grafts", 0, "mode"), "glue"),
        (("grafts", 0, "reads"), ["nothing", "answer_token"]),
        (("grafts", 0, "reads"), ["answer_token"]),
    ):
        with pytest.raises(PlanError):
            plan_from_json(damaged(to_json(plan()), *path, value=value))


def places(data: Any, above: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where the values of plain data are."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in entries for place in [(*above, key), *places(value, (*above, key))]]


@each("read", [head_set_from_json, plan_from_json])
@each("value", [None, True, -1, 2.5, "x", [], {}, [None], {"a": 1}, float("nan"), float("inf"), 10**400, [[]]])
def test_a_value_of_any_type_anywhere_is_refused_or_has_the_fields_type(read: Any, value: Any) -> None:
    """What is accepted has, everywhere, the type that a good file has there; so nothing fails later."""
    good = to_json(head_set() if read is head_set_from_json else plan())
    for place in places(good):
        try:
            found = to_json(read(damaged(good, *place, value=value)))
        except PlanError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            continue
        for path in places(good):
            before, after = good, found
            for key in path:
                before = before[key] if before is not None else None
                after = after[key] if isinstance(after, dict) and key in after else None
            numbers = {type(before), type(after)} <= {int, float}
            assert after is None or before is None or numbers or type(after) is type(before), path


def test_a_shape_that_no_mixer_has_is_refused() -> None:
    for change in ({"num_groups": 0}, {"num_groups": 3}, {"num_heads": 0}, {"head_dim": -1}, {"state_size": "8"},
                   {"layer": -1}, {"num_heads": True}, {"conv_kernel": None}, {"head_dim": 2.0}):  # fmt: skip
        with pytest.raises(ValueError):
            dataclasses.replace(mixers()[0], **change)
