"""Prompts of an evaluation, the same for every arm.

Facts and sentences come in disjoint halves: a KL term may see half 0, half 1 is held out. Both are reported. The name
of a task has its sizes after slashes: `kv_retrieval/16`, `needle_single/512/0.25` (tokens, depth).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.probes.documents import Document, rng_of
from surgery.probes.registry import Options
from surgery.recipe import Evaluate, EvaluationTask
from surgery.scoring.generation import answer_batches
from surgery.scoring.ranking import query_batches


@dataclass(frozen=True)
class PromptSet:
    """Prompts by task and size.

    Attributes:
        choices: questions with choices, ranked by likelihood.
        texts: texts for perplexity.
        held_out: documents that `holdout` keeps from training.
        generation: questions without choices: the answer is generated, and its tokens are counted.
    """

    choices: Mapping[str, Sequence[Document]]
    texts: Mapping[str, Sequence[Document]]
    held_out: Mapping[str, Sequence[Document]] = field(default_factory=dict)
    generation: Mapping[str, Sequence[Document]] = field(default_factory=dict)
    _encoded: dict[tuple[str, int, bool], list[EncodedBatch]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_tasks(self) -> int:
        """Number of tasks of all kinds."""
        return len(self.choices) + len(self.texts) + len(self.held_out) + len(self.generation)

    def batches(
        self, task: str, tokenizer: PreTrainedTokenizerBase, size: int, with_answers: bool
    ) -> list[EncodedBatch]:
        """Left-padded batches of a task, encoded once for all arms: they have the same tokenizer.

        Args:
            size: documents of a batch.
            with_answers: include the answers, as `generate_answers` takes them; else end at the query, for `ranked`.
        """
        key = (task, size, with_answers)
        if key not in self._encoded:
            documents = self.choices[task] if task in self.choices else self.generation[task]
            encode_batches = answer_batches if with_answers else query_batches
            self._encoded[key] = encode_batches(documents, tokenizer, size)
        return self._encoded[key]


def make_prompts(
    section: Evaluate,
    seed: int,
    held_out: Mapping[str, Sequence[Document]] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PromptSet:
    """Generate all prompts of an evaluation, from the evaluation splits: training never sees one of them.

    Args:
        held_out: documents of the user's own data, by name: `held_out_documents`.
        tokenizer: tokenizer of the base, for tasks whose text depends on one (mqar, phonebook, needles).

    Raises:
        ProbeError: more pairs than there are values, a length that is too short for the needles, or no tokenizer where
            a task needs one.
    """
    prompts: dict[str, dict[str, Sequence[Document]]] = {"choices": {}, "generation": {}, "perplexity": {}}
    for entry in section.tasks:
        entry.probe.check_tokenizer(tokenizer)
        documents = prompts[entry.probe.scoring]
        evaluation_set = entry.probe.evaluation_set()
        if evaluation_set is not None:
            documents[entry.task] = evaluation_set
            continue
        default = section.sentences if entry.probe.scoring == "perplexity" else section.examples
        for name, key, options in _sizes(entry, section.pairs, tokenizer):
            rngs = (rng_of("evaluate", seed, key, i) for i in range(entry.examples or default))
            documents[name] = [entry.probe.generate(rng, "eval", options) for rng in rngs]
    return PromptSet(prompts["choices"], prompts["perplexity"], held_out or {}, prompts["generation"])


def _sizes(
    entry: EvaluationTask, default_pairs: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[tuple[str, str, Options]]:
    """Each size of a task: its name, the key of its seed, and the options of its documents."""
    options = Options(hops=entry.hops, needles=entry.needles, tokenizer=tokenizer)
    task, key = entry.task, entry.probe.seed_name
    if "tokens" in entry.probe.options:
        for tokens in entry.tokens:
            for depth in entry.depths:
                sized = replace(options, tokens=tokens, depth=depth)
                yield f"{task}/{tokens}/{depth:g}", f"{key}{tokens}/{depth}", sized
    elif entry.probe.pairs is not None:
        for pairs in entry.pairs or default_pairs:
            yield f"{task}/{pairs}", f"{key}{pairs}", replace(options, pairs=pairs)
    else:
        yield task, key, options


__all__ = ["PromptSet", "make_prompts"]
