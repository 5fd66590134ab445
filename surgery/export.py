"""Writes the checkpoint folder that loads in stock transformers, and checks it. Owns: that folder's contents.

Must never know: how the model was trained. The shipped modelling files are this library's own modules, byte for byte;
transformers copies what they import.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import ModelError, RunError
from surgery.families import family_of, mixer_of, structure_of
from surgery.families.runtime import restore_chunks
from surgery.heads import HeadSet, Plan, to_json
from surgery.recipe import Export
from surgery.rundir import new_folder, write_json, write_text


def export(
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
) -> dict[str, Any]:
    """Writes the folder whole, verified, or not at all.

    Args:
        folder: must not be there, or be empty, or hold an export; `overwrite` replaces whatever it is.
        card: text of README.md.
        plan, heads, recipe_yaml, results, figures: the evidence that travels with the weights.

    Returns:
        What the verification found: `max_logit_difference`, `tensors`, `checked_without_surgery`.

    Raises:
        RunError: the folder holds something else.
        ModelError: a tensor is not finite, a silenced head is not silent, or the reloaded folder gives other logits.
    """
    section = section or Export()
    there = Path(folder)
    taken = there.is_file() or (there.is_dir() and any(there.iterdir()) and not (there / "export.json").is_file())
    if taken and not overwrite:
        raise RunError("folder", str(folder), "It holds something that is no export. Name another folder.")
    with new_folder(Path(folder)) as new:
        exported = _as_exported(model, section)
        exported.generation_config = _generation_config(model, tokenizer)
        _save_with_code(exported, new)
        _name_backbone(new, type(exported.base_model).__name__)
        tokenizer.save_pretrained(new)
        shutil.rmtree(new / "__pycache__", ignore_errors=True)
        if plan is not None:
            write_json(new / "plan.json", to_json(plan))
        if heads is not None:
            write_json(new / "heads.json", to_json(heads))
        if recipe_yaml is not None:
            write_text(new / "recipe.yaml", recipe_yaml)
        if results is not None:
            write_json(new / "results.json", results)
        if figures is not None and figures.is_dir():
            shutil.copytree(figures, new / "figures", ignore=shutil.ignore_patterns("*.svg", "*.csv"))
        if card:
            write_text(new / "README.md", card)
        report = verify(new, exported)
        write_json(new / "export.json", report)
    return report


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


def _save_with_code(model: PreTrainedModel, folder: Path) -> None:
    """Saves with the modelling files. The mark that asks for them sits on the class; it is taken off again."""
    model_class, config_class = type(model), type(model.config)
    try:
        model_class.register_for_auto_class("AutoModelForCausalLM")
        config_class.register_for_auto_class()
        model.save_pretrained(folder)
    finally:
        model_class._auto_class = config_class._auto_class = None


def _name_backbone(folder: Path, name: str) -> None:
    """transformers names the class that was saved; `AutoModel` finds the model without its head as well."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModel"] = config["auto_map"]["AutoModelForCausalLM"].split(".")[0] + "." + name
    write_json(folder / "config.json", config)


def _generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    config = copy.deepcopy(model.generation_config) or GenerationConfig()
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    return config


# Runs in a process that cannot import this library: what a stranger's machine would do.
_RELOAD = """
import json, sys
sys.modules["surgery"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
folder, ids, out = sys.argv[1:4]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()
ids = load_file(ids)["ids"]
with torch.no_grad():
    logits = model(ids, use_cache=False).logits
    text = model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0)
save_file({"logits": logits, "text": text}, out)
"""


def verify(folder: Path, model: PreTrainedModel, prompt_tokens: int = 24) -> dict[str, Any]:
    """Reloads the folder where `surgery` cannot be imported and compares logits and a generation with `model`'s.

    Raises:
        ModelError: they differ, a tensor is not finite, or a replaced head is not silent.
    """
    _check_silence(model)
    tensors = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (safe_open is no mapping)
                tensors += 1
                if not bool(opened.get_tensor(name).isfinite().all()):
                    raise ModelError("export", name, "It holds numbers that are not finite.")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (2, prompt_tokens), generator=generator)
    with tempfile.TemporaryDirectory() as scratch:
        given, found = Path(scratch, "ids.safetensors"), Path(scratch, "found.safetensors")
        save_file({"ids": ids}, given)
        command = [sys.executable, "-c", _RELOAD, str(folder.resolve()), str(given), str(found)]
        environment = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(scratch, "modules"))}
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(environment), cwd=scratch)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelError("export", last, "The folder does not load in stock transformers.")
        reloaded = load_file(found)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        text = model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0)
    difference = float((logits - reloaded["logits"]).abs().max())
    if difference != 0 or not torch.equal(text, reloaded["text"]):
        raise ModelError("export", f"logits differ by {difference}", "The reloaded folder is another model.")
    return {"checked_without_surgery": True, "max_logit_difference": difference, "tensors": tensors}


def _check_silence(model: PreTrainedModel) -> None:
    """Where heads were replaced, their columns of `out_proj` are still zero."""
    specs = {spec.layer: spec for spec in family_of(model.config).mixers(model.config) if spec.is_ssm}
    for site in getattr(model.config, "splice", None) or []:
        spec = specs[site["layer"]]
        out_proj = structure_of(spec).out_proj(mixer_of(model, spec))
        for head in site["heads"] if site["mode"] == "replace" else []:
            if bool(out_proj.weight[:, structure_of(spec).weight_slices(spec, head).out].any()):
                raise ModelError("export", f"L{spec.layer}H{head}", "It was replaced, and is not silent any more.")


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without secrets, and `extra`."""
    hidden = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
    kept = {k: v for k, v in os.environ.items() if k not in hidden and k not in _LAUNCHER}
    return {**kept, **extra}


_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
