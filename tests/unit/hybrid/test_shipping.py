"""Files of classes from outside the package: what travels with a checkpoint, and what cannot."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surgery.errors import PlanError
from surgery.hybrid.configuration_hybrid import BRANCHES, ENTRY, auto_map, outside_modules, register_branch
from surgery.recipe import Splice
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from tests.support.battery import base, plan_of
from tests.support.pico import pico_config
from tests.unit.splice.test_plan import chosen

BRANCH = """
from surgery.hybrid.modeling_hybrid import RandomAttention
from surgery.hybrid.configuration_hybrid import register_branch


@register_branch("planted")
class PlantedAttention(RandomAttention):
    pass
"""


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a module of this text, which registers the branch `planted`, and forget both afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    planted: list[str] = []

    def write(text: str, name: str = "planted_branch") -> type:
        (tmp_path / f"{name}.py").write_text(text)
        planted.append(name)
        importlib.invalidate_caches()
        importlib.import_module(name)
        return BRANCHES["planted"]

    yield write
    BRANCHES.pop("planted", None)
    for name in planted:
        del sys.modules[name]


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(ValueError, match=r"'ssm': .*modeling_hybrid\.SplicedAttention has this name already"):
        register_branch("ssm")(type("Other", (), {}))
    assert register_branch("ssm")(BRANCHES["ssm"]) is BRANCHES["ssm"]


def test_a_branch_travels_with_an_entry_module(plant: Any) -> None:
    plant(BRANCH)
    config = splice_model(base("bamba"), plan_of(base("bamba"), init="planted")).config
    modules = outside_modules(config)
    assert auto_map(config)["AutoModel"] == f"{ENTRY}.BambaHybridModel"
    assert modules["planted_branch.py"] == BRANCH.replace("surgery.hybrid.", ".").encode()
    entry = modules[f"{ENTRY}.py"].decode()
    assert "from .planted_branch import PlantedAttention" in entry
    assert "from .modeling_bamba_hybrid import BambaHybridConfig, BambaHybridForCausalLM, BambaHybridModel" in entry
    own = {"configuration_hybrid.py", "modeling_hybrid.py", "modeling_bamba_hybrid.py"}
    assert set(modules) == {"planted_branch.py", f"{ENTRY}.py", *own}


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("import surgery.recipe\n" + BRANCH, "planted_branch", r"imports surgery\.recipe, line 1"),
        ("from surgery import hybrid\n" + BRANCH, "planted_branch", r"imports surgery, line 1"),
        (BRANCH, "modeling_hybrid", r"Rename modeling_hybrid\.py"),
    ],
)
def test_what_cannot_travel_is_refused_before_a_run(text: str, name: str, says: str, plant: Any) -> None:
    plant(text, name)
    with pytest.raises(PlanError, match=rf"^splice\.init: planted\. PlantedAttention cannot travel.*{says}"):
        make_plan(chosen("L1H2"), pico_config(), Splice.model_validate({"init": "planted"}))
