"""The names of an export's tensors in the plugin's model."""

# Replaced in every name, in this order. The branch stands beside the mixer; vLLM's mixer holds -exp(A_log) as A.
RENAMED = {".mixer.attention.": ".branch.", ".A_log": ".A"}


def plugin_name(name: str) -> str:
    """Return the name of a tensor in the plugin's model."""
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name
