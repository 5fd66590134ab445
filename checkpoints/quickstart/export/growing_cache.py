"""Cache layers that write new keys and values into a buffer with room for more, instead of copying all at every token.

Shipped with every exported checkpoint, so it imports torch and transformers only.

Shape legend: B batch, G key/value heads, T new tokens, S all tokens, R rows of the buffer, K key width, V value width,
C channels of a convolution, W its width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

ROOM = 64  # rows that a new buffer has free at least; it has a quarter more than it needs


@dataclass
class KeysAndValues:
    """A buffer, and the views of it that the cache layer holds.

    It is append-only: rows that any view shows are never written again. A layer whose tensors are not these views has
    been reordered, cropped, copied or set by somebody, and takes a buffer of its own at its next token.

    Attributes:
        rows: (B,G,R,K+V), keys beside values, so that one copy writes both.
        keys: (B,G,S,K).
        values: (B,G,S,V).
    """

    rows: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def with_room(cls, keys: Tensor, values: Tensor, new: int) -> "KeysAndValues":
        """Copy (B,G,S,K) and (B,G,S,V) into a buffer that has room for `new` tokens and more."""
        B, G, S, K = keys.shape
        rows = keys.new_empty(B, G, S + new + max(ROOM, (S + new) // 4), K + values.shape[-1])
        rows[:, :, :S, :K], rows[:, :, :S, K:] = keys, values
        return cls(rows, rows[:, :, :S, :K], rows[:, :, :S, K:])

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write (B,G,T,K) and (B,G,T,V) behind the last token."""
        S, T, K = self.keys.shape[2], key.shape[2], key.shape[3]
        free = self.rows[:, :, S : S + T]
        both = _side_by_side(key, value)
        if both is not None:
            free.view(both.shape).copy_(both)
        else:
            free[..., :K].copy_(key)
            free[..., K:].copy_(value)
        self.keys, self.values = self.rows[:, :, : S + T, :K], self.rows[:, :, : S + T, K:]

    def takes(self, layer: DynamicLayer, new: int) -> bool:
        """Return whether `new` tokens of a layer can be written here."""
        is_own = layer.keys is self.keys and layer.values is self.values
        writable = torch.is_inference_mode_enabled() or not self.rows.is_inference()
        return is_own and writable and self.keys.shape[2] + new <= self.rows.shape[2]


def _side_by_side(key: Tensor, value: Tensor) -> Tensor | None:
    """Return one view of a token's key and value, (B,G,1,K+V) or (B,G,1,2,K), if they are parts of one tensor."""
    (B, G, T, K), V, gap = key.shape, value.shape[-1], value.storage_offset() - key.storage_offset()
    part_of_one = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() and T == 1
    if not part_of_one or key.stride(0) != value.stride(0) or (key.stride(3), value.stride(3)) != (1, 1):
        return None
    if G == 1 and gap == K:
        return key.as_strided((B, 1, 1, K + V), key.stride())
    if K == V and gap > 0 and key.stride(1) == value.stride(1):
        return key.as_strided((B, G, 1, 2, K), (*key.stride()[:3], gap, 1))
    return None


class GrowingLayer(DynamicLayer):
    """`DynamicLayer` with a buffer. It concatenates tensors that may need gradients, and in a compiled pass."""

    buffer: KeysAndValues | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B,G,T,K) and (B,G,T,V); return the keys and values of all tokens, (B,G,S,K) and (B,G,S,V).

        The first tokens are kept as they are: not every prompt is continued.
        """
        if torch.compiler.is_compiling() or self.get_seq_length() == 0 or not self._copies(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if self.buffer is None or not self.buffer.takes(self, key_states.shape[2]):
            self.buffer = KeysAndValues.with_room(self.keys, self.values, key_states.shape[2])
        self.buffer.append(key_states, value_states)
        self.keys, self.values = self.buffer.keys, self.buffer.values
        return self.keys, self.values

    def _copies(self, *new: Tensor) -> bool:
        """Return whether new tokens can be copied beside the old ones: no gradient flows, and all have one dtype."""
        tensors = (*new, self.keys, self.values)
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return not differentiable and len({x.dtype for x in tensors}) == 1

    def offload(self) -> None:
        """Move the tokens to the CPU, and free the buffer."""
        self.buffer = None
        super().offload()

    def reset(self) -> None:
        """Drop all tokens, and free the buffer."""
        self.buffer = None
        super().reset()


class GrowingHybridLayer(GrowingLayer, LinearAttentionAndFullAttentionLayer):
    """`LinearAttentionAndFullAttentionLayer` with a buffer."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers'; with one more token, (B,C,1), the state (B,C,W) is the tensor that is returned."""
        continues = conv_states.shape[-1] == 1 and self.has_previous_state[state_idx]
        if not continues or torch.compiler.is_compiling() or getattr(self, "record_past", False):
            return super().update_conv_state(conv_states, state_idx=state_idx, **kwargs)
        self.conv_states[state_idx] = torch.cat([self.conv_states[state_idx][..., 1:], conv_states], dim=-1)
        return self.conv_states[state_idx]


_GROWING = {DynamicLayer: GrowingLayer, LinearAttentionAndFullAttentionLayer: GrowingHybridLayer}


def let_grow(cache: Any) -> None:
    """Give the layers of a `DynamicCache` that keep all keys and values a buffer, in place.

    Other caches, and layers of other classes, stay as they are. So do offloaded ones, whose keys change places.
    """
    if isinstance(cache, DynamicCache) and not cache.offloading:
        for layer in cache.layers:
            layer.__class__ = _GROWING.get(type(layer), type(layer))
