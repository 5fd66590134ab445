"""Parse model names in recipes, and remove local paths from recipes that are published."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

from surgery.errors import ModelError
from surgery.files.shipped import local_path
from surgery.recipe.base import Base, Checkpoint, Teacher
from surgery.recipe.run import Recipe
from surgery.recipe.sources import Data, Source

# Address of a repository, or of a file in it, with or without the Hub's host.
_ADDRESS = re.compile(
    r"(?P<host>(https?://)?(www\.)?(huggingface\.co|hf\.co)/|hf://)?(models/)?(?P<id>[\w.-]+/[\w.-]+)"
    r"(?P<rest>/(tree|blob|resolve)/(?P<revision>[^/?#]+).*)?/?([?#].*)?"
)


def source_of(model: str, revision: str | None) -> tuple[str, str | None]:
    """Split `repo@revision` into a Hub id and its revision, and find shipped checkpoints. Own folders stay as they are.

    Args:
        model: folder or Hub id.
        revision: the recipe's `revision`, which is returned if `model` has none.

    Raises:
        ModelError: `model` and `revision` name different revisions, the @ is followed by nothing, or `model` is the
            address of a page.
    """
    model = local_path(model)
    address = _ADDRESS.fullmatch(model)
    if address and any(address[part] for part in ("host", "rest")) and not Path(model).exists():
        at = f"@{address['revision']}" if address["revision"] not in (None, "main") else ""
        raise ModelError("base.model", model, f"It is an address. Use the id in it: {address['id']}{at}.")
    name, at, written = model.partition("@")
    if not at or Path(model).exists() or not is_hub_id(name):
        return model, revision
    if not written:
        raise ModelError("base.model", model, "The revision after the @ is empty. Use repo@revision.")
    if revision not in (None, written):
        raise ModelError("base.revision", revision, f"base.model names another revision: {model}. Remove one of them.")
    return name, written


def is_hub_id(model: str) -> bool:
    """Whether a model is `owner/name` on the Hub rather than a local path."""
    model = local_path(model)
    return not Path(model).expanduser().exists() and model.count("/") == 1 and not model.startswith((".", "~", "/"))


def public_name(model: str) -> str:
    """Return a Hub id without its revision, or the last part of a path. `runs/NAME/export` becomes NAME."""
    model, _ = source_of(model, None)
    if is_hub_id(model):
        return model
    path = Path(model).expanduser().resolve()
    return path.parent.name if path.name == "export" else path.name


def finetune_name(data: str) -> str:
    """Return the name of the run that fine-tunes on a data set: `finetune-tickets` for `data/tickets.jsonl`.

    Characters that the name of a run cannot have become hyphens.

    Args:
        data: file, folder or Hub id of the data set.
    """
    last = re.sub(r"\.(jsonl|json|parquet)$", "", Path(data).name, flags=re.IGNORECASE)
    words = re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-.")
    return f"finetune-{words or 'data'}"[:200]


def public_recipe(recipe: Recipe) -> Recipe:
    """Return a recipe that can be published: every local path is replaced by its last part.

    Revisions stay. `repo@revision` of a model is split into `model` and `revision`; a tokenizer keeps the @.
    """
    base = _named(recipe.base)
    if base.tokenizer:
        tokenizer, revision = source_of(base.tokenizer, None)
        pinned = public_name(tokenizer) + (f"@{revision}" if revision else "")
        base = base.model_copy(update={"tokenizer": pinned})
    splice, control = recipe.splice, recipe.control
    if splice is not None and splice.teacher is not None:
        splice = splice.model_copy(update={"teacher": _named(splice.teacher)})
    train = recipe.train.model_copy(
        update={
            "sources": tuple(map(_public_source, recipe.train.sources)),
            "stages": tuple(
                stage.model_copy(update={"sources": tuple(map(_public_source, stage.sources))})
                for stage in recipe.train.stages
            ),
            "teacher": _named(recipe.train.teacher) if recipe.train.teacher else None,
        }
    )
    template = Path(recipe.export.chat_template).name if recipe.export.chat_template else None
    export = recipe.export.model_copy(update={"chat_template": template, "llama_cpp": None})
    control = _named(control) if control else None
    locate = recipe.locate
    if locate.data is not None:
        locate = locate.model_copy(update={"data": _public_data(locate.data)})
    update = {"base": base, "locate": locate, "splice": splice, "control": control, "train": train, "export": export}
    return recipe.model_copy(update=update)


M = TypeVar("M", Base, Teacher, Checkpoint)


def _named(section: M) -> M:
    model, revision = source_of(section.model, section.revision)
    return section.model_copy(update={"model": public_name(model), "revision": revision})


def _public_source(source: Source) -> Source:
    if source.data is None:
        return source
    return source.model_copy(update={"data": _public_data(source.data)})


def _public_data(data: Data) -> Data:
    return data.model_copy(update={"path": data.public_name})
