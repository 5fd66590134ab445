"""The twin that is sharded, and the blocks that it is sharded by, for every family."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import get_module_class_from_name
from transformers import PreTrainedModel

from surgery.errors import RunError
from surgery.models.lookup import family_of
from surgery.train.preparing import check_stage
from surgery.train.sharded import block_classes, gather, trainable_parameters, twin
from surgery.train.targets import Targets
from tests.support import training_worker as worker
from tests.support.battery import logits, trained
from tests.support.pico import FAMILY_NAMES, SPLICED_FAMILIES, pico_family, pico_hybrid, pico_site, tokens


def made(model: PreTrainedModel) -> tuple[PreTrainedModel, Any]:
    """The model's twin, and the plugin that hears of its blocks."""
    plugin = SimpleNamespace()
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    return twin(model, accelerator), plugin


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_blocks_hold_every_mixer_and_share_no_weight(name: str) -> None:
    model = pico_family(name)
    names = block_classes(model)
    classes = tuple(get_module_class_from_name(model, one) for one in names)
    assert names and None not in classes, "Accelerate refuses a class that is not there"
    blocks = [module for module in model.modules() if isinstance(module, classes)]
    users = Counter(id(p) for block in blocks for p in block.parameters())
    assert set(users.values()) == {1}
    inside = {id(module) for block in blocks for module in block.modules()}
    ssm = [spec.path for spec in family_of(model.config).mixers(model.config) if spec.is_ssm]
    assert all(id(model.get_submodule(path)) in inside for path in ssm)


def test_a_twin_has_the_tensors_and_modules_of_its_own() -> None:
    model = pico_hybrid([pico_site(1)])
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    other, plugin = made(model)
    assert plugin.transformer_cls_names_to_wrap == ["Mamba2Block"]
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert theirs[name] is not parameter and theirs[name].data_ptr() == parameter.data_ptr()
    assert [p.shape for p in trainable_parameters(other)] == [model.lm_head.weight.shape]
    assert not {id(m) for m in model.modules()} & {id(m) for m in other.modules()}


@pytest.mark.parametrize("name", SPLICED_FAMILIES)
def test_a_twin_computes_the_same(name: str) -> None:
    """Hooks are among what it copies: Mamba-1's branch reads what one keeps, and it has to be the twin's own."""
    model = trained(name)
    other, _ = made(model)
    ids = tokens()
    assert torch.equal(logits(other, ids), logits(model, ids))


def test_gathering_brings_the_weights_back() -> None:
    model = pico_hybrid([pico_site(1)])
    other, _ = made(model)
    before = model.lm_head.weight.detach().clone()
    for parameter in other.parameters():
        parameter.data = parameter.data + 1  # as sharding does: another tensor
    assert torch.equal(model.lm_head.weight, before)
    gather(other, model)
    assert torch.equal(model.lm_head.weight, before + 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Sharding(Accelerator):
    is_fsdp2 = True


class OldSharding(Accelerator):
    distributed_type = DistributedType.FSDP
    is_fsdp2 = False


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [(Sharding, {"check_every": 2}, "train.check_every"), (OldSharding, {}, "fsdp_version: 2")],
)
def test_what_sharding_cannot_do_is_said_first(
    kind: type[Accelerator], more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    section = worker.section(tmp_path, 1, **more)
    with pytest.raises(RunError, match=said):
        check_stage(section, section.sequence[0], Targets(), kind(cpu=True))
