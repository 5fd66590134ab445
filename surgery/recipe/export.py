"""What is exported, and the hardware that `--dry-run` estimates for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from surgery.recipe.section import Positive, Section


class Export(Section):
    """The checkpoint folder that loads in stock transformers."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    license: str | None = Field(None, description="Licence for the card; that of the base's own card if not said.")
    max_shard_size: str = Field(
        "50GB", pattern=r"^[1-9][0-9]{0,5}(KB|MB|GB|TB)$", description="Weights above it lie in several files."
    )


class Hardware(Section):
    """What it is to run on. Nothing depends on it but what `--dry-run` says of the fit."""

    gpu: str | None = Field(None, description="Name of the GPU, such as A100-80GB.")
    count: Positive = Field(1, description="How many; each holds the whole model and its share of a step's documents.")
    memory_gib: float | None = Field(None, gt=0, le=10**6, description="Memory of one, in GiB.")
