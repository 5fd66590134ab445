"""Verify an exported folder, such as a downloaded copy, without the model that it was exported from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from surgery.errors import ModelError, reading
from surgery.export.documents import check_documents
from surgery.export.files import AGAIN, RECORD, check_entries, check_files, read_object
from surgery.export.formats import format_of, plugin_of


def verify_folder(folder: Path | str, trust_remote_code: bool = False, plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Check a copy of an exported folder.

    For every format: size and SHA-256 of every file; config, plan, heads and model card name the same splice. Then the
    format's own checks. For `transformers`: every tensor is finite; replaced heads are silent; stock transformers, in a
    process without this library, loads model and tokenizer and computes the reference's logits and text within
    `reload.TOLERANCE`. That process holds the weights in fp32.

    By default only known code runs: the folder must name this library's classes, and its modules must equal this
    library's, an earlier version's, or those of a plugin. They are loaded from a private copy. Symbolic links are
    always refused.

    Args:
        trust_remote_code: run any modelling files that the folder holds, in a process of their own.
        plugins: modules to import that register export formats or attention branches.

    Returns:
        `format`; `files`, the number that export.json lists, or None; `agree`, the names of documents; what the format
        checked (`transformers`: `tensors`, `max_logit_difference` as a fraction of the logits' standard deviation,
        `generated_tokens` that agree); `not_checked`, a sentence each, such as for exports of older versions.

    Raises:
        ModelError: a file is missing, changed or foreign; a tensor is not finite or not silent; documents disagree; the
            folder does not load, computes another model, or is not an export; its format is not registered.
    """
    folder = Path(folder)
    record = _read_record(folder)
    export_format = format_of(record, plugins)
    report: dict[str, Any] = {"format": export_format.name, "files": None, "tensors": 0}
    not_checked = ["file hashes: this export was written by an older version and lists none"]
    if "files" in record:
        with reading(RECORD, None, AGAIN):
            not_checked = check_files(folder, record["files"], export_format.loadable)
            report["files"] = len(record["files"])
    report["agree"], absent = check_documents(folder, export_format.read_plan(folder, trust_remote_code))
    # An exception of a plugin becomes an error that names its format; one of ours is a fault to report.
    with reading(f"format {export_format.name}", None, AGAIN) if plugin_of(export_format) else nullcontext():
        checked = export_format.verify(folder, trust_remote_code)
    return {**report, **checked, "not_checked": [*not_checked, *absent, *checked.get("not_checked", ())]}


def _read_record(folder: Path) -> dict[str, Any]:
    """export.json. Raises ModelError if the folder is not an export."""
    if not folder.is_dir():
        raise ModelError("FOLDER", str(folder), "There is no such folder.")
    check_entries(folder)
    if (folder / RECORD).is_file():
        return read_object(folder, RECORD)
    config = read_object(folder, "config.json")
    if config.get("splice"):
        hint = f"It is a hybrid without {RECORD}, which every export has. Pass a folder that `surgery export` wrote."
        raise ModelError("FOLDER", str(folder), hint)
    hint = "It is a plain model, not an exported hybrid: nothing is spliced into it."
    raise ModelError("FOLDER", f"{folder} ({config.get('model_type', 'no model_type')})", hint)
