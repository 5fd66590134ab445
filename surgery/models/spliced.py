"""Recover a hybrid's plan from its config."""

from __future__ import annotations

import copy

from transformers import PreTrainedConfig

from surgery.errors import PlanError
from surgery.models.inserted import base_config_of, grafts_of, has_inserted
from surgery.models.lookup import family_of, geometry_of
from surgery.types import Graft, Plan

BASE_STATE_SIZE = "base_state_size"  # field of the config of a hybrid with a cut state: the width before the cut


def plan_of_hybrid(config: PreTrainedConfig, name: str) -> Plan:
    """Return the plan of a hybrid from its config, with the geometry of the base.

    A config does not store the seed and the teacher's name of a plan. These become 0 and empty.

    Args:
        config: config of the hybrid.
        name: name of the base in the plan.

    Raises:
        PlanError: nothing is spliced into the model, or an entry is for a layer that cannot be spliced.
    """
    if has_inserted(config):
        base = base_config_of(config)
        sites = {site.layer: site for site in family_of(base).sites(base)}
        return Plan(name, geometry_of(base), grafts_of(config, sites), 0)
    entries = getattr(config, "splice", None)
    if not entries:
        hint = "Nothing is spliced into this model. Use a hybrid, or splice it first with `surgery run`."
        raise PlanError("base.model", name, hint)
    plain = copy.deepcopy(config)
    plain.splice = []  # in the hybrid, a replaced layer is no longer a site
    size = getattr(config, BASE_STATE_SIZE, None)
    if size is not None:  # the state was cut
        if type(size) is not int or size < 1:
            raise PlanError(f"config.json {BASE_STATE_SIZE}", repr(size), "It must be a positive whole number.")
        plain = family_of(plain).with_state_size(plain, size)
    sites = {site.layer: site for site in family_of(plain).sites(plain)}
    grafts = []
    for entry in sorted(entries, key=lambda entry: entry["layer"]):
        if entry["layer"] not in sites:
            hint = f"Layers that can be spliced: {sorted(sites)}."
            raise PlanError("config.json splice", f"layer {entry['layer']}", hint)
        heads, reads = tuple(entry["heads"]), tuple(entry["reads"])
        unit, donors = entry.get("unit", "head"), entry.get("donors", [])
        if not isinstance(donors, list | tuple) or not all(isinstance(donor, str) for donor in donors):
            raise PlanError("config.json splice donors", repr(donors), "It must be a list of heads, such as [L0H1].")
        site = sites[entry["layer"]]
        grafts.append(Graft(site, heads, entry["mode"], entry["init"], reads, unit, tuple(donors)))
    return Plan(name, geometry_of(plain), tuple(grafts), 0)
