"""The mixin of a hybrid's config: the field `splice`, its checks, and what the cache keeps for each layer.

Shipped with every exported checkpoint, so it imports the standard library, torch and transformers only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .attention import SplicedAttention
from .branches import BRANCHES
from .donor import DonorAttention  # noqa: F401  (registers its branch)
from .shipping import auto_map, outside_modules
from .sites import check_entries, check_places, is_whole, splice_sites


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
            ValueError: a class from outside this package cannot travel; see `shipping`.
        """
        modules = outside_modules(self) if self._auto_class is not None else {}
        if modules:
            self.auto_map = auto_map(self)
            for name, text in modules.items():
                Path(json_file_path).parent.joinpath(name).write_bytes(text)
        super().to_json_file(json_file_path, use_diff=use_diff)

    def cache_types(self, plain: list[str]) -> list[str]:
        """Return what the cache keeps for each layer: keys and values too where spliced, or only in a whole layer."""
        spliced = {i: "full_attention" if is_whole(site) else "hybrid" for i, site in splice_sites(self.splice).items()}
        return [spliced.get(i, kind) for i, kind in enumerate(plain)]
