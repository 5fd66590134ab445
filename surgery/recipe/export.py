"""Recipe sections for the export, and for the hardware that `--dry-run` estimates for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from surgery.recipe.section import Positive, Section
from surgery.registry import NameOf, Registry

# Export formats by name. `surgery.export.formats` defines their base class and registers ours; it imports no torch.
EXPORT_FORMATS: Registry[Any] = Registry("export format", ("surgery.export.formats",))
SHARD_SIZE = r"^[1-9][0-9]{0,5}(KB|MB|GB|TB)$"
LAYER_FORMATS = ("nemotron_h", "gguf")  # of hybrids with inserted layers, and of no others


class Export(Section):
    """The exported folder: its format and the precision of its weights."""

    format: Annotated[str, NameOf(EXPORT_FORMATS)] = "transformers"
    """A registered export format. Default: safetensors with modelling files for transformers, or `nemotron_h` with
    `splice.form: block` or `pair`: safetensors of transformers' own class, without code. `gguf` adds a file for
    llama.cpp to these."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the stored weights."""
    license: str | None = None
    """License for the model card. Default: the license in the base model's card."""
    max_shard_size: str = Field("50GB", pattern=SHARD_SIZE)
    """Larger weights are split into files of this size."""
    chat_template: str | None = Field(None, min_length=1)
    """Chat template of the exported tokenizer, for chat endpoints of servers: `plain`, which joins the messages as
    text, or the path of a Jinja file. Default: the base's, if it has one."""
    llama_cpp: str | None = Field(None, min_length=1)
    """`gguf` only: folder of llama.cpp, or its convert_hf_to_gguf.py. Default: the script on the PATH."""
    pre_tokenizer: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """`gguf` only: llama.cpp's name for the rule that splits text into words, such as `gpt-2`. Default: the one that
    gives the same tokens. If none does, the export is refused."""

    @model_validator(mode="after")
    def _options_of_gguf_are_used(self) -> Export:
        for name in ("llama_cpp", "pre_tokenizer"):
            if getattr(self, name) is not None and self.format != "gguf":
                raise ValueError(f"export.{name} needs export.format: gguf. Set it, or remove {name}")
        return self


class Hardware(Section):
    """The machine to estimate for. Only `--dry-run` uses it."""

    gpu: str | None = None
    """GPU name, such as A100-80GB."""
    count: Positive = 1
    """Number of GPUs. Each holds the whole model and its share of a step's documents."""
    memory_gib: float | None = Field(None, gt=0, le=10**6)
    """Memory of one GPU, in GiB. Default: what is free on this machine."""
    tflops: float | None = Field(None, gt=0, le=10**6)
    """TFLOP/s that one GPU reaches in training, to estimate the time. By default a few steps with random weights are
    timed on this machine, if they are small."""
