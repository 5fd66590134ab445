"""Export a hybrid: write a folder in a registered format with its documents, and verify it first."""

from __future__ import annotations

import copy
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import __version__ as safetensors_version
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

from surgery import __version__
from surgery.errors import ModelError
from surgery.export.chat_template import with_chat_template
from surgery.export.documents import check_documents
from surgery.export.files import RECORD, fingerprints
from surgery.export.formats import ExportFormat, plugin_of
from surgery.files.atomic import new_folder, write_json, write_text
from surgery.files.lock import hold
from surgery.files.ownership import check_replaceable
from surgery.models.runtime import stays_in_fp32
from surgery.recipe import Export
from surgery.recipe.export import EXPORT_FORMATS
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
    page: Path | None = None,
) -> dict[str, Any]:
    """Write and verify an export. The folder is created only if the export is complete and verified.

    The same inputs on the same machine give the same bytes.

    Args:
        model: the hybrid. It is copied to the CPU and not changed.
        folder: new or empty. An earlier export in it is replaced. Any other folder is refused.
        section: the recipe's section `export`: format, precision, chat template. Its defaults if None.
        card: text of README.md.
        plan: stored as plan.json; `heads` as heads.json, `recipe_yaml` as recipe.yaml, `results` as results.json.
        figures: folder of figures; its PNG files are stored under figures/.
        page: the run's `report.html`.

    Returns:
        The content of export.json:

        - `format`, and `plugin` if the format comes from outside this library.
        - Checked quantities of the format. For `transformers`: `checked_without_surgery`, `max_logit_difference`,
          `generated_tokens`, `tensors`.
        - `agree`: documents that name the same splice.
        - `versions` of the libraries.
        - `files`: SHA-256 and size of every other file.

    Raises:
        RunError: the folder holds something else, or another process writes into it.
        ModelError: a weight is not finite, or the written folder does not verify.
        RecipeError: the format is not registered, or the chat template cannot be used.
    """
    section, folder = section or Export(), Path(folder)
    format_class: type[ExportFormat] = EXPORT_FORMATS[section.format]
    export_format = format_class()
    tokenizer = with_chat_template(tokenizer, section.chat_template)
    documents = {"plan.json": plan and to_json(plan), "heads.json": heads and to_json(heads), "results.json": results}
    texts = {"recipe.yaml": recipe_yaml, "README.md": card or None}
    with hold(folder):
        check_replaceable("folder", folder, "export", {})
        with new_folder(folder) as new:
            exported = _in_export_precision(model, section)
            export_format.write(exported, tokenizer, new, section)
            for name, data in documents.items():
                if data is not None:
                    write_json(new / name, data)
            for name, text in texts.items():
                if text is not None:
                    write_text(new / name, text)
            if figures is not None and figures.is_dir():
                shutil.copytree(figures, new / "figures", ignore=shutil.ignore_patterns("*.svg", "*.csv"))
            if page is not None and page.is_file():
                shutil.copyfile(page, new / "report.html")
            agree, _ = check_documents(new, export_format.read_plan(new))
            plugin = plugin_of(export_format)
            record: dict[str, Any] = {"format": export_format.name, **({"plugin": plugin} if plugin else {})}
            record |= {**export_format.check(new, exported, tokenizer), "agree": agree}
            record["versions"] = {  # the verification depends on them
                "surgery": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers_version,
                "safetensors": safetensors_version,
            }
            record["files"] = fingerprints(new)
            write_json(new / RECORD, record)
    return record


def _in_export_precision(model: PreTrainedModel, section: Export) -> PreTrainedModel:
    """Copy the model to the CPU in the precision of the export. Parameters that must stay in fp32 keep it."""
    # As after loading. torch rounds some products differently for a weight that requires no gradient.
    exported = copy.deepcopy(model).cpu().eval().requires_grad_(True)
    dtype = getattr(torch, section.dtype)
    for name, parameter in exported.named_parameters():
        cast = parameter.data.to(torch.float32 if stays_in_fp32(exported, name) else dtype)
        if not bool(cast.isfinite().all()):
            hint = "The weights hold NaN or infinity. Train again with a lower learning rate."
            if bool(parameter.isfinite().all()):
                hint = f"A weight is too large for {section.dtype}. Set export.dtype: bfloat16."
            raise ModelError("export", name, hint)
        parameter.data = cast
    exported.config.dtype = dtype
    exported.config.use_cache = True
    return exported
