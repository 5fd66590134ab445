"""Measure what a base can retrieve: in which format, and from how many pairs.

Every accuracy is a share of few seeded prompts of the evaluation split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.offsets import tokenized
from surgery.data.ranking import query_batches, ranked
from surgery.errors import ProbeError
from surgery.probes.documents import Document
from surgery.probes.registry import PROBES, Options, Probe, prompts_of
from surgery.stats import at_least

Say = Callable[[str], None]
EASY, HARD, AIM = 0.95, 0.60, 0.80  # accuracies between which heads can be told apart, and the one to come close to
LEAST, START = 2, 8  # pairs
_BY_CHANCE = 1e-3  # largest probability that guesses are right as often
_TRIES = 8  # numbers of pairs to measure


@dataclass(frozen=True)
class Format:
    """A text to retrieve from: a probe with its options."""

    task: str
    filler: tuple[int, int] | None = None
    value_digits: tuple[int, int] | None = None

    @property
    def probe(self) -> Probe:
        return PROBES[self.task]

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of a recipe besides `task`."""
        keys = {"filler": self.filler, "value_digits": self.value_digits}
        return {key: list(value) for key, value in keys.items() if value is not None}

    def __str__(self) -> str:
        apart = f" with {self.filler[0]} to {self.filler[1]} words between key and value" if self.filler else ""
        digits = f" with {self.value_digits[0]} to {self.value_digits[1]} digits" if self.value_digits else ""
        return f"{self.task}{apart}{digits}"


# From the most to the least preferred. Pairs apart test retrieval itself: adjacent ones fit into a short convolution.
FAR, ADJACENT = Format("kv_retrieval", filler=(0, 20)), Format("kv_retrieval")
FORMATS = (
    FAR,
    ADJACENT,
    Format("phonebook", value_digits=(2, 6)),
    Format("records"),
    Format("json_kv", value_digits=(2, 4)),
    Format("mqar"),
)


@dataclass(frozen=True)
class Share:
    """Number of right answers, of prompts, and the share of guesses that are right."""

    right: int
    prompts: int
    chance: float

    @property
    def accuracy(self) -> float:
        return self.right / self.prompts

    @property
    def above_chance(self) -> bool:
        """Whether guesses would hardly ever be right as often (binomial, p < 0.001)."""
        return at_least(self.right, self.prompts, self.chance) < _BY_CHANCE

    def __str__(self) -> str:
        return f"{two_digits(self.accuracy)} of {self.prompts} prompts"


def two_digits(share: float) -> str:
    """Write a share as .81 or 1.00."""
    return f"{share:.2f}".removeprefix("0")


@dataclass
class Prober:
    """Score a base on few prompts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    say: Say
    context: int | None = None  # maximum number of tokens
    shares: dict[tuple[Format, int], Share] = field(default_factory=dict)

    def documents(self, form: Format, pairs: int, count: int) -> list[Document]:
        """Generate prompts. Raises ProbeError for a number of pairs that the format or the model's context excludes."""
        low, high = form.probe.pairs or (pairs, pairs)
        if not low <= pairs <= high:
            raise ProbeError("pairs", pairs, f"{form.task} takes {low} to {high}.")
        options = Options(pairs=pairs, filler=form.filler, value_digits=form.value_digits, tokenizer=self.tokenizer)
        documents = prompts_of(form.probe, "init", 0, count, options)
        longest = max(documents, key=lambda document: len(document.text))
        tokens = len(tokenized(self.tokenizer, [longest.text])[0].ids)
        if self.context is not None and tokens > self.context:
            raise ProbeError("pairs", pairs, f"{tokens} tokens are more than the model's context of {self.context}.")
        return documents

    def share(self, form: Format, pairs: int, count: int) -> Share:
        """Score one format, once. Raises ProbeError as `documents`, or if the tokenizer cannot distinguish choices."""
        if (form, pairs) not in self.shares:
            share = self.shares[form, pairs] = self.answered(self.documents(form, pairs, count))
            self.say(f"{form}: {pairs} pairs, {share}")
        return self.shares[form, pairs]

    def answered(self, documents: Sequence[Document], batch_size: int | None = None) -> Share:
        correct = ranked(self.model, query_batches(documents, self.tokenizer, batch_size or self.batch_size)).correct
        chance = sum(1 / len(document.questions[-1].choices) for document in documents) / len(documents)
        return Share(int(correct.sum()), len(documents), chance)


@dataclass(frozen=True)
class Screening:
    """Formats that were tried."""

    shares: Mapping[Format, Share]  # of the last number of pairs that was tried
    pairs: int  # that number
    unusable: Mapping[Format, str]  # why the tokenizer or the model cannot use a format

    @property
    def able(self) -> dict[Format, Share]:
        """Formats that are answered above chance."""
        return {form: share for form, share in self.shares.items() if share.above_chance}

    @property
    def best(self) -> Format | None:
        """The first format that is at most .10 below the best; None if the base is at chance in all."""
        top = max((share.accuracy for share in self.able.values()), default=0.0)
        return next((form for form, share in self.able.items() if share.accuracy >= top - 0.1), None)


def screen(prober: Prober, count: int, formats: Iterable[Format] = FORMATS) -> Screening:
    """Try every format with 8 pairs and, if the base is at chance in all, with 3."""
    usable, unusable = tuple(formats), dict[Format, str]()
    for pairs, prompts in ((START, count), (LEAST + 1, 2 * count)):
        shares = {}
        for form in usable:
            try:
                shares[form] = prober.share(form, pairs, prompts)
                unusable.pop(form, None)
            except ProbeError as error:
                unusable[form] = str(error)
        result = Screening(shares, pairs, unusable)
        if result.best is not None:
            break
    return result


def find_pairs(accuracy: Callable[[int], float], most: int = 100) -> tuple[int, dict[int, float]]:
    """Find a number of pairs that a base answers in .60 to .95 of the prompts, as close to .80 as few tries come.

    Doubles or halves the number from 8 until the accuracy crosses .80, then bisects between a number that is too easy
    and one that is too hard. `accuracy` raises ProbeError for a number that cannot be measured, and so does this
    function if that is the smallest.

    Returns:
        The number, and all accuracies by number of pairs. If none is in the range, that with the closest accuracy.
    """
    measured: dict[int, float] = {}
    too_many = most + 1

    def measure(pairs: int) -> float:
        """Measure a number of pairs; 0 if there is no such number."""
        nonlocal too_many
        try:
            measured[pairs] = accuracy(pairs)
        except ProbeError:
            if pairs <= LEAST:
                raise
            too_many = min(too_many, pairs)
        return measured.get(pairs, 0.0)

    pairs = START
    while True:
        upward = measure(pairs) > AIM
        following = min(2 * pairs, too_many - 1) if upward else max(pairs // 2, LEAST)
        if following in measured or following >= too_many:
            break
        pairs = following
    while len(measured) < _TRIES and not any(HARD <= value <= EASY for value in measured.values()):
        easy = max((n for n, value in measured.items() if value > EASY), default=LEAST)
        hard = min((n for n, value in measured.items() if value < HARD and n > easy), default=too_many)
        middle = round(math.sqrt(easy * hard))
        if not easy < middle < hard or middle in measured:
            break
        measure(middle)

    # The closest to the aim; of equal ones, the most pairs if they are too easy, otherwise the fewest.
    return min(measured, key=lambda n: (abs(measured[n] - AIM), -n if measured[n] > AIM else n)), measured


def known_tasks(prober: Prober, names: Sequence[str], count: int) -> dict[str, Share]:
    """Score probes without sizes, such as closed_book. Returns those that are answered above chance."""
    known = {}
    for name in names:
        fixed = PROBES[name].evaluation_set()
        documents = list(fixed[:count]) if fixed is not None else prompts_of(PROBES[name], "init", 0, count, Options())
        share = prober.answered(documents)
        prober.say(f"{name}: {share}")
        if share.above_chance:
            known[name] = share
    return known
