"""Load a base and measure what its recipe needs to know."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from surgery.data.ranking import perplexity, query_batches
from surgery.errors import ModelError, PlanError, ProbeError, SurgeryError, fitting, is_out_of_memory
from surgery.locate.locating import peak_bytes
from surgery.models.loading import check_vocabulary, load_config, load_model, load_tokenizer, open_checkpoint
from surgery.models.lookup import family_of
from surgery.models.sizes import meta_model
from surgery.models.torch_scans import torch_scans
from surgery.probes.documents import rng_of
from surgery.probes.registry import PROBES, Options
from surgery.recipe import Base
from surgery.run.machine import GIB, Machine, find_machine
from surgery.run.own_data import source_of_file
from surgery.run.probing import ADJACENT, START, Format, Prober, Say, Screening, Share, find_pairs, known_tasks, screen
from surgery.splice.plan import check_not_spliced, check_splices
from surgery.train.training import make_accelerator

SMALL = 10_000_000  # weights: below, everything trains and is measured in minutes on a CPU
LARGE = 3_000_000_000  # weights: from here on, half precision and new heads alone
PROMPTS, PROMPTS_OF_SMALL = 32, 64  # for each accuracy, of large and of small bases
_KNOWLEDGE = ("closed_book", "letter_choice", "option_text")
_SENTENCES = 32
_LARGEST_BATCH = 64
_FEW_PAIRS = 4  # in prompts for a base that is at chance
_NEOX = range(50_254, 50_304)  # vocabularies of mamba_ssm's published models


@dataclass(frozen=True)
class Findings:
    """What a base is and can do, and the machine it was measured on."""

    base: Base
    config: PreTrainedConfig
    parameters: int  # number of weights
    machine: Machine
    screening: Screening
    form: Format  # to locate and train in
    pairs: int  # to locate with
    share: Share | None  # prompts of so many pairs that the base answers; None if it is at chance in every format
    sizes: tuple[int, ...]  # numbers of pairs to evaluate, all of them possible
    known: Mapping[str, Share]  # probes without sizes that the base answers
    batch_size: int  # prompts of one forward pass
    speeds: Mapping[int, float]  # prompts a second by batch size, for the longest evaluated prompts
    tokens: int  # of a located prompt
    perplexity: float  # of sentences
    own_data: tuple[dict[str, Any], str] | None = None  # the user's file as a source, and the reason for it
    ladder: Mapping[int, float] = field(default_factory=dict)  # accuracies in the format, by number of pairs

    @property
    def heads(self) -> int:
        """Number of heads that locating measures."""
        return sum(spec.num_heads for spec in family_of(self.config).mixers(self.config))

    @property
    def is_small(self) -> bool:
        return self.parameters <= SMALL

    @property
    def is_large(self) -> bool:
        return self.parameters >= LARGE

    def tokens_of(self, pairs: int) -> float:
        """Tokens of a prompt of so many pairs, by proportion."""
        return self.tokens * pairs / self.pairs

    @property
    def tokens_per_second(self) -> float:
        """Speed of plain forward passes with `batch_size`."""
        return self.speeds[self.batch_size] * self.tokens_of(max(self.sizes))


def measure_base(model: str, data: str | None, tokenizer: str | None, trust_remote_code: bool, say: Say) -> Findings:
    """Measure a base. The arguments are those of `surgery init`; `say` is called with a line for each measurement.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded, or no format can be written with the tokenizer.
        PlanError: nothing can be spliced into this model.
        DataError: the file cannot be used.
    """
    base = Base(model=model, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    config = load_config(base)
    try:
        check_not_spliced(config)
    except PlanError:
        hint = "It is a hybrid already. `surgery finetune MODEL DATA` trains it on your data."
        raise PlanError("MODEL", model, hint) from None
    check_splices(config)
    machine, parameters = find_machine(), meta_model(config, trust_remote_code).num_parameters()
    if parameters >= LARGE:
        base = base.model_copy(update={"dtype": "bfloat16"})
    words = _tokenizer(base, config)
    check_vocabulary(words, config)
    context = getattr(config, "max_position_embeddings", None)
    own = source_of_file(data, words, context, config.vocab_size) if data is not None else None
    width = 2 if base.dtype == "bfloat16" else 4
    say(f"{model}: {config.model_type}, {parameters:,} weights, on {machine.name} with {machine.memory_gib:g} GiB free")
    if parameters * width > machine.memory:
        value = f"{model}: {parameters * width / GIB:.1f} GiB of weights, {machine.memory_gib:g} GiB free"
        raise ModelError("MODEL", value, "Use a machine with more memory, or a smaller model.")
    loaded = load_model(base).to(make_accelerator().device)
    prober = Prober(loaded, words, START, say, context)
    count = PROMPTS_OF_SMALL if parameters <= SMALL else PROMPTS
    too_large = fitting("MODEL", model, "Use a machine with more memory, or a smaller model.")
    with too_large, torch.inference_mode(), torch_scans(loaded):
        screening = screen(prober, count)
        form, pairs, share, ladder = _place(prober, screening, count)
        sizes = _possible(prober, form, pairs)
        known = known_tasks(prober, _KNOWLEDGE, count)
        longest = prober.documents(form, max(sizes), _LARGEST_BATCH)
        room = machine.memory // 2
        batch_size, speeds = try_batch_sizes(lambda n: prober.answered(longest[:n], n), loaded.device, room)
        say(f"batch size {batch_size}: " + ", ".join(f"{n}: {1 / speed:.2g} s a prompt" for n, speed in speeds.items()))
        sentences = [PROBES["perplexity"].generate(rng_of("init", 0, i), "eval", Options()) for i in range(_SENTENCES)]
        nats = perplexity(loaded, words, sentences, START)
        say(f"perplexity of {_SENTENCES} sentences: {nats:.3g}")
        (prompt,) = query_batches(prober.documents(form, pairs, 1), words, 1)
    return Findings(
        base=base, config=config, parameters=parameters, machine=machine, screening=screening, form=form, pairs=pairs,
        share=share, sizes=sizes, known=known, batch_size=batch_size, speeds=speeds, tokens=prompt.input_ids.shape[1],
        perplexity=nats, own_data=own, ladder=ladder,
    )  # fmt: skip


def _tokenizer(base: Base, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer. The error of a base without one names the option to set."""
    try:
        return load_tokenizer(base)
    except ModelError as error:
        if base.tokenizer is not None or "no tokenizer" not in error.hint:
            raise
        hint = "The folder has no tokenizer. Set --tokenizer to the folder or Hub id of the one it was trained with"
        if open_checkpoint(base).is_mamba_ssm and config.vocab_size in _NEOX:
            hint += ", for the published models of this format EleutherAI/gpt-neox-20b"
        raise ModelError("MODEL", base.model, f"{hint}.") from None


def _place(prober: Prober, screening: Screening, count: int) -> tuple[Format, int, Share | None, dict[int, float]]:
    """Choose the format and the number of pairs to locate with. The share is None for a base at chance."""
    best = screening.best
    if best is None:
        form = ADJACENT if ADJACENT in screening.shares else next(iter(screening.shares), None)
        if form is None:
            reason = next(iter(screening.unusable.values()))
            raise ModelError("MODEL", prober.tokenizer.name_or_path, f"No probe works with this tokenizer: {reason}")
        return form, _FEW_PAIRS, None, {}
    pairs, ladder = find_pairs(lambda n: prober.share(best, n, count).accuracy)
    above = [n for n in ladder if prober.shares[best, n].above_chance]
    if pairs not in above:  # the accuracy closest to the aim may be that of guesses, with very few pairs
        pairs = max(above, key=lambda n: ladder[n], default=screening.pairs)  # where the format was found
        ladder.setdefault(pairs, prober.shares[best, pairs].accuracy)
    return best, pairs, prober.shares[best, pairs], ladder


def _possible(prober: Prober, form: Format, pairs: int) -> tuple[int, ...]:
    """Numbers of pairs to evaluate: half as many as are located, as many, twice and four times as many."""
    sizes = []
    for size in sorted({max(2, pairs // 2), pairs, 2 * pairs, 4 * pairs}):
        size = min(size, (form.probe.pairs or (2, size))[1])
        try:
            prober.documents(form, size, 1)
        except ProbeError:
            break
        sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def try_batch_sizes(run: Callable[[int], object], device: torch.device, room: int) -> tuple[int, dict[int, float]]:
    """Find the batch size with the most prompts a second that fits the memory. Also returns the rates by size.

    Doubles the size from 4. Stops where memory runs out, where the next size would take more than `room` bytes by the
    growth so far, or where the rate grows by less than a tenth.

    Raises:
        SurgeryError: not even the smallest batch fits.
    """
    speeds: dict[int, float] = {}
    size, before = 4, peak_bytes(device)
    run(1)  # the first pass also initialises libraries
    while size <= _LARGEST_BATCH:
        began = time.perf_counter()
        try:
            run(size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            break
        speeds[size] = size / (time.perf_counter() - began)
        slower = len(speeds) > 1 and speeds[size] < 1.1 * speeds[size // 2]
        if slower or 2 * (peak_bytes(device) - before) > room:
            break
        size *= 2
    if not speeds:
        raise SurgeryError("MODEL", "out of memory", "Not even 4 prompts fit. Use a larger machine or a smaller model.")
    return max(speeds, key=lambda n: speeds[n]), speeds
