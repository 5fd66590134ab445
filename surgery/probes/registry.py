"""Registry of probes: seeded tasks that recipes train on and evaluate.

A probe is one class. Its schema, training source, evaluation task, lm-eval tasks and labels are derived from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from surgery.errors import ProbeError, RecipeError
from surgery.probes.documents import Document, Split, rng_of
from surgery.registry import Registry, plugin_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Half = Literal[0, 1]
Scoring = Literal["choices", "generation", "perplexity"]


@dataclass(frozen=True)
class Options:
    """Sizes of one document, from the recipe. A probe uses those that its class lists in `pairs` and `options`.

    Evaluation and lm-eval tasks leave `questions` at 1.

    Attributes:
        pairs: key-value pairs, or pieces of a text.
        questions: maximum number of questions in one document.
        groups: digits of each group of a key and of a value.
        hops: lines from the question to its answer.
        needles: hidden numbers.
        tokens: maximum length of the document, in tokens; in characters if there is no tokenizer.
        depth: share of the text before the first needle; drawn at random if None.
        half: half of the facts or sentences to use; both if None.
        filler: smallest and largest number of words between a key and its value; no words if None.
        value_digits: smallest and largest number of digits of the values; those of the probe if None.
        tokenizer: tokenizer of the base model. lm-eval tasks are written without one.
    """

    pairs: int = 0
    questions: int = 1
    groups: tuple[int, ...] | None = None
    hops: int = 2
    needles: int = 4
    tokens: int = 0
    depth: float | None = None
    half: Half | None = None
    filler: tuple[int, int] | None = None
    value_digits: tuple[int, int] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None


class Probe(ABC):
    """A task whose documents are generated from a seed. Subclass it, implement `document`, and register the class.

    Attributes:
        name: set by `register_probe`.
        label: name in tables; `name` with spaces if empty.
        short_label: name in figures; `label` if empty.
        unit: unit of `pairs` in tables, such as `pairs`.
        knowledge: True for a probe of knowledge rather than retrieval. Figures use hollow markers for it.
        trains: whether it can be the `task` of a training source.
        evaluates: whether it can be a task of an evaluation.
        scoring: `choices` ranks `Question.choices` by likelihood and can also generate; `generation` generates the
            answer, for questions without choices; `perplexity` is for texts without questions.
        pairs: smallest and largest `pairs`; None if the probe has no such size.
        options: other fields of `Options` that the probe uses: `questions`, `groups`, `hops`, `needles`, `half`,
            `filler`, `value_digits`, `tokens`. With `tokens`, a recipe sets the length of a document.
        has_depth: with `tokens`, whether a recipe also sets the depth of what is asked for.
        gold_position: every question has a `segment` and a `value`, the places that attention may be trained to read.
        newline_ends_answer: a newline follows each answer, so that a source may train on it.
        held_out_from: training tasks with the same content. The evaluation is held out from them if their sources have
            a `split` that it does not ask for.
        evaluated: the half of the content that the evaluation asks for; None for both.
        needs_tokenizer: the text depends on the base model's tokenizer.
        seed_name: replaces `name` in the seed of evaluation prompts.
        lm_eval_group: the tasks belong to the lm-eval group `surgery_GROUP`. None for no lm-eval task.
        lm_eval_sizes: one lm-eval task for each number of `pairs`; with `tokens`, for each length in thousands of
            characters. Sizes outside `pairs` are skipped.
    """

    name: str
    label: str = ""
    short_label: str = ""
    unit: str = ""
    knowledge: bool = False
    trains: bool = True
    evaluates: bool = True
    scoring: Scoring = "choices"
    pairs: tuple[int, int] | None = None
    options: tuple[str, ...] = ()
    has_depth: bool = True
    gold_position: bool = False
    newline_ends_answer: bool = False
    held_out_from: tuple[str, ...] = ()
    evaluated: Half | None = 1
    needs_tokenizer: bool = False
    seed_name: str = ""
    lm_eval_group: str | None = "retrieval"
    lm_eval_sizes: tuple[int, ...] = (8, 32)

    @abstractmethod
    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate one document from `rng`.

        Args:
            rng: the only source of randomness.
            split: documents of `train` and `eval` must differ; `documents.draw` takes care of that.

        Raises:
            ProbeError: the options do not fit, such as more pairs than there are keys.
        """

    def generate(self, rng: Random, split: Split, options: Options) -> Document:
        """Call `document`, and check sizes before it and what it returns.

        Raises:
            ProbeError: as `document`; `pairs` or `questions` outside its limits; or a document without what the class
                announces.
            SurgeryError: the code of a plugin raised another error.
        """
        if self.pairs is not None and "tokens" not in self.options:
            low, high = self.pairs
            if not low <= options.pairs <= high:
                raise ProbeError(f"{self.name} pairs", options.pairs, f"Use {low} to {high}.")
            if "questions" in self.options and not 1 <= options.questions <= options.pairs:
                hint = f"Each question is about a different pair. Use 1 to {options.pairs}."
                raise ProbeError(f"{self.name} questions", options.questions, hint)
        with plugin_errors(f"probe {self.name}", self):
            document = self.document(rng, split, options)
        if not isinstance(document, Document):
            raise ProbeError(f"{self.name} document", type(document).__name__, "Return a `Document`.")
        if not document.questions and self.scoring != "perplexity":
            hint = "Give the document questions, or set `scoring = 'perplexity'`."
            raise ProbeError(f"{self.name} questions", "none", hint)
        for question in document.questions:
            if self.gold_position and (question.segment is None or question.value is None):
                hint = "With `gold_position` every question needs both. Set `Question.segment` and `Question.value`."
                raise ProbeError(f"{self.name} question", "no segment or no value", hint)
            if self.scoring == "choices" and not question.choices:
                hint = "Set `Question.choices` and `Question.gold`, or `scoring = 'generation'`."
                raise ProbeError(f"{self.name} question", "no choices", hint)
            answer = document.text[slice(*question.answer)]
            if question.choices and answer not in question.choices[question.gold : question.gold + 1]:
                hint = f"`choices[gold]` must be the text of the answer, {answer!r}, with the same spaces."
                raise ProbeError(f"{self.name} choices", list(question.choices)[:8], hint)
        return document

    def evaluation_set(self) -> Sequence[Document] | None:
        """Return all prompts of an evaluation if they are a fixed set. By default None: prompts are generated."""
        return None

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Raise ProbeError if the text depends on a tokenizer and there is none."""
        if self.needs_tokenizer and tokenizer is None:
            raise ProbeError(
                "tokenizer", None, f"The text of {self.name} depends on the tokenizer. Pass that of the base model."
            )

    def check_pairs(self, *sizes: int) -> None:
        """Raise ValueError unless all sizes are inside `pairs`."""
        low, high = self.pairs or (min(sizes), max(sizes))
        if min(sizes) < low or max(sizes) > high:
            found = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
            raise ValueError(f"{self.name} takes {low} to {high} `pairs`, not {found}. Change `pairs`.")


def prompts_of(probe: Probe, purpose: str, seed: int, count: int, options: Options) -> list[Document]:
    """Generate `count` prompts of the evaluation split. The seed includes the `purpose`, such as `locate`."""
    return [probe.generate(rng_of(purpose, seed, i), "eval", options) for i in range(count)]


_PLUGINS = dict.fromkeys(("variable_tracking", "common_words"), "bench.plugins.ruler")
PROBES: Registry[Probe] = Registry("task", plugins=_PLUGINS)
P = TypeVar("P", bound=type[Probe])


def register_probe(name: str) -> Callable[[P], P]:
    """Class decorator: register a subclass of `Probe` under the name that recipes use.

    Raises:
        RecipeError: another probe has this name, or an attribute of the class is not as `Probe` describes it.
    """

    def register(probe: P) -> P:
        _check_attributes(name, probe)
        entry = probe()
        entry.name = name
        entry.label = entry.label or name.replace("_", " ")
        entry.short_label = entry.short_label or entry.label
        entry.seed_name = entry.seed_name or name
        PROBES.register(name, entry)
        return probe

    return register


_OPTIONS = ("questions", "groups", "hops", "needles", "half", "tokens", "filler", "value_digits")


def _check_attributes(name: str, probe: type[Probe]) -> None:
    """Raise RecipeError for an attribute that recipes and evaluations could not use."""
    if not issubclass(probe, Probe):
        raise RecipeError(f"task {name}", probe.__name__, "Make it a subclass of surgery.probes.registry.Probe.")
    pairs, options, sizes = probe.pairs, probe.options, probe.lm_eval_sizes
    is_range = isinstance(pairs, tuple | list) and len(pairs) == 2 and all(type(n) is int for n in pairs)
    known = isinstance(options, tuple | list) and set(options) <= set(_OPTIONS)
    for attribute, fits, hint in (
        ("scoring", probe.scoring in get_args(Scoring), f"Use one of {', '.join(get_args(Scoring))}."),
        ("pairs", pairs is None or (is_range and 0 < pairs[0] <= pairs[1]), "Use (smallest, largest), or None."),
        ("options", known, f"Use a tuple of names among {', '.join(_OPTIONS)}."),
        ("lm_eval_sizes", isinstance(sizes, tuple | list), "Use a tuple of sizes."),
    ):
        if not fits:
            raise RecipeError(f"task {name}: {attribute}", repr(getattr(probe, attribute)), hint)
