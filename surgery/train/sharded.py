"""Weights that are cut up over processes, by Accelerate's FSDP2. Owns: what is cut up, and how it becomes whole again.

Must never know: losses, data, files. `fully_shard` changes a model for good: its classes, its hooks, its parameters. So
it is a twin that is sharded and stepped, and its weights are copied back into the model at the end. Between, the model
holds the weights from before, in main memory.
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
    """Whether a process holds a part of the parameters only."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def trains(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, each once, in the model's order."""
    return [p for p in model.parameters() if p.requires_grad]


def twin(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """A copy of the modules on the same tensors, for `accelerator.prepare` to shard by blocks.

    The model moves to main memory; what is sharded moves to the device block by block, so no device holds all of it.
    """
    model.cpu()
    shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = block_classes(model)
    made: PreTrainedModel = copy.deepcopy(model, shared)
    return made


def block_classes(model: PreTrainedModel) -> list[str]:
    """Classes of the blocks that are sharded one at a time: those around a mixer that share no weight with another.

    transformers' own list, `_no_split_modules`, names classes that a model need not have, which Accelerate refuses, and
    blocks with shared weights, which torch refuses.
    """
    paths = {spec.path.rpartition(".")[0] for spec in family_of(model.config).mixers(model.config)}
    blocks = [model.get_submodule(path) for path in paths]
    users = Counter(id(p) for block in blocks for p in block.parameters())
    return sorted({type(block).__name__ for block in blocks if all(users[id(p)] == 1 for p in block.parameters())})


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process; each of them has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather(sharded: nn.Module, model: nn.Module) -> None:
    """Copies the sharded weights into the model, on every process; one tensor at a time is whole on the device."""
    parts = dict(sharded.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.copy_(full(parts[name].detach()))
