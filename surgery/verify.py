"""Checks an exported folder, also someone else's copy, without the model that it was made from. Owns: what makes one
whole: its files are those that were written, its tensors are finite, its documents agree, and it computes what it did.

Must never know: how a folder is written. Nothing of a folder is run before its code is known to be this library's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

import surgery.hybrid
from surgery.checkpoint import load_config
from surgery.errors import ModelError, PlanError, RunError
from surgery.families import family_of, structure_of
from surgery.heads import Plan, head_set_from_json, plan_from_json
from surgery.plan import plan_of_hybrid
from surgery.recipe import Base
from surgery.reload import compare, prompt_ids, read_reference, reload
from surgery.rundir import read_json
from surgery.weights import Stored, inventory, read_tensors, weight_files

RECORD, REFERENCE = "export.json", "reference.safetensors"
_LIBRARY = Path(surgery.hybrid.__file__).parent
# What a loader could take up although nobody listed it.
_LOADED = (".py", ".json", ".safetensors", ".bin", ".pt", ".pth", ".jinja")
_AGAIN = "Download it again, or export again."


def verify_folder(folder: Path | str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Checks a copy of an exported folder against what it says of itself.

    Checked are: size and sha256 of every file; the index of the weights and every tensor; that replaced heads are
    silent; that config, plan, heads and card name the same splice; and, in a process without this library, that stock
    transformers loads it and computes the reference's logits and text within `reload.TOLERANCE`. That takes four bytes
    a parameter.

    The folder's modelling files are run for this. Without `trust_remote_code` they are run only if each of them equals
    this library's module of that name byte for byte, so that no code runs that is not installed here already.

    Args:
        trust_remote_code: run whatever modelling files the folder brings.

    Returns:
        What was checked: `files`, `tensors`, `agree` (the documents), `max_logit_difference` (a part of the logits'
        standard deviation), `generated_tokens` (that agree); `not_checked`: a sentence each, for exports of older
        versions, which carry less, and for files that nobody listed.

    Raises:
        ModelError: a file is missing, changed or no part of the export; a tensor is not finite or not silent; the
            documents disagree; it does not load, or computes another model; or it is no export at all.
    """
    folder, missing = Path(folder), list[str]()
    config = _open(folder)
    record = _read(folder, RECORD)
    report: dict[str, Any] = {"files": None, "tensors": 0, "agree": []}
    if "files" in record:
        report["files"] = len(record["files"])
        missing += check_files(folder, record["files"])
    else:
        missing.append("the files' hashes: an older version wrote it, and listed none")
    report["tensors"] = check_tensors(folder, config)
    report["agree"], unknown = check_agreement(folder, config)
    missing += unknown
    check_code(folder, trust_remote_code)
    if (folder / REFERENCE).is_file():
        reference = read_reference(folder / REFERENCE)
        found = reload(folder, reference["ids"], ("float32",))
        report["max_logit_difference"], report["generated_tokens"] = compare(reference, found, "float32")
    else:
        reload(folder, prompt_ids(config.vocab_size), ("float32",))
        missing.append(f"logits and a generation: it has no {REFERENCE}; it loads, and both can be computed")
    return {**report, "not_checked": missing}


def _open(folder: Path) -> PreTrainedConfig:
    """The config, by this library's own class. Raises ModelError where the folder is no export."""
    if not folder.is_dir():
        raise ModelError("FOLDER", str(folder), "There is no such folder.")
    data = _read(folder, "config.json")
    if not data.get("splice"):
        hint = "It is a plain model, not an export of a hybrid: nothing is spliced into it."
        raise ModelError("FOLDER", f"{folder} ({data.get('model_type', 'no model_type')})", hint)
    if not (folder / RECORD).is_file():
        hint = f"It is a hybrid without {RECORD}, which every export has. Verify what `surgery export` wrote."
        raise ModelError("FOLDER", str(folder), hint)
    return load_config(Base(model=str(folder)))


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        data = read_json(folder / name)
    except RunError as error:
        raise ModelError(name, str(error.value or "missing"), _AGAIN) from None
    if not isinstance(data, dict):
        raise ModelError(name, type(data).__name__, f"It should be a JSON object. {_AGAIN}")
    return data


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """`sha256` and `size` of every file below the folder by its relative path, but `export.json` and hidden ones."""
    found = {}
    for path in sorted(_visible(folder)):
        name = path.relative_to(folder).as_posix()
        if name != RECORD:
            found[name] = {"sha256": _sha256(path), "size": path.stat().st_size}
    return found


def _visible(folder: Path) -> Iterable[Path]:
    """Files; what version control and download tools leave is hidden."""
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(p.startswith(".") or p == "__pycache__" for p in parts):
            yield path


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            total.update(block)
    return total.hexdigest()


def check_files(folder: Path, listed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Compares every file with what is listed; gives a sentence on files that are not, and do no harm.

    Raises:
        ModelError: names the first file that is missing, of another length or content, or that a loader would take up
            although it is not listed.
    """
    for name, expected in listed.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            raise ModelError(name, "missing", f"{RECORD} lists it. {_AGAIN}")
        size = path.stat().st_size
        if size != expected["size"]:
            value = f"{size} bytes long, and {RECORD} says {expected['size']}"
            raise ModelError(name, value, f"It is cut off or changed. {_AGAIN}")
        if _sha256(path) != expected["sha256"]:
            raise ModelError(name, f"another sha256 than {RECORD} lists", f"It was changed. {_AGAIN}")
    extra = sorted({path.relative_to(folder).as_posix() for path in _visible(folder)} - set(listed) - {RECORD})
    for name in extra:
        if Path(name).suffix in _LOADED:
            raise ModelError(name, f"not listed in {RECORD}", "It was added later, and could be loaded. Remove it.")
    return [f"{', '.join(extra)}: not listed in {RECORD}"] if extra else []


def check_tensors(folder: Path, config: PreTrainedConfig) -> int:
    """How many tensors there are: each in the file that the index names, finite; columns of replaced heads zero.

    Raises:
        ModelError: names the file or the tensor.
    """
    files = weight_files(lambda name: folder / name if (folder / name).is_file() else None)
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ModelError("weights", "no model*.safetensors", f"An export holds its weights so. {_AGAIN}")
    stored = inventory(files)
    _check_index(folder, stored)
    for name, tensor in zip(stored, read_tensors(stored.values(), 1 << 28), strict=True):
        if not bool(tensor.isfinite().all()):
            raise ModelError(name, "not finite", "It holds NaN or infinity. Train again with a lower rate.")
    _check_silence(config, stored)
    return len(stored)


def _check_index(folder: Path, stored: Mapping[str, Stored]) -> None:
    """Where there are shards the index names every tensor, in the file that holds it, and counts their bytes."""
    path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not path.is_file():
        return
    index = json.loads(path.read_text(encoding="utf-8"))
    for name in sorted(set(index["weight_map"]) ^ set(stored)):
        where = "is in no file" if name in index["weight_map"] else "is not in the index"
        raise ModelError(path.name, f"{name} {where}", _AGAIN)
    for name, file in index["weight_map"].items():
        if stored[name].file.name != file:
            raise ModelError(path.name, f"{name} is in {stored[name].file.name}, not in {file}", _AGAIN)
    held = sum(tensor.bytes for tensor in stored.values())
    if index.get("metadata", {}).get("total_size", held) != held:
        raise ModelError(path.name, f"total_size {index['metadata']['total_size']}", f"The tensors have {held} bytes.")


def _check_silence(config: PreTrainedConfig, stored: Mapping[str, Stored]) -> None:
    """Where heads were replaced, their columns of `out_proj` are zero."""
    specs = {spec.layer: spec for spec in family_of(config).mixers(config) if spec.is_ssm}
    for site in config.splice or ():
        spec = specs.get(site["layer"])
        if site["mode"] != "replace" or spec is None:  # a whole layer is gone, and its heads with it
            continue
        name = f"{spec.path}.out_proj.weight"
        if name not in stored:
            raise ModelError(name, "missing", f"The config replaces heads of this mixer. {_AGAIN}")
        (weight,) = read_tensors([stored[name]])
        for head in site["heads"]:
            if bool(weight[:, structure_of(spec).weight_slices(spec, head).out].any()):
                raise ModelError(f"L{spec.layer}H{head}", "not silent", "It was replaced, and its columns must be 0.")


def check_agreement(folder: Path, config: PreTrainedConfig) -> tuple[list[str], list[str]]:
    """Holds `config.splice`, plan.json, heads.json and the card's table together.

    Returns:
        The names of those that agree, and a sentence on each one that is not there.

    Raises:
        ModelError: names the file that says something else, and what.
    """
    agree, unknown = ["config.json"], list[str]()
    if not config.splice:
        return agree, ["nothing is spliced: there is nothing to agree on"]
    plan = plan_of_hybrid(config, "")
    try:
        if (folder / "plan.json").is_file():
            _check_plan(plan_from_json(_read(folder, "plan.json")), plan)
            agree.append("plan.json")
        if (folder / "heads.json").is_file():
            _check_heads(folder, plan)
            agree.append("heads.json")
    except PlanError as error:
        raise ModelError(error.field, str(error.value), error.hint) from None
    card = folder / "README.md"
    rows = card_table(card.read_text(encoding="utf-8")) if card.is_file() else []
    if rows:
        _check_card(rows, plan)
        agree.append("README.md")
    unknown += [f"{name}: not in the folder" for name in ("plan.json", "heads.json") if name not in agree]
    return agree, unknown if rows else [*unknown, "README.md: it has no table of spliced heads"]


def _check_plan(written: Plan, plan: Plan) -> None:
    if written.geometry != plan.geometry:
        value = f"geometry {written.geometry}, and the config's is {plan.geometry}"
        raise ModelError("plan.json", value, "It is the plan of another model.")
    if written.grafts != plan.grafts:
        value = f"{_names(written)}, and config.splice {_names(plan)}"
        raise ModelError("plan.json", value, "They name different grafts.")


def _names(plan: Plan) -> str:
    grafts = (f"{g.site.name} heads {list(g.heads)} {g.mode} {g.init} {g.unit} {list(g.reads)}" for g in plan.grafts)
    return "; ".join(grafts)


def _check_heads(folder: Path, plan: Plan) -> None:
    """What was chosen is what is spliced; where whole layers went in, the heads that chose them lie there."""
    heads = head_set_from_json(_read(folder, "heads.json"))
    if heads.geometry != plan.geometry:
        raise ModelError("heads.json", f"geometry {heads.geometry}", "The heads were located in another model.")
    whole = {graft.site.layer for graft in plan.grafts if graft.unit == "layer"}
    chosen = {(s.head.layer, s.head.head, s.reads) for s in heads.chosen if s.head.layer not in whole}
    spliced = {
        (graft.site.layer, head, reads)
        for graft in plan.grafts
        for head, reads in zip(graft.heads, graft.reads, strict=True)
        if graft.site.layer not in whole
    }
    if chosen != spliced or not whole <= {s.head.layer for s in heads.chosen}:
        named = ", ".join(str(s.head) for s in heads.chosen)
        raise ModelError("heads.json", f"it chose {named}, and config.splice has {_names(plan)}", "They disagree.")


def card_table(text: str) -> list[dict[str, str]]:
    """The rows of a card's table of spliced heads, by the names of its columns; none where there is no such table."""
    rows: list[dict[str, str]] = []
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif cells[0] == "spliced head":
            header = cells
        elif header and set(line) - set("|-: "):
            rows.append(dict(zip(header, cells, strict=False)))
    return rows


def _check_card(rows: list[dict[str, str]], plan: Plan) -> None:
    expected: list[tuple[str, ...]] = []
    for graft in plan.grafts:
        if graft.unit == "layer":
            expected.append((f"L{graft.site.layer}, the whole layer", graft.mode))
            continue
        for head, reads in zip(graft.heads, graft.reads, strict=True):
            expected.append((f"L{graft.site.layer}H{head}", graft.mode, graft.init, reads.replace("_", " ")))
    found: list[tuple[str, ...]] = []
    for cells in rows:
        columns = ("mode",) if "whole layer" in cells["spliced head"] else ("mode", "init", "reads")
        found.append((cells["spliced head"], *(cells.get(column, "") for column in columns)))
    if sorted(found) != sorted(expected):
        raise ModelError("README.md", f"its table has {sorted(found)}", f"config.splice has {sorted(expected)}.")


def check_code(folder: Path, trust_remote_code: bool = False) -> None:
    """Raises ModelError where loading the folder would run code that is not this library's own, and before that where
    a modelling file is missing."""
    maps = _read(folder, "config.json").get("auto_map") or {}
    for name in ("AutoConfig", "AutoModelForCausalLM"):
        module = str(maps.get(name, "")).rpartition(".")[0]
        if not module or not (folder / f"{module}.py").is_file():
            value = f"auto_map.{name} names {maps.get(name) or 'nothing'}"
            raise ModelError("config.json", value, f"The modelling file is missing from the folder. {_AGAIN}")
    if (folder / "adapter_config.json").is_file():
        raise ModelError("adapter_config.json", "present", "transformers would load another base. Merge it first.")
    if trust_remote_code:
        return
    trust = "Read it, and pass --trust-remote-code to run it."
    for name, target in maps.items():
        if "--" in str(target):
            raise ModelError("config.json", f"auto_map.{name} names another repository, {target}", trust)
    for path in sorted(folder.rglob("*.py")):
        own = _LIBRARY / path.name
        if path.parent != folder or not own.is_file() or own.read_bytes() != path.read_bytes():
            name = path.relative_to(folder).as_posix()
            raise ModelError(name, "not the module of this version of the library, byte for byte", trust)
