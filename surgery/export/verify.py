"""Verify an exported folder, such as a downloaded copy, without the model that it was exported from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from surgery.errors import ModelError, SurgeryError, reading
from surgery.export.documents import check_documents
from surgery.export.files import AGAIN, CARD, RECORD, check_entries, check_files, read_object, sha256_of, shown
from surgery.export.formats import ExportFormat, format_of, plugin_of
from surgery.files.secret_scan import findings, secrets_of_environment
from surgery.recipe.export import EXPORT_FORMATS


def verify_folder(folder: Path | str, trust_remote_code: bool = False, plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Check a copy of an exported folder.

    For every format, the checks are:

    - Every file has the size and SHA-256 that export.json lists, but README.md, which may be edited. Symbolic links are
      refused.
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
    report: dict[str, Any] = {"format": export_format.name, "tensors": None}
    with reading(RECORD, None, AGAIN):
        not_checked = check_files(folder, record.get("files"), export_format.loadable)
        report["files"] = len(record["files"])
    # An exception of a plugin names its format. One of this library is a bug to report.
    name, is_plugin = f"format {export_format.name}", plugin_of(export_format) is not None
    with reading(name, None, AGAIN) if is_plugin else nullcontext():
        stated = export_format.read_plan(folder, trust_remote_code)
    report["agree"], absent = check_documents(folder, stated)
    with reading(name, None, AGAIN) if is_plugin else nullcontext():
        checked = export_format.verify(folder, trust_remote_code)
    return {**report, **checked, "not_checked": [*not_checked, *absent, *checked.get("not_checked", ())]}


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


def check_publishable(
    folder: Path, trust_remote_code: bool = False, plugins: Sequence[str] = (), say: Callable[[str], None] = print
) -> tuple[dict[str, str], type[ExportFormat]]:
    """Verify an export and list what `publish` uploads: export.json, the files that it lists, and README.md.

    Returns:
        SHA-256 by name, and the format of the export. A file that changes later is not uploaded.

    Raises:
        ModelError: the folder does not verify, or holds another file, also a hidden one.
        SurgeryError: a text has a token or a local path. Weights, figures and vocabularies are not searched.
    """
    before = sha256_of(folder / RECORD) if (folder / RECORD).is_file() else None
    report = verify_folder(folder, trust_remote_code, plugins)
    for sentence in report["not_checked"]:
        say(f"not checked: {sentence}")
    sums = {name: entry["sha256"] for name, entry in read_object(folder, RECORD)["files"].items()}
    sums |= {name: sha256_of(folder / name) for name in (RECORD, CARD) if (folder / name).is_file()}
    check_entries(folder)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if (name := path.relative_to(folder).as_posix()) not in sums:
            hint = f"Only what {RECORD} lists is published, and {CARD}. Move the file out of the folder."
            raise ModelError(shown(name), f"not listed in {RECORD}", hint)
    if sums[RECORD] != before:
        raise ModelError("FOLDER", str(folder), "Its files changed during the checks. Publish it again.")
    _check_private(folder, sums)
    size = sum((folder / name).stat().st_size for name in sums)
    export_format: type[ExportFormat] = EXPORT_FORMATS[report["format"]]
    say(f"verified {folder}: {export_format.summary}, {len(sums)} files, {size:,} bytes")
    return dict(sorted(sums.items())), export_format


_MAX_FINDINGS = 8  # in one error
_NOT_SEARCHED = (".safetensors", ".gguf", ".png", ".model")
# Their words may look like local paths.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json", "merges.txt", "vocab.txt")


def _check_private(folder: Path, names: Iterable[str]) -> None:
    """Search names and texts for tokens and local paths: home directories, the current folder, that of the export.

    Raises:
        SurgeryError: names file and line of the first finding, and the files of the others. It does not print a token.
    """
    places = {str(p) for p in (Path(os.path.expanduser("~")), Path.cwd(), folder.absolute(), folder.resolve())} - {"/"}
    secrets, found = known_secrets(), []
    for name in names:
        found += [(f"name of {shown(name)}", value, hint) for _, value, hint in findings(f" {name}", places, secrets)]
    for name in names:
        if not name.lower().endswith(_NOT_SEARCHED) and name not in _VOCABULARIES:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            found += [(f"{name}:{line}", value, hint) for line, value, hint in findings(text, places, secrets)]
    if found:
        where, value, hint = found[0]
        more = sorted({other for other, *_ in found} - {where})[:_MAX_FINDINGS]
        raise SurgeryError(where, value, f"{hint} More findings: {', '.join(more)}." if more else hint)


def known_secrets() -> dict[str, str]:
    """Secrets of this machine by description: those of environment variables, and the token of the Hub."""
    token = get_token()
    return secrets_of_environment() | ({"the token of the Hub": token} if token else {})
