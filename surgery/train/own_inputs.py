"""Train queries and keys alone, each layer on its own input: what `trainable: reads` does.

Queries and keys of a head depend on the input of its layer. With a loss of its attention, no gradient has to pass
through other layers, and those above the last new head need not run. MOHAWK's first stage (arXiv 2408.10189) trains
layers apart in the same way, on the teacher's inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from surgery.hybrid.modeling_hybrid import SplicedAttention
from surgery.models.inserted import new_modules


def reading_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters on which queries and keys of new heads depend. Those of a Gather layer in front are none of them."""
    readers = [
        module
        for module in new_modules(model).values()
        if isinstance(module, SplicedAttention) or hasattr(module.mixer, "q_proj")
    ]
    apart = re.compile(r"\b(o|v|gate)_proj\b")
    return [p for module in readers for name, p in module.named_parameters() if not apart.search(name)]


class OwnInputs:
    """Runs a model up to its last new head, without a gradient between layers.

    Args:
        model: a hybrid whose `reading_parameters` alone train.
    """

    def __init__(self, model: nn.Module) -> None:
        new = set(new_modules(model).values())
        blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and new & set(m.modules()))
        last = max(index for index, block in enumerate(blocks) if new & set(block.modules()))
        self._run, self._above = list(blocks[: last + 1]), list(blocks[last + 1 :])
        self._returns_tuple: dict[nn.Module, bool] = {}  # of blocks above, once they have run

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run passes in this way. The first pass runs all layers, to see what their outputs are."""
        with ExitStack() as patches:
            for block in self._run:
                patches.callback(block.register_forward_hook(_detached).remove)
            for block in self._above:
                if block in self._returns_tuple:
                    block.forward = partial(_unchanged, self._returns_tuple[block])
                    patches.callback(delattr, block, "forward")  # restores that of the class
                else:
                    patches.callback(block.register_forward_hook(self._see).remove)
            yield

    def _see(self, block: nn.Module, args: Any, output: Any) -> None:
        self._returns_tuple[block] = isinstance(output, tuple)


def _unchanged(as_tuple: bool, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    return (hidden_states, None) if as_tuple else hidden_states


def _detached(block: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(part.detach() if isinstance(part, Tensor) else part for part in output)
    return output.detach()
