"""Check a recipe as far as possible without weights and without the Hub (`surgery validate`).

torch and transformers are imported where the files of a model are checked. A recipe whose base is not on this machine
needs neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from surgery.data.files import local_files
from surgery.files.shipped import local_path
from surgery.recipe import Base, Checkpoint, Recipe, Teacher, as_base
from surgery.recipe.public import is_hub_id, source_of

M = TypeVar("M", Checkpoint, Teacher)


def check_installed(recipe: Recipe) -> None:
    """Check that this machine has the packages of a run. A dry run does not: it may be for another machine.

    Raises:
        RecipeError: a stage quantizes, and bitsandbytes is missing; or a tracker is.
    """
    if recipe.train.trackers:
        from surgery.train.tracking import check_trackers

        check_trackers(recipe.train.trackers)
    for stage in recipe.train.sequence:
        if stage.lora.quantization is not None:
            from surgery.train.quantization import quantization_of

            quantization_of(recipe.train, stage)


def check_without_weights(recipe: Recipe, file: Path | None = None) -> list[str]:
    """Check the base, the heads and the data of a recipe. Loads no weights and sends no request.

    Configs of models on the Hub are looked up in `configs/` next to the recipe's file.

    Returns:
        What was not checked, one text each.

    Raises:
        SurgeryError: the run would fail on a config, a tokenizer, the listed heads, or a row of the data.
    """
    own = [*recipe.train.own_data, *([recipe.locate.data] if recipe.locate.data is not None else [])]
    on_the_hub = [data.path for data in own if not local_files(data)]
    skipped = [f"data {path}, which is on the Hub" for path in on_the_hub]
    name, is_folder = recipe.base.model, not is_hub_id(recipe.base.model)
    base, shapes_from = _found(recipe.base, file)
    if base is None:
        return [*skipped, _unavailable("base.model", name, "base, heads and tokens")]
    from surgery.models.loading import check_vocabulary, has_tokenizer, open_checkpoint
    from surgery.run.context import Run
    from surgery.run.pipeline import stages_of
    from surgery.train.training import make_accelerator

    recipe, missing = _with_models_at_hand(recipe, base, file)
    skipped += missing
    stages = stages_of(recipe)
    run = Run(recipe, Path("runs") / recipe.name, make_accelerator(), stages=tuple(stage.name for stage in stages))
    for stage in stages:
        stage.check_configs(run)
    if is_folder:
        open_checkpoint(base).weight_files()
    elif not shapes_from:
        skipped.append(f"weight files of {name}, which is on the Hub")
    if base.tokenizer is not None:
        lacks_tokenizer = is_hub_id(source_of(base.tokenizer, None)[0])
    else:  # the config alone may be here
        lacks_tokenizer = not is_folder and (bool(shapes_from) or not has_tokenizer(base))
    if lacks_tokenizer:
        return [*skipped, _unavailable("tokenizer", base.tokenizer or name, "tokens of data and prompts")]
    check_vocabulary(run.tokenizer(), run.config)
    for stage in stages:
        stage.check_tokenizers(run)
    if on_the_hub:
        return [*skipped, "tokens of data and prompts, since some data is not local"]
    for stage in stages:
        stage.check_data(run)
    return skipped


def _found(model: Base, file: Path | None) -> tuple[Base | None, str]:
    """Return the model with local paths, or None if nothing of it is here; and the folder in `configs/`, if used."""
    base, shapes_from = at_hand(model, file)
    if is_hub_id(base.model):
        return None, ""
    if base.tokenizer is not None:
        folder = cached_folder(base.tokenizer, "tokenizer.json", None) or Path(local_path(base.tokenizer))
        base = base.model_copy(update={"tokenizer": str(folder)})
    return base, shapes_from


def _with_models_at_hand(recipe: Recipe, base: Base, file: Path | None) -> tuple[Recipe, list[str]]:
    """Replace models by their local copies. Teachers and controls that are not here are removed and listed."""
    from surgery.models.loading import load_config

    skipped: list[str] = []

    def local(field: str, model: M | None) -> M | None:
        if model is None:
            return None
        found, shapes_from = _found(as_base(model, field), file)
        if found is None or (shapes_from and field == "control.model"):  # its tokenizer is compared
            skipped.append(_unavailable(field, model.model, "control" if field == "control.model" else "teacher"))
            return None
        load_config(found)
        return model.model_copy(update={"model": found.model, "revision": found.revision})

    splice, train = recipe.splice, recipe.train
    if splice is not None:
        splice = splice.model_copy(update={"teacher": local("splice.teacher.model", splice.teacher)})
    train = train.model_copy(update={"teacher": local("train.teacher.model", train.teacher)})
    control = local("control.model", recipe.control)
    update = {"base": base, "splice": splice, "train": train, "control": control}
    return recipe.model_copy(update=update), skipped


def _unavailable(field: str, value: str, what: str) -> str:
    return f"{what} ({field} {value} is not in the local cache of the Hub)"


def at_hand(base: Base, path: Path | None) -> tuple[Base, str]:
    """Find the base's config, without a connection if possible.

    A folder is used unchanged. A Hub id is looked up in the local cache, then in `configs/` next to the recipe. If
    neither has it, loading requests the Hub.

    Returns:
        The base, without its revision if it is another folder now, and the folder in `configs/` if one is used.
    """
    model, _ = source_of(base.model, base.revision)
    cached = cached_folder(base.model, "config.json", base.revision)
    if cached is not None:
        return base.model_copy(update={"model": str(cached), "revision": None}), ""
    local = path.parent / "configs" / model.partition("/")[2] if path is not None else None
    if local is None or not is_hub_id(model) or not (local / "config.json").is_file():
        return base, ""
    return base.model_copy(update={"model": str(local), "revision": None}), str(local)


def cached_folder(source: str, name: str, revision: str | None) -> Path | None:
    """Find the folder in the Hub's local cache that has this file, or None."""
    source, revision = source_of(source, revision)
    if Path(source).exists():
        return None
    try:
        file = try_to_load_from_cache(source, name, revision=revision)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None
