"""What every arm is asked. Owns: which documents, under which names. Must never know: models, scores.

Facts and sentences come in disjoint halves: half 0 may be what a KL term saw, half 1 is what is scored; both are
reported. A task's name has its sizes behind slashes: `kv_retrieval/16`, `needle_single/512/0.25` (tokens, depth).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import cast

from transformers import PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.data.generated import fact_half, sentence_half
from surgery.errors import ProbeError
from surgery.probes.copying import copying_document
from surgery.probes.documents import Document, rng_of
from surgery.probes.hops import hop_document
from surgery.probes.json_kv import json_kv_document
from surgery.probes.knowledge import fact_question, letter_choice, option_text
from surgery.probes.kv_retrieval import kv_document
from surgery.probes.mqar import mqar_document, mqar_words
from surgery.probes.needle import Kind, needle_document, token_count
from surgery.probes.phonebook import phonebook_document, space_of
from surgery.recipe import Evaluate, Probe
from surgery.recipe.evaluate import OF_PAIRS, TEXTS
from surgery.scoring.answers import until_end
from surgery.scoring.ranking import until_query

SEEN, HELD_OUT = 0, 1
Maker = Callable[[Random], Document]


@dataclass(frozen=True)
class Prompts:
    """What every arm is asked, by task and size.

    Attributes:
        choices: with choices; ranked by likelihood.
        texts: for perplexity.
        held_out: what the user's own data held out.
        copied: with an answer and no choices; said, and counted token by token.
    """

    choices: Mapping[str, Sequence[Document]]
    texts: Mapping[str, Sequence[Document]]
    held_out: Mapping[str, Sequence[Document]] = field(default_factory=dict)
    copied: Mapping[str, Sequence[Document]] = field(default_factory=dict)
    _encoded: dict[tuple[str, int, bool], list[EncodedBatch]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_tasks(self) -> int:
        """Of all kinds."""
        return len(self.choices) + len(self.texts) + len(self.held_out) + len(self.copied)

    def batches(self, task: str, tokenizer: PreTrainedTokenizerBase, size: int, said: bool) -> list[EncodedBatch]:
        """The prompts of a task, left-padded; encoded once for all arms, whose tokenizer is the same.

        Args:
            size: documents at once.
            said: with their answers, as `say` takes them; else they end at the query, as `ranked` does.
        """
        key = (task, size, said)
        if key not in self._encoded:
            documents = self.choices[task] if task in self.choices else self.copied[task]
            self._encoded[key] = (
                until_end(documents, tokenizer, size) if said else until_query(documents, tokenizer, size)
            )
        return self._encoded[key]


def make_prompts(
    section: Evaluate,
    seed: int,
    held_out: Mapping[str, Sequence[Document]] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Prompts:
    """All prompts of an evaluation, from the evaluation splits: no prompt of training is among them.

    Args:
        held_out: of the user's own data, by name: `held_out_documents`.
        tokenizer: of the base; for tasks whose text depends on one (mqar, phonebook, needles).

    Raises:
        ProbeError: more pairs than there are values, a length that its needles do not fit in, a tokenizer that is
            needed and not given.
    """
    choices: dict[str, Sequence[Document]] = {}
    texts: dict[str, Sequence[Document]] = {}
    copied: dict[str, Sequence[Document]] = {}
    for probe in section.tasks:
        if probe.task.startswith("closed_book"):
            half = SEEN if probe.task == "closed_book_seen" else HELD_OUT
            choices[probe.task] = [fact_question(f) for f in fact_half(half)]
            continue
        count = section.sentences if probe.task in TEXTS else section.examples
        for name, key, make in _makers(probe, section, tokenizer):
            made = [make(rng_of("evaluate", seed, key, i)) for i in range(probe.examples or count)]
            (texts if probe.task in TEXTS else copied if probe.task == "copying" else choices)[name] = made
    return Prompts(choices, texts, held_out or {}, copied)


def _makers(
    probe: Probe, section: Evaluate, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[tuple[str, str, Maker]]:
    """Of each size: its name, what its random numbers depend on, what makes one document."""
    task = probe.task
    if task in ("letter_choice", "option_text"):
        twin = letter_choice if task == "letter_choice" else option_text
        yield task, "letter", partial(twin, split="eval")  # the twins are about the same facts
    elif task in TEXTS:
        if task == "perplexity_seen":
            yield task, "seen", partial(sentence_half, half=SEEN, split="train")
        else:
            yield task, "text", partial(sentence_half, half=HELD_OUT, split="eval")
    elif task in OF_PAIRS:
        sized = _of_pairs(probe, tokenizer)
        for pairs in probe.pairs or section.pairs:
            key = f"kv{pairs}" if task == "kv_retrieval" else f"{task}{pairs}"
            yield f"{task}/{pairs}", key, partial(sized, pairs)
    else:
        kind, given = cast(Kind, task.removeprefix("needle_")), _needed(tokenizer, task)
        size, space = token_count(given), space_of(given)
        for tokens in probe.tokens:
            for depth in probe.depths:
                make = partial(
                    needle_document, length=tokens, size=size, kind=kind, depth=depth, needles=probe.needles,
                    split="eval", space=space,
                )  # fmt: skip
                yield f"{task}/{tokens}/{depth:g}", f"{task}{tokens}/{depth}", make


def _of_pairs(probe: Probe, tokenizer: PreTrainedTokenizerBase | None) -> Callable[[int, Random], Document]:
    """What makes a document of so many pairs, or pieces."""
    task = probe.task
    if task == "mqar":
        words = mqar_words(_needed(tokenizer, task), "eval")
        return lambda pairs, rng: mqar_document(rng, pairs, words.keys, words.values, questions=1)
    if task == "phonebook":
        space = space_of(_needed(tokenizer, task))
        return lambda pairs, rng: phonebook_document(rng, pairs, split="eval", space=space)
    if task == "multi_hop":
        return lambda pairs, rng: hop_document(rng, pairs, probe.hops, "eval")
    make = {"kv_retrieval": kv_document, "json_kv": json_kv_document, "copying": copying_document}[task]
    return lambda pairs, rng: make(rng, pairs, split="eval")  # type: ignore[operator]


def _needed(tokenizer: PreTrainedTokenizerBase | None, task: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise ProbeError("tokenizer", None, f"The text of {task} depends on it: give the base's.")
    return tokenizer


__all__ = ["HELD_OUT", "SEEN", "Prompts", "make_prompts"]
