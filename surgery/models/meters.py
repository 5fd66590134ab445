"""Measure bytes saved for backward, peak bytes and FLOPs of a computation, on real tensors or the meta device.

Integer and boolean tensors keep their values on the meta device, since masks decide shapes. SDPA counts as a fused
kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_LARGEST_SHADOW = 1 << 24  # elements: larger tensors are masks and scores, whose values decide nothing
_GROUPED = getattr(aten, "_grouped_mm", None)  # for mixtures of experts; missing in older torch


@dataclass(frozen=True)
class PassCost:
    """Cost of one forward pass, and of its backward pass if an output requires a gradient.

    Attributes:
        saved: bytes that autograd saves for backward, each storage once, without parameters and buffers.
        forward_peak, backward_peak: peak bytes of each pass, without parameters and their gradients.
        flops: FLOPs of matrix products, convolutions and attention, without elementwise operations.
    """

    saved: int
    forward_peak: int
    backward_peak: int
    flops: int

    def times(self, factor: float) -> PassCost:
        """Return the cost of the same computation on `factor` times as many documents."""
        return PassCost(*(round(getattr(self, field.name) * factor) for field in fields(self)))


def measure(call: Callable[[], Sequence[Tensor]], model: nn.Module | None = None) -> PassCost:
    """Measure a call, and the backward pass from the returned tensors that require a gradient.

    Args:
        call: the computation. Returns its outputs.
        model: model whose parameters, gradients and buffers are not counted. Trained parameters should have a gradient
            already, as between two micro-batches, since a new one counts.
    """
    with FusedAttention(), Meter(belongings(model)) as meter:
        with saved_bytes(model) as saved:
            outputs = list(call())
        forward_peak = meter.peak
        trained = [output for output in outputs if output.requires_grad]
        if trained:
            meter.peak = meter.now
            torch.autograd.backward(trained, [torch.empty_like(output) for output in trained])
    return PassCost(saved.total, forward_peak, meter.peak if trained else 0, meter.flops)


def belongings(model: nn.Module | None) -> list[Tensor]:
    """List the parameters of a model, their gradients, and its buffers."""
    if model is None:
        return []
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *gradients, *model.buffers()]


@dataclass
class Total:
    """A count of bytes."""

    total: int = 0


@contextmanager
def saved_bytes(model: nn.Module | None = None) -> Iterator[Total]:
    """Count the bytes that forward passes inside the context save, each storage once, without the tensors of `model`.

    What a backward pass computes again and saves for itself does not count: it frees it at once.
    """
    counted = {StorageWeakRef(t.untyped_storage()) for t in belongings(model)}
    result = Total()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in counted and torch._C._current_graph_task_id() == -1:  # no backward pass runs
            counted.add(reference)
            result.total += storage.nbytes()
        return tensor.detach()  # saving the tensor itself would be a reference cycle with its node

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield result


class Meter(TorchDispatchMode):
    """Count the memory and the FLOPs of every operation.

    Attributes:
        now, peak: bytes of the storages that operations created: now, and at the peak.
        flops: FLOPs by the formulas of torch's flop counter.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._known = {StorageWeakRef(t.untyped_storage()) for t in known}
        self._shadows = Shadows()
        self._layouts: dict[Any, tuple[Any, Any, torch.dtype] | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASK_FOR_VALUES and args[0].is_meta:
            done, result, args = self._shadows.answer(func, args)
            if done:
                return result
        result = self._run(func, args, kwargs)
        made = [result] if isinstance(result, Tensor) else [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for tensor in made:
            self._count(tensor.untyped_storage())
        if made and made[0].is_meta and not made[0].is_floating_point():
            self._shadows.follow(func, args, kwargs, made)
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `func`, or reuse the layout of its output for meta tensors of the same shapes.

        Blocks of a model repeat, and many of torch's meta functions are slow.
        """
        if func._overloadpacket is _GROUPED and args[0].is_meta:
            return _grouped(*args, **kwargs)
        key = _key((args, kwargs)) if _makes_one(func) else None
        if key is None:
            return func(*args, **kwargs)
        key = (func, key)
        layout = self._layouts.get(key)
        if layout is not None:
            return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")
        result = func(*args, **kwargs)
        if key not in self._layouts:
            self._layouts[key] = _layout_of_new(result, (args, kwargs))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        if reference not in self._known:
            self._known.add(reference)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, reference, storage.nbytes())

    def _free(self, reference: StorageWeakRef, size: int) -> None:
        self._known.discard(reference)
        self.now -= size


def _grouped(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Shape of a grouped matrix product. torch's own meta function accepts bfloat16 only."""
    shape = (*a.shape[:-1], b.shape[-1])
    if a.dim() == b.dim() == 2 and offs is not None:
        shape = (offs.numel(), *shape)
    elif a.dim() == 3 and b.dim() == 2:
        shape = shape[1:]
    return torch.empty(shape, dtype=out_dtype or a.dtype, device="meta")


def _grouped_flops(
    a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None, out_val: Any = None
) -> int:
    return 2 * a.numel() * b.shape[-1]


_FORMULAS = {**flop_registry, _GROUPED: _grouped_flops}


@cache
def _makes_one(func: Any) -> bool:
    """Whether an operation creates one new tensor, neither a view nor a changed argument."""
    returns = func._schema.returns
    return not func._schema.is_mutable and len(returns) == 1 and returns[0].alias_info is None


def _key(tree: Any) -> Any:
    """Return a hashable key of everything that the shape of a result depends on; None if that is not known."""
    if isinstance(tree, Tensor):
        return (tree.shape, tree.stride(), tree.dtype) if tree.is_meta else None
    if isinstance(tree, dict):
        tree = [*tree.items()]
    if isinstance(tree, (tuple, list)):
        parts = [_key(part) for part in tree]
        return None if None in parts else tuple(parts)
    return (type(tree), tree)  # with the type, since 1 == True


def _layout_of_new(result: Any, inputs: Any) -> tuple[Any, Any, torch.dtype] | None:
    """Return the layout of a floating-point tensor that shares no memory with the inputs; None for others."""
    if not isinstance(result, Tensor) or not result.is_meta or not result.is_floating_point():
        return None
    storage = result.untyped_storage()
    shared = any(isinstance(t, Tensor) and t.untyped_storage()._cdata == storage._cdata for t in tree_leaves(inputs))
    return None if shared else (result.shape, result.stride(), result.dtype)


_ASK_FOR_VALUES = {aten._local_scalar_dense.default, aten.nonzero.default, aten.index.Tensor}


class Shadows:
    """CPU copies (shadows) of integer and boolean meta tensors, as far as their values are known.

    They make `mask.all()`, `logits[mask]` and `mask.nonzero()` work with meta logits. Masks are small enough to hold
    real values, weights are not. A shadow belongs to a storage, so views share it.
    """

    def __init__(self) -> None:
        self._shadows: dict[
            int, tuple[torch.UntypedStorage, Tensor]
        ] = {}  # keeps the storages alive, so that no id is reused

    def answer(self, func: Any, args: Any) -> tuple[bool, Any, Any]:
        """Answer an operation that needs values.

        Returns:
            Whether the operation is done, its result if so, and the arguments to call it with if not.
        """
        if func is aten.index.Tensor:
            return False, None, (args[0], self._positions(args[1]))
        value = self._value(args[0], needed=True)
        if func is aten._local_scalar_dense.default:
            return True, value.item(), args
        positions = value.nonzero()
        return True, self._remember(torch.empty(positions.shape, dtype=torch.long, device="meta"), positions), args

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], made: Sequence[Tensor]) -> None:
        """Repeat an operation on the shadows, if every input has one."""
        changes = func._schema.is_mutable
        if not changes and all(self._value(t) is not None for t in made):
            return  # views
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(self._value(t) is None for t in inputs) or any(t.numel() > _LARGEST_SHADOW for t in made):
            if changes:
                self._shadows.pop(made[0].untyped_storage()._cdata, None)
            return
        cpu_args, cpu_kwargs = tree_map(self._on_cpu, (args, kwargs))
        results = [t for t in tree_leaves(func(*cpu_args, **cpu_kwargs)) if isinstance(t, Tensor)]
        for meta, value in zip(made, results, strict=True):
            if self._value(meta) is None:
                self._remember(meta, value)

    def _remember(self, meta: Tensor, value: Tensor) -> Tensor:
        """Set the shadow of a meta tensor's storage. Returns the tensor."""
        storage = meta.untyped_storage()
        flat = torch.zeros(storage.nbytes() // meta.element_size(), dtype=meta.dtype)
        flat.as_strided(meta.size(), meta.stride(), meta.storage_offset()).copy_(value)
        self._shadows[storage._cdata] = (storage, flat)
        return meta

    def _value(self, tensor: Tensor, needed: bool = False) -> Any:
        """Return the values of a tensor, or None if they are not known."""
        if not tensor.is_meta:
            return tensor
        entry = self._shadows.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            flat = entry[1].view(tensor.dtype)
            return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        if needed:
            raise NotImplementedError("the computation needs values that a meta tensor does not have")
        return None

    def _on_cpu(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return self._value(x) if isinstance(x, Tensor) else x

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Convert boolean indices to the positions where they are True, so that their number is known."""
        positions: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                positions.append(index)
            else:
                positions += [i.to("meta") for i in self._value(index, needed=True).nonzero(as_tuple=True)]
        return positions


class FusedAttention(TorchFunctionMode):
    """Run SDPA on meta tensors as its memory-efficient kernel, which saves inputs, output and one number per row.

    Flash kernels without a mask save the same. Grouped keys and values are expanded first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return _fused(*args, **kwargs)
        return func(*args, **kwargs)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """(B,H,T,K), (B,H,S,K), (B,H,S,V) -> (B,H,T,V)."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return output
