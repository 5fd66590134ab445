"""Resolve the changes and sweeps of an analysis, and check them against the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from surgery.errors import PlanError, RecipeError, SurgeryError
from surgery.files.atomic import read_json
from surgery.files.shipped import local_path
from surgery.models.alterations import attends
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import AnalysisRecipe, Change, Splice, Swap, Sweep, Teacher
from surgery.splice.plan import make_plan
from surgery.types import HeadId, HeadSet, MixerSpec, Plan, ScoredHead, head_set_from_json


def expand(
    recipe: AnalysisRecipe,
    config: PreTrainedConfig,
    teacher_config: PreTrainedConfig | None = None,
    minimal: int | None = None,
) -> tuple[dict[str, list[Change]], list[Change]]:
    """Return the changes of each sweep in the recipe's order, and the changes that the recipe lists, all checked.

    `minimal` is the number of layers of `layers: minimal`, the whole model if it is not known yet. Raises RecipeError
    as `check_change`, or if two changes have the same name, a heads.json belongs to another model, or a sweep runs more
    layers than it has.
    """
    whole = minimal in (None, config.num_hidden_layers)
    resolved = {"layers": None if whole else minimal}
    sweeps: dict[str, list[Change]] = {}
    for listed in recipe.sweeps:
        sweep = listed.model_copy(update=resolved) if listed.layers == "minimal" else listed
        sweeps[sweep.kind] = list(_changes(sweep, config))
    single = [c.model_copy(update=resolved) if c.layers == "minimal" else c for c in recipe.changes]
    taken = {change.name for changes in sweeps.values() for change in changes}
    for change in single:
        if change.name in taken:
            raise RecipeError("changes", change.name, "An arm of a sweep has this name. Choose another one.")
    for change in (*single, *(c for changes in sweeps.values() for c in changes)):
        check_change(change, config, recipe.teacher, teacher_config)
    return sweeps, single


def _changes(sweep: Sweep, config: PreTrainedConfig) -> Iterator[Change]:
    """Yield one change for each layer or head. Layer numbers in names are zero-padded."""
    total, layers = config.num_hidden_layers, sweep.layers
    assert layers != "minimal"
    if layers is not None and layers >= total:
        raise RecipeError(f"sweeps.{sweep.kind}.layers", layers, f"The model has {total} layers. Set a smaller number.")
    digits = max(2, len(str(total - 1)))
    running = range(total if layers is None else layers)
    if sweep.kind == "prune":
        if config.num_hidden_layers < 2:
            raise RecipeError("sweeps.prune", "1 layer", "There is nothing to prune. Remove the sweep.")
        for count in range(total - 1, 0, -1):
            yield Change(name=f"prune_{count:0{digits}d}", layers=count)
    elif sweep.kind == "drop_one":
        for layer in running:
            yield Change(name=f"drop_{layer:0{digits}d}", drop=(layer,), layers=layers)
    elif sweep.kind == "swap_one":
        for layer in running:
            swap = Swap(layer=layer, with_block=sweep.with_block)
            yield Change(name=f"swap_{layer:0{digits}d}", swap=swap)
    else:
        heads = [head for head in _heads(sweep, config) if head.layer in running]
        for head in heads[: sweep.top]:
            yield Change(name=f"disable_{str(head).lower()}", disable=(str(head),), layers=layers)


def _heads(sweep: Sweep, config: PreTrainedConfig) -> list[HeadId]:
    """Heads in the order of heads.json if the sweep names one, otherwise all heads by layer."""
    if sweep.heads is None:
        return [head for spec in family_of(config).mixers(config) for head in spec.heads]
    field, again = "sweeps.disable_one.heads", "Run `surgery locate` on this model."
    try:
        head_set = head_set_from_json(read_json(Path(local_path(sweep.heads))))
    except SurgeryError as error:  # whose hints are for the files of a run
        raise RecipeError(field, f"{sweep.heads} ({error.value or 'missing'})", f"Set a heads.json. {again}") from error
    if head_set.geometry != geometry_of(config):
        raise RecipeError(field, sweep.heads, f"These heads were located in another model. {again}")
    return [scored.head for scored in head_set.heads]


def check_change(
    change: Change,
    config: PreTrainedConfig,
    teacher: Teacher | None = None,
    teacher_config: PreTrainedConfig | None = None,
) -> None:
    """Check a change against the model. `layers: minimal` is checked as the whole model.

    Raises RecipeError if the model has no such head or layer, it is not among the layers that run, or the swap is not
    possible.
    """
    specs, where = family_of(config).mixers(config), f"changes.{change.name}"
    total = config.num_hidden_layers
    if isinstance(change.layers, int) and change.layers >= total:
        raise RecipeError(f"{where}.layers", change.layers, f"The model has {total} layers. Set a smaller number.")
    running = set(range(change.layers if isinstance(change.layers, int) else total))
    for layer in change.drop:
        if layer not in running:
            raise RecipeError(f"{where}.drop", layer, f"Set a layer from 0 to {max(running)}.")
    running -= set(change.drop)
    mixers = {spec.name: spec for spec in specs if spec.layer in running}
    for field, head in [("disable", head) for head in change.disable] + [("keep", head) for head in change.keep]:
        parsed = HeadId.parse(head)
        spec = mixers.get(parsed.mixer)
        if spec is None or parsed.head >= spec.num_heads:
            names = [str(head) for spec in mixers.values() for head in spec.heads]
            heads = f"from {names[0]} to {names[-1]}" if names else "of a layer that runs"
            raise RecipeError(f"{where}.{field}", head, f"No layer that runs has this head. Set a head {heads}.")
    for layer in change.keep_in:
        if layer not in {spec.layer for spec in mixers.values()}:
            raise RecipeError(f"{where}.keep_in", layer, "This layer has no heads or does not run. Set another one.")
    if change.mask_last_row and not any(attends(config, spec) for spec in mixers.values()):
        hint = "The model has no attention in the layers that run. Remove the key."
        raise RecipeError(f"{where}.mask_last_row", "true", hint)
    if change.swap is not None:
        assert teacher is not None and teacher_config is not None
        swap_plan(change, config, teacher, teacher_config)


def off_heads(change: Change, specs: Sequence[MixerSpec]) -> dict[str, list[int]]:
    """Heads that `disable` and `keep` remove, by `MixerSpec.name`."""
    kept = {HeadId.parse(name) for name in change.keep}
    layers = set(change.keep_in) or {head.layer for head in kept}
    off = {spec.name: [head.head for head in spec.heads if head not in kept] for spec in specs if spec.layer in layers}
    for head in map(HeadId.parse, change.disable):
        off.setdefault(head.mixer, []).append(head.head)
    return off


def swap_plan(
    change: Change, config: PreTrainedConfig, teacher: Teacher, teacher_config: PreTrainedConfig
) -> tuple[Plan, Splice]:
    """Make the plan and the recipe section that splice this swap. Raises RecipeError if it cannot be."""
    assert change.swap is not None
    layer, teacher_layer = change.swap.layer, change.swap.teacher_layer
    head, donor = HeadId(layer, 0), HeadId(layer if teacher_layer is None else teacher_layer, 0)
    section = Splice(
        select="list",
        heads=(str(head),),
        unit="layer",
        init="teacher",
        mode="replace",
        with_block=change.swap.with_block,
        teacher=teacher.model_copy(update={"donors": {str(head): str(donor)}}),
    )
    chosen = (ScoredHead(head, "neither", "segment_end", {}),)
    heads = HeadSet(teacher.model, "", geometry_of(config), chosen, chosen, "list", 0)
    try:
        return make_plan(heads, config, section, 0, teacher_config), section
    except PlanError as error:
        hint = "Only llamba models can swap layers. Remove the swap." if error.field == "splice.unit" else error.hint
        raise RecipeError(f"changes.{change.name}.swap", error.value, hint) from None
