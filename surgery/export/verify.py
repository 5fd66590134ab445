"""Checks an exported folder, also someone else's copy, without the model that it was made from. Owns: what makes one
whole: its files are those that were written, its tensors are finite, its documents agree, and it computes what it did.

Must never know: how a folder is written. Nothing of a folder is run before its code is known to be this library's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from surgery.errors import ModelError, PlanError, reading
from surgery.export.files import AGAIN, RECORD, REFERENCE, check_entries, check_files, read_object
from surgery.export.reload import compare, prompt_ids, read_reference, reload
from surgery.export.shipped_code import check_code, private_copy
from surgery.hybrid.attention import SplicedAttention
from surgery.hybrid.branches import BRANCHES
from surgery.models.loading import load_config
from surgery.models.lookup import family_of, structure_of
from surgery.models.spliced import plan_of_hybrid
from surgery.models.tensor_files import Stored, inventory, read_tensors, weight_files
from surgery.recipe import Base
from surgery.registry import load_plugins
from surgery.types import Plan, head_set_from_json, plan_from_json


def verify_folder(folder: Path | str, trust_remote_code: bool = False) -> dict[str, Any]:
    """Checks a copy of an exported folder against what it says of itself.

    Checked are: size and sha256 of every file; the index of the weights and every tensor; that replaced heads are
    silent; that config, plan, heads and card name the same splice; and, in a process without this library, that stock
    transformers loads it and computes the reference's logits and text within `reload.TOLERANCE`. That takes four bytes
    a parameter.

    Without `trust_remote_code` only known code runs: the folder has to name this library's classes, and its modules
    have to equal this library's, an earlier version's, or those of an installed plugin. They are loaded from a private
    copy. Symbolic links are refused in any case.

    Args:
        trust_remote_code: run any modelling files that the folder holds, in a process of their own.

    Returns:
        What was checked: `files`, `tensors`, `agree` (the documents), `max_logit_difference` (a part of the logits'
        standard deviation), `generated_tokens` (that agree); `not_checked`: a sentence each, for exports of older
        versions, which carry less, and for files that nobody listed.

    Raises:
        ModelError: a file is missing, changed or no part of the export; a tensor is not finite or not silent; the
            documents disagree; it does not load, or computes another model; or it is no export at all.
    """
    folder, missing = Path(folder), list[str]()
    config = _open(folder, trust_remote_code)
    record = read_object(folder, RECORD)
    report: dict[str, Any] = {"files": None, "tensors": 0, "agree": []}
    if "files" in record:
        with reading(RECORD, None, AGAIN):
            missing += check_files(folder, record["files"])
            report["files"] = len(record["files"])
    else:
        missing.append("the files' hashes: an older version wrote it, and listed none")
    report["tensors"] = check_tensors(folder, config)
    report["agree"], unknown = check_agreement(folder, config)
    missing += unknown
    _check_generation(folder)
    modules = check_code(folder, config, trust_remote_code)
    has_reference = (folder / REFERENCE).is_file()
    reference = read_reference(folder / REFERENCE, config.vocab_size) if has_reference else {}
    with nullcontext(folder) if trust_remote_code else private_copy(folder, config, modules) as checked:
        found = reload(checked, reference.get("ids", prompt_ids(config.vocab_size)), ("float32",))
    if has_reference:
        report["max_logit_difference"], report["generated_tokens"] = compare(reference, found, "float32")
    else:
        missing.append(f"logits and a generation: it has no {REFERENCE}; it loads, and both can be computed")
    return {**report, "not_checked": missing}


def _open(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Return the config, by this library's own class. Raises ModelError where the folder is no export."""
    if not folder.is_dir():
        raise ModelError("FOLDER", str(folder), "There is no such folder.")
    check_entries(folder)
    data = read_object(folder, "config.json")
    if not data.get("splice"):
        hint = "It is a plain model, not an export of a hybrid: nothing is spliced into it."
        raise ModelError("FOLDER", f"{folder} ({data.get('model_type', 'no model_type')})", hint)
    if not (folder / RECORD).is_file():
        hint = f"It is a hybrid without {RECORD}, which every export has. Verify what `surgery export` wrote."
        raise ModelError("FOLDER", str(folder), hint)
    with reading("config.json", None, AGAIN), _standing_in(data["splice"], trust_remote_code):
        config = load_config(Base(model=str(folder)))
        if not isinstance(config.splice, list) or type(config.vocab_size) is not int or config.vocab_size < 1:
            raise TypeError(f"splice is no list, or vocab_size no count: {config.vocab_size}")
    return config


@contextmanager
def _standing_in(splice: Any, trust_remote_code: bool) -> Iterator[None]:
    """With trust, let the config have attention branches that are not installed: their fields are not checked.

    Raises:
        ModelError: without trust, for a branch that is not installed.
    """
    load_plugins()
    sites = [site for site in splice if isinstance(site, Mapping)] if isinstance(splice, list) else []
    names = {site["init"] for site in sites if isinstance(site.get("init"), str)} - set(BRANCHES)
    if names and not trust_remote_code:
        hint = "No such attention branch is installed. Install the plugin that registers it, or read the modules of "
        raise ModelError("config.json splice", f"init {', '.join(sorted(names))}", f"{hint}the export and {_TRUSTED}")
    BRANCHES.update(dict.fromkeys(names, _Unchecked))
    try:
        yield
    finally:
        for name in names:
            del BRANCHES[name]


class _Unchecked(SplicedAttention):
    """Stands for an attention branch that is not installed."""

    fields: Mapping[str, Any] = {}


_TRUSTED = "pass --trust-remote-code to run them."


def _check_generation(folder: Path) -> None:
    """Raises ModelError where generation_config.json is there and transformers could not take it."""
    name = "generation_config.json"
    if not (folder / name).is_file():
        return
    data = read_object(folder, name)
    with reading(name, None, AGAIN):
        GenerationConfig.from_dict(data).validate(strict=True)
        for key, value in data.items():
            ids = value if isinstance(value, list) else [value]
            if key.endswith("_token_id") and not all(i is None or type(i) is int for i in ids):
                raise TypeError(f"{key} is {str(value)[:40]!r}, not a token's number")


def check_tensors(folder: Path, config: PreTrainedConfig) -> int:
    """How many tensors there are: each in the file that the index names, finite; columns of replaced heads zero.

    Raises:
        ModelError: names the file or the tensor.
    """
    plain = {path.name: path for path in folder.iterdir() if path.is_file()}  # an index names nothing elsewhere
    files = weight_files(plain.get)
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ModelError("weights", "no model*.safetensors", f"An export holds its weights so. {AGAIN}")
    for name in sorted(set(plain) - {file.name for file in files} - {REFERENCE}):
        if name.endswith(".safetensors"):
            raise ModelError(name, "no part of the weights", "A loader could load it in their place. Remove it.")
    stored = inventory(files)
    _check_index(folder, stored)
    for name, tensor in zip(stored, read_tensors(stored.values(), 1 << 28), strict=True):
        if not bool(tensor.isfinite().all()):
            raise ModelError(name, "not finite", "It holds NaN or infinity. Train again with a lower rate.")
    with reading("config.json", None, AGAIN):
        _check_silence(config, stored)
    return len(stored)


def _check_index(folder: Path, stored: Mapping[str, Stored]) -> None:
    """Where there are shards the index names every tensor, in the file that holds it, and counts their bytes."""
    path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not path.is_file():
        return
    index = read_object(folder, path.name)
    with reading(path.name, None, AGAIN):
        for name in sorted(set(index["weight_map"]) ^ set(stored)):
            where = "is in no file" if name in index["weight_map"] else "is not in the index"
            raise ModelError(path.name, f"{name} {where}", AGAIN)
        for name, file in index["weight_map"].items():
            if stored[name].file.name != file:
                raise ModelError(path.name, f"{name} is in {stored[name].file.name}, not in {file}", AGAIN)
        held = sum(tensor.bytes for tensor in stored.values())
        total = index.get("metadata", {}).get("total_size", held)
        if total != held:
            raise ModelError(path.name, f"total_size {total}", f"The tensors have {held} bytes.")


def _check_silence(config: PreTrainedConfig, stored: Mapping[str, Stored]) -> None:
    """Where heads were replaced, their columns of `out_proj` are zero."""
    specs = {spec.layer: spec for spec in family_of(config).mixers(config) if spec.is_ssm}
    for site in config.splice or ():
        spec = specs.get(site["layer"])
        if site["mode"] != "replace" or spec is None:  # a whole layer is gone, and its heads with it
            continue
        name = f"{spec.path}.out_proj.weight"
        if name not in stored:
            raise ModelError(name, "missing", f"The config replaces heads of this mixer. {AGAIN}")
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
    try:
        with reading("config.json", None, AGAIN):
            plan = plan_of_hybrid(config, "")
        if (folder / "plan.json").is_file():
            with reading("plan.json", None, AGAIN):
                _check_plan(plan_from_json(read_object(folder, "plan.json")), plan)
            agree.append("plan.json")
        if (folder / "heads.json").is_file():
            with reading("heads.json", None, AGAIN):
                _check_heads(folder, plan)
            agree.append("heads.json")
    except PlanError as error:
        raise ModelError(error.field, str(error.value), error.hint) from None
    card = folder / "README.md"
    with reading("README.md", None, AGAIN):
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
    heads = head_set_from_json(read_object(folder, "heads.json"))
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
