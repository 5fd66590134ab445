"""Measure time and memory of models: prefill, decoding, states, keys and values.

Models are timed alternately, in one process, on the same random tokens. Ratios between models are comparable across
machines; tokens per second are not.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from surgery.data.choice_scores import arguments
from surgery.errors import fitting
from surgery.models.cache import cache_tensors
from surgery.models.meters import Meter, belongings
from surgery.models.runtime import evaluating
from surgery.models.torch_scans import code_text
from surgery.recipe import Efficiency

TRANSFORMER = "transformer"
_HEAD_DIM = 64


def efficiency(models: Mapping[str, PreTrainedModel], section: Efficiency) -> dict[str, Any]:
    """Measure every model at every size.

    Args:
        models: arm -> model, all on one device. With `section.transformer`, a Transformer of the same size as the first
            model is added.
        section: the recipe's section `evaluate.efficiency`.

    Returns:
        Keys as in `results.json`: `arms` (arm -> costs by size), `parameters` (arm -> count), `device`, `dtype`,
        `threads`, and `where`, a text of the last three that also says if scans had no kernels.

    Raises:
        RunError: out of memory.
    """
    first = next(iter(models.values()))
    if section.transformer:
        like = transformer_like(first.config, sum(p.numel() for p in first.parameters()))
        models = {**models, TRANSFORMER: like.to(first.device)}
    sizes = [(rows, tokens) for rows in section.batch_sizes for tokens in section.lengths]
    arms: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for rows, tokens in sizes:
        with fitting("evaluate.efficiency", f"{rows} prompts of {tokens} tokens", "Remove this size."):
            for name, cost in costs(models, rows, tokens, section).items():
                arms[name].append(cost)
    cuda, dtype = first.device.type == "cuda", str(first.dtype).removeprefix("torch.")
    device = torch.cuda.get_device_name(first.device) if cuda else "cpu"
    threads = None if cuda else torch.get_num_threads()
    cores = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    code = ", scans without kernels" if any("PyTorch" in code_text(m, m.device) for m in models.values()) else ""
    return {
        "arms": arms,
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
        "device": device,
        "threads": threads,
        "dtype": dtype,
        "where": f"{device}{cores}, {dtype}{code}",
        "new_tokens": section.new_tokens,
        "repeats": section.repeats,
    }


@torch.no_grad()
def costs(
    models: Mapping[str, PreTrainedModel], rows: int, tokens: int, section: Efficiency
) -> dict[str, dict[str, float]]:
    """Measure models on a batch of `rows` prompts: a warm-up of each, which measures memory, then rounds of timings.

    Returns:
        By arm, an entry of `results.json`. Of seconds, the median of the repeats:

        - `time_to_first_token` in seconds; tokens per second of the prefill and of decoding, over all rows.
        - `spread`: the larger interquartile range of the two, divided by its median. Smaller relative differences
          between models are noise.
        - `peak_bytes`: peak memory of the prefill without the weights: of CUDA's allocator, or on a CPU of all tensors
          that operations create.
        - `state_bytes`: convolution and recurrent states of all rows; `kv_bytes`: keys and values after the prompt.
    """
    vocabulary = min(model.config.get_text_config().vocab_size for model in models.values())
    ids = torch.randint(vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0))
    timers = {name: _Timer(model, ids.to(model.device)) for name, model in models.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    with evaluating(*models.values()):
        memory = {name: timer.memory() for name, timer in timers.items()}
        for _ in range(section.repeats):
            for name, timer in timers.items():
                seconds[name].append(timer.time(section.new_tokens))
    measured = {}
    for name in models:
        first, decode = map(list, zip(*seconds[name], strict=True))
        measured[name] = {
            "rows": rows,
            "tokens": tokens,
            "prefill_tokens_per_second": rows * tokens / median(first),
            "time_to_first_token": median(first),
            "decode_tokens_per_second": rows * section.new_tokens / median(decode),
            "spread": max(spread_of(first), spread_of(decode)),
            **memory[name],
        }
    return measured


@dataclass
class _Timer:
    """Prefill one batch of prompts and decode greedily after it."""

    model: PreTrainedModel
    ids_BT: Tensor

    def prefill(self) -> tuple[Tensor, Any]:
        """(B,1) likeliest next token of each row, and the cache."""
        output = self.model(**arguments(self.model, self.ids_BT, None), use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1), output.cache

    def decode(self, token_B1: Tensor, cache: Any, count: int) -> Tensor:
        """(B,1) the last of `count` further tokens."""
        for past in range(count):
            inputs = arguments(self.model, token_B1, None, self.ids_BT.shape[1] + past)
            output = self.model(**inputs, cache=cache, use_cache=True)
            token_B1 = output.logits[:, -1:].argmax(-1)
        return token_B1

    def time(self, new_tokens: int) -> tuple[float, float]:
        """Measure seconds to the first token, and seconds for `new_tokens` further tokens."""
        began = self._clock()
        token_B1, cache = self.prefill()
        halfway = self._clock()
        self.decode(token_B1, cache, new_tokens)
        return halfway - began, self._clock() - halfway

    def memory(self) -> dict[str, float]:
        """Measure the bytes. Warms up both phases."""
        if self.ids_BT.is_cuda:
            self.prefill()  # allocates what stays, such as workspaces of libraries, which is not this model's
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            token_B1, cache = self.prefill()
            peak = torch.cuda.max_memory_allocated() - before
        else:
            with Meter(belongings(self.model)) as meter:
                token_B1, cache = self.prefill()
            peak = meter.peak
        states, keys_values = cache_tensors(cache)
        found = {"state_bytes": sum(t.nbytes for t in states), "kv_bytes": sum(t.nbytes for t in keys_values)}
        self.decode(token_B1, copy.deepcopy(cache), 1)
        return {"peak_bytes": peak, **found}

    def _clock(self) -> float:
        if self.ids_BT.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def spread_of(values: list[float]) -> float:
    """Interquartile range divided by the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / median(values)


def transformer_like(config: PreTrainedConfig, parameters: int) -> PreTrainedModel:
    """Make a Llama with random weights and a model's width, depth and vocabulary, to compare costs with.

    The width of its MLP is such that it has about so many parameters.
    """
    shape = config.get_text_config()
    width, layers = shape.hidden_size, shape.num_hidden_layers
    heads = max(1, width // _HEAD_DIM)
    while width % heads or width // heads % 2:
        heads -= 1
    tied = bool(shape.tie_word_embeddings)
    rest = parameters - shape.vocab_size * width * (1 if tied else 2) - layers * 4 * width * width
    llama = LlamaConfig(
        vocab_size=shape.vocab_size,
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
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(llama, dtype=shape.dtype)
    return model.eval()
