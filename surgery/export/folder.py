"""Writes the checkpoint folder that loads in stock transformers, and checks it. Owns: that folder's contents.

Must never know: how the model was trained. The shipped modelling files are this library's own modules, byte for byte;
transformers copies what they import.
"""

from __future__ import annotations

import copy
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import __version__ as safetensors_version
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

from surgery import __version__
from surgery.errors import ModelError
from surgery.export.files import RECORD, REFERENCE, fingerprints
from surgery.export.reload import make_reference, prompt_ids, reload
from surgery.export.verify import check_agreement, check_tensors
from surgery.files.atomic import new_folder, write_json, write_text
from surgery.files.lock import hold
from surgery.files.ownership import check_replaceable
from surgery.models.runtime import restore_chunks
from surgery.recipe import Export
from surgery.types import HeadSet, Plan, to_json


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    section: Export | None = None,
    card: str = "",
    plan: Plan | None = None,
    heads: HeadSet | None = None,
    recipe_yaml: str | None = None,
    results: Mapping[str, Any] | None = None,
    figures: Path | None = None,
    overwrite: bool = False,
    page: Path | None = None,
) -> dict[str, Any]:
    """Writes the folder whole, verified, or not at all.

    Args:
        folder: must not be there, or be empty, or hold an export, which is replaced.
        card: text of README.md.
        plan, heads, recipe_yaml, results, figures: the evidence that travels with the weights.
        overwrite: changes nothing; an export is replaced, anything else never is.
        page: the run's `report.html`.

    Returns:
        What `export.json` holds: `checked_without_surgery`, `max_logit_difference`, `generated_tokens` (compared),
        `tensors`, `agree` (the documents that name the config's splice), `versions`, and `files` with the sha256 and
        size of every other file. The same inputs on the same machine give the same bytes, file by file.

    Raises:
        RunError: the folder holds something else, or another process writes into it.
        ModelError: as `verify`; a weight is not finite.
    """
    section, folder = section or Export(), Path(folder)
    with hold(folder):
        check_replaceable("folder", folder, "export", {})
        return _export(model, tokenizer, folder, section, card, plan, heads, recipe_yaml, results, figures, page)


def _export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    section: Export,
    *evidence: Any,
) -> dict[str, Any]:
    with new_folder(folder) as new:
        exported = _as_exported(model, section)
        exported.generation_config = _generation_config(model, tokenizer)
        try:
            exported.save_pretrained(new, max_shard_size=section.max_shard_size)
        except ValueError as error:  # a class from outside the library that cannot travel
            raise ModelError("export", type(exported).__name__, str(error)) from error
        tokenizer.save_pretrained(new)
        shutil.rmtree(new / "__pycache__", ignore_errors=True)
        _write_evidence(new, *evidence)
        report = verify(new, exported)
        report |= {"versions": _versions(), "files": fingerprints(new)}
        write_json(new / RECORD, report)
    return report


def _write_evidence(
    folder: Path,
    card: str,
    plan: Plan | None,
    heads: HeadSet | None,
    recipe_yaml: str | None,
    results: Mapping[str, Any] | None,
    figures: Path | None,
    page: Path | None,
) -> None:
    """What travels with the weights, as far as it is given."""
    if plan is not None:
        write_json(folder / "plan.json", to_json(plan))
    if heads is not None:
        write_json(folder / "heads.json", to_json(heads))
    if recipe_yaml is not None:
        write_text(folder / "recipe.yaml", recipe_yaml)
    if results is not None:
        write_json(folder / "results.json", results)
    if figures is not None and figures.is_dir():
        shutil.copytree(figures, folder / "figures", ignore=shutil.ignore_patterns("*.svg", "*.csv"))
    if page is not None and page.is_file():
        shutil.copyfile(page, folder / "report.html")
    if card:
        write_text(folder / "README.md", card)


def _as_exported(model: PreTrainedModel, section: Export) -> PreTrainedModel:
    """A copy in the export's dtype; what has to stay in fp32 does."""
    # As loading leaves it: torch rounds some products differently where a weight takes no gradient.
    exported = copy.deepcopy(model).cpu().eval().requires_grad_(True)
    restore_chunks(exported)
    dtype = getattr(torch, section.dtype)
    for name, parameter in exported.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ModelError("export", name, "It holds numbers that are not finite. Train again with a lower rate.")
        kept = name.rsplit(".", 1)[-1] in (exported._keep_in_fp32_modules_strict or ())
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
    exported.config.dtype = dtype
    exported.config.use_cache = True
    return exported


def _generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    config = copy.deepcopy(model.generation_config) or GenerationConfig()
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    return config


def verify(folder: Path, model: PreTrainedModel) -> dict[str, Any]:
    """Reloads the folder where `surgery` cannot be imported and compares logits and a generation with `model`'s.

    Writes the reference that later checks of a copy compare with.

    Raises:
        ModelError: they differ, a tensor is missing or not finite, a replaced head is not silent, or the documents in
            the folder name another splice than the config.
    """
    tensors = check_tensors(folder, model.config)
    agree, _ = check_agreement(folder, model.config)
    ids = prompt_ids(model.config.vocab_size)
    exact = "auto" if all(p.dtype == torch.float32 for p in model.parameters()) else "float32"
    found = reload(folder, ids, tuple(dict.fromkeys(("auto", exact))))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        text = model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0)
    difference = float((logits - found["auto.logits"]).abs().max())
    if difference != 0 or not torch.equal(text, found["auto.text"]):
        raise ModelError("export", f"logits differ by {difference}", "The reloaded folder is another model.")
    save_file(make_reference(ids, found, exact), folder / REFERENCE)
    return {
        "checked_without_surgery": True,
        "max_logit_difference": difference,
        "generated_tokens": text.shape[1] - ids.shape[1],
        "tensors": tensors,
        "agree": agree,
    }


def _versions() -> dict[str, str]:
    """What the check depends on."""
    own = {"surgery": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return own | {"transformers": transformers_version, "safetensors": safetensors_version}
