"""Verify an exported folder, such as a downloaded copy, without the model that it was exported from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from surgery.errors import ModelError, reading
from surgery.export.documents import check_documents
from surgery.export.files import AGAIN, RECORD, check_entries, check_files, read_object
from surgery.export.formats import ExportFormat, format_of, plugin_of


def verify_folder(folder: Path | str, trust_remote_code: bool = False, plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Check a copy of an exported folder.

    For every format, the checks are:

    - Every file has the size and SHA-256 that export.json lists. Symbolic links are refused.
    - Config, plan, heads and model card name the same splice.

    The format adds its own. For `transformers`:

    - Every tensor is finite, and replaced heads are silent.
    - Stock transformers loads model and tokenizer in a process without this library. The process computes the logits
      and the text of the reference within `reload.TOLERANCE`, with the weights in fp32.

    By default only known code runs: the folder must name this library's classes, and its modules must equal those of
    this library or of a plugin. They are loaded from a private copy.

    Args:
        trust_remote_code: run any modelling files that the folder holds, in a process of their own.
        plugins: modules to import that register export formats or attention branches.

    Returns:
        The checked quantities:

        - `format`: its name.
        - `files`: number of files that export.json lists.
        - `tensors`: number of tensors that were checked; None if the format does not report it.
        - `agree`: names of the documents that name the same splice.
        - `not_checked`: one sentence for each check that was skipped.
        - Quantities of the format. `transformers` adds the next two.
        - `max_logit_difference`: as a fraction of the standard deviation of the logits.
        - `generated_tokens`: number of generated tokens that agree.

    Raises:
        ModelError: a file is missing, changed or not listed; a tensor is not finite or not silent; documents disagree;
            the folder does not load, computes another model, or is not an export; its format is not registered.
    """
    folder = Path(folder)
    record = _read_record(folder)
    export_format = format_of(record, plugins)
    report: dict[str, Any] = {"format": export_format.name, "files": None, "tensors": None}
    with reading(RECORD, None, AGAIN):
        not_checked = check_files(folder, record.get("files"), export_format.loadable)
        report["files"] = len(record["files"])
    with _naming(export_format):
        stated = export_format.read_plan(folder, trust_remote_code)
    report["agree"], absent = check_documents(folder, stated)
    with _naming(export_format):
        checked = export_format.verify(folder, trust_remote_code)
    return {**report, **checked, "not_checked": [*not_checked, *absent, *checked.get("not_checked", ())]}


def _naming(export_format: ExportFormat) -> AbstractContextManager[None]:
    """Convert errors of a plugin to a ModelError that names the format. Errors of this library are bugs to report."""
    return reading(f"format {export_format.name}", None, AGAIN) if plugin_of(export_format) else nullcontext()


def _read_record(folder: Path) -> dict[str, Any]:
    """Read export.json. Raises ModelError if the folder is not an export."""
    if not folder.is_dir():
        hint = "It is a file. Use its folder." if folder.is_file() else "There is no such folder."
        raise ModelError("FOLDER", str(folder), hint)
    if (folder / "export" / RECORD).is_file() and not (folder / RECORD).is_file():
        raise ModelError("FOLDER", str(folder), f"It is a run folder. Its export is {folder / 'export'}")
    check_entries(folder)
    if (folder / RECORD).is_file():
        return read_object(folder, RECORD)
    config = read_object(folder, "config.json")
    if config.get("splice") or config.get("inserted"):
        hint = f"It is a hybrid without {RECORD}, which every export has. Pass a folder that `surgery export` wrote."
        raise ModelError("FOLDER", str(folder), hint)
    hint = "It is a plain model, not an exported hybrid: nothing is spliced into it."
    raise ModelError("FOLDER", f"{folder} ({config.get('model_type', 'no model_type')})", hint)
