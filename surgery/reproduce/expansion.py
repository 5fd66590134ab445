"""From an analysis recipe to the single changes that are scored: sweeps written out, everything checked.

Owns: names and order of the arms; what a change needs of a model. Pure: configs alone, and a heads.json that a sweep
names. Must never know: weights, how a part is removed, scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from surgery.errors import PlanError, RecipeError
from surgery.files.atomic import read_json
from surgery.interventions.alterations import attends
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import AnalysisRecipe, Change, Splice, Swap, Sweep, Teacher
from surgery.splice.plan import make_plan
from surgery.types import HeadId, HeadSet, MixerSpec, Plan, ScoredHead, head_set_from_json


def expand(
    recipe: AnalysisRecipe, config: PreTrainedConfig, minimal: int | None = None
) -> tuple[dict[str, list[Change]], list[Change]]:
    """The changes of each sweep, in the recipe's order, and those that it names one by one.

    Args:
        minimal: what `layers: minimal` stands for; the whole model if it is not known yet.

    Raises:
        RecipeError: two changes of one name; a heads.json of another model.
    """
    whole = minimal in (None, config.num_hidden_layers)
    resolved = {"layers": None if whole else minimal}
    sweeps: dict[str, list[Change]] = {}
    for given in recipe.sweeps:
        sweep = given.model_copy(update=resolved) if given.layers == "minimal" else given
        sweeps[sweep.kind] = list(_changes(sweep, config))
    single = [c.model_copy(update=resolved) if c.layers == "minimal" else c for c in recipe.changes]
    taken = {change.name for changes in sweeps.values() for change in changes}
    for change in single:
        if change.name in taken:
            raise RecipeError("changes", change.name, "An arm of a sweep has that name. Name it otherwise.")
    return sweeps, single


def _changes(sweep: Sweep, config: PreTrainedConfig) -> Iterator[Change]:
    """One change for each layer or head. Names have the layer's number in as many digits as the model needs."""
    total, layers = config.num_hidden_layers, sweep.layers
    assert layers != "minimal"
    digits = max(2, len(str(total - 1)))
    running = range(total if layers is None else layers)
    if sweep.kind == "prune":
        if config.num_hidden_layers < 2:
            raise RecipeError("sweeps.prune", "1 layer", "There is nothing to prune; leave the sweep out.")
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
    """As heads.json ranks them, or every head from below."""
    if sweep.heads is None:
        return [head for spec in family_of(config).mixers(config) for head in spec.heads]
    found = head_set_from_json(read_json(Path(sweep.heads)))
    if found.geometry != geometry_of(config):
        raise RecipeError("sweeps.disable_one.heads", sweep.heads, "Its heads were located in another model.")
    return [scored.head for scored in found.heads]


def check_change(
    change: Change,
    config: PreTrainedConfig,
    teacher: Teacher | None = None,
    teacher_config: PreTrainedConfig | None = None,
) -> None:
    """Raises RecipeError when the model has no such head or layer, or none that runs, or the swap cannot be made.

    `layers: minimal` counts as the whole model.
    """
    specs, where = family_of(config).mixers(config), f"changes.{change.name}"
    total = config.num_hidden_layers
    if isinstance(change.layers, int) and change.layers >= total:
        raise RecipeError(f"{where}.layers", change.layers, f"The model has {total}; keep fewer.")
    running = set(range(change.layers if isinstance(change.layers, int) else total))
    for layer in change.drop:
        if layer not in running:
            raise RecipeError(f"{where}.drop", layer, f"Layers that run go from 0 to {max(running)}.")
    running -= set(change.drop)
    mixers = {spec.name: spec for spec in specs if spec.layer in running}
    for field in ("disable", "keep"):
        _check_heads(f"{where}.{field}", getattr(change, field), mixers)
    for layer in change.keep_in:
        if layer not in {spec.layer for spec in mixers.values()}:
            raise RecipeError(f"{where}.keep_in", layer, "There are no heads in that layer, or it does not run.")
    if change.mask_last_row and not any(attends(config, spec) for spec in mixers.values()):
        raise RecipeError(f"{where}.mask_last_row", "true", "The model has no attention in layers that run.")
    if change.swap is not None:
        assert teacher is not None and teacher_config is not None
        swap_plan(change, config, teacher, teacher_config)


def _check_heads(field: str, names: Sequence[str], mixers: dict[str, MixerSpec]) -> None:
    for head in map(HeadId.parse, names):
        spec = mixers.get(head.mixer)
        if spec is None or head.head >= spec.num_heads:
            running = list(mixers.values())
            said = (
                f"Heads that run go from {running[0].heads[0]} to {running[-1].heads[-1]}." if running else "None run."
            )
            raise RecipeError(field, str(head), said)


def off_heads(change: Change, specs: Sequence[MixerSpec]) -> dict[str, list[int]]:
    """By `MixerSpec.name`, the heads that `disable` and `keep` remove."""
    kept = {HeadId.parse(name) for name in change.keep}
    layers = set(change.keep_in) or {head.layer for head in kept}
    off = {spec.name: [head.head for head in spec.heads if head not in kept] for spec in specs if spec.layer in layers}
    for head in map(HeadId.parse, change.disable):
        off.setdefault(head.mixer, []).append(head.head)
    return off


def swap_plan(
    change: Change, config: PreTrainedConfig, teacher: Teacher, teacher_config: PreTrainedConfig, seed: int = 0
) -> tuple[Plan, Splice]:
    """What `splice` needs for this swap. Raises RecipeError where a layer cannot be put there, with the reason."""
    assert change.swap is not None
    layer, own = change.swap.layer, change.swap.teacher_layer
    head, donor = HeadId(layer, 0), HeadId(layer if own is None else own, 0)
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
    heads = HeadSet(teacher.model, "", geometry_of(config), chosen, chosen, "list", seed)
    try:
        return make_plan(heads, config, section, seed, teacher_config), section
    except PlanError as error:
        raise RecipeError(f"changes.{change.name}.swap", error.value, error.hint) from None
