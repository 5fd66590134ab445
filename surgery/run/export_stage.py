"""The stage export: write the trained hybrid in the format of the recipe, with its card and report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from surgery.errors import RecipeError, RunError, reading
from surgery.export.chat_template import template_revision, with_chat_template
from surgery.export.folder import export_model
from surgery.export.formats import ExportFormat
from surgery.export.model_card import card_of, model_card
from surgery.files.atomic import read_json
from surgery.models.inserted import has_inserted
from surgery.recipe import Recipe, to_yaml
from surgery.recipe.export import EXPORT_FORMATS, LAYER_FORMATS
from surgery.recipe.public import public_recipe
from surgery.report.run_report import write_report
from surgery.run.context import Run
from surgery.run.stage import Stage


class ExportStage(Stage):
    name, what = "export", "exporting"
    sections = ("base", "control", "locate", "splice", "train", "evaluate", "export")
    reads = ("trained", "results.json", "report.html", "plan.json", "heads.json")
    writes = ("export",)
    version, is_shared = 3, False

    def depends_on(self, settings: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
        template = settings.export.chat_template
        return {"chat template": template_revision(template)} if template is not None else {}

    def check_configs(self, run: Run) -> None:
        if run.recipe.splice is not None:
            return  # the recipe's sections are checked together
        is_inserted, written = has_inserted(run.config), run.recipe.export.format
        if (written == "transformers") if is_inserted else (written in LAYER_FORMATS):
            kind = "layers that were inserted" if is_inserted else "heads that were spliced into its layers"
            hint = f"The base has {kind}. Set {' or '.join(LAYER_FORMATS) if is_inserted else 'transformers'}."
            raise RecipeError("export.format", written, hint)

    def check_data(self, run: Run) -> None:
        section = run.recipe.export
        with_chat_template(run.tokenizer(), section.chat_template)
        export_format: ExportFormat = EXPORT_FORMATS[section.format]()
        export_format.check_recipe(section, run.tokenizer())
        export_format.check_base(run.config)

    def work(self, run: Run, key: str) -> None:
        heads, plan = run.heads(), run.plan()
        base, path = run.recipe.base, run.folder / "results.json"
        results, base_card = read_json(path), card_of(base.model, base.revision)
        with TemporaryDirectory() as folder:
            with reading(str(path), None, "Delete the file and run the stage evaluate.", RunError):
                card = model_card(run.recipe, heads, plan, results, base_card)
                results.pop("held_out_examples", None)  # an export can be published, so it holds no rows of the data
                results.pop("recipe", None)  # nor local paths; recipe.yaml has none
                files = ("README.md", *(("heads.json",) if heads else ()), "plan.json", "results.json", "recipe.yaml")
                page, figures = Path(folder) / "report.html", run.folder / "figures"
                write_report(page, run.recipe, plan, heads, results, figures, files)
            given = (run.model("trained"), run.tokenizer(), run.folder / "export", run.recipe.export, card, plan, heads)
            export_model(*given, to_yaml(public_recipe(run.recipe)), results, figures, page=page)
