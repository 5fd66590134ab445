"""Sources for building a branch: the base's heads, a seed, or a teacher's attention.

`SplicedAttention.plan_fields` and `fill` receive these objects, so that branches need no import from this library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.errors import PlanError
from surgery.hybrid.modeling_hybrid import RandomAttention, SplicedAttention
from surgery.models.donors import donor_fields, donor_mixers, donor_weights
from surgery.models.lookup import structure_of
from surgery.recipe import Splice
from surgery.splice.draw import Draw
from surgery.types import Graft, HeadId, MixerSpec

_RANDOM_KERNEL = 4  # width of a random branch's convolution; the one of Mamba-2


def donor_of(graft: Graft, teacher: PreTrainedConfig) -> tuple[MixerSpec, list[int] | None]:
    """Find the teacher's attention for a graft.

    Returns:
        The teacher's mixer and its heads to copy; None for the whole layer.

    Raises:
        PlanError: the donors of one graft are in different layers.
    """
    mixers = {spec.layer: spec for spec in donor_mixers(teacher)}
    if graft.unit == "layer":
        return mixers[int(graft.donors[0].removeprefix("L"))], None
    heads = [HeadId.parse(name) for name in graft.donors]
    if len({head.layer for head in heads}) > 1:
        hint = "The donors of one layer's heads must come from one layer of the teacher."
        raise PlanError("splice.teacher.donors", list(graft.donors), hint)
    return mixers[heads[0].layer], [head.head for head in heads]


@dataclass(frozen=True)
class PlanSource:
    """Source of the config fields of a branch. Has no weights.

    Attributes:
        graft: the site with its heads, mode and donors.
        config: config of the base.
        teacher: the teacher's config, for a branch with `needs_teacher`.
    """

    graft: Graft
    config: PreTrainedConfig
    splice: Splice
    teacher: PreTrainedConfig | None = None

    @property
    def site(self) -> MixerSpec:
        """The mixer: `head_dim`, `state_size`, `conv_kernel`, ..."""
        return self.graft.site

    def plan_fields(self, branch: type[SplicedAttention]) -> dict[str, Any]:
        """Return widths, convolution and gate of a branch. Those that copy SSM heads have the heads' own.

        Raises:
            PlanError: as `donor_fields`.
        """
        site = self.site
        if branch.needs_teacher:
            return self.donor_fields()
        if issubclass(branch, RandomAttention):
            width, without = self.splice.random_width, {"gate": False, "activation": None}
            return {"qk_width": width, "v_width": site.head_dim, "conv_kernel": _RANDOM_KERNEL, **without}
        # Other branches than `ssm` decide about new channels themselves.
        width = max(site.state_size, (self.splice.min_width or 0) if self.graft.init == "ssm" else 0)
        return {
            "qk_width": width,
            **({"copied_width": site.state_size} if width > site.state_size else {}),
            "v_width": site.head_dim,
            "conv_kernel": 0 if branch.reads_streams else site.conv_kernel,  # streams have passed the mixer's own
            "gate": True,
        }

    def donor_fields(self) -> dict[str, Any]:
        """Return the fields of a branch that copies the teacher's attention.

        Raises:
            PlanError: as `donor_of`; or there is no teacher.
        """
        if self.teacher is None:
            hint = f"splice.init: {self.graft.init} needs a teacher. Set splice.teacher.model."
            raise PlanError("splice.teacher", None, hint)
        return {"donors": list(self.graft.donors), **donor_fields(self.teacher, *donor_of(self.graft, self.teacher))}


@dataclass(frozen=True)
class HeadSource:
    """Source of the weights of a branch.

    Attributes:
        graft: the site with its heads, mode and donors.
        mixer: the base's mixer, whose heads are copied.
        seed: seed of the plan.
        teacher: the teacher's model, for a branch with `needs_teacher`.
        copies_output: copy the heads' output projection too.
    """

    graft: Graft
    mixer: nn.Module
    seed: int
    teacher: PreTrainedModel | None = None
    copies_output: bool = False

    def fill(self, branch: SplicedAttention) -> None:
        """Set the weights of a branch: the teacher's, random ones, or copies of SSM heads.

        Raises:
            PlanError: as `copy` and `copy_output`.
        """
        if branch.needs_teacher:
            branch.build_rotary()
            branch.rotary.to(branch.scale.device)
            self.copy_donor(branch)
            return
        if isinstance(branch, RandomAttention):
            self.randomize(branch)
        else:
            self.copy(branch.gate_proj, "gate")
            if not branch.reads_streams:  # their queries and keys are as `initialize_inputs` sets them
                widths = (branch.qk_width, branch.qk_width, branch.v_width)
                self.copy(branch.qkv_proj, "query", "key", "value", widths=widths)
                self.copy(branch.conv1d, "conv_query", "conv_key", "conv_value", widths=widths)
            self._fill_new_channels(branch)
        self.copy_output(branch.o_proj)

    def _fill_new_channels(self, branch: SplicedAttention) -> None:
        """Draw the channels of query and key that are no copies, and set the new queries to 0.

        The attention is that of the copies at first. New keys are not 0, so new queries have gradients at once.
        """
        if branch.copied_width == branch.qk_width:
            return
        names = ["qk_proj"] if branch.reads_streams else ["qkv_proj", "conv1d"]
        for name in names:
            weight = branch.get_submodule(name).weight
            new = branch.new_channels(weight)
            new.copy_(self.draw(f"{name}.weight, new channels", new.shape, fan_in=weight[0].numel()))
        branch.new_channels(branch.get_submodule(names[0]).weight)[0].zero_()

    def copy(self, target: nn.Module | None, *parts: str, widths: Sequence[int] = ()) -> None:
        """Copy rows of the heads, weights and biases, into a linear layer or a convolution.

        Args:
            target: layer to fill.
            parts: fields of `HeadSlices` in the order of the target's rows. Those with `conv_` are rows of the mixer's
                convolution, the others of `in_proj`.
            widths: rows of a head in the target, for each part. Rows beyond those of the head are 0. By default the
                target has the head's rows only.

        Raises:
            PlanError: the mixer has no such rows, or the target has another shape.
        """
        structure = structure_of(self.graft.site)
        slices = [structure.weight_slices(self.graft.site, head) for head in self.graft.heads]
        rows = [getattr(head, part) for part in parts for head in slices]
        rows_of_heads = [width for width in widths for _ in slices] or [0] * len(rows)
        source = self.mixer.conv1d if parts[0].startswith("conv_") else structure.in_proj(self.mixer)
        if target is None or source is None or None in rows:
            hint = f"Heads of {self.graft.site.kind} have no rows for {', '.join(parts)}. Use another branch."
            raise PlanError("splice.init", self.graft.init, hint)

        def gather(values: torch.Tensor) -> torch.Tensor:
            return torch.cat([_padded(values[r], width) for r, width in zip(rows, rows_of_heads, strict=True)])

        target.weight.copy_(self._fitting(gather(source.weight), target.weight, *parts))
        if target.bias is not None:
            target.bias.zero_()
        if source.bias is not None:
            target.bias.copy_(gather(source.bias))
        gate_bias = structure.gate_bias(self.mixer)
        if parts == ("gate",) and gate_bias is not None:
            target.bias.add_(torch.cat([gate_bias[head.out] for head in slices]))

    def copy_output(self, o_proj: nn.Linear) -> None:
        """Copy the heads' columns of the output projection times the weight of the norm before, if `copies_output`.

        Raises:
            PlanError: the branch's values have another width than the heads.
        """
        if not self.copies_output:
            return
        structure = structure_of(self.graft.site)
        norm = structure.norm_weight(self.mixer)
        folded = structure.out_proj(self.mixer).weight if norm is None else structure.out_proj(self.mixer).weight * norm
        columns = [folded[:, structure.weight_slices(self.graft.site, head).out] for head in self.graft.heads]
        o_proj.weight.copy_(self._fitting(torch.cat(columns, dim=1), o_proj.weight, "out"))

    def copy_donor(self, branch: nn.Module) -> None:
        """Copy the teacher's projections, under the names of `DonorAttention`."""
        assert self.teacher is not None
        weights = donor_weights(self.teacher, *donor_of(self.graft, self.teacher.config))
        missing, unexpected = branch.load_state_dict(weights, strict=False)
        assert missing == ["scale"] and not unexpected, (missing, unexpected)

    def randomize(self, branch: SplicedAttention) -> None:
        """Draw weights with variance 1/fan-in, seeded by the plan, the layer and the tensor; biases are 0."""
        for name, parameter in branch.named_parameters():
            if name.endswith("weight"):
                parameter.copy_(self.draw(name, parameter.shape, fan_in=parameter[0].numel()))
            elif name.endswith("bias"):
                parameter.zero_()
        branch.scale.fill_(branch.initial_scale)

    def draw(self, name: str, shape: Sequence[int], fan_in: int) -> torch.Tensor:
        """Draw values with variance 1/fan-in, seeded by the plan, the layer and the name of the tensor."""
        return Draw(f"{self.seed}:L{self.graft.site.layer}", "cpu").normal(name, *shape, fan_in=fan_in)

    def _fitting(self, rows: torch.Tensor, weight: torch.Tensor, *parts: str) -> torch.Tensor:
        if rows.shape != weight.shape:
            value = f"{self.graft.init}, whose weights have shape {tuple(weight.shape)}"
            hint = f"The heads' {', '.join(parts)} have shape {tuple(rows.shape)}. Use another branch."
            raise PlanError("splice.init", value, hint)
        return rows


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Append rows of zeros up to `count` rows."""
    return torch.cat([rows, rows.new_zeros(max(0, count - len(rows)), *rows.shape[1:])])
