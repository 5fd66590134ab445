"""The model card. Owns: its text and front matter. Must never know: models. Every number in it comes from `results`.

Nothing of the user's machine goes in: a base given as a folder is named by the folder's name alone. The front matter
is the Hub's (huggingface.co/docs/hub/model-cards), results in its model-index.
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
from surgery.recipe import Recipe, to_yaml
from surgery.recipe.public import public_name, public_recipe, source_of
from surgery.recipe.yaml import load_yaml
from surgery.report.results import arm_name, cell_of, entries, label_of, limits_of, ordered_arms, own_data
from surgery.types import HeadId, HeadSet, Plan


def model_card(
    recipe: Recipe,
    heads: HeadSet | None,
    plan: Plan,
    results: Mapping[str, Any],
    base_card: Mapping[str, Any] | None = None,
) -> str:
    """README.md of an exported folder: front matter, what was done, evidence with controls, usage, limits, recipe.

    Args:
        heads: None where it is not known how they were chosen, as of a hybrid that is trained further.
        base_card: front matter of the base's own card, which the licence comes from; empty where there is none.
    """
    base, base_card = public_name(recipe.base.model), base_card or {}
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **_license(recipe, base_card),
        **_origins(recipe, plan, base_card),
        "tags": [plan.grafts[0].site.kind, "hybrid", "retrieval", "ssm-surgery"],
        "model-index": eval_results_to_model_index(recipe.name, list(_measured(results, recipe))),
    }
    parts = [
        "---\n" + yaml.safe_dump(front, sort_keys=False, allow_unicode=True) + "---",
        f"# {recipe.name}",
        _origin(recipe, base) + "\n\n" + _what(heads, plan, results),
        "## Evidence\n\n" + _evidence(results, recipe),
        "## Use\n\n" + _USE,
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits_of(recipe)),
        "## Licence\n\n" + _license_text(recipe, plan, base_card),
        "## Recipe\n\n```yaml\n" + to_yaml(public_recipe(recipe)) + "```",
        "## Citation\n\n" + _CITATION,
    ]
    return "\n\n".join(parts) + "\n"


def card_of(model: str, revision: str | None = None) -> dict[str, Any]:
    """The front matter of a model's own card: README.md of its folder, or from the Hub. Empty where there is none.

    Of it, the entries that are text or lists of text; a card that cannot be read is none.
    """
    model, revision = source_of(model, revision)
    here = Path(model)
    try:
        with reading("README.md", model, "It has no front matter that can be read."):
            path = here / "README.md" if here.is_dir() else hf_hub_download(model, "README.md", revision=revision)
            front = REGEX_YAML_BLOCK.search(Path(path).read_text(encoding="utf-8"))
            entries = load_yaml(front.group(2)).items() if front else ()
    except SurgeryError:
        return {}
    parts = ((key, value, value if isinstance(value, list) else [value]) for key, value in entries)
    return {key: value for key, value, texts in parts if all(isinstance(text, str) for text in texts)}


def _license(recipe: Recipe, base_card: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's if it names one, else the base's; `unknown` where neither does: it is not guessed."""
    if recipe.export.license is not None:
        return {"license": recipe.export.license}
    if not base_card.get("license"):
        return {"license": "unknown"}
    found = {key: base_card[key] for key in ("license", "license_name", "license_link") if base_card.get(key)}
    base, link = public_name(recipe.base.model), str(found.get("license_link", ""))
    if link and "://" not in link and "/" in base:
        found["license_link"] = f"https://huggingface.co/{base}/blob/main/{link}"
    return found


def _license_text(recipe: Recipe, plan: Plan, base_card: Mapping[str, Any]) -> str:
    base, found = public_name(recipe.base.model), _license(recipe, base_card)
    if recipe.export.license is not None:
        text = f"{found['license']}, as the recipe says."
    elif base_card.get("license"):
        text = f"{found.get('license_name', found['license'])}, inherited from the card of {base}."
    else:
        text = f"**Not known**: no card of {base} was found that names one. Look it up before you share this model."
    if plan.teacher:
        text += f" The transplanted attention is {public_name(plan.teacher)}'s, whose own licence holds as well."
    return text


def _origins(recipe: Recipe, plan: Plan, base_card: Mapping[str, Any]) -> dict[str, Any]:
    """Models and data sets of the Hub that went in. Of a base in a folder, the one that its own card came from."""
    base = public_name(recipe.base.model)
    given = base_card.get("base_model") or []
    models = [base] if "/" in base else [given] if isinstance(given, str) else list(given)
    relation = "finetune"
    if plan.teacher and "/" in public_name(plan.teacher):
        models, relation = [*models, public_name(plan.teacher)], "merge"
    found: dict[str, Any] = {}
    if models:
        found["base_model"] = models[0] if len(models) == 1 else models
        found["base_model_relation"] = relation
    datasets = sorted({data.path for data in recipe.train.own_data if not Path(data.path).exists()})
    return {**found, "datasets": datasets} if datasets else found


def _origin(recipe: Recipe, base: str) -> str:
    """What was made of what."""
    if recipe.splice is not None:
        return (
            f"{base}, a state-space language model, with softmax attention spliced in where in-context retrieval hangs."
        )
    on = f" on {' and '.join(own_data(recipe))}" if recipe.train.own_data else ""
    return f"Fine-tuned from {base}{on}: a state-space language model with softmax attention spliced in."


def _what(heads: HeadSet | None, plan: Plan, results: Mapping[str, Any]) -> str:
    """Every spliced head, how they were chosen, and how far the untrained hybrid was from the base."""
    lines = [
        "| spliced head | mode | init | reads | role that ablation found |",
        "|---|---|---|---|---|",
    ]
    roles = {s.head: s.role for s in heads.heads} if heads is not None else {}
    for graft in plan.grafts:
        if graft.unit == "layer":
            donor = f"{graft.donors[0]} of {public_name(plan.teacher) if plan.teacher else 'a teacher'}"
            lines.append(f"| L{graft.site.layer}, the whole layer | {graft.mode} | {donor} | | |")
            continue
        for head, reads in zip(graft.heads, graft.reads, strict=True):
            role = roles.get(HeadId(graft.site.layer, head), "unknown")
            name = f"L{graft.site.layer}H{head}"
            lines.append(f"| {name} | {graft.mode} | {graft.init} | {reads.replace('_', ' ')} | {role} |")
    if heads is not None:
        chosen = f"Heads were selected by `{heads.method}` on generated KV-retrieval prompts (seed {heads.seed})."
        lines += ["", chosen]
    gap = results.get("step_zero_gap")
    if gap:
        moved = f"differed from the base's by {gap['max_logit']:.3g} at most" if gap["max_logit"] else "were the base's"
        lines += ["", f"Before training the hybrid's logits {moved}."]
    return "\n".join(lines)


def _evidence(results: Mapping[str, Any], recipe: Recipe) -> str:
    """The measured table: arms side by side, 95% Wilson intervals, and what it was measured with."""
    arms = {name: dict(entries(results["arms"][name])) for name in ordered_arms(results["arms"])}
    p_values = results.get("p_values", {}).get("hybrid", {})
    # The user's own rows first, perplexities last.
    order = sorted(arms["base"].items(), key=lambda row: ("perplexity" in row[1], row[0][0] != "held_out"))
    header = ["", *(arm_name(name, recipe) for name in arms), "prompts", *(["p"] if p_values else [])]
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in header) + "|", "|---" * len(header) + "|"]
    for path, entry in order:
        cells = [label_of(path, entry), *(cell_of(arm.get(path)) for arm in arms.values()), str(entry.get("n", ""))]
        if p_values:
            p = p_values.get("/".join(path))
            cells.append(f"{p:.2g}" if isinstance(p, float) else "")
        lines.append("| " + " | ".join(cells) + " |")
    notes = [
        "Accuracy with 95% Wilson intervals on the same prompts for every arm, none of them seen in training but where "
        f"it is said; one training seed ({recipe.seed})."
    ]
    if p_values:
        notes.append("p: exact one-sided McNemar test that this hybrid is right more often than the base.")
    if "versions" in results:
        notes.append(f"Measured with {', '.join(f'{k} {v}' for k, v in results['versions'].items())}.")
    return "\n".join([*lines, "", " ".join(notes)])


def _measured(results: Mapping[str, Any], recipe: Recipe) -> Iterator[EvalResult]:
    """The hybrid's numbers for the model-index; the controls' are in the table alone."""
    for path, entry in entries(results["arms"]["hybrid"]):
        own, exact = path[0] == "held_out", "accuracy" in entry
        kind = path[1] if own and len(path) > 1 else f"ssm-surgery-{path[0]}"
        interval = {"interval": "95% Wilson", "low": entry["low"], "high": entry["high"]} if "low" in entry else None
        yield EvalResult(
            task_type="text-generation",
            dataset_name=label_of(path, entry) + ("" if own else " (generated probe)"),
            dataset_type=kind,
            dataset_config="/".join(path[1:]) or "default",
            dataset_split="held-out" if own else "evaluate",
            dataset_args={"seed": recipe.seed, **({"prompts": entry["n"]} if "n" in entry else {})},
            metric_type="accuracy" if exact else "perplexity",
            metric_value=entry["accuracy"] if exact else entry["perplexity"],
            metric_args=interval,
        )


_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "."  # this folder, or its id on the Hub
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
inputs = tokenizer("The value of", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=8)[0]))
```

Remote code is the `*.py` of this folder: read it, and name a `revision` when you load it from the Hub. With
`pip install ssm-surgery` and `import surgery.hybrid` none is needed, and `surgery verify` checks a copy."""

_CITATION = (
    "Gather and Aggregate heads, which this method starts from, and the toolkit:\n\n"
    """```bibtex
@inproceedings{bick2025gather,
  title = {Understanding the Skill Gap in Recurrent Language Models: The Role of the Gather-and-Aggregate Mechanism},
  author = {Bick, Aviv and Xing, Eric P. and Gu, Albert},
  booktitle = {International Conference on Machine Learning},
  year = {2025},
  eprint = {2504.18574},
  archivePrefix = {arXiv}
}
"""
    f"""@software{{ssm_surgery,
  title = {{ssm-surgery: locate the retrieval heads of a pretrained Mamba and splice attention in there}},
  version = {{{__version__}}}
}}
```

"""
    "Mamba-2: Dao, Gu, arXiv 2405.21060."
)
