"""Schema of the sections `export` and `hardware`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from surgery.recipe.section import Positive, Section


class Export(Section):
    """The exported checkpoint, which loads in stock transformers."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    license: str | None = Field(
        None, description="Licence in the model card. By default the licence of the base's card."
    )
    max_shard_size: str = Field(
        "50GB", pattern=r"^[1-9][0-9]{0,5}(KB|MB|GB|TB)$", description="Maximum size of one weight file."
    )


class Hardware(Section):
    """The hardware of the run. Only `--dry-run` uses it, to estimate whether the run fits."""

    gpu: str | None = Field(None, description="Name of the GPU, such as A100-80GB.")
    count: Positive = Field(
        1, description="Number of GPUs. Each holds the whole model and its share of a step's documents."
    )
    memory_gib: float | None = Field(None, gt=0, le=10**6, description="Memory of one GPU in GiB.")
