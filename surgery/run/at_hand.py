"""Find configs and tokenizers that are available without a connection."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from surgery.files.shipped import local_path
from surgery.recipe import Base


def at_hand(base: Base, path: Path | None) -> tuple[Base, str]:
    """Find the base's config, without a connection if possible.

    A folder is used unchanged. A Hub id is looked up in the local cache, then in `configs/` next to the recipe. If
    neither has it, loading requests the Hub.

    Returns:
        The base, and the folder in `configs/` if one is used (otherwise empty).
    """
    cached = cached_folder(base.model, "config.json", base.revision)
    if Path(local_path(base.model)).exists() or cached is not None:
        return base.model_copy(update={"model": str(cached or base.model)}), ""
    owner, _, name = base.model.partition("/")
    local = path.parent / "configs" / name if path is not None else None
    if (
        local is None
        or not name
        or "/" in name
        or owner.startswith((".", "~"))
        or not (local / "config.json").is_file()
    ):
        return base, ""
    return base.model_copy(update={"model": str(local)}), str(local)


def cached_folder(source: str, name: str, revision: str | None) -> Path | None:
    """Find the folder in the Hub's local cache that has this file, or None."""
    if Path(local_path(source)).exists():
        return None
    try:
        file = try_to_load_from_cache(source, name, revision=revision)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None
