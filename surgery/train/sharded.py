"""Sharded training with Accelerate's FSDP2.

`fully_shard` changes a model for good: its classes, hooks and parameters. So a twin is sharded and stepped, and its
weights are copied back into the model at the end. Until then the model holds the old weights, in main memory.
"""

from __future__ import annotations

import copy
from collections import Counter

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from surgery.models.lookup import family_of


def is_sharded(model: nn.Module) -> bool:
    """Whether this process holds a part of the parameters only."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that are not frozen, each once, in the model's order."""
    return [p for p in model.parameters() if p.requires_grad]


def twin(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """Copy the modules on the same tensors, for `accelerator.prepare` to shard by blocks.

    The model moves to main memory. Shards move to the device block by block, so no device holds the whole model.
    """
    model.cpu()
    shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = block_classes(model)
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    return copied


def block_classes(model: PreTrainedModel) -> list[str]:
    """Class names of the blocks that are sharded one at a time: those with a mixer and without shared weights.

    transformers' `_no_split_modules` is not used: it names classes that a model may lack, which Accelerate refuses, and
    blocks with shared weights, which torch refuses.
    """
    paths = {spec.path.rpartition(".")[0] for spec in family_of(model.config).mixers(model.config)}
    blocks = [model.get_submodule(path) for path in paths]
    users = Counter(id(p) for block in blocks for p in block.parameters())
    return sorted({type(block).__name__ for block in blocks if all(users[id(p)] == 1 for p in block.parameters())})


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process. All processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather(sharded: nn.Module, model: nn.Module) -> None:
    """Copy sharded weights into the model, on every process, one whole tensor on the device at a time."""
    parts = dict(sharded.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.copy_(full(parts[name].detach()))
