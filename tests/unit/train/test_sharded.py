"""The twin that is sharded, and the blocks that it is sharded by, for every family."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils.dataclasses import get_module_class_from_name

from surgery.models.lookup import family_of
from surgery.train.sharded import block_classes, twin
from tests.support.battery import logits, trained
from tests.support.pico import FAMILY_NAMES, SPLICED_FAMILIES, pico_family, tokens


def test_blocks_hold_every_mixer_and_share_no_weight() -> None:
    for name in FAMILY_NAMES:
        model = pico_family(name)
        names = block_classes(model)
        classes = tuple(get_module_class_from_name(model, one) for one in names)
        assert names and None not in classes, f"{name}: Accelerate refuses a class that is not there"
        blocks = [module for module in model.modules() if isinstance(module, classes)]
        users = Counter(id(p) for block in blocks for p in block.parameters())
        assert set(users.values()) == {1}, name
        inside = {id(module) for block in blocks for module in block.modules()}
        ssm = [spec.path for spec in family_of(model.config).mixers(model.config) if spec.is_ssm]
        assert all(id(model.get_submodule(path)) in inside for path in ssm), name


def test_a_twin_computes_the_same() -> None:
    """Hooks are among what it copies: Mamba-1's branch reads what one keeps, and it has to be the twin's own."""
    for name in SPLICED_FAMILIES:
        model = trained(name)
        accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace()))
        other = twin(model, accelerator)
        assert torch.equal(logits(other, tokens()), logits(model, tokens())), name
