"""What a model costs to run: reading a prompt, writing tokens, memory. Owns: the timings and what is compared.

Models are timed in turn, in the same run, on the same random tokens: a ratio says more than a number of tokens a second
does, which is this machine's. Must never know: accuracy, files.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from surgery.errors import fitting
from surgery.models.cache import cache_tensors
from surgery.models.lookup import family_of
from surgery.models.meters import Meter, belongings
from surgery.recipe import Efficiency
from surgery.scoring.choices import arguments

TRANSFORMER = "transformer"
_HEAD_DIM = 64
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Cost:
    """One model at one size: `rows` prompts of `tokens` tokens each.

    Attributes:
        first_token: seconds until the first new token is known, median of the repeats.
        decode: seconds for each new token after it (all rows at once).
        spread: the larger interquartile range of the two, over its median; differences within it are none.
        peak_bytes: most bytes alive beside the weights while the prompt is read: of CUDA's allocator, or on a CPU of
            all tensors that operations made.
        state_bytes: convolution and recurrent states of all rows. `kv_bytes`: keys and values after the prompt.
    """

    first_token: float
    decode: float
    spread: float
    peak_bytes: int
    state_bytes: int
    kv_bytes: int

    def as_json(self, rows: int, tokens: int) -> dict[str, float]:
        """With tokens a second beside the seconds."""
        return {
            "rows": rows,
            "tokens": tokens,
            "prefill_tokens_per_second": rows * tokens / self.first_token,
            "time_to_first_token": self.first_token,
            "decode_tokens_per_second": rows / self.decode,
            "spread": self.spread,
            "peak_bytes": self.peak_bytes,
            "state_bytes": self.state_bytes,
            "kv_bytes": self.kv_bytes,
        }


def efficiency(
    models: Mapping[str, PreTrainedModel], section: Efficiency, progress: Progress | None = None
) -> dict[str, Any]:
    """Times every model at every size.

    Args:
        models: arm -> model, the first one is what the others are compared with. All are on one device. A Transformer
            like the first is added if the section says so.
        progress: called with (done, all) after each size.

    Returns:
        As in `results.json`: `arms`, arm -> a list of costs by size; `parameters`, arm -> count; `device`, `dtype`,
        `threads`, and all three in words, `where`.

    Raises:
        RunError: a size does not fit in memory.
    """
    first = next(iter(models.values()))
    if section.transformer:
        like = transformer_like(first.config, sum(p.numel() for p in first.parameters()))
        models = {**models, TRANSFORMER: like.to(first.device)}
    sizes = [(rows, tokens) for rows in section.batch_sizes for tokens in section.lengths]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for done, (rows, tokens) in enumerate(sizes):
        with fitting("evaluate.efficiency", f"{rows} prompts of {tokens} tokens", "Leave this size out."):
            measured = costs(models, rows, tokens, section)
        for name, cost in measured.items():
            found[name].append(cost.as_json(rows, tokens))
        if progress is not None:
            progress(done + 1, len(sizes))
    cuda, dtype = first.device.type == "cuda", str(first.dtype).removeprefix("torch.")
    device = torch.cuda.get_device_name(first.device) if cuda else "cpu"
    threads = None if cuda else torch.get_num_threads()
    cores = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    return {
        "arms": found,
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
        "device": device,
        "threads": threads,
        "dtype": dtype,
        "where": f"{device}{cores}, {dtype}",
        "new_tokens": section.new_tokens,
        "repeats": section.repeats,
    }


@torch.no_grad()
def costs(models: Mapping[str, PreTrainedModel], rows: int, tokens: int, section: Efficiency) -> dict[str, Cost]:
    """Every model at one size, in turn: warmed up once with its memory measured, then timed `repeats` times."""
    vocabulary = min(model.config.get_text_config().vocab_size for model in models.values())
    ids = torch.randint(vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0))
    training = {name: model.training for name, model in models.items()}
    readers = {name: _Reader(model.eval(), ids.to(model.device)) for name, model in models.items()}
    memory = {name: reader.memory() for name, reader in readers.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(section.repeats):
        for name, reader in readers.items():
            seconds[name].append(reader.timed(section.new_tokens))
    found = {}
    for name, model in models.items():
        model.train(training[name])
        first, decode = ([each[i] for each in seconds[name]] for i in (0, 1))
        spread = max(spread_of(first), spread_of(decode))
        found[name] = Cost(median(first), median(decode) / section.new_tokens, spread, *memory[name])
    return found


class _Reader:
    """Reads one prompt and goes on with it."""

    def __init__(self, model: PreTrainedModel, ids_BT: Tensor) -> None:
        self.model, self.ids_BT = model, ids_BT
        self.argument = family_of(model.config).cache_argument

    def read(self) -> tuple[Tensor, Any]:
        """(B,1) the likeliest next token of each row, and the cache."""
        output = self.model(**arguments(self.model, self.ids_BT, None), use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1), output[self.argument]

    def write(self, token_B1: Tensor, cache: Any, count: int) -> Tensor:
        """(B,1) the last of so many more tokens."""
        for past in range(count):
            given = arguments(self.model, token_B1, None, self.ids_BT.shape[1] + past)
            output = self.model(**given, **{self.argument: cache}, use_cache=True)
            token_B1 = output.logits[:, -1:].argmax(-1)
        return token_B1

    def timed(self, new_tokens: int) -> tuple[float, float]:
        """Seconds until the first token, and of `new_tokens` more."""
        began = self._clock()
        token_B1, cache = self.read()
        halfway = self._clock()
        self.write(token_B1, cache, new_tokens)
        return halfway - began, self._clock() - halfway

    def memory(self) -> tuple[int, int, int]:
        """Bytes at the peak beside the weights, of states, of keys and values. Warms up, decoding too."""
        gc.collect()
        if self.ids_BT.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            token_B1, cache = self.read()
            peak = torch.cuda.max_memory_allocated() - before
        else:
            with Meter(belongings(self.model)) as meter:
                token_B1, cache = self.read()
            peak = meter.peak
        states, grown = cache_tensors(cache)
        found = peak, sum(t.nbytes for t in states), sum(t.nbytes for t in grown)
        self.write(token_B1, copy.deepcopy(cache), 1)
        return found

    def _clock(self) -> float:
        if self.ids_BT.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def spread_of(values: list[float]) -> float:
    """The interquartile range over the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / median(values)


def transformer_like(config: PreTrainedConfig, parameters: int, seed: int = 0) -> PreTrainedModel:
    """A Llama of random weights: the model's width, depth and vocabulary, its MLP as wide as the parameters allow.

    What it says is noise; what it costs is a Transformer's.

    Args:
        parameters: how many it should have, as nearly as its shape allows.
    """
    given = config.get_text_config()
    width, layers = given.hidden_size, given.num_hidden_layers
    heads = max(1, width // _HEAD_DIM)
    while width % heads or width // heads % 2:
        heads -= 1
    tied = bool(given.tie_word_embeddings)
    rest = parameters - given.vocab_size * width * (1 if tied else 2) - layers * 4 * width * width
    shape = LlamaConfig(
        vocab_size=given.vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=max(1, round(rest / (layers * 3 * width))),
        tie_word_embeddings=tied,
        max_position_embeddings=1 << 20,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, dtype=given.dtype)
    return model.eval()


__all__ = ["TRANSFORMER", "Cost", "costs", "efficiency", "spread_of", "transformer_like"]
