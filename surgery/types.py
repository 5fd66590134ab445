"""The values that stages exchange, with their checks and their JSON form: HeadId, MixerSpec, HeadSet, Graft, Plan.

Terms follow "Understanding the Skill Gap in Recurrent Language Models: The Role of the Gather-and-Aggregate
Mechanism" (arXiv 2504.18574); `L17H24` is layer 17, head 24, both counted from 0.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from surgery.errors import PlanError

Role = Literal["gather", "aggregate", "both", "neither", "unmeasured"]
Reads = Literal["segment_end", "answer_token"]
READS: tuple[Reads, ...] = ("segment_end", "answer_token")
Where = Literal["everywhere", "context", "segment", "segment_end", "answer_token", "query"]
Fill = Literal["zero", "mean", "resample"]
Mode = Literal["add", "replace"]
Unit = Literal["head", "layer"]
Form = Literal["head", "block", "pair"]

Letter = Literal["H", "A"]

_HEAD_NAME = re.compile(r"L(\d+)([HA])(\d+)")


def better_read(gains: Mapping[str, float]) -> Reads | None:
    """Choose the position that a spliced head reads, by the gains in margin from oracle reads there.

    Where both lose margin, the smaller loss says nothing: on a base of paper/HEAD_CHOICE.md the head reached .73
    trained on the segment's end, and .85 on the answer token.

    Returns:
        The segment's end if it gains margin, and more than the answer token. Otherwise the answer token. None if
        neither was measured.
    """
    if not {"segment_end", "answer_token"} & gains.keys():
        return None
    end_gains_more = gains.get("segment_end", 0.0) > max(0.0, gains.get("answer_token", 0.0))
    return "segment_end" if end_gains_more else "answer_token"


@dataclass(frozen=True, order=True)
class HeadId:
    """Head of a mixer. `str()` and `parse()` are inverse: `HeadId.parse("L1H2") == HeadId(1, 2)`.

    Attributes:
        letter: `A` for the attention heads of a model that has SSM heads too, where one layer may have both; else `H`.
    """

    layer: int
    head: int
    letter: Letter = "H"

    def __str__(self) -> str:
        return f"{self.mixer}{self.head}"

    @property
    def mixer(self) -> str:
        """The `MixerSpec.name` of its mixer."""
        return f"L{self.layer}{self.letter}"

    @classmethod
    def parse(cls, name: str) -> HeadId:
        """Parse a name. Raises PlanError unless it has the form L<layer>H<head> or L<layer>A<head>."""
        match = _HEAD_NAME.fullmatch(name)
        if match is None:
            raise PlanError("head", repr(name), "Use L<layer>H<head>, both counted from 0, for example L1H2.")
        return cls(int(match[1]), int(match[3]), "A" if match[2] == "A" else "H")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        name, text = core_schema.str_schema(strict=True), core_schema.to_string_ser_schema()
        return core_schema.no_info_after_validator_function(cls.parse, name, serialization=text)


@dataclass(frozen=True)
class MixerSpec:
    """Mixer of a layer, as the model's config describes it.

    Attributes:
        layer: index of the block it sits in.
        path: dotted module path from the ForCausalLM model, e.g. `backbone.layers.1.mixer`.
        kind: its structure: `mamba2`, `mamba1`, `attention`, ...; see `surgery.models.layouts.STRUCTURES`.
        num_heads, head_dim: H and P; the inner width is H * P.
        num_groups: G; heads of one group share B and C, or a key and a value.
        state_size: N, the width of B and C; of query and key.
        native_heads: False if the "heads" are groups of channels that the model itself does not define.
        conv_kernel: width of the short convolution; 0 without one.
        letter: as in `HeadId`.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    layer: int
    path: str
    kind: str
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    native_heads: bool = True
    conv_kernel: int = 4
    letter: Letter = "H"

    def __post_init__(self) -> None:
        """Raise ValueError for a shape that no mixer has."""
        counts = (self.num_heads, self.head_dim, self.num_groups, self.state_size)
        if not all(type(n) is int and n > 0 for n in counts):
            names = "num_heads, head_dim, num_groups and state_size"
            raise ValueError(f"layer {self.layer}: {names} are {counts}. Set positive integers.")
        if not all(type(n) is int and n >= 0 for n in (self.layer, self.conv_kernel)):
            raise ValueError(f"layer {self.layer!r}, conv_kernel {self.conv_kernel!r}. Set integers of at least 0.")
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"layer {self.layer}: num_heads {self.num_heads} is no multiple of {self.num_groups} groups"
            )

    @property
    def name(self) -> str:
        """Name within the model: `L17H`, or `L17A` for attention in a model that also has SSM heads."""
        return f"L{self.layer}{self.letter}"

    @property
    def is_ssm(self) -> bool:
        """True for a recurrence, False for softmax attention."""
        return not self.kind.endswith("attention")

    @property
    def heads(self) -> tuple[HeadId, ...]:
        """All its heads."""
        return tuple(HeadId(self.layer, head, self.letter) for head in range(self.num_heads))

    def group_of(self, head: int) -> int:
        """Return the B/C group of a head."""
        return head // (self.num_heads // self.num_groups)


def geometry_hash(family: str, mixers: tuple[MixerSpec, ...], hidden_size: int, vocab_size: int) -> str:
    """Return a short hash of the shapes that head numbers refer to. Equal for a base and its fine-tunes."""
    payload = json.dumps([family, [asdict(m) for m in mixers], hidden_size, vocab_size], sort_keys=True)
    return hashlib.sha256(payload.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval: `value` in [`low`, `high`], from `n` observations."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", allow_inf_nan=False)

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class ScoredHead:
    """A head with its measurements.

    Attributes:
        role: from ablation before the query and at it. `unmeasured` if neither was tested.
        reads: the position of the oracle read (`sharpen`) with the larger gain. Training supervises the new head's
            attention there. None if not measured.
        scores: column name -> interval, in logits (margins) or in accuracy; see `surgery.recipe.methods`.
        given: heads that already had an oracle read when `reads` and its gain were measured.
    """

    head: HeadId
    role: Role
    reads: Reads | None
    scores: Mapping[str, Interval]
    given: tuple[HeadId, ...] = ()


@dataclass(frozen=True)
class ScoredGroup:
    """Heads that were measured together.

    Attributes:
        kind: `layer` (all heads of one mixer), `backup` (redundancy: one more head ablated after the others), `pair` (a
            Gather and an Aggregate head ablated together) or `chosen` (all chosen heads ablated).
        scores: as for a head. `alone` is the loss of separate ablations: the sum for a pair, the last head's for a
            backup.
    """

    kind: str
    heads: tuple[HeadId, ...]
    scores: Mapping[str, Interval]


@dataclass(frozen=True)
class HeadSet:
    """Located heads, ranked: the best first, in the order in which they would be spliced.

    Attributes:
        model: name or path of the model, as the user gave it, and its `revision`.
        geometry: `geometry_hash` of the model that was measured.
        heads: every head of the model with its scores, ranked by `method`.
        chosen: the heads that `method` selects for splicing, in order, each with the position that it reads.
        method: a value of `splice.select`.
        seed: seed of the probe.
        clean: accuracy and margin of the untouched model on the same prompts.
        groups: heads that were measured together, if the recipe requests it.
        cost: seconds, prompts, passes (full forward passes of one prompt) and peak_bytes of the measurement. The JSON
            form omits it, so that equal measurements give equal files.
    """

    model: str
    revision: str
    geometry: str
    heads: tuple[ScoredHead, ...]
    chosen: tuple[ScoredHead, ...]
    method: str
    seed: int
    clean: Mapping[str, Interval] = field(default_factory=dict)
    groups: tuple[ScoredGroup, ...] = ()
    cost: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class PromptAttention:
    """Attention of heads over one prompt of T tokens.

    Attributes:
        tokens: T decoded tokens.
        marks: name (`segment end`) -> position in 0..T-1. The rows are those of the token `query`.
        rows: name of a head -> (T,) shares of the query's row, 0 to 1.
        matrices: name of a head -> (T,T) shares, for a few heads. Row t is what token t reads; zero above the diagonal.
    """

    tokens: tuple[str, ...]
    marks: Mapping[str, int]
    rows: Mapping[str, NDArray[Any]]
    matrices: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Graft:
    """Splice of one mixer: its heads in order, with the position that each one reads.

    Attributes:
        init: the kind of branch, a name of `BRANCHES` in `surgery.hybrid`; looked up where the branch is built.
        unit: `layer` replaces the whole mixer by a teacher's attention; `heads` are then the teacher's.
        donors: with `init: teacher`, the teacher's head for each head, or its layer, such as `L17`.
        form: `head` adds to the mixer of the heads. `block` inserts an attention block into the stack of layers, and
            `pair` an SSM layer followed by such a block. `site` and `heads` are then the located heads, of which the
            block has as many.
        before: layer of the base that follows the inserted layers; None with `form: head`.
    """

    site: MixerSpec
    heads: tuple[int, ...]
    mode: Mode
    init: str
    reads: tuple[Reads, ...]
    unit: Unit = "head"
    donors: tuple[str, ...] = ()
    form: Form = "head"
    before: int | None = None

    def __post_init__(self) -> None:
        if len(self.reads) != len(self.heads):
            raise PlanError("graft.reads", f"{len(self.reads)} for {len(self.heads)} heads", "Set one for each head.")
        if (self.form == "head") != (self.before is None):
            raise PlanError("graft.before", self.before, "Set it with form block or pair, and only with these.")
        if self.unit == "layer":
            return
        if len(set(self.heads)) < len(self.heads) or not all(0 <= h < self.site.num_heads for h in self.heads):
            hint = f"Use different heads from 0 to {self.site.num_heads - 1}."
            raise PlanError(f"graft.heads of layer {self.site.layer}", list(self.heads), hint)

    @property
    def how(self) -> str:
        """The mode, or the form with its place, for tables: `add`, `replace`, `pair before layer 0`."""
        return self.mode if self.form == "head" else f"{self.form} before layer {self.before}"


@dataclass(frozen=True)
class Plan:
    """Every input of a splice except the weights. Made from a config without loading the model.

    Attributes:
        section: the recipe's section `splice` that `make_plan` had, with the widths of the branches. It is not part of
            the JSON form: None for a plan that was read from a file.
    """

    base: str
    geometry: str
    grafts: tuple[Graft, ...]
    seed: int
    teacher: str = ""
    # What a file holds under this name is not read.
    section: Annotated[Any, AfterValidator(lambda read: None)] = field(default=None, compare=False, repr=False)

    @property
    def heads(self) -> tuple[HeadId, ...]:
        """The spliced heads, by layer."""
        return tuple(HeadId(g.site.layer, h) for g in self.grafts for h in g.heads)


def to_json(value: HeadSet | Plan) -> dict[str, Any]:
    """Return the JSON form of a value, with heads as names. Inverse: `head_set_from_json`, `plan_from_json`."""
    kind: type = type(value)
    data: dict[str, Any] = _adapter(kind).dump_python(value, mode="json", exclude={"cost", "section"}, warnings=False)
    for graft in data.get("grafts", ()):
        if graft["form"] == "head":  # there is no inserted layer
            del graft["form"], graft["before"]
    return data


def head_set_from_json(data: Mapping[str, Any]) -> HeadSet:
    """Parse the JSON form. Raises PlanError where a field is missing or malformed."""
    head_set: HeadSet = _parsed(data, HeadSet, "heads.json", "It is not a HeadSet. Write it with `surgery locate`.")
    return head_set


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """Parse the JSON form. Raises PlanError where a field is missing or malformed."""
    plan: Plan = _parsed(data, Plan, "plan.json", "It is not a Plan. Write it with `surgery plan`.")
    return plan


def _parsed(data: Mapping[str, Any], kind: type, file: str, hint: str) -> Any:
    try:
        return _adapter(kind).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise PlanError(file, f"{place}: {fault['msg']}"[:200], hint) from error


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
