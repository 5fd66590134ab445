"""From a config to its family: every model type is found, unknown ones are named, hybrids keep what the base said."""

from __future__ import annotations

import pytest
from transformers import PreTrainedConfig

from surgery.errors import ModelError, PlanError
from surgery.hybrid import CLASSES
from surgery.models.layouts import STRUCTURES
from surgery.models.lookup import family_of
from surgery.models.registry import families, register_family
from surgery.splice.plan import splice_field
from tests.support.battery import plan_of
from tests.support.cases import each
from tests.support.pico import FAMILY_NAMES, SPLICED_FAMILIES, pico_family, pico_family_config

WRITTEN = {"model_type", "layer_types", "architectures", "transformers_version", "splice"}


def typed(name: str) -> PreTrainedConfig:
    class Unknown(PreTrainedConfig):
        model_type = name

    return Unknown()


@each(("name", "nearest"), [("mamba3", "mamba"), ("zamba", "zamba2"), ("qwen3", "qwen2")])
def test_unknown_type_names_the_nearest_and_where_to_write(name: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=rf"^model_type: {name}\. ") as caught:
        family_of(typed(name))
    message = str(caught.value)
    assert f"Did you mean {nearest}?" in message
    assert "docs/EXTENDING.md" in message and "\n" not in message
    assert all(t in message for f in families() for t in f.model_types if not t.endswith("_hybrid"))


def test_every_type_belongs_to_one_family() -> None:
    types = [t for family in families() for t in family.model_types]
    assert len(set(types)) == len(types)
    hybrids = {config.model_type for config, _, _ in CLASSES}
    assert hybrids <= set(types), "every class that is registered has a family"
    for family in families():
        assert (family.hybrid is None) == bool(family.refuses)
        assert family.hybrid is None or family.hybrid[0].model_type in family.model_types


@each("name", FAMILY_NAMES)
def test_mixers_are_in_order_and_of_known_kinds(name: str) -> None:
    mixers = family_of(pico_family_config(name)).mixers(pico_family_config(name))
    assert [s.layer for s in mixers] == sorted(s.layer for s in mixers)
    assert {s.kind for s in mixers} <= set(STRUCTURES)
    both = {s.layer for s in mixers if s.is_ssm} & {s.layer for s in mixers if not s.is_ssm}
    for layer in both:
        first, second = (s for s in mixers if s.layer == layer)
        assert first.is_ssm and not second.is_ssm
    letters = {s.letter for s in mixers if not s.is_ssm}
    assert letters <= ({"A"} if any(s.is_ssm for s in mixers) else {"H"})


class TestHybridConfig:
    @each("name", SPLICED_FAMILIES)
    def test_keeps_all_but_the_splice(self, name: str) -> None:
        base = pico_family_config(name)
        family, before = family_of(base), base.to_dict()
        splice = splice_field(plan_of(pico_family(name)), base)
        config = family.hybrid_config(base, splice)
        assert config.splice == splice and base.to_dict() == before
        assert config.model_type in family.model_types and type(config) is family.hybrid[0]
        ours = config.to_dict()
        for field in set(before) - WRITTEN:
            assert ours[field] == before[field], field
        assert family.mixers(config) == family.mixers(base)


@each("name", sorted(set(FAMILY_NAMES) - set(SPLICED_FAMILIES)))
def test_no_hybrid_where_the_family_refuses(name: str) -> None:
    config = pico_family_config(name)
    for attempt in (
        lambda: family_of(config).hybrid_config(config, []),
        lambda: family_of(config).build_hybrid(config),
    ):
        with pytest.raises(PlanError, match=config.model_type):
            attempt()


def test_a_model_type_belongs_to_one_family() -> None:
    """A name or a type that is taken is refused, and the table stays as it was."""
    before = families()
    for name, types in (("another", ("mamba2",)), ("mamba2", ("another_type",))):
        with pytest.raises(ModelError, match=r"^model_type: mamba2\. The family mamba2 has this name already"):
            register_family(name, *types)(lambda config: [])
    assert families() == before
