"""Write a recipe from what was measured on a base. Every choice has its reason as a comment."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from surgery import __version__
from surgery.errors import PlanError
from surgery.models.lookup import family_of
from surgery.recipe import Splice, check_recipe
from surgery.recipe.optimizer import RATES, rates
from surgery.recipe.public import public_name
from surgery.report.text import duration_text, size_text
from surgery.run.dry_run import dry_run
from surgery.run.machine import GIB
from surgery.run.measuring import SMALL, Findings
from surgery.run.probing import ADJACENT, EASY, FAR, HARD, Format, Say, two_digits
from surgery.splice.insertion import check_inserts

_AT_QUERY = ["query", "patching", "sharpen"]  # one decode step per head and column
_MINUTES = {"locate": 5, "evaluate": 15}  # aimed at
_STEP = 1.2  # cost of a token in a decode step, compared with one in a full pass (paper/LOG.md, 2026-11-23)
_WIDE = 32  # channels of a state from which copies are not widened (paper/LOG.md, 2026-11-23)
_SHARE_OF_MEMORY = 0.8
_PAIRS_OF_UNSIZED = 4  # pairs that are as long as a prompt of a task without pairs
Place = tuple[str | int, ...]  # of a value, such as `("train", "sources", 0)`
_WIDTH = 116  # of a comment
_MOST = 3  # accuracies to list in a comment
_LONG = (3, 6)  # digits of a value of several tokens
# `steps` of small bases; `read_steps` and `steps` of others, and of those on a CPU, where steps are slow. Measured
# were the first (docs/your-model.md) and the last (paper/SCALE.md).
_STEPS, _STEPS_OF_NEW_HEADS, _STEPS_ON_A_CPU = 500, (400, 100), (250, 60)
_SPREAD = f"From {SMALL // 10**6} million weights on"  # one base was measured, of 24 million (paper/SCALE.md)


class _Draft:
    """A recipe as plain data, and the comments of its values."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.comments: dict[Place, str] = {}

    def set(self, key: str, value: Any, why: str = "") -> None:
        """Set a value by its dotted key."""
        *parents, last = key.split(".")
        section = self.data
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = value
        self.explain(tuple(key.split(".")), why)

    def explain(self, place: Place, why: str) -> None:
        """Set the comment of a value, unless it is empty."""
        if why:
            self.comments[place] = why


def write_recipe(found: Findings, say: Say) -> str:
    """Write a recipe as YAML with comments. `say` is called with a line for each slow step."""
    draft = _Draft()
    draft.set("name", recipe_name(found.base.model))
    draft.set("seed", 0)
    dtype = found.base.dtype
    size = size_text(found.parameters * getattr(torch, dtype).itemsize)
    draft.set("base", found.base.model_dump(mode="json", exclude_defaults=True), f"{dtype}: {size} of weights.")
    _locate(draft, found)
    _splice(draft, found)
    _train(draft, found)
    _evaluate(draft, found)
    if found.is_large:
        draft.set("export", {"dtype": "bfloat16"})
    why = "Read by --dry-run alone. A run uses every GPU that its launcher starts, or the CPU."
    hardware = {"gpu": found.machine.name, "memory_gib": found.machine.memory_gib}
    hardware |= {"count": found.machine.count} if found.machine.count > 1 else {}
    draft.set("hardware", hardware, f"Found here. {why}")
    if not found.is_small:
        _fit_memory(draft, found, say)
    check_recipe(draft.data)
    head = [part for line in _head(found) for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ") or [""]]
    return commented_yaml(draft.data, draft.comments, head)


def recipe_name(model: str) -> str:
    """Name a recipe after its base."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", public_name(model).split("/")[-1]).lstrip("._-")[:100]
    return name or "hybrid"


def _head(found: Findings) -> list[str]:
    mixers = family_of(found.config).mixers(found.config)
    size = f"{found.parameters:,} weights, {found.heads} heads in {len(mixers)} layers"
    lines = [
        f"Recipe for {found.base.model}, written by `surgery init` of version {__version__}. It runs unchanged:",
        "",
        "  surgery run THIS_FILE",
        "",
        f"The base: {found.config.model_type}, {size}.",
    ]
    shares, pairs = found.screening.shares, found.screening.pairs
    unusable = [f"- {form}: not possible. {reason}" for form, reason in found.screening.unusable.items()]
    if found.share is not None:
        tried = "; ".join(f"{form} {two_digits(share.accuracy)}" for form, share in shares.items())
        lines += [f"Accuracy by format, with {pairs} pairs: {tried}.", *unusable]
    else:
        lines += [
            "",
            "THE BASE IS AT CHANCE: it retrieves in no format that was tried, so its heads cannot be told apart. "
            "A head is chosen at random, and training may or may not teach it. Tried:",
            *(
                f"- {form}, {pairs} pairs: {share}, guesses {two_digits(share.chance)}"
                for form, share in shares.items()
            ),
            *unusable,
            "What to try: train the base longer, or use a larger one. Pass your data with --data. Locate on prompts of "
            "your own that the base can answer (locate.data). List heads that you know (splice.select: list).",
        ]
    if found.perplexity >= found.config.vocab_size:
        lines.append(
            f"Perplexity of simple English sentences: {found.perplexity:.3g}, with {found.config.vocab_size} tokens to "
            "choose from. The base looks untrained, or the tokenizer is that of another model."
        )
    return lines


def _locate(draft: _Draft, found: Findings) -> None:
    section: dict[str, Any] = {"task": found.form.task, "pairs": found.pairs, **found.form.keys}
    if found.form.task == ADJACENT.task:
        del section["task"]
    batch_size = min(found.batch_size, 32)
    examples, methods, why = _prompts_to_locate(found)
    draft.data["locate"] = section
    draft.explain(("locate", next(iter(section))), _why_pairs(found))
    if methods:
        draft.set("locate.methods", methods)
    draft.set("locate.examples", examples, why)
    speeds = ", ".join(f"{size}: {1 / speed:.2g}" for size, speed in found.speeds.items())
    draft.set("locate.batch_size", batch_size, f"Seconds a prompt by batch size: {speeds}.")


def _why_pairs(found: Findings) -> str:
    if found.share is None:
        return "No number of pairs tells heads apart in this base."
    others = sorted(found.ladder, key=lambda n: abs(n - found.pairs))[1 : _MOST + 1]
    measured = ", ".join(f"{two_digits(found.ladder[n])} of {n}" for n in sorted(others))
    text = f"{found.form}. {found.pairs} pairs: the base answers {found.share}"
    text += f" ({measured})." if measured else "."
    if found.share.accuracy > EASY:
        return f"{text} No number of pairs that was tried is harder."
    if found.share.accuracy < HARD:
        return f"{text} No number of pairs that was tried comes closer to .80."
    return text


def _prompts_to_locate(found: Findings) -> tuple[int, list[str], str]:
    """Choose the number of prompts and the methods by the time that they take: the number, the methods, the reason."""
    if found.share is None:
        return 16, _AT_QUERY, "Few: the scores choose no head here."
    second = found.tokens / found.tokens_per_second  # of a pass
    full, steps = found.heads / 2, found.heads / 2 * _STEP / found.tokens  # passes of one column, half of the layers
    budget = _MINUTES["locate"] * 60 / second
    for methods, passes in (([], 4 + 2 * full + 4 * steps), (_AT_QUERY, 3 + 4 * steps)):
        for examples in (128, 64, 32):
            if examples * passes <= budget:
                return examples, methods, f"About {duration_text(examples * passes * second)} at the measured speed."
    return 16, _AT_QUERY, f"Few: about {duration_text(16 * passes * second)} at the measured speed."


def _splice(draft: _Draft, found: Findings) -> None:
    if found.share is None:
        draft.set("splice.select", "random", "The base is at chance: no ranking of its heads means anything.")
    width = max(spec.state_size for spec in family_of(found.config).sites(found.config))
    if width >= _WIDE:
        why = f"A state of {width} channels: wider copies gained nothing from {_WIDE} on, where that was measured."
        draft.set("splice.min_width", None, why)
    why, count = "One head to begin with.", 1
    if found.share is not None and not found.is_small:
        why, count = f"{_SPREAD}: retrieval is spread over several heads.", min(8, found.heads)
    if count > 1:
        why_copy = "What a new head reads is what its SSM head would put out, from the start."
        with suppress(PlanError):  # of a base that takes no layers
            check_inserts(found.config, Splice(form="pair", output="copy"), getattr(torch, found.base.dtype))
            why_copy += " With splice.form=pair they are new layers, and the export is a stock Nemotron-H."
        draft.set("splice.output", "copy", why_copy)
    draft.set("splice.num_heads", count, f"{why} Compare: surgery sweep THIS_FILE splice.num_heads=0,1,2,4,8")


def _train(draft: _Draft, found: Findings) -> None:
    slow = not found.is_small and not found.machine.on_gpu
    sources, reasons = _sources(found, slow)
    base_rate, heads_rate = rates(found.parameters)
    rated = {"lr": base_rate, "new_heads_lr": heads_rate, "warmup": 20}
    section: dict[str, Any] = {"steps": _STEPS}
    why = "that the shipped bases needed"
    if not found.is_small:
        read, steps = _STEPS_ON_A_CPU if slow else _STEPS_OF_NEW_HEADS
        why = "that one larger base needed" if slow else "for a GPU: more than one larger base needed on a CPU"
        why_read = "the new heads first learn where to read, in steps that run no layer above them."
        section = {"read_steps": read, "steps": steps, "trainable": "new_heads"}
        draft.explain(("train", "read_steps"), f"{_SPREAD}: {why_read}")
        draft.explain(("train", "trainable"), "Then what to make of it. The frozen base keeps what it can do.")
    draft.data["train"] = {**section, "sources": sources, "optimizer": rated}
    draft.explain(("train", "steps"), f"Steps {why}. Train longer if `answer` in training.json still falls at the end.")
    if found.machine.on_gpu and found.parameters >= 1e9:
        draft.set("train.precision", "bf16", "A GPU, and a billion weights or more.")
    for number, reason in enumerate(reasons):
        draft.explain(("train", "sources", number), reason)
    ends = ", ".join(f"{a:g} / {b:g} at {float(f'{size / 1e6:.2g}'):,g} million" for size, a, b in RATES)
    draft.explain(("train", "optimizer"), f"Rates by size, between those of the recipes: {ends} weights.")


def _sources(found: Findings, slow: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Choose the sources of training, each with its reason."""
    rows, text_rows = (3, 2) if slow else (8, 12 if found.is_small else 8)
    low, high = _trained(found)
    size = f"{low} to {high} pairs, half to twice as many as located."
    size += " Fewer words between than in the evaluation." if found.form == FAR else ""
    sources: list[dict[str, Any]] = []
    reasons: list[str] = []

    def add(form: Format, pairs: list[int], questions: int, rows: int, reason: str) -> None:
        keys = form.keys | ({"filler": [0, 12]} if form.filler else {})
        source = {"task": form.task, "pairs": pairs, **keys, "questions": questions, "rows": rows}
        source |= {"train_eos": True} if form.probe.newline_ends_answer else {}
        sources.append({**source, "weights": {"answer": 2.0, "attention": 1.0}})
        reasons.append(reason)

    longer = _longer(found)
    part = max(1, rows // 4)
    if longer:
        add(found.form, [low, high], 48, rows - part * len(longer), size)
        for form in longer:
            reason = "Values of several tokens: other heads read the later ones."
            add(form, [max(2, low // 3), _fewer(high)], 16, part, reason)
    elif found.form == FAR:
        add(FAR, [low, high], 12, rows - part, size)
        add(ADJACENT, [low, high], 12, part, "The same pairs, adjacent.")
    else:
        add(found.form, [low, high], 12, rows, size)
    if found.own_data is not None:
        sources.append(found.own_data[0])
        reasons.append(found.own_data[1])
    if "closed_book" in found.known:
        sources.append({"task": "closed_book", "split": 0, "rows": text_rows, "weights": {"base_kl": 1.0}})
        sources.append({"task": "statement", "split": 0, "rows": text_rows // 2, "weights": {"base_kl": 1.0}})
        known = found.known["closed_book"]
        reasons += [f"Keep the facts that the base knows: {known}. The other half is never trained on.", ""]
    if found.is_small:
        sources.append({"task": "sentence", "split": 0, "rows": text_rows, "weights": {"base_kl": 1.0}})
        reasons.append("Keep the base's language. The other half of the sentences is never trained on.")
    else:
        texts = {"base_text": 64, "rows": max(2, text_rows // 2), "max_tokens": 256}
        sources.append({**texts, "weights": {"base_kl": 4.0}})
        reasons.append("Keep the base's language, by texts that it writes itself before training.")
    return sources, reasons


def _trained(found: Findings) -> tuple[int, int]:
    """Fewest and most pairs to train on."""
    return max(2, found.pairs // 2), min(2 * found.pairs, max(found.sizes))


def _fewer(pairs: int) -> int:
    """Number of pairs with longer values. More brought nothing (paper/SCALE.md)."""
    return max(2, pairs * 2 // 5)


def _longer(found: Findings) -> list[Format]:
    """Formats with values of several tokens: that of locating, and records if the base answers them."""
    if found.is_small or found.share is None:
        return []
    forms = [found.form, *(form for form in found.screening.able if form.task == "records" and form != found.form)]
    fit = [form for form in forms if "value_digits" in form.probe.options and form.value_digits is None]
    return [replace(form, value_digits=_LONG) for form in fit]


def _evaluate(draft: _Draft, found: Findings) -> None:
    tasks: list[dict[str, Any]] = [{"task": found.form.task, "pairs": list(found.sizes), **found.form.keys}]
    reasons = ["Half to four times as many pairs as located: twice as many are trained on, at most."]
    longer = {form.task: form for form in _longer(found)}
    others = {form: share for form, share in found.screening.able.items() if form != found.form}
    if found.form == FAR:
        others.pop(ADJACENT, None)
        twice = found.sizes[min(2, len(found.sizes) - 1)]
        tasks.append({"task": ADJACENT.task, "pairs": [twice], "name": "adjacent_pairs"})
        reasons.append("")
    for form, share in others.items():
        name = {"name": "apart"} if form == FAR else {"name": "adjacent_pairs"} if form == ADJACENT else {}
        tasks.append({"task": form.task, "pairs": [found.screening.pairs], **form.keys, **name})
        trained = "Trained with longer values" if form.task in longer else "Never trained on here"
        reasons.append(f"{trained}. The base answers {share}.")
    for form in longer.values():
        longest = {"pairs": [_fewer(_trained(found)[1])], "value_digits": [4, _LONG[1]], "name": f"{form.task}_long"}
        tasks.append({"task": form.task, **form.keys, **longest})
        reasons.append("The most pairs that are trained, with values of several tokens.")
    for task, share in found.known.items():
        tasks.append({"task": task})
        reasons.append(f"The base answers {share}.")
    tasks.append({"task": "perplexity"})
    reasons.append(f"Of sentences: {found.perplexity:.3g} before training.")
    tokens = sum(found.tokens_of(n) for task in tasks for n in task.get("pairs", (_PAIRS_OF_UNSIZED,)))
    arms = 4 if found.is_small else 2  # base and hybrid; a trained control, and the hybrid without its new heads
    seconds = [(n, n * tokens * arms / found.tokens_per_second) for n in (200, 100, 50, 32)]
    examples, time = next((pair for pair in seconds if pair[1] <= _MINUTES["evaluate"] * 60), seconds[-1])
    draft.set("evaluate.tasks", [task["task"] if len(task) == 1 else task for task in tasks])
    for number, reason in enumerate(reasons):
        draft.explain(("evaluate", "tasks", number), reason)
    why = f"Of each size. All models together: about {duration_text(time)} at the measured speed."
    draft.set("evaluate.examples", examples, why)
    draft.set("evaluate.sentences", examples)
    draft.set("evaluate.batch_size", found.batch_size)


def _fit_memory(draft: _Draft, found: Findings, say: Say) -> None:
    """Reduce the memory of training until it fits, by the estimate of `--dry-run`."""
    room = found.machine.memory * _SHARE_OF_MEMORY
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"micro_batch": 2}, "Smaller steps do not fit otherwise."),
        ({"micro_batch": 1, "gradient_checkpointing": True}, "Larger ones do not fit."),
    )
    section = draft.data["train"]
    measured = _estimate(draft.data)
    for more, reason in changes:
        if measured <= room:
            break
        for key, value in more.items():
            section[key] = value
            draft.explain(("train", key), reason)
        measured = _estimate(draft.data)
    say(f"memory of training: about {measured / GIB:.1f} of {found.machine.memory_gib:g} GiB")
    place = ("train", "steps")
    draft.explain(place, f"{draft.comments[place]} Memory: about {measured / GIB:.1f} GiB.")


def _estimate(data: dict[str, Any]) -> int:
    """Estimate the bytes of memory of a training step."""
    # With the speed of a machine, no steps are run to measure the time.
    recipe = check_recipe({**data, "hardware": {**data.get("hardware", {}), "tflops": 1}})
    with TemporaryDirectory() as folder:
        total: int = dry_run(recipe, Path(folder) / "run")["memory"]["total"]
    return total


def commented_yaml(data: Mapping[str, Any], comments: Mapping[Place, str], head: Sequence[str] = ()) -> str:
    """Write nested plain data as YAML.

    Mappings with a comment inside and lists of mappings are written over several lines, others in one.

    Args:
        data: mappings, lists and scalars.
        comments: by the path of a value, such as `("locate", "pairs")` or `("train", "sources", 0)`.
        head: lines of comments at the top.
    """
    lines = [f"# {line}".rstrip() for line in head]
    return "\n".join([*lines, *_block(data, (), comments, "")]) + "\n"


def _block(data: Mapping[str, Any], path: Place, comments: Mapping[Place, str], indent: str) -> list[str]:
    lines = []
    for key, value in data.items():
        place = (*path, key)
        lines += _comment(comments.get(place, ""), indent)
        if isinstance(value, Mapping) and any(other[:-1][: len(place)] == place for other in comments):
            lines += [f"{indent}{key}:", *_block(value, place, comments, indent + "  ")]
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            lines.append(f"{indent}{key}:")
            for number, item in enumerate(value):
                inner = (*place, number)
                lines += _comment(comments.get(inner, ""), indent + "  ")
                if any(other[:-1][: len(inner)] == inner for other in comments):
                    first, *rest = _block(item, inner, comments, indent + "    ")
                    lines += [f"{indent}  - {first.lstrip()}", *rest]
                else:
                    lines.append(f"{indent}  - {_flow(item)}")
        else:
            lines.append(f"{indent}{key}: {_flow(value)}")
    return lines


def _comment(text: str, indent: str) -> list[str]:
    """Wrap a comment, one `#` for each line."""
    lines = textwrap.wrap(text, _WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]


def _flow(value: Any) -> str:
    """Write a value in one line of flow style."""
    plain = json.loads(json.dumps(value))  # YAML's safe writer knows no tuples
    text = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()
