"""Write the model card: front matter for the Hub, spliced heads, measured results, usage, limits and recipe.

Every number comes from results.json. A base in a local folder is named by the last part of its path. The front matter
follows huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, hf_hub_download
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.repocard_data import eval_results_to_model_index

from surgery import __version__
from surgery.errors import SurgeryError, reading
from surgery.export.documents import WHOLE, card_rows
from surgery.export.formats import ExportFormat
from surgery.recipe import Recipe, to_yaml
from surgery.recipe.export import EXPORT_FORMATS
from surgery.recipe.methods import UNRANKED, all_columns, gloss_of
from surgery.recipe.public import public_name, public_recipe, source_of
from surgery.recipe.yaml import load_yaml
from surgery.report.results import entries, label_of, limits_of, measurements_of, own_data
from surgery.report.templates import render
from surgery.report.verdict import base_at_chance, verdict_of
from surgery.types import HeadSet, Plan


def model_card(
    recipe: Recipe,
    heads: HeadSet | None,
    plan: Plan,
    results: Mapping[str, Any],
    base_card: Mapping[str, Any] | None = None,
) -> str:
    """Render README.md of an exported folder.

    Args:
        heads: None if the selection of the heads is not known, as for a fine-tuned hybrid.
        results: content of results.json.
        base_card: front matter of the base's card, from which the license is inherited.
    """
    base_card = base_card or {}
    export_format: type[ExportFormat] = EXPORT_FORMATS[recipe.export.format]
    license_entries, license_text = _license(recipe, plan, base_card)
    data, located_on = recipe.locate.data, f"generated {recipe.locate.probe.label} prompts"
    if data is not None:
        located_on = f"prompts of {data.public_name}" + (f" and {located_on}" if recipe.locate.generated else "")
    front = {
        **({"library_name": export_format.library} if export_format.library else {}),
        "pipeline_tag": "text-generation",
        **license_entries,
        **_origins(recipe, plan, base_card),
        "tags": [plan.grafts[0].site.kind, "hybrid", "retrieval", "ssm-surgery"],
        "model-index": eval_results_to_model_index(recipe.name, list(_measured(results, recipe))),
    }
    table = measurements_of(results, recipe)
    table["columns"][1] = f"**{table['columns'][1]}**"
    table["rows"] = [[cell.replace("|", r"\|") for cell in row] for row in table["rows"]]
    values = {
        "front_matter": yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        "name": recipe.name,
        "base": public_name(recipe.base.model),
        "spliced": recipe.splice is not None,
        "form": plan.grafts[0].form,
        "data": " and ".join(own_data(recipe)),
        "heads": _spliced_heads(heads, plan),
        "method": heads.method if heads is not None else None,
        "measured": _acts_by_measurement(heads) and base_at_chance(results["arms"], recipe) is None,
        "ranked": heads is not None and heads.method not in UNRANKED,
        "gloss": gloss_of(heads.method) if heads is not None else "",
        "head_seed": heads.seed if heads is not None else None,
        "located_on": located_on,
        "gap": (results.get("step_zero_gap") or {}).get("max_logit"),
        "state": (plan.grafts[0].site.state_size, recipe.state_size) if recipe.state_size is not None else None,
        "verdict": verdict_of(results, recipe).sentence,
        "table": table,
        "seed": recipe.seed,
        "has_control": recipe.splice is not None and "no_splice" in results["arms"],
        "has_ablation": "hybrid_heads_off" in results["arms"],
        "versions": ", ".join(f"{name} {version}" for name, version in results.get("versions", {}).items()),
        "usage": export_format.usage,
        "chat_template": Path(recipe.export.chat_template).name if recipe.export.chat_template else None,
        "limits": limits_of(recipe, results),
        "license": license_text,
        "recipe": to_yaml(public_recipe(recipe)),
        "version": __version__,
    }
    return render("surgery.export", "model_card.md.j2", values)


def card_of(model: str, revision: str | None = None) -> dict[str, Any]:
    """Front matter of a model's card, in its folder or on the Hub: entries of text. Empty if no card can be read."""
    model, revision = source_of(model, revision)
    here = Path(model)
    try:
        with reading("README.md", model, "Its front matter cannot be read."):
            path = here / "README.md" if here.is_dir() else hf_hub_download(model, "README.md", revision=revision)
            front = REGEX_YAML_BLOCK.search(Path(path).read_text(encoding="utf-8"))
            entries = load_yaml(front.group(2)).items() if front else ()
    except SurgeryError:
        return {}
    parts = ((key, value, value if isinstance(value, list) else [value]) for key, value in entries)
    return {key: value for key, value, texts in parts if all(isinstance(text, str) for text in texts)}


def _license(recipe: Recipe, plan: Plan, base_card: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """License entries of the front matter, and the sentence that says where they come from.

    They are those of the recipe, otherwise those of the base, otherwise `unknown`.
    """
    base = public_name(recipe.base.model)
    if recipe.export.license is not None:
        entries: dict[str, Any] = {"license": recipe.export.license}
        text = f"{recipe.export.license}, set in the recipe."
    elif base_card.get("license", "unknown") == "unknown":
        entries = {"license": "unknown"}
        text = f"**Unknown**: no card of {base} names a license. Look it up before you share this model."
    else:
        entries = {key: base_card[key] for key in ("license", "license_name", "license_link") if base_card.get(key)}
        text = f"{entries.get('license_name', entries['license'])}, inherited from the card of {base}."
        link = str(entries.get("license_link", ""))
        if link and "://" not in link and "/" in base:
            entries["license_link"] = f"https://huggingface.co/{base}/blob/main/{link}"
    if plan.teacher:
        text += f" The transplanted attention comes from {public_name(plan.teacher)}, whose license applies as well."
    return entries, text


def _origins(recipe: Recipe, plan: Plan, base_card: Mapping[str, Any]) -> dict[str, Any]:
    """Front matter entries for base models and data sets on the Hub. For a local base, its card names the model."""
    base = public_name(recipe.base.model)
    named = base_card.get("base_model") or []
    models = [base] if "/" in base else [named] if isinstance(named, str) else list(named)
    relation = "finetune"
    if plan.teacher:
        relation = "merge"
        models += [public_name(plan.teacher)] if "/" in public_name(plan.teacher) else []
    origins: dict[str, Any] = {}
    if models:
        origins["base_model"] = models[0] if len(models) == 1 else models
        origins["base_model_relation"] = relation
    datasets = sorted({data.path for data in recipe.train.own_data if data.is_on_hub})
    return {**origins, "datasets": datasets} if datasets else origins


def _spliced_heads(heads: HeadSet | None, plan: Plan) -> list[tuple[str, ...]]:
    """Table rows: those of `card_rows`, with the role of each head."""
    roles = {str(scored.head): scored.role for scored in heads.heads} if heads is not None else {}
    return [(*row, "" if row[0].endswith(WHOLE) else roles.get(row[0], "unknown")) for row in card_rows(plan)]


def _acts_by_measurement(heads: HeadSet | None) -> bool:
    """Whether the heads were ranked, and the answers lose margin without each of them, by its 95% interval."""
    if heads is None or heads.method in UNRANKED:
        return False
    effects = [column.name for column in all_columns().values() if column.effect == "loss"]
    lows = [[head.scores[name].low for name in effects if name in head.scores] for head in heads.chosen]
    return all(max(of_head, default=0.0) > 0 for of_head in lows)


def _measured(results: Mapping[str, Any], recipe: Recipe) -> Iterator[EvalResult]:
    """Yield the results of the hybrid for the front matter's model-index."""
    for path, entry in entries(results["arms"]["hybrid"]):
        kind, made = path[0], path[0] not in ("held_out", "lm_eval")
        # The entry's key, with the metric's name on the Hub.
        names = (("accuracy", "accuracy"), ("perplexity", "perplexity"), ("nats", "loss"), ("score", path[-1]))
        metric, value = next((name, entry[key]) for key, name in names if key in entry)
        interval = {"interval": "95% Wilson", "low": entry["low"], "high": entry["high"]} if "low" in entry else None
        yield EvalResult(
            task_type="text-generation",
            dataset_name=label_of(path, entry) + (" (generated probe)" if made else ""),
            dataset_type=f"ssm-surgery-{kind}" if made or len(path) == 1 else path[1],
            dataset_config="/".join(path[1:]) or "default",
            dataset_split="held-out" if kind == "held_out" else "evaluate",
            dataset_args={"seed": recipe.seed, **({"prompts": entry["n"]} if "n" in entry else {})},
            metric_type=metric,
            metric_value=value,
            metric_args=interval,
        )
