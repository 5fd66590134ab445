"""Parse model names in recipes, and remove local paths from recipes that are published."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeVar

from surgery.errors import ModelError
from surgery.files.shipped import local_path
from surgery.recipe.base import Base, Checkpoint
from surgery.recipe.export import Export
from surgery.recipe.pretrain import PretrainRecipe
from surgery.recipe.section import Section
from surgery.recipe.sources import Data

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
    if address and any(address[part] for part in ("host", "rest")) and not os.path.exists(model):
        at = f"@{address['revision']}" if address["revision"] not in (None, "main") else ""
        raise ModelError("base.model", model, f"It is an address. Use the id in it: {address['id']}{at}.")
    name, at, written = model.partition("@")
    if not at or os.path.exists(model) or not is_hub_id(name):
        return model, revision
    if not written:
        raise ModelError("base.model", model, "The revision after the @ is empty. Use repo@revision.")
    if revision not in (None, written):
        raise ModelError("base.revision", revision, f"base.model names another revision: {model}. Remove one of them.")
    return name, written


def is_hub_id(model: str) -> bool:
    """Whether a model is `owner/name` on the Hub rather than a local path."""
    model = local_path(model)
    return not os.path.exists(model) and model.count("/") == 1 and not model.startswith((".", "~", "/"))


def public_name(model: str) -> str:
    """Return a Hub id without its revision, or the last part of a path. `runs/NAME/export` becomes NAME."""
    model, _ = source_of(model, None)
    if is_hub_id(model):
        return model
    path = Path(os.path.realpath(model))
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


S = TypeVar("S", bound=Section)


def public_recipe(section: S) -> S:
    """Return a recipe, or a section of one, that can be published: every local path is replaced by its last part.

    Revisions stay. `repo@revision` of a model is split into `model` and `revision`; a tokenizer keeps the @.
    """
    update: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Section):
            update[name] = public_recipe(value)
        elif isinstance(value, tuple):
            update[name] = tuple(public_recipe(entry) if isinstance(entry, Section) else entry for entry in value)
    if isinstance(section, Base | Checkpoint):
        model, revision = source_of(section.model, section.revision)
        update |= {"model": public_name(model), "revision": revision}
    if isinstance(section, Base) and section.tokenizer:
        tokenizer, revision = source_of(section.tokenizer, None)
        update["tokenizer"] = public_name(tokenizer) + (f"@{revision}" if revision else "")
    if isinstance(section, Data):
        update["path"] = section.public_name
    if isinstance(section, PretrainRecipe) and section.tokenizer_text:
        update["tokenizer_text"] = Path(section.tokenizer_text).name
    if isinstance(section, Export):
        template = section.chat_template
        update |= {"chat_template": Path(template).name if template else None, "llama_cpp": None}
    return section.model_copy(update=update)
