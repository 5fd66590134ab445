"""Base class of all recipe sections, and shared number types."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema, core_schema

from surgery.probes.pairs import num_values
from surgery.types import HeadId

Positive = Annotated[int, Field(gt=0, le=10**9, strict=True)]
Tokens = Annotated[int, Field(gt=0, le=10**15, strict=True)]  # of a whole stage
Pairs = Annotated[int, Field(ge=2, le=100, strict=True, description="Values are distinct integers 0-99.")]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


class _OneAlone:
    """Annotation of a list that may be written as its only entry, if that is of one of these classes."""

    def __init__(self, *kinds: type) -> None:
        self.kinds = kinds

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def in_a_list(value: Any) -> Any:
            return (value,) if isinstance(value, self.kinds) and not isinstance(value, bool) else value

        return core_schema.no_info_before_validator_function(in_a_list, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        several = handler(schema)
        return {"anyOf": [several["items"], several]}


def one_message(kinds: str) -> WrapValidator:
    """Give values of several kinds one error. Pydantic has one for each kind, under names that no recipe has."""

    def checked(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(f"It must be {kinds}") from None

    return WrapValidator(checked)


def _one_number(value: Any) -> Any:
    if isinstance(value, list | tuple):
        raise ValueError(
            "Use one number, such as 12. A source takes a range [low, high], an evaluation a list of sizes"
        )
    return value


def _as_range(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) != 2:
        raise ValueError("Use one number, or a range [low, high]. Each step draws one number from the range")
    return (value, value) if isinstance(value, int) and not isinstance(value, bool) else value


def ordered(value: tuple[float, float]) -> tuple[float, float]:
    """Raise ValueError for a range whose ends are in the wrong order."""
    if value[0] > value[1]:
        raise ValueError("the range is [low, high], with low <= high")
    return value


def _long_enough(groups: tuple[int, ...]) -> tuple[int, ...]:
    if sum(groups) < 4 or groups[0] < 3:
        raise ValueError("`groups` needs at least 4 digits, and at least 3 in the first group")
    return groups


def _is_head(name: str) -> str:
    HeadId.parse(name)
    return name


T = TypeVar("T")
OneOrMore = Annotated[tuple[T, ...], _OneAlone(str, Mapping)]  # of names or of sections

HeadName = Annotated[str, AfterValidator(_is_head)]  # such as L1H2

# `pairs` means one number in `locate`, a range in a source, and a list of sizes in `evaluate`. All accept one number.
OnePairs = Annotated[Pairs, BeforeValidator(_one_number)]
PairsRange = Annotated[
    tuple[Pairs, Pairs],
    AfterValidator(ordered),
    BeforeValidator(_as_range, json_schema_input_type=Pairs | tuple[Pairs, Pairs]),
]
PairsSizes = Annotated[tuple[Pairs, ...], Field(min_length=1, examples=[[4, 8]]), _OneAlone(int)]

_Words = Annotated[int, Field(ge=0, le=100, strict=True)]
_Digits = Annotated[int, Field(ge=1, le=16, strict=True)]
Filler = Annotated[
    Annotated[tuple[_Words, _Words], AfterValidator(ordered)] | None,
    Field(
        examples=[[0, 20]],
        description="kv_retrieval, phonebook, json_kv, multi_hop, records, key_echo, kv_repeated: range of the number "
        "of words between a key and its value, drawn for each record. By default no words.",
    ),
]
ValueDigits = Annotated[
    Annotated[tuple[_Digits, _Digits], AfterValidator(ordered)] | None,
    Field(
        examples=[[2, 6]],
        description="kv_retrieval, phonebook, json_kv, records, key_echo, kv_repeated: range of the number of digits "
        "of a value, drawn for each document. By default integers 0-99 for kv_retrieval, key_echo and kv_repeated, two "
        "digits for records, ten for phonebook, a string as long as the keys for json_kv.",
    ),
]
Groups = Annotated[
    Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(_long_enough)] | None,
    Field(
        examples=[[4]],
        description="json_kv: digits in each group of a key and of a value, such as [4] for short ones. By default "
        "those of a UUID.",
    ),
]


def check_value_digits(pairs: int, digits: tuple[int, int] | None) -> None:
    """Raise ValueError if fewer numbers than `pairs` have so many digits."""
    if digits is not None and num_values(digits[1]) < pairs:
        raise ValueError(
            f"there are {num_values(digits[1])} values of {digits[1]} digits, fewer than {pairs} `pairs`. "
            "Increase `value_digits`, or lower `pairs`"
        )


Module = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
Plugins = Annotated[
    tuple[Module, ...],
    Field(
        description="Modules on the import path that register probes, objectives or other parts. Imports run code.",
        examples=[["my_package.probes"]],
    ),
]


class Section(BaseModel):
    """A part of a recipe. Frozen; unknown keys are refused. The text under a field is its description in the schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @property
    def changed(self) -> dict[str, Any]:
        """Fields that differ from their defaults."""
        fields = type(self).model_fields.items()
        return {name: getattr(self, name) for name, field in fields if getattr(self, name) != field.default}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).get("properties", {})
        for section in (kind for kind in reversed(cls.__mro__) if issubclass(kind, Section)):
            for name, text in _texts_under_fields(section).items():
                properties[name]["description"] = text
        return described


def _texts_under_fields(section: type[Section]) -> dict[str, str]:
    """As `use_attribute_docstrings` of pydantic, which would read the source of every section at every start."""
    try:
        (body,) = ast.parse(dedent(inspect.getsource(section))).body
    except (OSError, TypeError, SyntaxError):  # typed at a prompt
        return {}
    texts = {}
    for field, text in pairwise(getattr(body, "body", ())):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(description))):
                texts[name] = " ".join(description.split())
    return texts


def section_of(section: type[Section] | None, key: Any) -> type[Section] | None:
    """The class of the section that a field holds, alone or in a list."""
    field = section.model_fields.get(key) if section is not None else None
    return next(_sections_in(field.annotation), None) if field is not None else None


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)
