"""Turn a HeadSet into a Plan, and a Plan into the config field `splice`. Reads configs only: no weights, no files."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from surgery.errors import PlanError
from surgery.hybrid.configuration_hybrid import BRANCHES
from surgery.models.config_checks import check_unquantized
from surgery.models.donors import donor_mixers
from surgery.models.inserted import has_inserted
from surgery.models.layouts import Family
from surgery.models.lookup import family_of, geometry_of
from surgery.models.registry import families
from surgery.models.spliced import BASE_STATE_SIZE
from surgery.recipe import Splice
from surgery.recipe.public import public_name
from surgery.splice.insertion import check_counts, check_inserts
from surgery.splice.source import PlanSource
from surgery.splice.travel import check_travels
from surgery.types import Graft, HeadId, HeadSet, MixerSpec, Plan, Reads, ScoredHead


def make_plan(
    head_set: HeadSet,
    config: PreTrainedConfig,
    splice: Splice | None = None,
    seed: int = 0,
    teacher: PreTrainedConfig | None = None,
) -> Plan:
    """Group the chosen heads by layer.

    Args:
        head_set: located heads. `chosen` has the heads to splice, with the position that each one reads.
        config: config of the model to splice.
        splice: the recipe's section `splice`, as for `locate_heads`, which has chosen the heads with it.
        seed: seed for random branches.
        teacher: with `init: teacher`, config of the teacher.

    Raises:
        PlanError: no head is chosen; the heads were located in a model of another geometry or are out of range; the
            model is a hybrid; the teacher has no such head or another width; the branch cannot be exported; the state
            cannot be cut to `splice.state_size`; or `splice` asks for other heads than were chosen.
    """
    splice = splice or Splice()
    chosen = [str(scored.head) for scored in head_set.chosen]
    wanted = splice.num_heads if "num_heads" in splice.model_fields_set else len(chosen)
    if chosen and (chosen != [*splice.heads] if splice.heads else len(chosen) != wanted):
        hint = "splice.heads or splice.num_heads asks for others. Locate with this section `splice`: it chooses them."
        raise PlanError("heads.json chosen", ", ".join(chosen), hint)
    hybrid = family_of(config).hybrid
    shipped = [("splice.init", splice.init, branch_of(splice.init))]
    for field, value, cls in [*shipped, *([("base.model", config.model_type, hybrid[0])] if hybrid else [])]:
        try:
            check_travels(cls)
        except ValueError as error:
            raise PlanError(field, value, str(error)) from None
    geometry = geometry_of(config)
    if head_set.geometry != geometry:
        value = f"{head_set.geometry}, but the model's is {geometry}"
        raise PlanError("heads.json geometry", value, "The heads were located in another model. Locate again.")
    check_base(config, splice)
    if splice.unit == "layer" and not _takes_layers(family_of(config)):
        names = ", ".join(family.name for family in families() if _takes_layers(family))
        raise PlanError("splice.unit", "layer", f"Only {names} models support whole layers. Set it to head.")
    if not head_set.chosen:
        hint = "No head is chosen, so nothing would be spliced. Set splice.heads, or locate again."
        raise PlanError("heads.json chosen", [], hint)
    specs = {spec.layer: spec for spec in family_of(config).sites(config)}
    by_layer: dict[int, list[ScoredHead]] = {}
    for scored in head_set.chosen:
        check_in_range(scored.head, config)
        by_layer.setdefault(scored.head.layer, []).append(scored)
    if splice.form != "head":
        check_counts({layer: len(heads) for layer, heads in by_layer.items()}, config, "splice.num_heads")
    unused = set(splice.teacher.donors) - {str(s.head) for s in head_set.chosen} if splice.teacher else set()
    if unused and splice.select == "list":
        hint = "It is not in splice.heads. Use heads of this list as keys."
        raise PlanError("splice.teacher.donors", min(unused), hint)
    grafts = tuple(_graft(specs[layer], heads, splice, teacher) for layer, heads in sorted(by_layer.items()))
    if teacher is not None and teacher.hidden_size != config.hidden_size:
        value = f"hidden size {teacher.hidden_size}, but the base's is {config.hidden_size}"
        raise PlanError("splice.teacher.model", value, "Use a teacher of the same hidden size.")
    name = public_name(splice.teacher.model) if splice.teacher else ""  # published with the plan
    return Plan(head_set.model, geometry, grafts, seed, name, splice)


def _graft(site: MixerSpec, heads: list[ScoredHead], splice: Splice, teacher: PreTrainedConfig | None) -> Graft:
    """Return the graft of one mixer."""
    reads: list[Reads] = []
    for scored in heads:
        # Without a convolution a block finds the value itself, and not the end of its segment.
        read = "answer_token" if splice.form == "block" else scored.reads
        if read is None:
            hint = (
                "The position that this head reads was not measured. Add sharpen to locate.methods, and locate again."
            )
            raise PlanError("heads.json", str(scored.head), hint)
        reads.append(read)
    numbers = tuple(scored.head.head for scored in heads)
    if splice.form != "head":
        before = site.layer if splice.before is None else splice.before
        return Graft(site, numbers, splice.mode, splice.init, tuple(reads), form=splice.form, before=before)
    if not branch_of(splice.init).needs_teacher:
        return Graft(site, numbers, splice.mode, splice.init, tuple(reads))
    assert teacher is not None and splice.teacher is not None
    names = splice.teacher.donors
    donors = tuple(HeadId.parse(names.get(str(s.head), f"L{s.head.layer}H{s.head.head}")) for s in heads)
    for donor in donors:
        if donor not in {head for spec in donor_mixers(teacher) for head in spec.heads}:
            hint = "The teacher has no such head. Set its heads in splice.teacher.donors."
            raise PlanError("splice.teacher.donors", str(donor), hint)
    if splice.unit == "head":
        return Graft(site, numbers, splice.mode, splice.init, tuple(reads), "head", tuple(map(str, donors)))
    if len({donor.layer for donor in donors}) > 1:
        hint = "With splice.unit: layer, all heads of a layer need donors of one layer of the teacher."
        raise PlanError("splice.teacher.donors", ", ".join(map(str, donors)), hint)
    count = donor_mixers(teacher)[donors[0].layer].num_heads
    same = (reads[0],) * count
    return Graft(site, tuple(range(count)), "replace", "teacher", same, "layer", (f"L{donors[0].layer}",))


def _takes_layers(family: Family) -> bool:
    return family.hybrid is not None and family.hybrid[0].takes_layers


def branch_of(init: str) -> type[Any]:
    """Return the class of a branch. Raises PlanError if none is registered under this name."""
    if init not in BRANCHES:
        hint = f"Use one of {', '.join(BRANCHES)}, or import the module that registers it (recipe key `plugins`)."
        raise PlanError("graft.init", repr(init), hint)
    return BRANCHES[init]


def check_base(config: PreTrainedConfig, splice: Splice, dtype: torch.dtype | None = None) -> None:
    """Raise PlanError or ModelError if this base cannot be spliced so. `dtype` as in `check_inserts`."""
    check_not_spliced(config)
    check_splices(config)
    check_state_size(splice.state_size, config)
    if splice.form != "head":
        check_inserts(config, splice, dtype)


def check_not_spliced(config: PreTrainedConfig) -> None:
    """Raise PlanError if the model is a hybrid already."""
    if getattr(config, "splice", None) or has_inserted(config):
        hint = "The model is a hybrid already. Splice all heads into its base at once (splice.num_heads)."
        raise PlanError("base.model", config.model_type, hint)


def check_splices(config: PreTrainedConfig) -> None:
    """Raise PlanError if nothing can be spliced into this model, ModelError if the weights are quantized."""
    check_unquantized(config)
    why_not = family_of(config).why_not(config)
    if why_not:
        hint = f"This model can be inspected and located but not spliced: {why_not}"
        raise PlanError("base.model", config.model_type, hint)


def check_state_size(size: int | None, config: PreTrainedConfig) -> None:
    """Raise PlanError if the state of this model cannot be cut to `size` channels. None is no cut."""
    if size is None:
        return
    family = family_of(config)
    if not family.state_field:
        names = ", ".join(family.name for family in families() if family.state_field and family.hybrid)
        hint = f"The state of {family.name} models cannot be cut, but that of {names} models can. Remove the key."
        raise PlanError("splice.state_size", size, hint)
    present = state_size_of(config)
    if size >= present:
        hint = f"The model's state has {present} channels. Set a smaller number, or remove the key to keep all."
        raise PlanError("splice.state_size", size, hint)


def state_size_of(config: PreTrainedConfig) -> int:
    """Return the width of B and C of a model's SSM layers."""
    return next(spec.state_size for spec in family_of(config).mixers(config) if spec.is_ssm)


def check_in_range(head: HeadId, config: PreTrainedConfig, field: str = "head") -> None:
    """Raise PlanError if the model has no such head, or nothing can be spliced there. The error names the field."""
    family = family_of(config)
    mixers = {spec.name: spec for spec in family.mixers(config)}
    spec = mixers.get(head.mixer)
    if spec is None or head.head >= spec.num_heads:
        names = [str(h) for s in mixers.values() for h in s.heads]
        raise PlanError(field, str(head), f"The model has heads {names[0]} to {names[-1]}. Use one of them.")
    if spec not in family.sites(config):
        layers = sorted({s.layer for s in family.sites(config)})
        hint = f"This layer has attention already. Layers that can be spliced: {layers}."
        raise PlanError(field, str(head), hint)


def check_sites(plan: Plan, config: PreTrainedConfig) -> None:
    """Check the grafts of a plan, which may come from an edited file.

    Raises:
        PlanError: there is no graft; a graft has no heads, an unknown branch or no site in the model; two grafts share
            a site; or they are not in the order of the layers.
    """
    check_splices(config)
    if not plan.grafts or not all(graft.heads for graft in plan.grafts):
        value = [list(graft.heads) for graft in plan.grafts]
        raise PlanError("plan.json grafts", value, "Every graft needs at least one head. Plan again.")
    sites = family_of(config).sites(config)
    layers = [site.layer for site in sites]
    for graft in plan.grafts:
        if graft.site not in sites:
            hint = f"No such mixer, or its layer has attention already. Layers that can be spliced: {layers}."
            raise PlanError("plan.json site", graft.site.name, hint)
        branch_of(graft.init)
    spliced = [graft.site.layer for graft in plan.grafts]
    if len(set(spliced)) < len(spliced):
        raise PlanError("plan.json grafts", f"layers {spliced}", "Put all heads of one layer into one graft.")
    if spliced != sorted(spliced):
        raise PlanError("plan.json grafts", f"layers {spliced}", "List the grafts in the order of their layers.")


def hybrid_config(
    config: PreTrainedConfig, fields: list[dict[str, Any]], state_size: int | None = None
) -> PreTrainedConfig:
    """Build the config of a hybrid.

    Args:
        config: config of the base.
        fields: the field `splice`, from `splice_field`.
        state_size: width of the state after the cut. None if it is not cut. The branches keep the base's width.
    """
    check_state_size(state_size, config)
    family = family_of(config)
    hybrid = family.hybrid_config(config, fields)
    if state_size is not None:
        hybrid = family.with_state_size(hybrid, state_size)
        setattr(hybrid, BASE_STATE_SIZE, state_size_of(config))
    hybrid._attn_implementation = "sdpa"
    return hybrid


def splice_field(
    plan: Plan, config: PreTrainedConfig, splice: Splice | None = None, teacher: PreTrainedConfig | None = None
) -> list[dict[str, Any]]:
    """Build the config field `splice`, which describes all spliced heads: one plain entry per graft.

    Query and key have the width of the state (N) with `init: ssm`, at least `splice.min_width` (64 by default),
    `splice.random_width` with `random`, and the teacher's width with `teacher`. Values have the width of the head,
    or the teacher's.

    Args:
        plan: the plan.
        config: config of the base. A branch copies fields such as biases from it.
        splice: the recipe's section `splice`; None for that of the plan, or the defaults if it has none.
        teacher: with `init: teacher`, config of the teacher.

    Raises:
        PlanError: as `check_sites`.
    """
    check_sites(plan, config)
    splice = splice or plan.section or Splice()
    family = family_of(config)
    assert family.hybrid is not None
    variants = family.hybrid[0].branch_variants
    return [
        {
            "layer": graft.site.layer,
            "heads": list(graft.heads),
            "head_dim": graft.site.head_dim,
            "mode": graft.mode,
            "init": graft.init,
            "unit": graft.unit,
            "reads": list(graft.reads),
            **family.branch_fields(config),
            **variants.get(graft.init, BRANCHES[graft.init]).plan_fields(PlanSource(graft, config, splice, teacher)),
        }
        for graft in plan.grafts
    ]
