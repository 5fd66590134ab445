"""Read the config field `splice` of an export: which layers have attention heads, and the shapes that vLLM needs.

Standard library only, so that a config can be checked without torch and without vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

SPLICE_VERSIONS = (1,)  # of the field `splice_version`; a config without it is version 1
MODES = ("add", "replace")
BRANCHES = ("ssm", "random")
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # those of vLLM's attention on the CPU
CONV_KERNELS = (2, 3, 4)  # widths of vLLM's causal convolution

REQUIRED = {
    "layer", "heads", "head_dim", "mode", "init", "reads", "qk_width", "v_width", "activation", "gate", "bias",
    "norm_eps", "conv_kernel", "conv_bias",
}  # fmt: skip
OPTIONAL = {"unit", "gate_bias", "out_bias", "copied_width"}
STREAM_FIELDS = {"rank", "stream_eps"}  # of copied heads in Mamba-1, which read the mixer's streams


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


WHOLE = (_is_whole, "a whole number of at least 1")
FLAG = (lambda value: isinstance(value, bool), "true or false")
POSITIVE = (_is_positive, "a positive number")
CHECKS = {
    "layer": (lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
    "head_dim": WHOLE, "qk_width": WHOLE, "v_width": WHOLE, "copied_width": WHOLE, "rank": WHOLE,
    "gate": FLAG, "bias": FLAG, "conv_bias": FLAG, "gate_bias": FLAG, "out_bias": FLAG,
    "norm_eps": POSITIVE,
    "stream_eps": (lambda value: value is None or _is_positive(value), "a positive number or null"),
    "activation": (lambda value: value is None or value == "silu", "'silu' or null"),
}  # fmt: skip


@dataclass(frozen=True)
class Layers:
    """What a splice is checked against.

    Attributes:
        indices: the layers with an SSM mixer.
        num_heads, head_dim: heads of each, and their width.
        streams: whether copied heads read the mixer's streams.
    """

    indices: list[int]
    num_heads: int
    head_dim: int
    streams: bool = False


@dataclass(frozen=True)
class Site:
    """The attention heads of one layer.

    Attributes:
        layer: index of the layer.
        heads: the SSM heads that they stand beside (`add`) or replace (`replace`).
        head_dim: width of an SSM head.
        mode: `add` or `replace`.
        qk_width, v_width: widths of a query or key, and of a value.
        copied_width: how many channels of query and key are copies of the SSM's; the others are new.
        silu: whether SiLU follows the convolution, on values and copied channels.
        gate, gate_bias, bias, conv_bias, out_bias: which modules and biases the branch has.
        conv_kernel: width of the convolution.
        norm_eps: of the RMSNorm of every head.
        rank: width of the mixer's dt, for heads that read its streams; None for others. Those have no convolution.
        stream_eps: of the RMSNorm of the mixer's dt, B and C; None where it has none.
    """

    layer: int
    heads: tuple[int, ...]
    head_dim: int
    mode: str
    qk_width: int
    v_width: int
    copied_width: int
    silu: bool
    gate: bool
    gate_bias: bool
    bias: bool
    conv_bias: bool
    out_bias: bool
    conv_kernel: int
    norm_eps: float
    rank: int | None = None
    stream_eps: float | None = None

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values."""
        count = len(self.heads)
        return count * self.qk_width, count * self.qk_width, count * self.v_width

    @property
    def replaced_channels(self) -> list[int]:
        """The mixer's channels that the output projection must ignore."""
        if self.mode != "replace":
            return []
        return [head * self.head_dim + channel for head in self.heads for channel in range(self.head_dim)]


def read_sites(splice: Any, version: Any, layers: Layers) -> dict[int, Site]:
    """Return the sites by layer.

    Args:
        splice: the config field.
        version: the config field `splice_version`, 1 if the config has none.
        layers: of the model.

    Raises:
        ValueError: one line that names the field, its value and what the plugin serves.
    """
    if type(version) is not int or version not in SPLICE_VERSIONS:
        known = ", ".join(map(str, SPLICE_VERSIONS))
        raise ValueError(f"splice_version: {version!r}. This plugin serves version {known}. Install a newer plugin.")
    if not isinstance(splice, (list, tuple)) or not splice:
        raise wrong("splice", splice, "a list of one entry for each spliced layer. Serve a plain base as itself")
    sites: dict[int, Site] = {}
    for index, entry in enumerate(splice):
        name = f"splice[{index}]"
        site = _site(name, entry, layers.streams)
        if site.layer not in layers.indices or site.layer in sites:
            raise wrong(f"{name}.layer", site.layer, f"one of the layers {layers.indices}, none twice")
        if not all(0 <= head < layers.num_heads for head in site.heads):
            raise wrong(f"{name}.heads", list(site.heads), f"heads from 0 to {layers.num_heads - 1}")
        if site.head_dim != layers.head_dim:
            raise wrong(f"{name}.head_dim", site.head_dim, f"{layers.head_dim}, the width of the model's heads")
        sites[site.layer] = site
    return dict(sorted(sites.items()))


def attention_shape(sites: Mapping[int, Site], own: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return how many heads every branch has in vLLM, and their width.

    All branches get one shape. Missing heads and channels are zeros, which change no output. Where the base has
    attention of its own, the shape is the base's if the heads fit into it; otherwise the cache of a token is a multiple
    or a divisor of the base's, since vLLM gives all layers pages of one size.

    Args:
        sites: the spliced layers.
        own: key and value heads of the base's own attention, and their width.

    Raises:
        ValueError: a head is wider than the attention kernels take.
    """
    count = max(len(site.heads) for site in sites.values())
    widest = max(max(site.qk_width, site.v_width) for site in sites.values())
    fitting = [size for size in HEAD_SIZES if size >= widest]
    if not fitting:
        raise ValueError(f"splice: heads of width {widest}. vLLM's attention takes at most {HEAD_SIZES[-1]}.")
    if own is None:
        return count, fitting[0]
    if count <= own[0] and widest <= own[1]:
        return own
    page = own[0] * own[1]
    shapes = [(heads, size) for heads in range(count, count + page + 1) for size in fitting]
    return min(
        (shape for shape in shapes if prod(shape) % page == 0 or page % prod(shape) == 0),
        key=lambda shape: (prod(shape), shape),
    )


def conv_state_shape(sites: Mapping[int, Site]) -> tuple[int, int]:
    """Return channels and past tokens of the branches' convolution state, the largest of all layers.

    vLLM wants a state in every layer. Without convolutions it is one number.
    """
    convolved = [site for site in sites.values() if site.rank is None]
    channels = max((sum(site.widths) for site in convolved), default=1)
    return channels, max((site.conv_kernel - 1 for site in convolved), default=1)


def wrong(field: str, value: Any, accepted: str) -> ValueError:
    """Return the error for a value that the plugin does not serve."""
    text = repr(value)
    return ValueError(f"{field}: {text if len(text) <= 80 else text[:77] + '...'}. The plugin needs {accepted}.")


def _site(name: str, entry: Any, streams: bool) -> Site:
    if not isinstance(entry, Mapping):
        raise wrong(name, entry, "a mapping of fields")
    versions = ", ".join(map(str, SPLICE_VERSIONS))
    for field, choices in (("mode", MODES), ("init", BRANCHES)):
        if not isinstance(entry.get(field), str) or entry[field] not in choices:
            raise wrong(f"{name}.{field}", entry.get(field), f"{' or '.join(choices)} (splice version {versions})")
    if entry.get("unit", "head") != "head":
        raise wrong(f"{name}.unit", entry["unit"], "'head': whole layers are not served")
    reads_streams = streams and entry["init"] == "ssm"
    required = REQUIRED | STREAM_FIELDS if reads_streams else REQUIRED
    ignored = OPTIONAL | STREAM_FIELDS if streams else OPTIONAL  # other heads of such a model have these fields too
    unknown = sorted(set(entry) - required - ignored)
    if unknown:
        raise ValueError(f"{name}.{unknown[0]}: unknown in splice version {versions}. Install a newer plugin.")
    missing = sorted(required - set(entry))
    if missing:
        raise ValueError(f"{name}.{missing[0]} is missing. Export the model again.")
    for field, (accepts, accepted) in CHECKS.items():
        if field in entry and not accepts(entry[field]):
            raise wrong(f"{name}.{field}", entry[field], accepted)
    heads = entry["heads"]
    whole = isinstance(heads, (list, tuple)) and all(type(head) is int for head in heads)
    if not whole or not heads or len(set(heads)) != len(heads):
        raise wrong(f"{name}.heads", heads, "a list of heads, at least one and none twice")
    kernel, kernels = entry["conv_kernel"], (0,) if reads_streams else CONV_KERNELS
    if type(kernel) is not int or kernel not in kernels:
        raise wrong(f"{name}.conv_kernel", kernel, f"one of {', '.join(map(str, kernels))}")
    copied = entry.get("copied_width", entry["qk_width"])
    if copied > entry["qk_width"]:
        raise wrong(f"{name}.copied_width", copied, f"1 to {entry['qk_width']}, the width of query and key")
    return Site(
        layer=entry["layer"],
        heads=tuple(heads),
        head_dim=entry["head_dim"],
        mode=entry["mode"],
        qk_width=entry["qk_width"],
        v_width=entry["v_width"],
        copied_width=copied,
        silu=entry["activation"] == "silu",
        gate=entry["gate"],
        gate_bias=entry.get("gate_bias", entry["bias"]),
        bias=entry["bias"],
        conv_bias=entry["conv_bias"],
        out_bias=entry.get("out_bias", False),
        conv_kernel=entry["conv_kernel"],
        norm_eps=entry["norm_eps"],
        rank=entry["rank"] if reads_streams else None,
        stream_eps=entry["stream_eps"] if reads_streams else None,
    )
