"""From a HeadSet to a Plan, and from a Plan to the config field `splice`. Owns: grouping heads into grafts.

Pure: no weights, no files. Must never know: how heads were found, how a graft is put in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from surgery.errors import PlanError
from surgery.families import family_of, geometry_of
from surgery.heads import Graft, HeadId, HeadSet, MixerSpec, Plan, ScoredHead
from surgery.recipe import Splice

CONV_KERNEL = 4  # of a randomly initialised branch; the short convolution of Mamba-2


def make_plan(head_set: HeadSet, config: PreTrainedConfig, splice: Splice | None = None, seed: int = 0) -> Plan:
    """Groups the chosen heads by layer.

    Args:
        head_set: `chosen` says which heads and what each is to read.
        config: of the model that is to be spliced.

    Raises:
        PlanError: the heads were located in a model of another geometry, are out of range, or the model is a hybrid.
    """
    splice = splice or Splice()
    geometry = geometry_of(config)
    if head_set.geometry != geometry:
        value = f"{head_set.geometry}, and the model's is {geometry}"
        raise PlanError("heads.json geometry", value, "The heads were located in another model. Locate again.")
    check_not_spliced(config)
    specs = {spec.layer: spec for spec in family_of(config).mixers(config)}
    by_layer: dict[int, list[ScoredHead]] = {}
    for scored in head_set.chosen:
        check_in_range(scored.head, specs)
        by_layer.setdefault(scored.head.layer, []).append(scored)
    grafts = tuple(
        Graft(specs[layer], tuple(s.head.head for s in heads), splice.mode, splice.init, tuple(s.reads for s in heads))
        for layer, heads in sorted(by_layer.items())
    )
    return Plan(head_set.model, geometry, grafts, seed)


def check_not_spliced(config: PreTrainedConfig) -> None:
    """Raises PlanError when the model is a hybrid already."""
    if getattr(config, "splice", None):
        hint = "It is a hybrid already. Splice all heads into the base at once (splice.num_heads)."
        raise PlanError("base.model", config.model_type, hint)


def check_in_range(head: HeadId, specs: Mapping[int, MixerSpec]) -> None:
    """Raises PlanError when the model has no such head; `specs` are its mixers by layer."""
    spec = specs.get(head.layer)
    if spec is None or head.head >= spec.num_heads:
        last = max(specs)
        hint = f"Heads go from L{min(specs)}H0 to L{last}H{specs[last].num_heads - 1}."
        raise PlanError("head", str(head), hint)


def splice_field(plan: Plan, splice: Splice | None = None, conv_kernel: int = CONV_KERNEL) -> list[dict[str, Any]]:
    """The config field `splice`: one plain entry for each graft; the one source of what is spliced where.

    With `init: ssm` query and key are as wide as the state N, with `random` as `splice.random_width`; values are as
    wide as the head.
    """
    width = (splice or Splice()).random_width
    return [
        {
            "layer": graft.site.layer,
            "heads": list(graft.heads),
            "mode": graft.mode,
            "init": graft.init,
            "reads": list(graft.reads),
            "qk_width": graft.site.state_size if graft.init == "ssm" else width,
            "v_width": graft.site.head_dim,
            "conv_kernel": conv_kernel,
            "activation": "silu" if graft.init == "ssm" else None,
            "gate": graft.init == "ssm",
        }
        for graft in plan.grafts
    ]
