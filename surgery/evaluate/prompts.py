"""Generate the prompts of an evaluation, the same for every arm.

Facts and sentences are split into two disjoint halves. Training may use the first half, in KL terms; the second is held
out. Both are reported. Sizes follow the name of a task after slashes: `kv_retrieval/16` (pairs),
`needle_single/512/0.25` (tokens, depth).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch
from surgery.data.generation import answer_batches
from surgery.data.ranking import query_batches
from surgery.errors import naming
from surgery.probes.documents import Document, Span, answer_list, rng_of
from surgery.probes.registry import Options
from surgery.recipe import Evaluate, EvaluationTask

READ_TWICE = "_read_twice"  # end of an arm's name


@dataclass(frozen=True)
class PromptSet:
    """Prompts by task and size."""

    choices: Mapping[str, Sequence[Document]]  # questions with choices, ranked by likelihood
    texts: Mapping[str, Sequence[Document]]  # for perplexity
    held_out: Mapping[str, Sequence[Document]] = field(default_factory=dict)  # that `holdout` excludes from training
    generation: Mapping[str, Sequence[Document]] = field(default_factory=dict)  # questions whose answer is generated
    _encoded: dict[tuple[str, int, bool], list[EncodedBatch]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_tasks(self) -> int:
        """Number of tasks of all kinds."""
        return len(self.choices) + len(self.texts) + len(self.held_out) + len(self.generation)

    def batches(
        self, task: str, tokenizer: PreTrainedTokenizerBase, size: int, with_answers: bool
    ) -> list[EncodedBatch]:
        """Left-padded batches of `size` documents of a task, encoded once for all arms: they have the same tokenizer.

        With their answers they are for `generate_answers`. Otherwise they end at the query, for `ranked`.
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
    """Generate all prompts of an evaluation from the evaluation splits, which training never uses.

    Args:
        section: the recipe's section `evaluate`.
        seed: of the prompts.
        held_out: documents of the user's own data by name, from `held_out_documents`.
        tokenizer: tokenizer of the base, for tasks whose text depends on it (mqar, phonebook, needles).

    Raises:
        ProbeError: a task has more pairs than values, its length is too short for its needles, or it needs a tokenizer
            and none was passed.
    """
    prompts: dict[str, dict[str, Sequence[Document]]] = {"choices": {}, "generation": {}, "perplexity": {}}
    for number, entry in enumerate(section.tasks):
        entry.probe.check_tokenizer(tokenizer)
        documents = prompts[entry.probe.scoring]
        evaluation_set = entry.probe.evaluation_set()
        if evaluation_set is not None:
            documents[entry.result_name] = evaluation_set
            continue
        default = section.sentences if entry.probe.scoring == "perplexity" else section.examples
        for name, key, options in _sizes(entry, section.pairs, tokenizer):
            rngs = (rng_of("evaluate", seed, key, i) for i in range(entry.examples or default))
            with naming(f"evaluate.tasks.{number}.tokens", "tokens"):
                documents[name] = [entry.probe.generate(rng, "eval", options) for rng in rngs]
    return PromptSet(prompts["choices"], prompts["perplexity"], held_out or {}, prompts["generation"])


def _sizes(
    entry: EvaluationTask, default_pairs: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[tuple[str, str, Options]]:
    """Yield each size of a task: its name, the key of its seed, and the options of its documents."""
    options = Options(
        hops=entry.hops,
        needles=entry.needles,
        groups=entry.groups,
        filler=entry.filler,
        value_digits=entry.value_digits,
        tokenizer=tokenizer,
    )
    task, key = entry.result_name, entry.probe.seed_name
    if "tokens" in entry.probe.options:
        for tokens in entry.tokens:
            if not entry.probe.has_depth:
                yield f"{task}/{tokens}", f"{key}{tokens}", replace(options, tokens=tokens)
                continue
            for depth in entry.depths:
                sized = replace(options, tokens=tokens, depth=depth)
                yield f"{task}/{tokens}/{depth:g}", f"{key}{tokens}/{depth}", sized
    elif entry.probe.pairs is not None:
        for pairs in entry.pairs or default_pairs:
            yield f"{task}/{pairs}", f"{key}{pairs}", replace(options, pairs=pairs)
    else:
        yield task, key, options


def prompts_twice(prompts: PromptSet, begin: str | None = None) -> PromptSet:
    """Repeat every prompt with an answer: a control that improves retrieval without attention.

    A recurrent model has to choose what it keeps before it knows the question. At the second reading it knows (Just
    Read Twice, arXiv 2407.05483). Texts for perplexity are left out. `begin`: as of `read_twice`.
    """

    def twice(tasks: Mapping[str, Sequence[Document]]) -> dict[str, list[Document]]:
        return {
            task: [read_twice(document, begin) for document in documents]
            for task, documents in tasks.items()
            if documents[0].questions
        }

    return PromptSet(twice(prompts.choices), {}, twice(prompts.held_out), twice(prompts.generation))


def read_twice(document: Document, begin: str | None = None) -> Document:
    """Put the prompt of a document, its question included, and a newline before its text.

    Args:
        begin: BOS, which a chat template may write at the start of a text. It stays there alone.
    """
    prompt, text = document.text[: answer_list(document)[0].answer[0]] + "\n", document.text.removeprefix(begin or "")
    shift = len(prompt) + len(text) - len(document.text)

    def moved(span: Span) -> Span:
        return span[0] + shift, span[1] + shift

    questions = tuple(
        replace(q, answer=moved(q.answer), segment=q.segment and moved(q.segment), value=q.value and moved(q.value))
        for q in document.questions
    )
    return Document(document.task, prompt + text, questions)
