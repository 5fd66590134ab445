"""Random numbers of new layers: each tensor has its own seed, so no tensor depends on the others."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor


class Draw:
    """Draw random tensors, each from its own seed.

    Args:
        key: identifies plan and graft.
        device: of the results.
    """

    def __init__(self, key: str, device: Any) -> None:
        self.key, self.device = key, device

    def _generator(self, name: str) -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(f"{self.key}:{name}".encode()).digest()[:8], "big") % 2**63
        return torch.Generator().manual_seed(seed)

    def normal(self, name: str, *shape: int, fan_in: int | None = None) -> Tensor:
        """Return a tensor with variance 1/fan-in, by default 1/(size of the last axis)."""
        drawn = torch.randn(*shape, generator=self._generator(name))
        return (drawn * (fan_in or shape[-1]) ** -0.5).to(self.device)

    def tokens(self, name: str, count: int, vocab_size: int) -> Tensor:
        """Return (count/128, 128) token ids, or (1, count): permutations of the vocabulary, one after the other."""
        generator = self._generator(name)
        ids = torch.cat([torch.randperm(vocab_size, generator=generator) for _ in range(-(-count // vocab_size))])
        length = min(128, count)
        return ids[: count // length * length].view(-1, length).to(self.device)

    def uniform(self, name: str, count: int, low: float, high: float) -> Tensor:
        """Return (count,) between `low` and `high`."""
        return (torch.rand(count, generator=self._generator(name)) * (high - low) + low).to(self.device)
