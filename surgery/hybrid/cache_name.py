"""The keyword under which models take and return their cache; transformers 5.24 renamed it to `cache` in all of them.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.
"""

import inspect
import warnings
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask

RENAMED = "cache" in inspect.signature(create_causal_mask).parameters


def cache_name(old_name: str) -> str:
    """Return the keyword in the installed transformers, from that of releases before 5.24."""
    return "cache" if RENAMED else old_name


def take_cache(cache: Any, kwargs: dict[str, Any], **old: Any) -> Any:
    """Return the cache that a caller passed, under any of its three names. The old ones are removed from `kwargs`.

    Args:
        old: caches under old names that are no part of `kwargs`.
    """
    old |= {name: kwargs.pop(name) for name in ("cache_params", "past_key_values") if name in kwargs}
    for name, value in old.items():
        if value is not None and RENAMED and not torch.compiler.is_compiling():
            warnings.warn(f"`{name}` is deprecated since transformers 5.24. Use `cache` instead.", FutureWarning, 3)
        cache = value if cache is None else cache
    return cache
