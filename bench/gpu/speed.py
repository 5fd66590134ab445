"""Speed of hybrid and base at the shapes of published models, with random weights: prefill, decoding, a training step.

Decoding is timed as a loop in Python, and with `graph` as replays of a CUDA graph of one step on a static cache, which
wait for no CPU. Both models share their weights, so that one GPU holds both and a peak is that of one model. They are
timed in turn, in the same run. `ratio` is the hybrid's time over the base's; a ratio within `spread` of 1 is no
difference.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, Mamba2Config, PreTrainedModel, StaticCache

from bench.gpu.env import Row
from bench.gpu.models import in_words, prompts, timed_plan, watch
from bench.gpu.runner import Options
from surgery.evaluate.efficiency import spread_of
from surgery.hybrid.modeling_hybrid import SplicedAttention
from surgery.models.cache import branched
from surgery.splice.graft import splice_model

WARM_UP, FEWEST, LONGEST = 2, 3, 10.0  # runs, repeats, seconds of one timing
CAPTURE = 3  # steps before a graph is recorded


@dataclass(frozen=True)
class Shape:
    """Shape of a Mamba-2, and the sizes at which it is measured.

    Attributes:
        prefill: tokens. decode: (rows, tokens before them), `steps` new ones at a time.
        train: (rows, tokens) of a training step; `checkpointing` where activations would not fit.
    """

    hidden: int
    layers: int
    vocabulary: int = 50288
    head_dim: int = 64
    state: int = 128
    chunk: int = 256
    prefill: tuple[int, ...] = (2048, 8192, 32768)
    decode: tuple[tuple[int, int], ...] = ((1, 2048), (16, 2048), (1, 32768), (16, 32768))
    steps: int = 16
    train: tuple[int, int] = (4, 2048)
    checkpointing: bool = False

    def config(self) -> Mamba2Config:
        return Mamba2Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_heads=2 * self.hidden // self.head_dim,
            head_dim=self.head_dim,
            state_size=self.state,
            n_groups=1,
            chunk_size=self.chunk,
            vocab_size=self.vocabulary,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )


SMALL = Shape(512, 12, 8192, state=64, chunk=128)  # mamba2-24m, of paper/BENCHMARKS.md
SHAPES = {
    "mamba2-130m": Shape(768, 24),
    "mamba2-2.7b": Shape(2560, 64, train=(1, 2048), checkpointing=True),
}
TOY = {
    "toy": Shape(32, 4, 61, 16, 8, 8, (32, 64), ((1, 32), (2, 32)), 4, (2, 32)),
    "toy, checkpointing": Shape(32, 4, 61, 16, 8, 8, (), (), 4, (2, 32), checkpointing=True),
}


def shapes(options: Options) -> dict[str, Shape]:
    return TOY if options.toy else SHAPES


def items(options: Options) -> list[str]:
    """`shape | task`, by shape, so that each model is built once."""
    names = []
    for name, shape in shapes(options).items():
        names += [f"{name} | prefill {tokens}" for tokens in shape.prefill]
        names += [f"{name} | train all"] + ([f"{name} | train new heads"] if shape.checkpointing else [])
        for way in ("", " graph"):
            names += [f"{name} | decode {rows} x {tokens}{way}" for rows, tokens in shape.decode]
    return names


def warm(options: Options) -> list[str]:
    """Training, and the shortest prompts: Triton compiles the others' kernels for these, or for 1 and 16 rows."""
    shortest = {f" {size}" for shape in shapes(options).values() for size in (shape.prefill[:1])}
    return [item for item in items(options) if "train" in item or any(item.endswith(size) for size in shortest)]


def run(item: str, options: Options) -> list[Row]:
    """One row of `speed`."""
    name, task = item.split(" | ")
    shape = shapes(options)[name]
    models = pair(name, options)
    ran: dict[str, str] = {}
    with watch(models["hybrid"]) as seen:
        if task.startswith("prefill"):
            samples = _prefill(models, int(task.split()[1]), options)
        elif task.startswith("decode"):
            rows, tokens = int(task.split()[1]), int(task.split()[3])
            samples = _decode(models, shape, rows, tokens, task.endswith("graph"), options)
        else:
            samples = _train(models, shape, task == "train new heads", options)
        ran.update(seen)
    return [{**_row(samples), "table": "speed", "shape": name, "task": task, "ran": in_words(ran)}]


@lru_cache(maxsize=1)
def pair(name: str, options: Options) -> dict[str, PreTrainedModel]:
    """Base and hybrid on the device, in bf16 there, with the same tensors; one head in each of two layers."""
    gc.collect()
    config = shapes(options)[name].config()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(options.device):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    hybrid = splice_model(base, timed_plan(name, config))
    for key, parameter in base.named_parameters():  # as hybrids keep them
        if key.rsplit(".", 1)[-1] in hybrid._keep_in_fp32_modules_strict:
            parameter.data = parameter.data.float()
    hybrid.load_state_dict(base.state_dict(), strict=False, assign=True)
    hybrid.tie_weights()
    return {"base": base, "hybrid": hybrid}


@dataclass
class Samples:
    """Timings: seconds of each repeat, peak bytes (None on a CPU), tokens of one repeat if they are counted."""

    seconds: dict[str, list[float]]
    peak: dict[str, int | None]
    tokens: int | None = None


def timed(function: Callable[[], object], device: str) -> float:
    """Measure the seconds of one call with the device's own clock."""
    if device != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    function()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def in_turn(functions: dict[str, Callable[[], object]], options: Options) -> Samples:
    """Warm up each function and measure its peak memory, then time all of them alternately."""
    peak = {name: _peak(function, options.device) for name, function in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    start = time.perf_counter()
    for repeat in range(options.repeats):
        if repeat >= FEWEST and time.perf_counter() - start > LONGEST:
            break
        for name, function in functions.items():
            seconds[name].append(timed(function, options.device))
    return Samples(seconds, peak)


def _peak(function: Callable[[], object], device: str) -> int | None:
    if device != "cuda":
        function()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _row(samples: Samples) -> Row:
    """Format milliseconds, or tokens per second if tokens are counted."""
    middle = {name: median(values) for name, values in samples.seconds.items()}
    row: Row = {"unit": "ms" if samples.tokens is None else "tokens/s"}
    for name in ("base", "hybrid"):
        value = middle.get(name)
        shown = None if value is None else 1e3 * value if samples.tokens is None else samples.tokens / value
        bytes_ = samples.peak.get(name)
        row[name], row[f"{name} GiB"] = shown, None if bytes_ is None else bytes_ / 2**30
        row[f"{name} repeats"] = len(samples.seconds.get(name, []))
    row["ratio"] = middle["hybrid"] / middle["base"] if "base" in middle else None
    row["spread"] = max(spread_of(values) for values in samples.seconds.values())
    return row


@torch.no_grad()
def _prefill(models: dict[str, PreTrainedModel], tokens: int, options: Options) -> Samples:
    ids = prompts(models["base"], 1, tokens)
    return in_turn({n: partial(m, ids, use_cache=True, logits_to_keep=1) for n, m in models.items()}, options)


@torch.no_grad()
def _decode(
    models: dict[str, PreTrainedModel], shape: Shape, rows: int, tokens: int, graph: bool, options: Options
) -> Samples:
    """Greedy tokens after a prompt that every row shares."""
    ids = prompts(models["base"], 1, tokens)
    longest = tokens + shape.steps * (WARM_UP + options.repeats) + CAPTURE + 1

    def built(model: PreTrainedModel) -> Callable[[], object]:
        cache = StaticCache(config=model.config, max_cache_len=longest) if graph else None
        cache = model(ids, cache=cache, use_cache=True, logits_to_keep=1).cache
        step = _step(model, branched(cache, ids.new_zeros(rows)), ids[:, -1:].repeat(rows, 1))
        return _repeated(captured(step) if graph and options.device == "cuda" else step, shape.steps)

    peak = {name: _peak(built(model), options.device) for name, model in models.items()}  # each alone on the device
    samples = in_turn({name: built(model) for name, model in models.items()}, options)
    samples.peak, samples.tokens = peak, rows * shape.steps
    return samples


def _step(model: PreTrainedModel, cache: Cache, token_B1: Tensor) -> Callable[[], object]:
    """One decoded token, written over the last one: a graph reads and writes the same memory at every replay."""

    def step() -> None:
        token_B1.copy_(model(token_B1, cache=cache, use_cache=True).logits[:, -1:].argmax(-1))

    return step


def _repeated(function: Callable[[], object], times: int) -> Callable[[], object]:
    def repeat() -> None:
        for _ in range(times):
            function()

    return repeat


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Record a step as a CUDA graph, after steps that compile its kernels; returns the replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURE):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_: object = step) -> None:  # the graph reads and writes the tensors that the step holds
        graph.replay()

    return replay


def _train(models: dict[str, PreTrainedModel], shape: Shape, new_heads: bool, options: Options) -> Samples:
    """Forward, backward and AdamW, one model after the other: their optimizers' states would add up."""
    ids = prompts(models["base"], *shape.train)
    found = Samples({}, {})
    for name, model in models.items():
        if new_heads and name == "base":
            continue
        one = _train_one(model, ids, shape.checkpointing, new_heads, options)
        found.seconds[name], found.peak[name] = one.seconds["step"], one.peak["step"]
    return found


def _train_one(model: PreTrainedModel, ids: Tensor, checkpointing: bool, new_heads: bool, options: Options) -> Samples:
    branches = [m for m in model.modules() if isinstance(m, SplicedAttention)]
    trained = [p for branch in branches for p in branch.parameters()] if new_heads else list(model.parameters())
    model.train().requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(trained, lr=1e-6)

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        return in_turn({"step": step}, options)
    finally:
        model.zero_grad(set_to_none=True)
        if checkpointing:
            model.gradient_checkpointing_disable()
        model.eval().requires_grad_(True)
