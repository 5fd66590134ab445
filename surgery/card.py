"""The model card. Owns: its text. Must never know: models, files. Every number in it comes from `results`.

Nothing of the user's machine goes in: a base given as a folder is named by the folder's name alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from surgery.checkpoint import source_of
from surgery.heads import HeadId, HeadSet, Plan
from surgery.recipe import Recipe, to_yaml

_ARM_NAMES = {"base": "base", "no_splice": "same training, no splice", "hybrid": "**this hybrid**"}


def model_card(recipe: Recipe, heads: HeadSet, plan: Plan, results: Mapping[str, Any]) -> str:
    """README.md of an exported folder: front matter, what was done, evidence with controls, usage, limits, recipe."""
    base = public_name(recipe.base.model)
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": recipe.export.license,
        "tags": [plan.grafts[0].site.kind, "hybrid", "retrieval", "ssm-surgery"],
    }
    if "/" in base:
        front["base_model"] = base
    shared = public_recipe(recipe)
    parts = [
        "---\n" + yaml.safe_dump(front, sort_keys=False) + "---",
        f"# {recipe.name}",
        _what(base, heads, plan),
        "## Evidence\n\n" + _evidence(results, recipe),
        "## Use\n\n" + _USE,
        "## Limits\n\n" + _limits(recipe),
        "## Recipe\n\n```yaml\n" + to_yaml(shared) + "```",
        "## Method\n\n" + _METHOD,
    ]
    return "\n\n".join(parts) + "\n"


def public_name(model: str) -> str:
    """A Hub id without its revision; of a folder, its last part."""
    model, _ = source_of(model, None)
    return model if model.count("/") == 1 and not Path(model).exists() else Path(model).resolve().name


def public_recipe(recipe: Recipe) -> Recipe:
    """The recipe as it may be published: a folder of this machine becomes its last part."""
    base = recipe.base.model_copy(
        update={
            "model": public_name(recipe.base.model),
            "tokenizer": public_name(recipe.base.tokenizer) if recipe.base.tokenizer else None,
        }
    )
    splice = recipe.splice
    if splice.teacher is not None:
        teacher = splice.teacher.model_copy(update={"model": public_name(splice.teacher.model)})
        splice = splice.model_copy(update={"teacher": teacher})
    return recipe.model_copy(update={"base": base, "splice": splice})


def _what(base: str, heads: HeadSet, plan: Plan) -> str:
    lines = [
        f"{base}, a state-space language model, with softmax attention spliced in where in-context retrieval hangs.",
        "",
        "| spliced head | mode | init | reads | role that ablation found |",
        "|---|---|---|---|---|",
    ]
    roles = {s.head: s.role for s in heads.heads}
    for graft in plan.grafts:
        if graft.unit == "layer":
            donor = f"{graft.donors[0]} of {public_name(plan.teacher)}"
            lines.append(f"| L{graft.site.layer}, the whole layer | {graft.mode} | {donor} | | |")
            continue
        for head, reads in zip(graft.heads, graft.reads, strict=True):
            role = roles[HeadId(graft.site.layer, head)]
            name = f"L{graft.site.layer}H{head}"
            lines.append(f"| {name} | {graft.mode} | {graft.init} | {reads.replace('_', ' ')} | {role} |")
    lines += ["", f"Heads were selected by `{heads.method}` on generated KV-retrieval prompts (seed {heads.seed})."]
    return "\n".join(lines)


def _evidence(results: Mapping[str, Any], recipe: Recipe) -> str:
    """The measured table: arms side by side, 95% Wilson intervals."""
    arms = {name: results["arms"][name] for name in _ARM_NAMES if name in results["arms"]}
    rows: list[tuple[str, tuple[str, ...]]]
    rows = [("KV-retrieval, " + pairs + " pairs", ("kv_retrieval", pairs)) for pairs in arms["base"]["kv_retrieval"]]
    rows += [("letter choice", ("letter_choice",)), ("option text (its twin)", ("option_text",))]
    rows += [("closed-book facts, held-out half", ("closed_book",))]
    rows += [("closed-book facts, half seen in training", ("closed_book_seen",))]
    lines = ["| | " + " | ".join(_ARM_NAMES[a] for a in arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for label, path in rows:
        lines.append(f"| {label} | " + " | ".join(_cell(arm, path) for arm in arms.values()) + " |")
    for label, key in (("perplexity, held-out", "perplexity"), ("perplexity, seen half", "perplexity_seen")):
        lines.append(f"| {label} | " + " | ".join(f"{arm[key]:.3f}" for arm in arms.values()) + " |")
    n = next(iter(arms["base"]["kv_retrieval"].values()))["n"]
    seed = f"Accuracy with 95% Wilson intervals, {n} prompts a row, the same for every arm; one training seed"
    return "\n".join([*lines, "", f"{seed} ({recipe.seed})."])


def _cell(arm: Mapping[str, Any], path: tuple[str, ...]) -> str:
    entry: Any = arm
    for key in path:
        entry = entry[key]
    return f"{entry['accuracy']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"


def _limits(recipe: Recipe) -> str:
    tasks = sorted({source.task for source in recipe.train.sources})
    return (
        f"- Trained for {recipe.train.steps} steps on generated text ({', '.join(tasks)}), and on nothing else.\n"
        "- Keys and values are kept for the spliced layers: memory grows with length there, unlike in the base.\n"
        "- Assisted decoding refuses stateful models. vLLM and SGLang do not load head-level hybrids.\n"
        "- Needs transformers 5.21 or newer: older ones decode such layers wrongly."
    )


_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

With `pip install ssm-surgery` and `import surgery.hybrid` no remote code is needed."""

_METHOD = (
    "Gather and Aggregate heads: Bick, Xing, Gu, *Understanding the Skill Gap in Recurrent Language Models: The Role "
    "of the Gather-and-Aggregate Mechanism*, arXiv 2504.18574. Mamba-2: Dao, Gu, arXiv 2405.21060. Tool: ssm-surgery."
)
