"""The export formats `transformers` and `nemotron_h`: write the folder, compare it with the model, verify a copy.

A hybrid with inserted layers is a checkpoint of transformers' own class, without code. Otherwise the modelling files
are those of `surgery.hybrid`, byte for byte. Code in a folder runs only after it was found to equal this library's.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, NemotronHConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import ModelError, reading
from surgery.export.files import AGAIN, REFERENCE, read_object
from surgery.export.reload import SAMPLE, compare, make_reference, prompt_ids, read_reference, reload, write_reference
from surgery.export.shipped_code import check_code, private_copy
from surgery.files.atomic import write_text
from surgery.hybrid.configuration_hybrid import BRANCHES
from surgery.hybrid.modeling_hybrid import SplicedAttention
from surgery.models.config_checks import SPLICE_VERSION
from surgery.models.inserted import CLASS, has_inserted, portable_config
from surgery.models.loading import load_config
from surgery.models.lookup import family_of, structure_of
from surgery.models.spliced import plan_of_hybrid
from surgery.models.tensor_files import Stored, inventory, read_tensors, weight_files
from surgery.recipe import Base, Export
from surgery.types import Plan

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def write_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, section: Export) -> None:
    """Write weights, config, modelling files and tokenizer. Raises ModelError for what the format cannot hold."""
    inserted = has_inserted(model.config) and isinstance(model.config, NemotronHConfig)
    if section.format != "transformers" and not inserted:
        hint = "This format holds models with inserted layers. Set splice.form: block or pair, or export.format: "
        raise ModelError("export.format", f"nemotron_h for a {model.config.model_type}", hint + "transformers.")
    config = copy.deepcopy(model.generation_config) or GenerationConfig()
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    # Another id belongs to another tokenizer, such as the default of a config class.
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stops:
        config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    if not config.do_sample:  # transformers saves no config with flags that it would not use
        for flag in _SAMPLING:
            setattr(config, flag, None)
    model.generation_config = config
    if getattr(model.config, "splice", None):
        model.config.splice_version = SPLICE_VERSION
    try:
        model.save_pretrained(folder, max_shard_size=section.max_shard_size)
    except ValueError as error:  # a plugin's class whose file cannot be shipped
        raise ModelError("export", type(model).__name__, str(error)) from error
    tokenizer.save_pretrained(folder)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    if inserted:
        data = portable_config(read_object(folder, "config.json"), model.config)
        write_text(folder / "config.json", json.dumps(data, indent=2, sort_keys=True) + "\n")


def compare_with_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Reload the written folder in a process that cannot import `surgery`, and compare logits and tokens.

    Writes the reference that `verify_copy` compares with later.

    Returns:
        `checked_without_surgery`, `max_logit_difference`, `generated_tokens` (number compared), `tensors` (number).

    Raises:
        ModelError: they differ, a tensor is missing or not finite, or a replaced head is not silent.
    """
    tensors = check_tensors(folder, model.config)
    ids = prompt_ids(model.config.vocab_size)
    exact = "auto" if all(p.dtype == torch.float32 for p in model.parameters()) else "float32"
    reloaded = reload(folder, ids, tuple(dict.fromkeys(("auto", exact))), not has_inserted(model.config))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        text = model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0)
    difference = float((logits - reloaded["auto.logits"]).abs().max())
    if difference != 0 or not torch.equal(text, reloaded["auto.text"]):
        hint = "The reloaded folder must reproduce the model exactly."
        raise ModelError("export", f"logits differ by {difference}", hint)
    if "tokenizer" in reloaded and reloaded["tokenizer"].tolist() != tokenizer(SAMPLE)["input_ids"]:
        value = f"the reloaded tokenizer encodes {SAMPLE!r} as other tokens"
        raise ModelError("tokenizer", value, "Set base.tokenizer to one that transformers saves without loss.")
    if "chat_template" in reloaded and json.loads(bytes(reloaded["chat_template"].tolist())) != tokenizer.chat_template:
        hint = "transformers does not save it without loss. Set export.chat_template to a file with the template."
        raise ModelError("chat template", "the reloaded tokenizer has another one", hint)
    write_reference(folder / REFERENCE, make_reference(ids, reloaded, exact))
    return {
        "checked_without_surgery": True,
        "max_logit_difference": difference,
        "generated_tokens": text.shape[1] - ids.shape[1],
        "tensors": tensors,
    }


def plan_in(folder: Path, trust_remote_code: bool = False) -> tuple[str, Plan] | None:
    """Read the plan from config.json; None if nothing is spliced."""
    config = _load_config(folder, trust_remote_code)
    with reading("config.json", None, AGAIN):
        return ("config.json", plan_of_hybrid(config, "")) if _is_hybrid(config) else None


def verify_copy(folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Check a copy: tensors, silence of replaced heads, code, and the logits in a process without this library.

    Returns:
        `tensors`, `max_logit_difference` (as a fraction of the logits' standard deviation), `generated_tokens` (number
        that agree), `not_checked` (sentences).

    Raises:
        ModelError: a check fails. The error names the file, tensor or head.
    """
    config = _load_config(folder, trust_remote_code)
    if not _is_hybrid(config):
        hint = "It is a plain model: nothing is spliced into it."
        raise ModelError("FOLDER", f"{folder} ({config.model_type})", hint)
    tensors = check_tensors(folder, config)
    check_generation_config(folder)
    if has_inserted(config):
        data = read_object(folder, "config.json")
        if data.get("architectures") != [CLASS] or data.get("auto_map"):
            value = f"architectures {data.get('architectures')}, auto_map {data.get('auto_map')}"
            raise ModelError("config.json", value[:200], f"With inserted layers it names {CLASS} and no code. {AGAIN}")
    has_reference = (folder / REFERENCE).is_file()
    reference = read_reference(folder / REFERENCE, config.vocab_size) if has_reference else {}
    ids = reference.get("ids", prompt_ids(config.vocab_size))
    with nullcontext(folder) if trust_remote_code else private_copy(folder) as checked:
        check_code(checked, config, trust_remote_code)
        reloaded = reload(checked, ids, ("float32",), not has_inserted(config))
    report: dict[str, Any] = {"tensors": tensors, "not_checked": []}
    if reference:
        report["max_logit_difference"], report["generated_tokens"] = compare(reference, reloaded, "float32")
    else:
        absent = f"logits and generation: {REFERENCE} is absent. The folder loads and generates"
        report["not_checked"].append(absent)
    if "tokenizer" not in reloaded:
        report["not_checked"].append("tokenizer: it is absent or needs code of its own")
    return report


def _load_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Load the config with this library's class."""
    data = read_object(folder, "config.json")
    with reading("config.json", None, AGAIN), _placeholder_branches(data.get("splice"), trust_remote_code):
        config = load_config(Base(model=str(folder)))
        splice = getattr(config, "splice", None)
        if not isinstance(splice, list | None):
            raise TypeError("splice is not a list")
        if has_inserted(config) and not isinstance(config, NemotronHConfig):
            raise TypeError(f"inserted layers in a {config.model_type}")
        return config


def _is_hybrid(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "splice", None)) or has_inserted(config)


@contextmanager
def _placeholder_branches(splice: Any, trust_remote_code: bool) -> Iterator[None]:
    """With `trust_remote_code`, accept attention branches that are not registered. Raise ModelError without it."""
    sites = [site for site in splice if isinstance(site, Mapping)] if isinstance(splice, list) else []
    names = {site["init"] for site in sites if isinstance(site.get("init"), str)} - set(BRANCHES)
    if names and not trust_remote_code:
        hint = "No such attention branch is registered. Pass --plugin with the module that registers it, or read the "
        hint += "modules of the export and pass --trust-remote-code to run them."
        raise ModelError("config.json splice", f"init {', '.join(sorted(names))}", hint)
    BRANCHES.update(dict.fromkeys(names, _AnyBranch))
    try:
        yield
    finally:
        for name in names:
            del BRANCHES[name]


class _AnyBranch(SplicedAttention):
    """Placeholder for an attention branch that is not registered."""

    fields: Mapping[str, Any] = {}


def check_generation_config(folder: Path) -> None:
    """Raise ModelError if transformers cannot use generation_config.json."""
    name = "generation_config.json"
    if not (folder / name).is_file():
        return
    data = read_object(folder, name)
    with reading(name, None, AGAIN):
        GenerationConfig.from_dict(data).validate(strict=True)
        for key, value in data.items():
            ids = value if isinstance(value, list) else [value]
            if key.endswith("_token_id") and not all(i is None or type(i) is int for i in ids):
                raise TypeError(f"{key} is {str(value)[:40]!r}, expected a token id")


def check_tensors(folder: Path, config: PreTrainedConfig) -> int:
    """Return the number of tensors, all finite and in the file that the index names; replaced heads are silent.

    Raises:
        ModelError: they are not, or a file could be loaded instead of the weights.
    """
    regular = {path.name: path for path in folder.iterdir() if path.is_file()}  # an index cannot name files elsewhere
    files = weight_files(regular.get)
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ModelError("weights", "no model*.safetensors", f"An export stores its weights there. {AGAIN}")
    for name in sorted(set(regular) - {file.name for file in files}):
        if name.endswith(".safetensors"):
            raise ModelError(name, "not part of the weights", "A loader could load it in their place. Remove it.")
    stored = inventory(files)
    _check_index(folder, stored)
    for name, tensor in zip(stored, read_tensors(stored.values(), 1 << 28), strict=True):
        if not bool(tensor.isfinite().all()):
            raise ModelError(name, "not finite", "It holds NaN or infinity. Train again with a lower learning rate.")
    with reading("config.json", None, AGAIN):
        _check_silence(config, stored)
    return len(stored)


def _check_index(folder: Path, stored: Mapping[str, Stored]) -> None:
    """Check that the index of sharded weights names every tensor, its file, and the total size."""
    path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not path.is_file():
        return
    index = read_object(folder, path.name)
    with reading(path.name, None, AGAIN):
        places, sizes = index["weight_map"], sum(tensor.bytes for tensor in stored.values())
        for name in sorted(set(places) ^ set(stored)):
            raise ModelError(path.name, f"{name} is {'in no file' if name in places else 'not in the index'}", AGAIN)
        for name, file in places.items():
            if stored[name].file.name != file:
                raise ModelError(path.name, f"{name} is in {stored[name].file.name}, not in {file}", AGAIN)
        total = index.get("metadata", {}).get("total_size", sizes)
        if total != sizes:
            raise ModelError(path.name, f"total_size {total}", f"The tensors have {sizes} bytes. {AGAIN}")


def _check_silence(config: PreTrainedConfig, stored: Mapping[str, Stored]) -> None:
    """Check that the columns of `out_proj` that belong to replaced heads are zero."""
    specs = {spec.layer: spec for spec in family_of(config).mixers(config) if spec.is_ssm}
    for site in getattr(config, "splice", None) or ():
        spec = specs.get(site["layer"])
        if site["mode"] != "replace" or spec is None:  # a replaced layer has no SSM heads left
            continue
        name = f"{spec.path}.out_proj.weight"
        if name not in stored:
            raise ModelError(name, "missing", f"The config replaces heads of this mixer. {AGAIN}")
        (weight,) = read_tensors([stored[name]])
        for head in site["heads"]:
            if bool(weight[:, structure_of(spec).weight_slices(spec, head).out].any()):
                hint = "The config replaces this head, so its columns of out_proj must be 0."
                raise ModelError(f"L{spec.layer}H{head}", "not silent", hint)
