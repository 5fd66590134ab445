"""Sharded training with Accelerate's FSDP2.

`fully_shard` permanently changes the classes, hooks and parameters of a model. So a copy ("twin") is sharded and
trained, and its weights are copied back at the end. Until then the model holds the old weights, in main memory.
"""

from __future__ import annotations

import copy
from collections import Counter

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from surgery.models.lookup import family_of


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that are not frozen, each once, in the model's order."""
    return [p for p in model.parameters() if p.requires_grad]


def twin(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """Copy the modules but not the tensors. `accelerator.prepare` then shards the copy by blocks.

    The model moves to main memory. Shards move to the device block by block, so no device holds the whole model.
    """
    model.cpu()
    shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = block_classes(model)
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    return copied


def block_classes(model: PreTrainedModel) -> list[str]:
    """Class names of the blocks that are sharded one at a time: those with a mixer and without shared weights.

    transformers' `_no_split_modules` may name classes that a model lacks, which Accelerate refuses, and blocks with
    shared weights, which torch refuses.
    """
    paths = {spec.path.rpartition(".")[0] for spec in family_of(model.config).mixers(model.config)}
    blocks = [model.get_submodule(path) for path in paths]
    users = Counter(id(p) for block in blocks for p in block.parameters())
    return sorted({type(block).__name__ for block in blocks if all(users[id(p)] == 1 for p in block.parameters())})


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every process. All processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's part of a tensor, if the parameter is sharded; otherwise the tensor."""
    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


@torch.no_grad()
def gather(sharded: nn.Module, model: nn.Module) -> None:
    """Copy sharded weights into the model on every process. One whole tensor is on the device at a time."""
    parts = dict(sharded.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.copy_(full(parts[name].detach()))
