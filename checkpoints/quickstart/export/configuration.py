"""The mixin of a hybrid's config: the field `splice`, its checks, and what the cache keeps for each layer.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only. transformers
copies a modelling file and what it imports relatively. A class from outside this package imports it by name, `from
surgery.hybrid.attention import ...`, which a folder cannot resolve: its file is saved with relative imports. Branches
from outside are imported by one more module, which `auto_map` then names.
"""

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from .attention import SplicedAttention
from .donor import DonorAttention  # noqa: F401  (registers its branch)
from .sites import BRANCHES, BUILT_IN, check_entries, check_places, is_whole, splice_sites

ENTRY = "hybrid_with_branches"
LORA_TARGETS = ("in_proj", "out_proj")  # projections of every mixer
_HERE = Path(__file__).parent
_RELATIVE = re.compile(rb"^[ \t]*from[ \t]+\.(\w+)[ \t]+import\b", re.MULTILINE)
_ABSOLUTE = re.compile(rb"^([ \t]*from[ \t]+)surgery\.hybrid(\.\w+[ \t]+import\b)", re.MULTILINE)


class HybridConfigMixin:
    """Put before a family's config class.

    Fields:
        splice: one entry for each spliced layer: `layer`, `heads`, `head_dim` (the width of the SSM's heads), `mode`,
            `init`, `reads`, and the fields of the branch. The one source of what is spliced where; `layer_types`
            follows it.

    Attributes:
        takes_layers: whether attention may replace a whole mixer.
        branch_variants: the family's own class for a kind of branch, by `init`.

    Raises:
        ValueError: an entry of `splice` lacks a field, or has a value that the model cannot be built from.
    """

    takes_layers = False
    branch_variants = {}

    @property
    def number_of_conv_states(self) -> int:
        """The SSM's convolution state, and the branch's."""
        return 2

    def branch_class(self, init: str) -> type[SplicedAttention]:
        """Return the class of a branch."""
        return self.branch_variants.get(init) or BRANCHES[init]

    def __post_init__(self, **kwargs: Any) -> None:
        check_entries(self.splice, self.branch_class)
        super().__post_init__(**kwargs)
        self._check_places()

    def ssm_heads(self) -> tuple[int, int]:
        """Return how many heads an SSM layer has, and their width."""
        return self.num_heads, self.head_dim

    def validate(self) -> None:
        """Check `splice`, and run the family's own checks, which know its own layer types only. Raises ValueError."""
        check_entries(self.splice, self.branch_class)
        self._check_places()
        with self._unspliced():
            super().validate()

    def _check_places(self) -> None:
        if self.splice:
            with self._unspliced():
                kinds = getattr(self, "layers_block_type", None) or self.layer_types
            layers = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
            check_places(self.splice, layers, *self.ssm_heads(), self.takes_layers, self.branch_class)

    @contextmanager
    def _unspliced(self) -> Iterator[None]:
        splice, self.splice = self.splice, None
        try:
            yield
        finally:
            self.splice = splice

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As transformers'. Where modelling files are saved, `auto_map` names all classes, whichever is saved."""
        if self._auto_class is not None:
            self.auto_map = auto_map(self)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """As transformers', which has copied the modelling file by then; modules from outside are added or replaced.

        Raises:
            ValueError: a class from outside this package cannot travel; see `outside_modules`.
        """
        modules = outside_modules(self) if self._auto_class is not None else {}
        if modules:
            self.auto_map = auto_map(self)
            for name, text in modules.items():
                Path(json_file_path).parent.joinpath(name).write_bytes(text)
        super().to_json_file(json_file_path, use_diff=use_diff)

    def to_dict(self) -> dict[str, Any]:
        """As transformers'. PEFT asks for it before it looks the model type up among its default targets."""
        peft = sys.modules.get("peft.utils.constants")
        if peft is not None:
            peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(self.model_type, list(LORA_TARGETS))
        return super().to_dict()

    def cache_types(self, plain: list[str]) -> list[str]:
        """Return what the cache keeps for each layer: keys and values too where spliced, or only in a whole layer."""
        spliced = {i: "full_attention" if is_whole(site) else "hybrid" for i, site in splice_sites(self.splice).items()}
        return [spliced.get(i, kind) for i, kind in enumerate(plain)]


def auto_map(config: Any) -> dict[str, str]:
    """Return the config's `auto_map`: the module and class of config, model and causal language model.

    `AutoModelForDecision` names the causal language model too: `transformers serve` 5.23 finds a folder's code by that
    entry only.
    """
    module, stem = type(config).__module__.rsplit(".", 1)[-1], type(config).__name__.removesuffix("Config")
    if _outside_branches(config):
        module = ENTRY
    names = {"AutoConfig": "Config", "AutoModel": "Model"}
    names |= dict.fromkeys(("AutoModelForCausalLM", "AutoModelForDecision"), "ForCausalLM")
    return {auto: f"{module}.{stem}{suffix}" for auto, suffix in names.items()}


def outside_modules(config: Any) -> dict[str, bytes]:
    """Return the files that transformers does not copy, by name: none where all classes are of this package.

    Raises:
        ValueError: a class cannot travel: it has no file, its file has the name of one of ours, or imports more than
            modules of `surgery.hybrid` and installed packages.
    """
    branches = _outside_branches(config)
    classes = [cls for cls in (type(config), *branches) if branches or _is_outside(cls)]
    modules = dict(module_of(cls) for cls in classes)
    if branches:
        stem = type(config).__name__.removesuffix("Config")
        names = ", ".join(f"{stem}{suffix}" for suffix in ("Config", "ForCausalLM", "Model"))
        lines = ['"""Register the attention branches of this checkpoint, and import its classes."""', ""]
        lines += sorted(f"from .{cls.__module__.rsplit('.', 1)[-1]} import {cls.__name__}  # noqa: F401"
                        for cls in branches)  # fmt: skip
        lines += [f"from .{type(config).__module__.rsplit('.', 1)[-1]} import {names}  # noqa: F401", ""]
        modules[f"{ENTRY}.py"] = "\n".join(lines).encode()
    needed = {name.decode() for text in modules.values() for name in _RELATIVE.findall(text)}
    siblings = [_HERE / f"{name}.py" for name in sorted(needed) if f"{name}.py" not in modules]
    for sibling in siblings:
        for file in (sibling, *map(Path, get_relative_import_files(sibling))):
            modules.setdefault(file.name, file.read_bytes())
    return modules


def module_of(cls: type[Any]) -> tuple[str, bytes]:
    """Return the name and the text of the file that a class travels in, with relative imports.

    Raises:
        ValueError: as `outside_modules`.
    """
    source = getattr(sys.modules[cls.__module__], "__file__", None)
    if source is None or not Path(source).is_file():
        raise _stays(cls, "it is in no file. Move it to a module")
    file = Path(source)
    if not _is_outside(cls):
        return file.name, file.read_bytes()
    if (_HERE / file.name).is_file():
        raise _stays(cls, f"a file of this name travels already. Rename {file.name}")
    text = _ABSOLUTE.sub(rb"\1\2", file.read_bytes())
    for node in ast.walk(ast.parse(text)):
        module = getattr(node, "module", None) or ""
        if isinstance(node, ast.ImportFrom) and node.level and not (_HERE / f"{module}.py").is_file():
            raise _stays(cls, f"{file.name} imports a sibling, line {node.lineno}. Put both into one file")
        absolute = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [module]
        if not getattr(node, "level", 0) and any(name.split(".")[0] == "surgery" for name in absolute):
            hint = "It may use `from surgery.hybrid.MODULE import NAME`, and no other import of surgery"
            raise _stays(cls, f"{file.name} imports {', '.join(absolute)}, line {node.lineno}. {hint}")
    return file.name, text


def _outside_branches(config: Any) -> list[type[Any]]:
    names = sorted({site["init"] for site in config.splice or ()} - set(BUILT_IN))
    return [BRANCHES[name] for name in names]


def _is_outside(cls: type[Any]) -> bool:
    return cls.__module__.rpartition(".")[0] != __package__


def _stays(cls: type[Any], reason: str) -> ValueError:
    return ValueError(f"{cls.__name__} cannot travel with a checkpoint: {reason}.")
