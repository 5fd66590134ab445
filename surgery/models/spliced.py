"""Read from a hybrid's config what is spliced where."""

from __future__ import annotations

import copy

from transformers import PreTrainedConfig

from surgery.errors import PlanError
from surgery.models.lookup import family_of, geometry_of
from surgery.types import Graft, Plan


def plan_of_hybrid(config: PreTrainedConfig, name: str) -> Plan:
    """The plan that a hybrid was spliced by, from its config alone.

    The base's name, the seed of random branches and the name of a teacher are not in a config: they are `name`, 0 and
    nothing. The geometry is that of the base.

    Raises:
        PlanError: nothing is spliced into the model, or an entry is for no site of it.
    """
    entries = getattr(config, "splice", None)
    if not entries:
        raise PlanError("base.model", name, "Nothing is spliced into it. Splice it first, with surgery run.")
    plain = copy.deepcopy(config)
    plain.splice = []  # a layer that attention took whole is no site any more
    sites = {site.layer: site for site in family_of(plain).sites(plain)}
    grafts = []
    for entry in entries:
        if entry["layer"] not in sites:
            raise PlanError("config.json splice", f"layer {entry['layer']}", f"Sites are in layers {sorted(sites)}.")
        heads, reads = tuple(entry["heads"]), tuple(entry["reads"])
        unit, donors = entry.get("unit", "head"), tuple(entry.get("donors", ()))
        grafts.append(Graft(sites[entry["layer"]], heads, entry["mode"], entry["init"], reads, unit, donors))
    return Plan(name, geometry_of(plain), tuple(grafts), 0)
