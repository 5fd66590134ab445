"""Time locating at the shapes of published models, with random weights and few prompts.

A random model retrieves nothing, so the chosen head means nothing. The work is that of a real base. Time grows with the
number of prompts: multiply.
"""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM

from bench.gpu.env import Row
from bench.gpu.models import in_words, watch
from bench.gpu.runner import Options
from bench.gpu.speed import SHAPES, SMALL, TOY
from surgery.locate.locating import locate_heads
from surgery.recipe import Locate
from tests.support.pico import pico_tokenizer

AT_QUERY = ("query", "patching", "sharpen")  # one decode step for each head and column
# Shape, methods (None: the default ones), prompts, pairs in a prompt.
CASES = {
    "mamba2-24m": (SMALL, None, 16, 24),
    "mamba2-130m": (SHAPES["mamba2-130m"], AT_QUERY, 8, 24),
    "mamba2-2.7b": (SHAPES["mamba2-2.7b"], AT_QUERY, 4, 24),
}
LONG = 60.0  # seconds of a call that is not repeated


def items(options: Options) -> list[str]:
    """The shapes."""
    return ["toy"] if options.toy else list(CASES)


warm = items


def run(item: str, options: Options) -> list[Row]:
    """One row of `locate`."""
    shape, methods, examples, pairs = (TOY["toy"], AT_QUERY, 2, 4) if options.toy else CASES[item]
    tokenizer, cuda = pico_tokenizer(), options.device == "cuda"
    config = shape.config()
    config.vocab_size = max(config.vocab_size, len(tokenizer))
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config).eval()  # in fp32, as recipes load it by default
    given = {"examples": examples, "pairs": pairs, "batch_size": examples}
    section = Locate.model_validate({**given, **({"methods": methods} if methods else {})})
    seconds: list[float] = []
    with watch(model) as ran:
        while len(seconds) < 2 and sum(seconds) < LONG:
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            found = locate_heads(model, tokenizer, section, any_accuracy=True)
            seconds.append(time.perf_counter() - start)
    row: Row = {"table": "locate", "shape": item, "heads": len(found.heads), "methods": ", ".join(section.methods)}
    row |= {"prompts": examples, "passes": found.cost["passes"], "seconds": seconds[0]}
    row["again"] = seconds[1] if len(seconds) > 1 else None
    row["GiB"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return [{**row, "ran": in_words(ran)}]
