"""Held-out rows of the user's data: wanted and generated texts side by side, and advice if no answer is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.probes.documents import Document
from surgery.recipe import Train
from surgery.report.text import cut_middle
from surgery.scoring.generation import ExactAnswers

_SHOWN = 12  # rows of a data set
_PROMPT = 2000  # characters of a prompt to keep
_FEW = 0.5  # share of rows with a gold position below which marking them is suggested


@dataclass(frozen=True)
class Example:
    """One held-out row as one model answers it.

    Attributes:
        prompt: long ones are cut in the middle.
        wanted: the answer of the row, without the end token.
        generated: the model's text.
    """

    prompt: str
    wanted: str
    generated: str


def examples_of(documents: Sequence[Document], answers: ExactAnswers) -> list[Example]:
    """Select a dozen rows, spread evenly over all. They depend on the number of documents only."""
    count = min(_SHOWN, len(documents))
    chosen = [i * len(documents) // count for i in range(count)]
    prompts = [documents[i].text[: documents[i].questions[-1].answer[0]] for i in chosen]
    return [
        Example(cut_middle(prompt, _PROMPT), answers.wanted[i], answers.generated[i])
        for i, prompt in zip(chosen, prompts, strict=True)
    ]


def side_by_side(examples: Mapping[str, Mapping[str, Sequence[Example]]]) -> dict[str, list[dict[str, Any]]]:
    """Join the examples of all arms: entry `held_out_examples` of results.json.

    Args:
        examples: arm -> data set -> examples of the same rows.

    Returns:
        Data set -> rows with `prompt`, `wanted` and `generated`, the text of each arm.
    """
    names = dict.fromkeys(name for of_arm in examples.values() for name in of_arm)
    joined: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        by_arm = {arm: of_arm[name] for arm, of_arm in examples.items() if name in of_arm}
        joined[name] = [
            {"prompt": row[0].prompt, "wanted": row[0].wanted,
             "generated": {arm: example.generated for arm, example in zip(by_arm, row, strict=True)}}
            for row in zip(*by_arm.values(), strict=True)
        ]  # fmt: skip
    return joined


def advice_of(
    train: Train,
    arms: Mapping[str, Mapping[str, Any]],
    answer_spans: Mapping[str, Mapping[str, int]],
    training: Mapping[str, Mapping[str, int]] | None = None,
) -> list[str]:
    """State for each data set that no arm has a right answer, if so, and what to try.

    Args:
        train: the recipe's section `train`, with the number of steps that were trained.
        arms: entry `arms` of results.json.
        answer_spans: counts of `answer_span: auto` by data set, from `count_answer_spans`.
        training: entry `training` of results.json, if a stage could end at a plateau.
    """
    advice = []
    longer = f"train longer (now {train.num_all_steps} steps)"
    if any("plateau" in stage for stage in (training or {}).values()):  # more `steps` would change nothing
        longer += ": a plateau ended a stage early, so increase `plateau.patience` or `plateau.min_steps`"
    for name, entry in arms["hybrid"].get("held_out", {}).items():
        if "accuracy" not in entry or any(arm["held_out"][name]["accuracy"] > 0 for arm in arms.values()):
            continue
        text = f"{name}: no model generates any of the {entry['n']} held-out answers exactly."
        first_token = entry.get("first_token", {}).get("accuracy", 0.0)
        if first_token:
            text += f" The hybrid's first token is right in {100 * first_token:.3g}% of them."
        tips = [longer, *_span_tips(train, answer_spans.get(name))]
        tips.append("check the format: compare wanted and generated text, and the space or newline before the answer")
        advice.append(f"{text} What to try: {'; '.join(tips)}.")
    return advice


def _span_tips(train: Train, counts: Mapping[str, int] | None) -> list[str]:
    """Suggest spans if the attention of the new heads is supervised on few rows, or on none."""
    sources = [source for stage in train.sequence for source in stage.sources if source.data is not None]
    if not any(source.weights.needs("gold_positions") for source in sources):
        return [
            "mark the place of each answer in its prompt (`answer_span`), or set `data.columns.answer_span: auto`, "
            "with `weights.attention: 1.0`"
        ]
    if counts is None:
        return []
    rows = sum(counts[key] for key in ("found", "ambiguous", "missing")) + counts.get("marked", 0)
    located = counts["found"] + counts.get("marked", 0)
    if located >= _FEW * rows:
        return []
    return [
        f"mark the place of each answer (`answer_span`), as `answer_span: auto` found it in {located} of {rows} rows"
    ]
