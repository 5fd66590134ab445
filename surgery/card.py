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
from surgery.recipe import Checkpoint, Recipe, Source, to_yaml

_ARM_NAMES = {"base": "base", "no_splice": "same training, no splice", "hybrid": "**this hybrid**"}


def model_card(recipe: Recipe, heads: HeadSet | None, plan: Plan, results: Mapping[str, Any]) -> str:
    """README.md of an exported folder: front matter, what was done, evidence with controls, usage, limits, recipe.

    Args:
        heads: None where it is not known how they were chosen, as of a hybrid that is trained further.
    """
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
        _origin(recipe, base) + "\n\n" + _what(heads, plan),
        "## Evidence\n\n" + _evidence(results, recipe),
        "## Use\n\n" + _USE,
        "## Limits\n\n" + _limits(recipe),
        "## Recipe\n\n```yaml\n" + to_yaml(shared) + "```",
        "## Method\n\n" + _METHOD,
    ]
    return "\n\n".join(parts) + "\n"


def public_name(model: str) -> str:
    """A Hub id without its revision; of a folder or file, its last part, or the run's name where that is `export`."""
    model, _ = source_of(model, None)
    if model.count("/") == 1 and not Path(model).exists():
        return model
    path = Path(model).resolve()
    return path.parent.name if path.name == "export" else path.name


def public_recipe(recipe: Recipe) -> Recipe:
    """The recipe as it may be published: a folder or file of this machine becomes its last part."""
    base = recipe.base.model_copy(
        update={
            "model": public_name(recipe.base.model),
            "tokenizer": public_name(recipe.base.tokenizer) if recipe.base.tokenizer else None,
        }
    )
    splice, control = recipe.splice, recipe.control
    if splice is not None and splice.teacher is not None:
        splice = splice.model_copy(update={"teacher": _named(splice.teacher)})
    train = recipe.train.model_copy(
        update={
            "sources": tuple(map(_public_source, recipe.train.sources)),
            "stages": tuple(
                stage.model_copy(update={"sources": tuple(map(_public_source, stage.sources))})
                for stage in recipe.train.stages
            ),
            "teacher": _named(recipe.train.teacher) if recipe.train.teacher else None,
        }
    )
    update = {"base": base, "splice": splice, "control": _named(control) if control else None, "train": train}
    return recipe.model_copy(update=update)


def _named(given: Checkpoint) -> Checkpoint:
    return given.model_copy(update={"model": public_name(given.model)})


def _public_source(source: Source) -> Source:
    if source.data is None:
        return source
    return source.model_copy(update={"data": source.data.model_copy(update={"path": public_name(source.data.path)})})


def _own_data(recipe: Recipe) -> list[str]:
    """The public names of the user's own data."""
    return sorted({public_name(data.path) for data in recipe.train.own_data})


def _origin(recipe: Recipe, base: str) -> str:
    """What was made of what."""
    if recipe.splice is not None:
        return (
            f"{base}, a state-space language model, with softmax attention spliced in where in-context retrieval hangs."
        )
    on = f" on {' and '.join(_own_data(recipe))}" if recipe.train.own_data else ""
    return f"Fine-tuned from {base}{on}: a state-space language model with softmax attention spliced in."


def _what(heads: HeadSet | None, plan: Plan) -> str:
    """Every spliced head."""
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
    return "\n".join(lines)


def _evidence(results: Mapping[str, Any], recipe: Recipe) -> str:
    """The measured table: arms side by side, 95% Wilson intervals."""
    arms = {name: results["arms"][name] for name in _ARM_NAMES if name in results["arms"]}
    names = dict(_ARM_NAMES)
    if recipe.splice is None:
        names["base"] = f"{public_name(recipe.base.model)}, before"
        names["no_splice"] = f"{public_name(recipe.control.model)}, same training" if recipe.control else ""
    rows: list[tuple[str, tuple[str, ...]]]
    held_out = arms["base"].get("held_out", {})
    rows = [
        (f"{name}, held-out rows, exact match", ("held_out", name))
        for name, entry in held_out.items()
        if "accuracy" in entry
    ]
    rows += [("KV-retrieval, " + pairs + " pairs", ("kv_retrieval", pairs)) for pairs in arms["base"]["kv_retrieval"]]
    rows += [("letter choice", ("letter_choice",)), ("option text (its twin)", ("option_text",))]
    rows += [("closed-book facts, held-out half", ("closed_book",))]
    rows += [("closed-book facts, half seen in training", ("closed_book_seen",))]
    lines = ["| | " + " | ".join(names[a] for a in arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for label, path in rows:
        lines.append(f"| {label} | " + " | ".join(_cell(arm, path) for arm in arms.values()) + " |")
    for label, key in (("perplexity, held-out", "perplexity"), ("perplexity, seen half", "perplexity_seen")):
        lines.append(f"| {label} | " + " | ".join(f"{arm[key]:.3f}" for arm in arms.values()) + " |")
    for name in [name for name, entry in held_out.items() if "perplexity" in entry]:
        cells = (f"{arm['held_out'][name]['perplexity']:.3f}" for arm in arms.values())
        lines.append(f"| perplexity of {name}, held-out rows | " + " | ".join(cells) + " |")
    n = next(iter(arms["base"]["kv_retrieval"].values()))["n"]
    asked = "".join(f", {entry['n']} of {name}" for name, entry in held_out.items())
    seed = f"Accuracy with 95% Wilson intervals, {n} prompts a row{asked}, the same for every arm; one training seed"
    return "\n".join([*lines, "", f"{seed} ({recipe.seed})."])


def _cell(arm: Mapping[str, Any], path: tuple[str, ...]) -> str:
    entry: Any = arm
    for key in path:
        entry = entry[key]
    return f"{entry['accuracy']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"


def _limits(recipe: Recipe) -> str:
    sources = [source for stage in recipe.train.sequence for source in stage.sources]
    tasks = sorted({source.task for source in sources if source.task})
    data = [f"generated text ({', '.join(tasks)})"] * bool(tasks) + _own_data(recipe)
    trained = "Trained further" if recipe.splice is None else "Trained"
    return (
        f"- {trained} for {recipe.train.num_all_steps} steps on {' and '.join(data)}, and on nothing else.\n"
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
