"""Recover a hybrid's plan from its config."""

from __future__ import annotations

import copy

from transformers import PreTrainedConfig

from surgery.errors import PlanError
from surgery.models.lookup import family_of, geometry_of
from surgery.types import Graft, Plan


def plan_of_hybrid(config: PreTrainedConfig, name: str) -> Plan:
    """Return the plan of a hybrid from its config. The geometry is the base's.

    A config has no name of the base, seed and name of a teacher: these become `name`, 0 and empty.

    Raises:
        PlanError: nothing is spliced into the model, or an entry is for no site of it.
    """
    entries = getattr(config, "splice", None)
    if not entries:
        raise PlanError("base.model", name, "Nothing is spliced into it. Splice it first with `surgery run`.")
    plain = copy.deepcopy(config)
    plain.splice = []  # a layer that was replaced whole is no site in the hybrid
    sites = {site.layer: site for site in family_of(plain).sites(plain)}
    grafts = []
    for entry in entries:
        if entry["layer"] not in sites:
            raise PlanError(
                "config.json splice", f"layer {entry['layer']}", f"Layers that can be spliced: {sorted(sites)}."
            )
        heads, reads = tuple(entry["heads"]), tuple(entry["reads"])
        unit, donors = entry.get("unit", "head"), tuple(entry.get("donors", ()))
        grafts.append(Graft(sites[entry["layer"]], heads, entry["mode"], entry["init"], reads, unit, donors))
    return Plan(name, geometry_of(plain), tuple(grafts), 0)
