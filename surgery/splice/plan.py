"""From a HeadSet to a Plan, and from a Plan to the config field `splice`. Owns: grouping heads into grafts.

Pure: no weights, no files. Must never know: how heads were found, how a graft is put in.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from surgery.errors import PlanError
from surgery.models.donors import donor_fields, donor_mixers
from surgery.models.lookup import family_of, geometry_of, structure_of
from surgery.recipe import Splice
from surgery.types import Graft, HeadId, HeadSet, MixerSpec, Plan, Reads, ScoredHead

CONV_KERNEL = 4  # of a randomly initialised branch; the short convolution of Mamba-2


def make_plan(
    head_set: HeadSet,
    config: PreTrainedConfig,
    splice: Splice | None = None,
    seed: int = 0,
    teacher: PreTrainedConfig | None = None,
) -> Plan:
    """Groups the chosen heads by layer.

    Args:
        head_set: `chosen` says which heads and what each is to read.
        config: of the model that is to be spliced.
        teacher: config of the teacher, with `init: teacher`.

    Raises:
        PlanError: no head is chosen; the heads were located in a model of another geometry, are out of range, or the
            model is a hybrid; the teacher has no such head, or is not as wide as the model.
    """
    splice = splice or Splice()
    geometry = geometry_of(config)
    if head_set.geometry != geometry:
        value = f"{head_set.geometry}, and the model's is {geometry}"
        raise PlanError("heads.json geometry", value, "The heads were located in another model. Locate again.")
    check_not_spliced(config)
    check_splices(config)
    if not head_set.chosen:
        raise PlanError("heads.json chosen", [], "No head is chosen: nothing would be spliced. Name heads, or locate.")
    specs = {spec.layer: spec for spec in family_of(config).sites(config)}
    by_layer: dict[int, list[ScoredHead]] = {}
    for scored in head_set.chosen:
        check_in_range(scored.head, config)
        by_layer.setdefault(scored.head.layer, []).append(scored)
    grafts = tuple(_graft(specs[layer], heads, splice, teacher) for layer, heads in sorted(by_layer.items()))
    if teacher is not None and teacher.hidden_size != config.hidden_size:
        value = f"hidden size {teacher.hidden_size}, and the base's is {config.hidden_size}"
        raise PlanError("splice.teacher.model", value, "Attention can be transplanted between equal widths only.")
    return Plan(head_set.model, geometry, grafts, seed, splice.teacher.model if splice.teacher else "")


def _reads_of(scored: ScoredHead) -> Reads:
    if scored.reads is None:
        hint = "It was not measured what this head is to read: add sharpen to locate.methods, and locate again."
        raise PlanError("heads.json", str(scored.head), hint)
    return scored.reads


def _graft(site: MixerSpec, heads: list[ScoredHead], splice: Splice, teacher: PreTrainedConfig | None) -> Graft:
    """What goes into one mixer."""
    if splice.unit == "layer" and site.kind not in TAKES_LAYERS:
        raise PlanError("splice.unit", "layer", f"Whole layers can be put into {', '.join(TAKES_LAYERS)} models only.")
    reads = tuple(_reads_of(s) for s in heads)
    numbers = tuple(s.head.head for s in heads)
    if splice.init != "teacher":
        return Graft(site, numbers, splice.mode, splice.init, reads)
    assert teacher is not None and splice.teacher is not None
    names = splice.teacher.donors
    donors = tuple(HeadId.parse(names.get(str(s.head), f"L{s.head.layer}H{s.head.head}")) for s in heads)
    for donor in donors:
        if donor not in {head for spec in donor_mixers(teacher) for head in spec.heads}:
            raise PlanError("splice.teacher.donors", str(donor), "The teacher has no such head.")
    if splice.unit == "head":
        return Graft(site, numbers, splice.mode, splice.init, reads, "head", tuple(map(str, donors)))
    count = donor_mixers(teacher)[donors[0].layer].num_heads
    return Graft(site, tuple(range(count)), "replace", "teacher", reads[:1] * count, "layer", (f"L{donors[0].layer}",))


TAKES_LAYERS = ("llamba",)


def check_not_spliced(config: PreTrainedConfig) -> None:
    """Raises PlanError when the model is a hybrid already."""
    if getattr(config, "splice", None):
        hint = "It is a hybrid already. Splice all heads into the base at once (splice.num_heads)."
        raise PlanError("base.model", config.model_type, hint)


def check_splices(config: PreTrainedConfig) -> None:
    """Raises PlanError when nothing can be spliced into models of this type."""
    family = family_of(config)
    if family.hybrid is None:
        hint = f"It can be inspected and located, not spliced: {family.refuses}"
        raise PlanError("base.model", config.model_type, hint)


def check_in_range(head: HeadId, config: PreTrainedConfig) -> None:
    """Raises PlanError when the model has no such head, or none that can be spliced there."""
    family = family_of(config)
    mixers = {spec.name: spec for spec in family.mixers(config)}
    spec = mixers.get(head.mixer)
    if spec is None or head.head >= spec.num_heads:
        names = [str(h) for s in mixers.values() for h in s.heads]
        raise PlanError("head", str(head), f"Heads go from {names[0]} to {names[-1]}.")
    if spec not in family.sites(config):
        layers = sorted({s.layer for s in family.sites(config)})
        hint = f"That layer has keys and values of its own; layers that can be spliced: {layers}."
        raise PlanError("head", str(head), hint)


def check_sites(plan: Plan, config: PreTrainedConfig) -> None:
    """Raises PlanError when there is no graft, one has no heads or is for no site of the model, or two are for one."""
    check_splices(config)
    if not plan.grafts or not all(graft.heads for graft in plan.grafts):
        value = [list(graft.heads) for graft in plan.grafts]
        raise PlanError("plan.json grafts", value, "A graft of at least one head is needed. Plan again.")
    sites = family_of(config).sites(config)
    layers = [site.layer for site in sites]
    for graft in plan.grafts:
        if graft.site not in sites:
            hint = (
                f"No site of the model, or one with keys and values of its own. Layers that can be spliced: {layers}."
            )
            raise PlanError("plan.json site", graft.site.name, hint)
    spliced = [graft.site.layer for graft in plan.grafts]
    if len(set(spliced)) < len(spliced):
        raise PlanError("plan.json grafts", f"layers {spliced}", "Put all heads of one layer into one graft.")


def splice_field(
    plan: Plan, config: PreTrainedConfig, splice: Splice | None = None, teacher: PreTrainedConfig | None = None
) -> list[dict[str, Any]]:
    """The config field `splice`: one plain entry for each graft; the one source of what is spliced where.

    With `init: ssm` query and key are as wide as the state N, with `random` as `splice.random_width`, and values as
    wide as the head; with `teacher` all are as wide as the teacher's.

    Args:
        config: of the base: what a branch takes over from it, such as biases.
        teacher: config of the teacher, with `init: teacher`.

    Raises:
        PlanError: as `check_sites`.
    """
    check_sites(plan, config)
    return [
        {
            "layer": graft.site.layer,
            "heads": list(graft.heads),
            "head_dim": graft.site.head_dim,
            "mode": graft.mode,
            "init": graft.init,
            "unit": graft.unit,
            "reads": list(graft.reads),
            **family_of(config).branch_fields(config),
            **_branch_fields(graft, config, splice or Splice(), teacher),
        }
        for graft in plan.grafts
    ]


def _branch_fields(
    graft: Graft, config: PreTrainedConfig, splice: Splice, teacher: PreTrainedConfig | None
) -> dict[str, Any]:
    """What the branch is made of, where `init` decides."""
    if graft.init == "teacher":
        assert teacher is not None
        spec, heads = donor_of(graft, teacher)
        return {"donors": list(graft.donors), **donor_fields(teacher, spec, heads)}
    copied = graft.init == "ssm"
    fields: dict[str, Any] = {} if copied else {"activation": None}
    return {
        "qk_width": graft.site.state_size if copied else splice.random_width,
        "v_width": graft.site.head_dim,
        "conv_kernel": _conv_kernel(graft),
        "gate": copied,
        **fields,
    }


def donor_of(graft: Graft, teacher: PreTrainedConfig) -> tuple[MixerSpec, list[int] | None]:
    """The teacher's attention that a graft comes from, and its heads there; None for all of a layer.

    Raises:
        PlanError: heads of different layers in one graft.
    """
    mixers = {spec.layer: spec for spec in donor_mixers(teacher)}
    if graft.unit == "layer":
        return mixers[int(graft.donors[0].removeprefix("L"))], None
    heads = [HeadId.parse(name) for name in graft.donors]
    if len({head.layer for head in heads}) > 1:
        hint = "The donors of one layer's heads must come from one layer of the teacher."
        raise PlanError("splice.teacher.donors", list(graft.donors), hint)
    return mixers[heads[0].layer], [head.head for head in heads]


def _conv_kernel(graft: Graft) -> int:
    """Of the branch's own short convolution; a branch that reads the mixer's streams has none."""
    if graft.init == "ssm":
        return 0 if reads_streams(graft.site) else graft.site.conv_kernel
    return CONV_KERNEL


def reads_streams(site: MixerSpec) -> bool:
    """Whether copies of a head would be copies of the layer, so that its branch reads the mixer's streams."""
    return structure_of(site).weight_slices(site, 0).query is None
