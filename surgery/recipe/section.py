"""The base class of recipe sections, and the types that they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0, le=10**9, strict=True)]
Tokens = Annotated[int, Field(gt=0, le=10**15, strict=True)]  # of a whole training
Pairs = Annotated[int, Field(ge=2, le=100, strict=True, description="Values are distinct integers 0-99.")]

Module = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
Plugins = Annotated[
    tuple[Module, ...],
    Field(description="Modules on the import path that register probes, objectives or other parts. They are run."),
]


class Section(BaseModel):
    """A section of a recipe: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
