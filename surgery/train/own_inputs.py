"""Train queries and keys alone, each layer on its own input: what `trainable: reads` does.

Queries and keys of a head depend on the input of its layer, and in a pair on its Gather layer. With a loss of its
attention, no gradient has to pass through other layers, and those above the last new head need not run. MOHAWK's first
stage (arXiv 2408.10189) trains layers apart in the same way, on the teacher's inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.hybrid.modeling_hybrid import SplicedAttention
from surgery.models.hooks import replaced_once
from surgery.models.inserted import new_modules, pairs_of


def reading_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters on which queries and keys of new heads depend.

    Those of a Gather layer with side channels are among them. Without, it would write to what the base reads.
    """
    gathers = _gathers(model)
    readers = [
        module
        for module in new_modules(model).values()
        if isinstance(module, SplicedAttention) or hasattr(module.mixer, "q_proj") or module in gathers
    ]
    apart = re.compile(r"\b(o|v|gate)_proj\b")
    return [p for module in readers for name, p in module.named_parameters() if not apart.search(name)]


def _gathers(model: nn.Module) -> set[nn.Module]:
    """Gather layers whose side channels only the block above them reads."""
    return {gather for gather, _, entry in pairs_of(model) if "channels" in entry}


class OwnInputs:
    """Runs a model up to its last new head, without a gradient between layers.

    Args:
        model: a hybrid whose `reading_parameters` alone train.
        is_sharded: whether FSDP2 shards it. Then add `zero` to the loss.
    """

    def __init__(self, model: nn.Module, is_sharded: bool = False) -> None:
        self.is_sharded = is_sharded
        new = set(new_modules(model).values())
        blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and new & set(m.modules()))
        last = max(index for index, block in enumerate(blocks) if new & set(block.modules()))
        self._run, self._above = list(blocks[: last + 1]), list(blocks[last + 1 :])
        self._gathers = _gathers(model)
        self._returns_tuple: dict[nn.Module, bool] = {}  # of blocks above, once they have run
        self._outputs: list[Tensor] = []  # of blocks with new heads, in the last pass

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a pass in this way. The first one runs all layers, to see what their outputs are."""
        self._outputs.clear()
        with ExitStack() as patches:
            for block in self._run:
                if block in self._gathers:
                    continue  # the loss of the block above trains it
                patches.callback(block.register_forward_hook(self._detached).remove)
            for block in self._above:
                if block in self._returns_tuple:
                    patches.enter_context(replaced_once(block, lambda h: h, self._returns_tuple[block]))
                else:
                    patches.callback(block.register_forward_hook(self._see).remove)
            yield

    def zero(self) -> Tensor:
        """0, with a gradient of 0 for the outputs of blocks with new heads in the last pass.

        FSDP2 gathers the weights of a block when a gradient reaches its output, which no other loss does here.
        """
        return torch.stack([output.sum() for output in self._outputs]).sum() * 0

    def _see(self, block: nn.Module, args: Any, output: Any) -> None:
        self._returns_tuple[block] = isinstance(output, tuple)

    def _detached(self, block: nn.Module, args: Any, output: Any) -> Any:
        hidden_states = output[0] if isinstance(output, tuple) else output
        if self.is_sharded and hidden_states.requires_grad:
            self._outputs.append(hidden_states)
        if isinstance(output, tuple):
            return tuple(part.detach() if isinstance(part, Tensor) else part for part in output)
        return output.detach()
