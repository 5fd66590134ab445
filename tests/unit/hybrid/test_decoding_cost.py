"""What a spliced layer adds to a decode step, counted in operators that would launch a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.hybrid import modeling_hybrid
from tests.support.battery import base, trained
from tests.support.cases import each
from tests.support.pico import SPLICED_FAMILIES, pico_base, pico_hybrid, pico_site, random_site, tokens

NO_KERNEL = (
    {"alias", "as_strided", "detach", "empty", "expand", "lift_fresh", "narrow", "new_empty", "permute", "select"}
    | {"slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
    | {"_reshape_alias", "_unsafe_view"}
)


class Operators(TorchDispatchMode):
    """The names of the operators that compute or copy; an RMSNorm is one, as it is on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name not in NO_KERNEL:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class OneNorm(TorchFunctionMode):
    def __init__(self, counter: Operators) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.counter.names)
        result = function(*args, **(kwargs or {}))
        if function is F.rms_norm:
            self.counter.names[before:] = ["rms_norm"]
        return result


@contextmanager
def counted() -> Iterator[list[str]]:
    counter = Operators()
    with OneNorm(counter), counter:
        yield counter.names


@torch.no_grad()
def operators_of_a_step(model: Any, padded: bool = False) -> list[str]:
    """One token after a prompt of two rows and two tokens more."""
    ids = tokens(2, 12)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[0, :3] = 0
    given = [{"attention_mask": mask[:, :length]} if padded else {} for length in (11, 12, 13, 14)]
    cache = model(ids[:, :11], use_cache=True, **given[0]).cache
    for more in given[1:3]:
        model(ids[:, 11:], use_cache=True, **more, cache=cache)
    with counted() as names:
        model(ids[:, 11:], use_cache=True, **given[3], cache=cache)
    return names


def added(site: dict[str, Any], padded: bool = False) -> int:
    return len(operators_of_a_step(pico_hybrid([site]), padded)) - len(operators_of_a_step(pico_base()))


@each("heads", [[2], [0, 3]])
def test_a_copied_head_adds_thirteen_operators(heads: list[int]) -> None:
    """Projection, two for the convolution, SiLU, scale, two copies, attention, gate (3), norm, output."""
    assert added(pico_site(0, heads, qk_width=16, v_width=16)) == 13
    assert added(pico_site(0, heads, qk_width=16, v_width=16, activation=None, gate=False)) == 9


def test_what_costs_more() -> None:
    """Without one operator for the attention it takes three; so do, on a GPU, all widths."""
    assert added(pico_site(0, [2])) == 15
    assert added(pico_site(0, [0, 3])) == 15
    assert added({**pico_site(0, [2], qk_width=16, v_width=16), "copied_width": 8}) == 15  # new channels
    assert added(pico_site(0, [2], "replace", qk_width=16, v_width=16)) == 14  # silences the head
    assert added(random_site(0, [2])) == 11
    assert added(pico_site(0, [2]), padded=True) == 19  # three make the mask of all layers, one adds it


@each("name", SPLICED_FAMILIES)
def test_a_step_does_not_wait_for_the_device(name: str) -> None:
    """No number is read from a tensor, but where the family's own code does."""
    waits = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal"}
    found = [
        sum(op in waits for op in operators_of_a_step(m, padded=True)) for m in (trained(name, "replace"), base(name))
    ]
    assert found[0] <= found[1]


def test_sdpa_runs_without_cudnn_alone() -> None:
    """The other backends are those that the user allows; cuDNN is left where no other is allowed."""
    cuda = torch.backends.cuda

    def allowed() -> list[bool]:
        return [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]

    before = [*allowed(), cuda.cudnn_sdp_enabled()]
    with modeling_hybrid.without_cudnn():
        assert allowed() == before[:3] and not cuda.cudnn_sdp_enabled()
    assert [*allowed(), cuda.cudnn_sdp_enabled()] == before
    with sdpa_kernel(SDPBackend.MATH), modeling_hybrid.without_cudnn():
        assert allowed() == [False, False, True]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), modeling_hybrid.without_cudnn():
        assert allowed() == [False] * 3 and cuda.cudnn_sdp_enabled()


@torch.no_grad()
def test_hooks_of_a_branch_run_and_see_its_own_output() -> None:
    """A step that adds the branch in one operator calls the module all the same where something waits for the call."""
    model, ids = pico_hybrid([pico_site(1, [2])]), tokens(2, 12)

    def step() -> Tensor:
        cache = model(ids[:, :11], use_cache=True).cache
        return model(ids[:, 11:], use_cache=True, cache=cache).logits

    expected, branch = step(), model.backbone.layers[1].mixer.attention
    for module in (branch, branch.o_proj):
        seen: list[Any] = []
        handle = module.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output))
        torch.testing.assert_close(step(), expected, atol=1e-5, rtol=1e-5)
        model(ids, use_cache=False)
        handle.remove()
        prompt, decoded, whole = (output[0] if isinstance(output, tuple) else output for output in seen)
        torch.testing.assert_close(torch.cat([prompt, decoded], dim=1), whole, atol=1e-5, rtol=1e-5)
    branch.o_proj.forward = lambda x, weight=branch.o_proj.weight: F.linear(x, 2 * weight)  # as offloading replaces it
    assert (step() - expected).abs().max() > 1e-3
