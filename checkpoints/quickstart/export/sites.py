"""The kinds of attention branch, and the config field `splice`: its entries, and their checks.

Shipped with every exported checkpoint, so it imports the standard library only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

BUILT_IN = ("ssm", "random", "teacher")  # registered by attention.py and donor.py
BRANCHES: dict[str, type[Any]] = {}  # by name, which is `init` in an entry of `config.splice`

Check = tuple[Callable[[Any], bool], str]  # accepts a value; the words of the message say which values it accepts


def register_branch(name: str) -> Callable[[type[Any]], type[Any]]:
    """Decorate a subclass of `SplicedAttention`: `splice.init: NAME` then builds it.

    Raises:
        ValueError: another class has this name.
    """

    def register(branch: type[Any]) -> type[Any]:
        present = BRANCHES.get(name, branch)
        if (present.__module__, present.__qualname__) != (branch.__module__, branch.__qualname__):
            taken = f"{present.__module__}.{present.__qualname__}"
            raise ValueError(f"attention branch {name!r}: {taken} has this name already. Choose another name.")
        BRANCHES[name] = branch
        return branch

    return register


def at_least(least: int) -> Check:
    """Accept whole numbers of at least `least`."""
    return lambda v: type(v) is int and v >= least, f"a whole number of at least {least}"


def one_of(*choices: str | None) -> Check:
    """Accept one of these names, or None where it is among them."""
    names = " or ".join("null" if c is None else repr(c) for c in choices)
    return lambda v: (v is None or isinstance(v, str)) and v in choices, names


def _heads(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(type(v) is int and v >= 0 for v in value)
        and len(set(value)) == len(value)
    )


FLAG: Check = (lambda v: isinstance(v, bool), "true or false")
POSITIVE: Check = (lambda v: type(v) in (int, float) and 0 < v < float("inf"), "a positive number")
POSITIVE_OR_NONE: Check = (lambda v: v is None or POSITIVE[0](v), "a positive number or null")
NAMES: Check = (
    lambda v: isinstance(v, (list, tuple)) and all(isinstance(text, str) for text in v),
    "a list of names, one for each head",
)

# Fields of every entry; `init` is checked against the registered branches, which bring more fields.
_ALWAYS: dict[str, Check] = {
    "layer": at_least(0),
    "heads": (_heads, "a list of heads, at least one and none twice"),
    "head_dim": at_least(1),
    "mode": one_of("add", "replace"),
    "reads": NAMES,
    "qk_width": at_least(1),
    "v_width": at_least(1),
    "activation": one_of("silu", None),
    "gate": FLAG,
    "bias": FLAG,
    "norm_eps": POSITIVE,
}
_OPTIONAL: dict[str, Check] = {"unit": one_of("head", "layer"), "gate_bias": FLAG, "copied_width": at_least(1)}


def splice_sites(splice: list | None) -> dict[int, dict[str, Any]]:
    """Return the entries of the config field `splice` by layer index."""
    return {site["layer"]: site for site in splice or []}


def is_whole(site: Mapping[str, Any]) -> bool:
    """Return whether the branch replaces the layer's whole mixer."""
    return site.get("unit", "head") == "layer"


def check_entries(splice: Any, branch_class: Callable[[str], Any]) -> None:
    """Check every entry by itself.

    Args:
        splice: the config field.
        branch_class: the class of a branch by `init`.

    Raises:
        ValueError: an entry lacks a field or holds a value that no branch can be built from.
    """
    if splice is None:
        return
    if not isinstance(splice, (list, tuple)):
        raise wrong("splice", splice, "a list of one entry for each spliced layer, or null")
    first_of_layer: dict[int, int] = {}
    for index, site in enumerate(splice):
        name = f"splice[{index}]"
        if not isinstance(site, Mapping):
            raise wrong(name, site, "a mapping of fields")
        is_registered, names = one_of(*BRANCHES)
        init = is_registered, f"{names}, or a branch whose module has been imported"
        for field, check in {**_ALWAYS, "init": init}.items():
            _check(name, site, field, check)
        branch = branch_class(site["init"])
        for field, check in branch.fields.items():
            _check(name, site, field, check)
        for field in _OPTIONAL.keys() & site.keys():
            _check(name, site, field, _OPTIONAL[field])
        if len(site["reads"]) != len(site["heads"]):
            raise wrong(f"{name}.reads", site["reads"], NAMES[1])
        branch.check_site(name, site)
        first = first_of_layer.setdefault(site["layer"], index)
        if first != index:
            hint = f"another layer (splice[{first}] has this one; list all heads of a layer in one entry)"
            raise wrong(f"{name}.layer", site["layer"], hint)


def check_places(
    splice: Any,
    layers: Sequence[int],
    num_heads: int,
    head_dim: int,
    takes_layers: bool,
    branch_class: Callable[[str], Any],
) -> None:
    """Check every entry against the model; `check_entries` comes first.

    Args:
        layers: those that can be spliced.
        num_heads, head_dim: of the model's SSM layers.
        takes_layers: whether attention may replace a whole mixer.
        branch_class: as of `check_entries`.

    Raises:
        ValueError: an entry is for no site of the model.
    """
    for index, site in enumerate(splice or ()):
        name = f"splice[{index}]"
        if site["layer"] not in layers:
            raise wrong(f"{name}.layer", site["layer"], f"one of the layers that can be spliced, {list(layers)}")
        if is_whole(site):
            if not takes_layers:
                raise wrong(f"{name}.unit", "layer", "'head': this model takes single heads only")
            for field, value in (("init", "teacher"), ("mode", "replace")):
                if site[field] != value:
                    raise wrong(f"{name}.{field}", site[field], f"{value!r} with unit 'layer'")
            continue
        if max(site["heads"]) >= num_heads:
            raise wrong(f"{name}.heads", list(site["heads"]), f"heads from 0 to {num_heads - 1}")
        for field in branch_class(site["init"]).equal_widths:
            if site[field] != head_dim:
                raise wrong(f"{name}.{field}", site[field], f"{head_dim}, the width of the model's heads")


def _check(name: str, site: Mapping[str, Any], field: str, check: Check) -> None:
    accepts, accepted = check
    if field not in site:
        raise ValueError(f"{name}.{field} is missing. It needs {accepted}.")
    if not accepts(site[field]):
        raise wrong(f"{name}.{field}", site[field], accepted)


def wrong(field: str, value: Any, accepted: str) -> ValueError:
    """Return the error for a value that a field does not accept."""
    text = repr(value)
    return ValueError(f"{field}: {text if len(text) <= 80 else text[:77] + '...'}. It needs {accepted}.")
