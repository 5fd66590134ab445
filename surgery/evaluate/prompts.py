"""What every arm is asked. Owns: which documents, under which names. Must never know: models, scores.

Facts and sentences come in disjoint halves: half 0 may be what a KL term saw, half 1 is what is scored; both are
reported. A task's name has its sizes behind slashes: `kv_retrieval/16`, `needle_single/512/0.25` (tokens, depth).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.probes.documents import Document, rng_of
from surgery.probes.registry import Options
from surgery.recipe import Evaluate, EvaluationTask
from surgery.scoring.answers import until_end
from surgery.scoring.ranking import until_query


@dataclass(frozen=True)
class PromptSet:
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
) -> PromptSet:
    """All prompts of an evaluation, from the evaluation splits: no prompt of training is among them.

    Args:
        held_out: of the user's own data, by name: `held_out_documents`.
        tokenizer: of the base; for tasks whose text depends on one (mqar, phonebook, needles).

    Raises:
        ProbeError: more pairs than there are values, a length that its needles do not fit in, a tokenizer that is
            needed and not given.
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
            documents[name] = [entry.probe.document(rng, "eval", options) for rng in rngs]
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
