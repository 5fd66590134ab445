"""The config field `splice`: what an entry must hold, checked when a config is built.

Shipped with every exported checkpoint, so it imports the standard library only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Check = tuple[Callable[[Any], bool], str]  # whether a value will do, and what would


def _whole(least: int) -> Check:
    return lambda v: type(v) is int and v >= least, f"a whole number of at least {least}"


def _one_of(*choices: str | None) -> Check:
    names = " or ".join("null" if c is None else repr(c) for c in choices)
    return lambda v: (v is None or isinstance(v, str)) and v in choices, names


def _heads(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(type(v) is int and v >= 0 for v in value)
        and len(set(value)) == len(value)
    )


_FLAG: Check = (lambda v: isinstance(v, bool), "true or false")
_POSITIVE: Check = (lambda v: type(v) in (int, float) and 0 < v < float("inf"), "a positive number")
_POSITIVE_OR_NONE: Check = (lambda v: v is None or _POSITIVE[0](v), "a positive number or null")
_TEXTS: Check = (
    lambda v: isinstance(v, (list, tuple)) and all(isinstance(text, str) for text in v),
    "a list of names, one for each head",
)
_ROPE: Check = (
    lambda v: (
        isinstance(v, Mapping)
        and type(v.get("dim")) is int
        and v["dim"] > 0
        and v["dim"] % 2 == 0
        and type(v.get("max_position_embeddings")) is int
        and isinstance(v.get("parameters"), Mapping)
    ),
    "dim (an even number), parameters and max_position_embeddings",
)

_ALWAYS: dict[str, Check] = {
    "layer": _whole(0),
    "heads": (_heads, "a list of heads, at least one and none twice"),
    "head_dim": _whole(1),
    "mode": _one_of("add", "replace"),
    "init": _one_of("ssm", "random", "teacher"),
    "reads": _TEXTS,
    "qk_width": _whole(1),
    "v_width": _whole(1),
    "activation": _one_of("silu", None),
    "gate": _FLAG,
    "bias": _FLAG,
    "norm_eps": _POSITIVE,
}
_OPTIONAL: dict[str, Check] = {"unit": _one_of("head", "layer"), "gate_bias": _FLAG}
_OF_CONVOLUTIONS: dict[str, Check] = {"conv_kernel": _whole(1), "conv_bias": _FLAG}
_OF_STREAMS: dict[str, Check] = {"conv_kernel": _whole(0), "rank": _whole(1), "stream_eps": _POSITIVE_OR_NONE}
_OF_DONORS: dict[str, Check] = {"conv_kernel": _whole(0), "kv_heads": _whole(1), "out_bias": _FLAG, "rope": _ROPE}


def check_entries(splice: Any, streams: bool) -> None:
    """Raises ValueError where an entry lacks a field or holds a value that no branch could be built from.

    Args:
        splice: the config field.
        streams: whether copies of a head read the mixer's streams, as in Mamba-1.
    """
    if splice is None:
        return
    if not isinstance(splice, (list, tuple)):
        raise _wrong("splice", splice, "a list of one entry for each spliced layer, or null")
    seen: dict[int, int] = {}
    for index, site in enumerate(splice):
        name = f"splice[{index}]"
        if not isinstance(site, Mapping):
            raise _wrong(name, site, "a mapping of fields")
        for field, check in _ALWAYS.items():
            _check(name, site, field, check)
        own = {"ssm": _OF_STREAMS if streams else _OF_CONVOLUTIONS, "teacher": _OF_DONORS}
        for field, check in own.get(site["init"], _OF_CONVOLUTIONS).items():
            _check(name, site, field, check)
        for field in _OPTIONAL.keys() & site.keys():
            _check(name, site, field, _OPTIONAL[field])
        if len(site["reads"]) != len(site["heads"]):
            raise _wrong(f"{name}.reads", site["reads"], _TEXTS[1])
        if site["init"] == "teacher" and len(site["heads"]) % site["kv_heads"]:
            raise _wrong(f"{name}.kv_heads", site["kv_heads"], f"a divisor of the {len(site['heads'])} heads")
        first = seen.setdefault(site["layer"], index)
        if first != index:
            hint = f"another layer (splice[{first}] has this one; list all heads of a layer in one entry)"
            raise _wrong(f"{name}.layer", site["layer"], hint)


def check_places(splice: Any, layers: Sequence[int], num_heads: int, head_dim: int, whole: bool, streams: bool) -> None:
    """Raises ValueError where an entry is for no site of the model; `check_entries` comes first.

    Args:
        layers: those that take a splice.
        num_heads, head_dim: of the model's SSM layers.
        whole: whether attention may take the place of a whole mixer.
        streams: as of `check_entries`.
    """
    for index, site in enumerate(splice or ()):
        name = f"splice[{index}]"
        if site["layer"] not in layers:
            raise _wrong(f"{name}.layer", site["layer"], f"one of the layers that take a splice, {list(layers)}")
        if site.get("unit", "head") == "layer":
            if not whole:
                raise _wrong(f"{name}.unit", "layer", "'head': this model takes single heads only")
            for field, value in (("init", "teacher"), ("mode", "replace")):
                if site[field] != value:
                    raise _wrong(f"{name}.{field}", site[field], f"{value!r} with unit 'layer'")
            continue
        if max(site["heads"]) >= num_heads:
            raise _wrong(f"{name}.heads", list(site["heads"]), f"heads from 0 to {num_heads - 1}")
        widths = ("head_dim", "v_width") if streams and site["init"] == "ssm" else ("head_dim",)
        for field in widths:
            if site[field] != head_dim:
                raise _wrong(f"{name}.{field}", site[field], f"{head_dim}, the width of the model's heads")


def _check(name: str, site: Mapping[str, Any], field: str, check: Check) -> None:
    fits, what = check
    if field not in site:
        raise ValueError(f"{name}.{field} is missing. It needs {what}.")
    if not fits(site[field]):
        raise _wrong(f"{name}.{field}", site[field], what)


def _wrong(field: str, value: Any, what: str) -> ValueError:
    text = repr(value)
    return ValueError(f"{field}: {text if len(text) <= 80 else text[:77] + '...'}. It needs {what}.")
