"""Run one recipe with several values of a key (`surgery sweep`). Runs share the stages that have equal keys.

Every run is an ordinary run folder inside the folder of the sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from surgery.errors import SurgeryError, TrainingDiverged
from surgery.files.atomic import new_folder, read_json, write_json
from surgery.files.lock import hold
from surgery.files.ownership import check_replaceable, kind_of, mark
from surgery.models.loading import load_config
from surgery.models.sizes import meta_model, sizes_of
from surgery.recipe import Base, Recipe, to_yaml
from surgery.recipe.grid import Grid, GridPoint, naming
from surgery.recipe.inputs import inputs_of
from surgery.report.progress_lines import ProgressLines
from surgery.report.sweep_report import point_of, summarize, write_sweep_page
from surgery.run.context import Run
from surgery.run.folder import RunDir
from surgery.run.pipeline import check_inputs, run_pipeline, stages_of
from surgery.run.sharing import find_origin, origin_among, origin_text
from surgery.train.training import make_accelerator


def run_sweep(
    grid: Grid, folder: Path, overwrite: bool = False, reporter: ProgressLines | None = None, file: Path | None = None
) -> dict[str, Any]:
    """Run every recipe of a grid, and write `sweep.json`, `sweep.html` and a figure. Finished stages are skipped.

    All recipes and models are checked before the first run. If the training of a run diverges, the other runs follow,
    and the error is raised at the end.

    Args:
        grid: the recipes.
        folder: folder of the sweep. The runs are folders inside.
        overwrite, reporter, file: as in `run_pipeline`.

    Returns:
        Content of `sweep.json`. Empty on processes other than the first.

    Raises:
        SurgeryError: a recipe does not fit the model, a folder cannot be used, or a run fails.
    """
    is_main = make_accelerator().is_main_process
    diverged: dict[str, TrainingDiverged] = {}
    summary: dict[str, Any] = {}
    with hold(folder, "sweep folder") if is_main else nullcontext():
        if is_main:
            _check_folders(grid, folder, overwrite, file)
        previous: Run | None = None
        for recipe in grid.recipes:
            run = _run(recipe, folder)
            if previous is not None:
                run.share_models(previous)
            with naming(_values_of(grid, recipe)):
                check_inputs(run)
            previous = run
        del run, previous  # they hold the base
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            mark(folder, "sweep")
        for number, recipe in enumerate(grid.recipes, start=1):
            path = folder / recipe.name
            if is_main and reporter is not None:
                reporter.note("sweep", f"{path}: run {number} of {len(grid.recipes)}")
            try:
                run_pipeline(recipe, path, None, None, overwrite, reporter, file, _siblings(path))
            except TrainingDiverged as error:
                diverged[recipe.name] = error
        if is_main:
            summary = _write(grid, folder, diverged)
    if diverged:
        name, cause = next(iter(diverged.items()))
        what = f"{len(diverged)} of {len(grid.recipes)} runs diverged, such as {name}"
        raise TrainingDiverged(what, None, str(cause))
    return summary


def plan_sweep(grid: Grid, folder: Path, overwrite: bool = False, file: Path | None = None) -> dict[str, Any]:
    """Predict what `run_sweep` would do. Loads no weights and writes nothing.

    Returns:
        `runs`: run -> stage -> `run`, `finished`, `copied from RUN` or `scores from RUN` (heads are chosen again from
        the scores of that run). `controls`: points that are read from an arm of another point's run.

    Raises:
        SurgeryError: as `run_sweep`, if it can be seen without weights.
    """
    _check_folders(grid, folder, overwrite, file)
    known: dict[tuple[str, str], str] = {}
    runs = {}
    for recipe in grid.recipes:
        run = _run(recipe, folder)
        with naming(_values_of(grid, recipe)):
            for stage in stages_of(recipe):
                stage.check_configs(run)
        runs[recipe.name] = _planned_stages(run, known, grid)
    read = [point for point in grid.points if point.arm != "hybrid"]
    controls = [{"values": dict(point.values), "run": point.recipe.name, "arm": point.arm} for point in read]
    return {"runs": runs, "controls": controls}


def _run(recipe: Recipe, folder: Path) -> Run:
    path, names = folder / recipe.name, tuple(stage.name for stage in stages_of(recipe))
    return Run(recipe, path, make_accelerator(), stages=names, siblings=_siblings(path))


def _siblings(path: Path) -> tuple[Path, ...]:
    """Run folders next to this one. They may belong to an earlier sweep with other values."""
    others = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return tuple(other for other in others if other != path and other.is_dir() and kind_of(other) == "run")


def _values_of(grid: Grid, recipe: Recipe) -> dict[str, Any]:
    return next(dict(point.values) for point in grid.points if point.recipe is recipe and point.arm == "hybrid")


def _check_folders(grid: Grid, folder: Path, overwrite: bool, file: Path | None) -> None:
    check_replaceable("sweep folder", folder, "sweep", {}, f"Set another name, such as name={grid.name}-2.")
    for recipe in grid.recipes:
        RunDir(folder / recipe.name).check(to_yaml(recipe), overwrite, inputs_of(recipe, file))


def _planned_stages(run: Run, known: dict[tuple[str, str], str], grid: Grid) -> dict[str, str]:
    """Predict each stage of a run, and add it to `known`.

    `known` has the run that computes a stage first, by name and predicted key of the stage: a key with those of earlier
    stages in the place of the hashes of their files.
    """
    planned: dict[str, str] = {}
    inputs: dict[str, str] = {}
    finished: set[str] = set()  # outputs of finished stages: only their hashes are known
    splices = {run.folder.with_name(recipe.name): recipe.splice for recipe in grid.recipes}

    def is_computed(folder: Path, key: str) -> bool:
        return known.get((stage.name, key)) == folder.name

    for stage in stages_of(run.recipe):
        predicted = stage.key(run, inputs=inputs)
        key = stage.key(run) if finished.issuperset(stage.inputs(run.recipe)) else ""
        outputs = stage.outputs(run.recipe)
        if key and run.rundir.is_fresh(stage.name, key, outputs):
            planned[stage.name] = "finished"
            finished |= set(outputs)
        else:
            origin = find_origin(run, stage, key) if key else None
            origin = origin or origin_among(run, stage, predicted, list(splices), splices.get, is_computed)
            planned[stage.name] = "run" if origin is None else origin_text(*origin)
        known.setdefault((stage.name, predicted), run.recipe.name)
        inputs |= dict.fromkeys(outputs, predicted)
    return planned


def _write(grid: Grid, folder: Path, diverged: dict[str, TrainingDiverged]) -> dict[str, Any]:
    """Write `sweep.json`, the figure and `sweep.html` of the runs that are finished."""
    has_plateau = any(recipe.train.has_plateau for recipe in grid.recipes)
    points = []
    for point in grid.points:
        finished = [recipe for recipe in (point.recipe, *point.others) if recipe.name not in diverged]
        if finished:
            points.append(_results(replace(point, recipe=finished[0]), folder, has_plateau))
    failures = {name: str(error) for name, error in diverged.items()}
    if not points:
        raise SurgeryError("sweep", "no run is finished", f"Change the recipe: {next(iter(failures.values()))}")
    summary = summarize(grid.name, grid.axes, points, failures)
    write_json(folder / "sweep.json", summary)
    from surgery.report.figures.by_value import results_by_value  # matplotlib is slow to import

    with new_folder(folder / "figures") as figures:
        results_by_value(summary["rows"], list(grid.axes), figures)
    write_sweep_page(summary, folder / "figures", folder / "sweep.html")
    return summary


def _results(point: GridPoint, folder: Path, has_plateau: bool) -> dict[str, Any]:
    """Read the numbers of a point from its run. With plateaus in the sweep, also its number of steps."""
    recipe, run = point.recipe, RunDir(folder / point.recipe.name)
    results = read_json(run.path / "results.json")
    origins = {stage.name: (run.manifest(stage.name) or {}).get("origin", "") for stage in stages_of(recipe)}
    saved = {"hybrid": "trained", "no_splice": "no_splice"}.get(point.arm)
    base = recipe.base if saved is None else Base(model=str(run.path / saved), dtype="auto")
    sizes = sizes_of(meta_model(load_config(base), base.trust_remote_code))
    # Stages that are not in `training` have a fixed number of steps. The control skips those of new heads alone.
    trained: Mapping[str, Mapping[str, int]] = results.get("training", {})
    stages = [stage for stage in recipe.train.sequence if point.arm == "hybrid" or stage.trains_control]
    steps = sum(trained[s.name]["steps"] if s.name in trained else s.num_steps for s in stages)
    return point_of(
        results["arms"],
        point.arm,
        recipe.evaluate.probes,
        values=dict(point.values),
        run=recipe.name,
        heads=results["heads"] if point.arm == "hybrid" else [],
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        state_bytes=sizes.state_bytes,
        new_parameters=sizes.new_parameters,
        origins={name: origin for name, origin in origins.items() if origin},
        **({"steps": steps} if has_plateau else {}),
    )
