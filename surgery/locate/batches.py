"""Run batches of prompts one at a time, distributed over processes.

The processes take batches in turn. Results are gathered in the order of the batches, so every process has all of them,
and the numbers do not depend on the number of processes.

Shape legend: B prompts of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.own_prompts import own_batches, own_prompts
from surgery.data.ranking import ranked
from surgery.errors import ModelError, SurgeryError, fitting
from surgery.locate.ablation_sweep import Variant, change_at_query
from surgery.locate.clean_run import CleanRun, run_clean
from surgery.locate.scores import Record, plain
from surgery.models.loading import check_vocabulary
from surgery.probes.documents import Document
from surgery.probes.registry import prompts_of
from surgery.recipe import Locate
from surgery.recipe.methods import METHODS

ROUNDING = 1e-3  # logits: largest difference by rounding between two computations of one margin


def is_stepwise(section: Locate) -> bool:
    """Whether all methods change heads at the query alone, so that the clean query can be a decode step."""
    return all(METHODS[method].decode_step for method in section.methods)


class PromptBatches:
    """Batches of prompts for one model: left-padded, up to the query.

    Args:
        batches: prompts to use. By default those of `section`: its `data`, or generated ones of the evaluation split.

    Attributes:
        passes: number of full forward passes of one prompt so far, over all processes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        section: Locate,
        seed: int,
        batches: Sequence[EncodedBatch] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.section = model, tokenizer, section
        self.passes = 0.0
        self._passes_by_batch: dict[int, float] = {}  # of this process since the last gathering
        self._is_checked = not any(METHODS[method].decode_step for method in section.methods)
        self._documents: list[list[Document]] | None = None
        if batches is None:
            check_vocabulary(tokenizer, model.config)
            pairs = _encoded(model, tokenizer, section, seed)
            self._documents, batches = [documents for documents, _ in pairs], [batch for _, batch in pairs]
        self.batches = list(batches)
        self._counterfactuals = counterfactuals(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def chance(self) -> float:
        """Accuracy of random guesses among the choices of each prompt's last question."""
        counts = torch.cat([(batch.of_last_question(batch.choice_ids) >= 0).sum(-1) for batch in self.batches])
        return float((1 / counts.clamp(min=1)).mean())

    def documents(self, index: int) -> list[Document] | None:
        """Text of a batch; None if encoded batches were passed."""
        return self._documents[index] if self._documents is not None else None

    def counterfactual(self, index: int) -> Tensor | None:
        """(B,T) tokens of a batch with other answers in the context; None without (`counterfactuals`)."""
        return None if self._counterfactuals is None else self._counterfactuals[index].to(self.model.device)

    def clean(self, least: int | None = None) -> list[Record]:
        """Score the clean model in one plain pass, on the first batches with at least so many prompts or on all."""
        ends = np.cumsum([len(batch) for batch in self.batches])
        count = len(self) if least is None else min(int(np.searchsorted(ends, least)) + 1, len(self))
        with self.gathered() as records:
            for index in self._share(range(count)):
                batch = self.batches[index]
                records[index] = Record(plain(ranked(self.model, [batch])))
                self._passes_by_batch[index] = float(len(batch))
        return list(records.values())

    def clean_runs(self) -> Iterator[tuple[int, CleanRun]]:
        """Run the clean model on this process's share of the batches, one at a time.

        Use it inside `gathered()`. Delete a run before the next one, or both are in memory.
        """
        stepwise = is_stepwise(self.section)
        for index in self._share(range(len(self))):
            batch = self.batches[index].to(self.model.device)
            if index == 0 and not self._is_checked:  # on one process only
                self._check_decode(batch[:2])
                self._is_checked = True
            run = run_clean(self.model, batch, stepwise)
            yield index, run
            self._passes_by_batch[index] = run.passes
            del run

    @contextmanager
    def gathered(self) -> Iterator[dict[int, Any]]:
        """Gather results from all processes.

        Yields:
            A dict for this process's results, by index of the batch. After the context it holds those of all
            processes, in the order of the batches.

        Raises:
            SurgeryError: a process failed. Every process raises, since the others would wait for it.
        """
        results: dict[int, Any] = {}
        size, failure = self.section.batch_size, None
        hint = "Lower it." if size > 1 else "Lower locate.pairs, or set a smaller base.dtype."
        try:
            with fitting("locate.batch_size", size, hint):
                yield results
        except SurgeryError as error:
            failure = error
        shares = [(results, self._passes_by_batch, "" if failure is None else str(failure))]
        if distributed.is_available() and distributed.is_initialized():
            shares *= distributed.get_world_size()
            distributed.all_gather_object(shares, shares[0])
        if failure is not None:
            raise failure
        for process, (_, _, message) in enumerate(shares):
            if message:
                raise ModelError("locate", f"process {process}", message)
        merged = {index: result for share, _, _ in shares for index, result in share.items()}
        passes = {index: count for _, share, _ in shares for index, count in share.items()}
        self.passes += sum(passes[index] for index in sorted(passes))
        self._passes_by_batch = {}
        results.clear()
        results.update((index, merged[index]) for index in sorted(merged))

    def _share(self, indices: range) -> range:
        """Indices of the batches that this process runs."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return indices
        return indices[distributed.get_rank() :: distributed.get_world_size()]

    def _check_decode(self, batch: EncodedBatch) -> None:
        """Raise ModelError if a cached decode step differs from the forward pass: changes at the query rely on it.

        Both steps are compared: the model's own one, and the one that reads shared states.
        """
        run, clean = run_clean(self.model, batch, stepwise=True), ranked(self.model, [batch]).margin
        steps = (run.scores.margin, change_at_query(run, [Variant()])[0].margin)
        apart = max(float((margin.to(clean) - clean).abs().max()) for margin in steps)
        if self.model.dtype == torch.float32 and apart > ROUNDING * max(1.0, float(clean.abs().max())):
            hint = (
                "The model's cached decode step differs from its forward pass, for example by a finite time_step_limit."
            )
            hint += " Remove the methods query, patching and sharpen."
            raise ModelError("locate", f"{apart:.3g} logits apart", hint)


def counterfactuals(batches: Sequence[EncodedBatch]) -> list[Tensor] | None:
    """Copy prompts with another answer in the place of their own. Questions and lengths stay.

    The first token of the value in the context is replaced by that of the next prompt with another answer: the query
    predicts the first token of the answer. If there is no such prompt, it is replaced by the first token of another
    choice.

    Returns:
        For each batch, (B,T) tokens. None if a prompt has no place of its answer, or no other answer was found.
    """
    copies = [batch.input_ids.cpu().clone() for batch in batches]
    places = [batch.of_last_question(batch.answer_token).cpu() for batch in batches]
    values = [copy.gather(1, place[:, None].clamp(min=0))[:, 0] for copy, place in zip(copies, places, strict=True)]
    targets = [batch.of_last_question(batch.target).cpu() for batch in batches]
    answers = list(zip(torch.cat(values).tolist(), torch.cat(targets).tolist(), strict=True)) if batches else []
    choices = (row for batch in batches for row in batch.last_question()[0][..., 0].tolist())
    others = []
    for i, (own, row) in enumerate(zip(answers, choices, strict=True)):
        following = (value for value, target in answers[i + 1 :] + answers[:i] if value != own[0] and target != own[1])
        # The choices of own data are tokens of the prompt in the order of their ids. The last one is no punctuation.
        others.append(next(following, next((token for token in reversed(row) if token >= 0 and token not in own), -1)))
    if not others or min(*others, *torch.cat(places).tolist()) < 0:
        return None
    sizes = [len(batch) for batch in batches]
    for copy, place_B, other_B in zip(copies, places, torch.tensor(others).split(sizes), strict=True):
        copy.scatter_(1, place_B[:, None], other_B[:, None])
    return copies


def _encoded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: Locate, seed: int
) -> list[tuple[list[Document], EncodedBatch]]:
    """Make the prompts of a recipe: its own data first, then generated ones. Returns each batch with its documents."""
    size, count, batches = section.batch_size, section.examples, []
    if section.data is not None:
        context = getattr(model.config, "max_position_embeddings", None)
        own = own_prompts(section.data, tokenizer, section.examples, context, model.config.vocab_size)
        batches, count = own_batches(own, tokenizer, size), section.generated
    documents = prompts_of(section.probe, "locate", seed, count, section.options(tokenizer=tokenizer))
    for start in range(0, count, size):
        chunk = documents[start : start + size]
        batches.append((chunk, encode(chunk, tokenizer, padding_side="left", until_answer=True)))
    return batches
