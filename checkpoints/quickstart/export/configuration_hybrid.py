"""The config of a hybrid: its field `splice` names the layers that have spliced attention heads.

A folder with a hybrid holds this file, `modeling_hybrid.py` and the file of its family. They import the standard
library, torch and transformers only.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

BUILT_IN = ("ssm", "random", "teacher")  # the branches of modeling_hybrid.py
BRANCHES: dict[str, type[Any]] = {}  # classes of attention branches by name, which is `init` in an entry of `splice`
ENTRY = "hybrid_with_branches"  # module that imports the branches of others, and the classes of the family
LORA_TARGETS = ("in_proj", "out_proj")  # PEFT's default targets: projections that every mixer has

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


def _are_heads(v: Any) -> bool:
    return isinstance(v, (list, tuple)) and len(v) > 0 and all(type(h) is int and h >= 0 for h in v)


FLAG: Check = (lambda v: isinstance(v, bool), "true or false")
POSITIVE: Check = (lambda v: type(v) in (int, float) and 0 < v < float("inf"), "a positive number")
POSITIVE_OR_NONE: Check = (lambda v: v is None or POSITIVE[0](v), "a positive number or null")
NAMES: Check = (
    lambda v: isinstance(v, (list, tuple)) and all(isinstance(text, str) for text in v),
    "a list of names, one for each head",
)

# Fields of every entry of `splice`. A kind of branch has more, in its attribute `fields`.
_FIELDS: dict[str, Check] = {
    "layer": at_least(0),
    "heads": (lambda v: _are_heads(v) and len(set(v)) == len(v), "a list of heads, at least one and none twice"),
    "head_dim": at_least(1),  # the width of the SSM's heads
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


def wrong(field: str, value: Any, accepted: str) -> ValueError:
    """Return the error for a value that a field does not accept."""
    text = repr(value)
    return ValueError(f"{field}: {text if len(text) <= 80 else text[:77] + '...'}. It needs {accepted}.")


def splice_sites(splice: list | None) -> dict[int, dict[str, Any]]:
    """Return the entries of the config field `splice` by layer index."""
    return {site["layer"]: site for site in splice or []}


def is_whole(site: Mapping[str, Any]) -> bool:
    """Return whether the branch replaces the layer's whole mixer."""
    return site.get("unit", "head") == "layer"


class HybridConfigMixin:
    """Put before a family's config class.

    Fields:
        splice: one entry for each spliced layer: the fields above, `init`, and those of the branch. The one source of
            what is spliced where; `layer_types` follows it.

    Attributes:
        takes_layers: whether attention may replace a whole mixer.
        branch_variants: the family's own class for a kind of branch, by `init`.

    Raises:
        ValueError: an entry of `splice` lacks a field, or has a value that the model cannot be built from.
    """

    takes_layers = False
    branch_variants: Mapping[str, type[Any]] = {}
    number_of_conv_states = 2  # in the cache of a layer: the SSM's convolution, and the branch's

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_entries()
        super().__post_init__(**kwargs)
        self._check_places()

    def validate(self) -> None:
        """Check `splice`, and run the family's own checks, which know its own layer types only. Raises ValueError."""
        self._check_entries()
        self._check_places()
        with self._unspliced():
            super().validate()

    def branch_class(self, init: str) -> type[Any]:
        """Return the class of a branch."""
        return self.branch_variants.get(init) or BRANCHES[init]

    def ssm_heads(self) -> tuple[int, int]:
        """Return how many heads an SSM layer has, and their width."""
        return self.num_heads, self.head_dim

    def cache_types(self, plain: Sequence[str]) -> list[str]:
        """Return what the cache keeps for each layer: keys and values too where spliced, or only in a whole layer."""
        spliced = {i: "full_attention" if is_whole(site) else "hybrid" for i, site in splice_sites(self.splice).items()}
        return [spliced.get(i, kind) for i, kind in enumerate(plain)]

    def _check_entries(self) -> None:
        """Check every entry of `splice` by itself."""
        if self.splice is None:
            return
        if not isinstance(self.splice, (list, tuple)):
            raise wrong("splice", self.splice, "a list of one entry for each spliced layer, or null")
        first_of_layer: dict[int, int] = {}
        for index, site in enumerate(self.splice):
            name = f"splice[{index}]"
            if not isinstance(site, Mapping):
                raise wrong(name, site, "a mapping of fields")
            is_registered, names = one_of(*BRANCHES)
            init = (is_registered, f"{names}, or a branch whose module has been imported")
            _check(name, site, {**_FIELDS, "init": init})
            branch = self.branch_class(site["init"])
            _check(name, site, {**branch.fields, **{k: check for k, check in _OPTIONAL.items() if k in site}})
            if len(site["reads"]) != len(site["heads"]):
                raise wrong(f"{name}.reads", site["reads"], NAMES[1])
            branch.check_site(name, site)
            first = first_of_layer.setdefault(site["layer"], index)
            if first != index:
                hint = f"another layer (splice[{first}] has this one; list all heads of a layer in one entry)"
                raise wrong(f"{name}.layer", site["layer"], hint)

    def _check_places(self) -> None:
        """Check every entry against the model."""
        if not self.splice:
            return
        with self._unspliced():
            kinds = getattr(self, "layers_block_type", None) or self.layer_types
        layers = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
        num_heads, head_dim = self.ssm_heads()
        for index, site in enumerate(self.splice):
            name = f"splice[{index}]"
            if site["layer"] not in layers:
                raise wrong(f"{name}.layer", site["layer"], f"one of the layers that can be spliced, {layers}")
            if is_whole(site):
                if not self.takes_layers:
                    raise wrong(f"{name}.unit", "layer", "'head': this model takes single heads only")
                for field, value in (("init", "teacher"), ("mode", "replace")):
                    if site[field] != value:
                        raise wrong(f"{name}.{field}", site[field], f"{value!r} with unit 'layer'")
                continue
            if max(site["heads"]) >= num_heads:
                raise wrong(f"{name}.heads", list(site["heads"]), f"heads from 0 to {num_heads - 1}")
            for field in self.branch_class(site["init"]).equal_widths:
                if site[field] != head_dim:
                    raise wrong(f"{name}.{field}", site[field], f"{head_dim}, the width of the model's heads")

    @contextmanager
    def _unspliced(self) -> Iterator[None]:
        splice, self.splice = self.splice, None
        try:
            yield
        finally:
            self.splice = splice

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """As transformers'. Where code is saved, `auto_map` names all classes, and the modules of plugins are added."""
        if self._auto_class is not None:
            self.auto_map = auto_map(self)
            for name, text in outside_modules(self).items():
                Path(json_file_path).parent.joinpath(name).write_bytes(text)
        super().to_json_file(json_file_path, use_diff=use_diff)

    def to_dict(self) -> dict[str, Any]:
        """As transformers'. PEFT asks for it before it looks the model type up among its default targets."""
        if peft := sys.modules.get("peft.utils.constants"):
            peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(self.model_type, list(LORA_TARGETS))
        return super().to_dict()


def _check(name: str, site: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    for field, (accepts, accepted) in checks.items():
        if field not in site:
            raise ValueError(f"{name}.{field} is missing. It needs {accepted}.")
        if not accepts(site[field]):
            raise wrong(f"{name}.{field}", site[field], accepted)


def auto_map(config: Any) -> dict[str, str]:
    """Return the module and class of config, model and language model, whichever of them is saved."""
    module, stem = _module(type(config)), type(config).__name__.removesuffix("Config")
    if outside_branches(config):
        module = ENTRY
    names = {"AutoConfig": "Config", "AutoModel": "Model"}
    # `transformers serve` finds a folder's code by AutoModelForDecision only.
    names |= dict.fromkeys(("AutoModelForCausalLM", "AutoModelForDecision"), "ForCausalLM")
    return {auto: f"{module}.{stem}{suffix}" for auto, suffix in names.items()}


def outside_branches(config: Any) -> list[type[Any]]:
    """Return the classes of the branches that are not of this package."""
    return [BRANCHES[name] for name in sorted({site["init"] for site in config.splice or ()} - set(BUILT_IN))]


def outside_modules(config: Any) -> dict[str, bytes]:
    """Return the modules of classes from outside this package, which transformers does not copy, by file name.

    Such a module imports this package by name, `from surgery.hybrid.MODULE import NAME`, and is saved with relative
    imports. With branches from outside, `ENTRY` imports them and the family's classes.
    """
    branches, modules = outside_branches(config), dict[str, bytes]()
    for cls in (type(config), *branches):
        if cls in branches or cls.__module__.rpartition(".")[0] != __package__:
            source = Path(sys.modules[cls.__module__].__file__ or "")
            absolute = rb"^([ \t]*from[ \t]+)surgery\.hybrid(\.\w+[ \t]+import\b)"
            modules[source.name] = re.sub(absolute, rb"\1\2", source.read_bytes(), flags=re.MULTILINE)
    if branches:
        stem = type(config).__name__.removesuffix("Config")
        names = ", ".join(f"{stem}{suffix}" for suffix in ("Config", "ForCausalLM", "Model"))
        lines = ['"""Register the attention branches of this checkpoint, and import its classes."""', ""]
        lines += sorted(f"from .{_module(cls)} import {cls.__name__}  # noqa: F401" for cls in branches)
        lines += [f"from .{_module(type(config))} import {names}  # noqa: F401", ""]
        modules[f"{ENTRY}.py"] = "\n".join(lines).encode()
    for text in list(modules.values()):
        for name in re.findall(rb"^[ \t]*from[ \t]+\.(\w+)[ \t]+import\b", text, re.MULTILINE):
            sibling = Path(__file__).with_name(f"{name.decode()}.py")
            for file in [] if sibling.name in modules else [sibling, *map(Path, get_relative_import_files(sibling))]:
                modules.setdefault(file.name, file.read_bytes())
    return modules


def _module(cls: type[Any]) -> str:
    return cls.__module__.rpartition(".")[2]
