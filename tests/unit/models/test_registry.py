"""From a config to its family: every model type is found, unknown ones are named, hybrids keep what the base said."""

from __future__ import annotations

import pytest
from transformers import PreTrainedConfig

from surgery.errors import ModelError
from surgery.models.lookup import family_of
from surgery.models.registry import families, register_family
from surgery.splice.plan import splice_field
from tests.support.battery import plan_of
from tests.support.cases import each
from tests.support.pico import SPLICED_FAMILIES, pico_family, pico_family_config

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


@each("name", SPLICED_FAMILIES)
def test_the_config_of_a_hybrid_keeps_all_but_the_splice(name: str) -> None:
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


def test_a_model_type_belongs_to_one_family() -> None:
    """A name or a type that is taken is refused, and the table stays as it was."""
    before = families()
    for name, types in (("another", ("mamba2",)), ("mamba2", ("another_type",))):
        with pytest.raises(ModelError, match=r"^model_type: mamba2\. The family mamba2 has this name already"):
            register_family(name, *types)(lambda config: [])
    assert families() == before
