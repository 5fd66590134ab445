"""Estimate the memory that locating holds, from shapes alone.

Shape legend: B prompts of a batch, T tokens, D model width, I inner width of a mixer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from surgery.locate.batches import PromptBatches, is_stepwise
from surgery.locate.clean_run import read_tokens
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.models.sizes import sizes_of
from surgery.report.text import size_text


@dataclass(frozen=True)
class LocateMemory:
    """Bytes that one device holds while heads are measured, without the temporary tensors of a pass.

    Attributes:
        weights: parameters and buffers of the model.
        activations: what the clean run of a batch records for the changed runs. Of a query that is a decode step, all;
            of the other tokens then a dozen.
        states: states, keys and values of a batch before the query and, if the query is a decode step, after it.
    """

    weights: int
    activations: int
    states: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {size_text(getattr(self, field.name))}" for field in fields(self))
        return f"{size_text(self.total)} held on a device ({parts}), and temporary tensors"


def locate_memory(prompts: PromptBatches) -> LocateMemory:
    """Estimate the memory of locating, without values of several tokens.

    Args:
        prompts: the prompts, with the section of the recipe and the base, which may be on the meta device.
    """
    model, config = prompts.model, prompts.model.config
    specs, D, item = family_of(config).mixers(config), config.hidden_size, model.dtype.itemsize
    stream = 4 if getattr(config, "residual_in_fp32", False) else item
    recorded, projected = len({spec.layer for spec in specs}) * D * stream, 0
    for spec in specs:
        mixer, structure = mixer_of(model, spec), structure_of(spec)
        out_proj, in_proj = structure.out_proj(mixer), structure.in_proj(mixer)
        streams = 1 if structure.scan_reader(mixer) is out_proj else 2  # the heads, and the scan before a gated norm
        projected += item * (0 if in_proj is None else getattr(in_proj, "out_features", 0))
        recorded += item * (D + streams * spec.num_heads * spec.head_dim)
    size, shapes = sizes_of(model), [batch.input_ids.shape for batch in prompts.batches]
    whole, caches = [B * T * (recorded + projected) for B, T in shapes], 1
    if is_stepwise(prompts.section):
        kept = read_tokens(prompts.batches[0], specs).shape[1] + 2  # the query twice
        whole, caches = [B * (recorded + kept * projected) for B, _ in shapes], 2
    return LocateMemory(
        weights=sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers()),
        activations=max(whole),
        states=caches * max(B * (size.state_bytes + size.kv_bytes(T)) for B, T in shapes),
    )
