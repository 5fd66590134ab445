"""Recipe sections for the export, and for the hardware that `--dry-run` estimates for."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from surgery.recipe.section import Positive, Section
from surgery.registry import NameOf, Registry

# Export formats by name. `surgery.export.formats` defines their base class and registers ours; it imports no torch.
EXPORT_FORMATS: Registry[Any] = Registry("export format", ("surgery.export.formats",))


class Export(Section):
    """The exported folder: its format and the precision of its weights."""

    format: Annotated[str, NameOf(EXPORT_FORMATS)] = Field(
        "transformers",
        description="A registered export format. Default: safetensors with modelling files for transformers, or "
        "`nemotron_h` with `splice.form: block` or `pair`: safetensors of transformers' own class, without code.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Precision of the stored weights.")
    license: str | None = Field(
        None, description="License for the model card. Default: the license in the base model's card."
    )
    max_shard_size: str = Field(
        "50GB",
        pattern=r"^[1-9][0-9]{0,5}(KB|MB|GB|TB)$",
        description="Larger weights are split into files of this size.",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Chat template of the exported tokenizer, for chat endpoints of servers: `plain`, which joins the "
        "messages as text, or the path of a Jinja file. Default: the base's, if it has one.",
    )
    new_keys: ClassVar[dict[str, Any]] = {"format": "transformers", "chat_template": None}


class Hardware(Section):
    """The machine to estimate for. Only `--dry-run` uses it."""

    gpu: str | None = Field(None, description="GPU name, such as A100-80GB.")
    count: Positive = Field(
        1, description="Number of GPUs. Each holds the whole model and its share of a step's documents."
    )
    memory_gib: float | None = Field(None, gt=0, le=10**6, description="Memory of one GPU, in GiB.")
