"""Schema of the section `splice`: the heads to splice, and their attention branch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from surgery.recipe.base import Teacher
from surgery.recipe.locate import Select
from surgery.recipe.section import HeadName, OneOrMore, Positive, Section
from surgery.registry import NameOf, Registry
from surgery.types import Form, Mode, Unit

INSERTED_INITS = {"block": ("random",), "pair": ("random", "ssm")}  # values of `init` by `form`
SIDE_CHANNELS = {"random": 64, "ssm": 128}  # default with `form: pair`, by `init`


class _Branches(Registry[Any]):
    """Names of attention branches, built-in and from plugins. Does not import torch."""

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Names with their classes. A built-in branch maps to its name until torch is imported."""
        module = sys.modules.get("surgery.hybrid.configuration_hybrid")
        built_in = {name: name for name in ("ssm", "random", "teacher")}
        return tuple({**built_in, **(module.BRANCHES if module else {})}.items())

    def needs_teacher(self, name: str) -> bool:
        """Whether this branch is copied from `splice.teacher`."""
        return bool(getattr(dict(self.items())[name], "needs_teacher", name == "teacher"))


_BRANCHES = _Branches("attention branch")


class Splice(Section):
    """Heads to splice, and the attention that they get."""

    select: Select = "patching"
    """How to choose heads: a ranking of a locating method, `list` (the heads in `heads`), or a control: `random`,
    `uniform` (evenly spaced). `patching` ranks by the margin lost when the head's output at the query is that for
    another answer, and needs `patching` in `locate.methods`."""
    num_heads: Positive = 1
    """Number of heads to splice."""
    heads: OneOrMore[HeadName] = Field((), examples=[["L1H2"]])
    """With `select: list`: names of the heads, such as L1H2."""
    mode: Mode = "add"
    """`add`: add attention to the SSM head. `replace`: use attention instead of the SSM head, which is silenced."""
    output: Literal["zero", "copy"] = "zero"
    """With `mode: add`: what the new heads add before training. `zero`: nothing. `copy`: what they read, through the
    output projection of the copied head, so that one which learns where to read answers at once. Needs `init: ssm`.
    With `form: pair` also the head's values and how open its gate is, found on a few prompts of `locate`."""
    init: Annotated[str, NameOf(_BRANCHES)] = "ssm"
    """Attention branch. `ssm`: copy the head's C, B, x and gate. `teacher`: copy a Transformer's attention. `random`:
    random weights, as a control, and the default of inserted layers with `output: zero`. With `form: pair`, `ssm`
    copies C and B of the layer that follows into the Gather layer."""
    unit: Unit = "head"
    """`layer`: replace the whole mixer of each chosen head by the teacher's attention (Llamba)."""
    with_block: bool = False
    """With `unit: layer`: also copy the teacher's norms and MLP of that layer. The norms keep the base's epsilon."""
    teacher: Teacher | None = None
    """With `init: teacher`: Transformer whose attention is copied."""
    random_width: Positive = 32
    """With `init: random`: width of query and key."""
    min_width: Positive | None = 64
    """With `init: ssm`: smallest width of query and key. The copies are as wide as the SSM state. Where the state is
    smaller than `min_width`, new channels are added, which start without effect on the attention. `null` adds no
    channels. Other branches have no `min_width`."""
    state_size: Positive | None = None
    """Cut the SSM state of every layer to this many channels before training: less memory per sequence. Keeps the
    channels of B and C that contribute most to the answers of located prompts. The control is cut the same way. By
    default the state is not cut."""
    form: Form = "head"
    """Where the attention goes. `head`: into the mixers of the chosen heads. `block`: into new blocks, each `h +
    attention(norm(h))` without a position code, inserted between layers. `pair`: a new Mamba-2 layer, which begins as a
    delay line of the tokens before, followed by such a block. `block` and `pair` need a plain Mamba-2 or a Nemotron-H.
    Their export is a Nemotron-H of transformers itself."""
    before: int | None = Field(None, ge=0, le=10**9, strict=True)
    """With `form: block` or `pair`: layer of the base before which to insert. By default the layer of the chosen
    heads."""
    head_dim: Positive | None = None
    """With `form: block` or `pair`: width of query, key and value of an attention head. By default 64. If the base has
    attention, it is that width. vLLM takes 32, 64, 80, 96, 112 or 128, for example, and not every width."""
    side_channels: int | None = Field(None, ge=0, le=10**6, strict=True)
    """With `form: pair`: channels added to the residual stream for each pair, by default 64, or 128 with `init: ssm`.
    The new Mamba-2 layer writes to them alone and the base does not read them, so the base works as before. With 0 it
    writes to the base's own channels."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_form_and_init(cls, data: Any) -> Any:
        """Defaults that depend on other keys.

        `form: block` and `pair` have no `min_width` and, without a copied output, `init: random`; `pair` has side
        channels. Of the other branches, only `init: ssm` has a `min_width`.
        """
        if isinstance(data, Mapping) and data.get("form") in ("block", "pair"):
            copies = data["form"] == "pair" and data.get("output") == "copy"
            data = {"init": "ssm" if copies else "random", "min_width": None, **data}
            if data["form"] == "pair" and data.get("side_channels") is None:
                data["side_channels"] = SIDE_CHANNELS.get(str(data["init"]), 0)
        if isinstance(data, Mapping) and data.get("init", "ssm") != "ssm":
            data = {"min_width": None, **data}
        return data

    @model_validator(mode="after")
    def _form(self) -> Splice:
        if self.form != "pair" and self.side_channels is not None:
            raise ValueError("`side_channels` needs `form: pair`: set it, or remove `side_channels`")
        if self.form == "head":
            for key in ("before", "head_dim"):
                if getattr(self, key) is not None:
                    raise ValueError(f"`{key}` needs `form: block` or `form: pair`: set it, or remove `{key}`")
            return self
        allowed = {"mode": ("add",), "init": INSERTED_INITS[self.form], "unit": ("head",)}
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                hint = "remove it, or set " + " or ".join(f"`{key}: {value}`" for value in values)
                raise ValueError(f"`form: {self.form}` does not support `{key}: {getattr(self, key)}`: {hint}")
        if self.init == "ssm" and not self.side_channels:
            raise ValueError("`form: pair` with `init: ssm` needs `side_channels`: set 128, or set `init: random`")
        if self.output == "copy" and self.before is not None:
            raise ValueError("`output: copy` copies from the layer of the chosen heads: remove `before`")
        for key in ("teacher", "min_width", "state_size"):
            if getattr(self, key) is not None:
                raise ValueError(f"`form: {self.form}` does not support `{key}`: remove it, or set `form: head`")
        return self

    @model_validator(mode="after")
    def _list_and_select(self) -> Splice:
        if len(set(self.heads)) < len(self.heads):
            raise ValueError(f"`heads` lists a head twice: {', '.join(self.heads)}. List each once")
        if (self.select == "list") != bool(self.heads):
            raise ValueError(
                "`heads` needs `select: list`" if self.heads else "`select: list` needs `heads`: list some"
            )
        if self.heads and "num_heads" in self.changed and self.num_heads != len(self.heads):
            raise ValueError(
                f"`heads` lists {len(self.heads)}, but `num_heads` is {self.num_heads}: remove `num_heads`"
            )
        if _BRANCHES.needs_teacher(self.init) != (self.teacher is not None):
            raise ValueError(
                f"`init: {self.init}` needs `teacher`: set it"
                if self.teacher is None
                else f"`init: {self.init}` does not use `teacher`: remove it, or set `init: teacher`"
            )
        is_random = self.form == "head" and self.init == "random"
        if "random_width" in self.changed and not is_random:
            raise ValueError("`random_width` is for `form: head` with `init: random`: remove it")
        if self.min_width is not None and self.init != "ssm":
            hint = "set `random_width` instead" if self.init == "random" else "remove it, or set `init: ssm`"
            raise ValueError(f"`init: {self.init}` does not use `min_width`: {hint}")
        if self.output == "copy" and (self.form == "block" or (self.mode, self.init) != ("add", "ssm")):
            raise ValueError(
                "`output: copy` needs `form: head` or `pair`, `mode: add` and `init: ssm`: set them, or remove it"
            )
        if self.unit == "layer" and (self.init, self.mode) != ("teacher", "replace"):
            raise ValueError("`unit: layer` needs `init: teacher` and `mode: replace`")
        if self.with_block and self.unit != "layer":
            raise ValueError("`with_block` needs `unit: layer`")
        return self
