"""The keyword under which models take and return their cache; transformers 5.24 renamed it to `cache` in all of them.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.
"""

import inspect
from typing import Any

from transformers.masking_utils import create_causal_mask

RENAMED = "cache" in inspect.signature(create_causal_mask).parameters


def cache_name(old_name: str) -> str:
    """Return the keyword in the installed transformers, from that of releases before 5.24."""
    return "cache" if RENAMED else old_name


def take_cache(cache: Any, kwargs: dict[str, Any]) -> Any:
    """Return the cache that a caller passed, under any of its three names; the old ones are removed from `kwargs`."""
    for old_name in ("cache_params", "past_key_values"):
        old = kwargs.pop(old_name, None)
        cache = old if cache is None else cache
    return cache
