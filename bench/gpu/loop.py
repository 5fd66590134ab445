"""Tokens per second of the toolkit's training loop against a plain loop, at the shape of mamba2-24m.

The toolkit trains on nine sources, as in a pretraining: text, and eight tasks whose documents are generated for each
step. The plain loop knows nothing of tasks: documents of the same sources, tokenized, packed into rows and on the GPU
beforehand, a language modelling loss, autocast in bf16, fused AdamW. It shows what the GPU can do with this model.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.gpu.env import Row
from bench.gpu.models import in_words, watch
from bench.gpu.runner import Options
from bench.gpu.speed import SMALL, TOY
from surgery.data.generated import maker
from surgery.recipe import Source, Train
from surgery.train.training import train_model
from tests.support.pico import pico_tokenizer

ROW = 1024  # tokens of a packed row
WARM_UP, MEASURED = 5, 20  # steps
TEXT_TOKENS, DOCUMENT = 16_384, 40  # tokens of text in a step; sentences of a text
TASKS: tuple[dict[str, Any], ...] = (
    {"task": "kv_repeated", "rows": 24, "pairs": (2, 12), "filler": (0, 2), "weights": {"answer": 0.7, "lm": 0.05}},
    {"task": "kv_retrieval", "rows": 16, "pairs": (2, 16), "questions": 6, "weights": {"answer": 0.7, "lm": 0.05}},
    {"task": "closed_book", "rows": 12, "weights": {"lm": 0.3, "answer": 0.3}},
    {"task": "key_echo", "rows": 8, "pairs": (2, 8), "filler": (1, 2), "weights": {"answer": 0.5}},
    {"task": "records", "rows": 8, "pairs": (2, 8), "questions": 8, "weights": {"answer": 0.7}},
    {"task": "phonebook", "rows": 6, "pairs": (4, 12), "value_digits": (2, 6), "weights": {"answer": 0.5}},
    {"task": "multi_hop", "rows": 6, "pairs": (4, 8), "weights": {"answer": 0.5}},
    {"task": "sentence", "rows": 12, "weights": {"lm": 0.3}},
)
SIZES = {"a step": 1, "a step of 3 times the documents": 3}


def items(options: Options) -> list[str]:
    """`shape | size`."""
    return ["toy | a step"] if options.toy else [f"mamba2-24m | {size}" for size in SIZES]


warm = items


def run(item: str, options: Options) -> list[Row]:
    """Two rows of `loop`: the plain loop with as many tokens in a step, and the toolkit's."""
    name, size = item.split(" | ")
    steps = (1, 2) if options.toy else (WARM_UP, MEASURED)
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder) / "text.jsonl", 20 if options.toy else 1000)
        sources = nine_sources(text, SIZES[size], options)
        with watch(model := _model(options)) as ran:
            ours, tokens = toolkit(model, sources, steps)
        del model
        rows = packed_rows(sources, text, round(tokens / ROW) or 1, options)
    plain = plain_loop(_model(options), rows, steps, options)
    loops = {"plain": (plain, rows.numel()), "toolkit": (ours, tokens)}
    found: list[Row] = [
        {"shape": name, "loop": loop, "tokens/s": speed, "tokens/step": each, "ms/step": 1e3 * each / speed}
        for loop, (speed, each) in loops.items()
    ]
    found[1] |= {"of plain": ours / plain, "ran": in_words(ran)}
    return found


def _model(options: Options) -> PreTrainedModel:
    """Random weights in fp32, which the loops run in bf16."""
    config = (TOY["toy"] if options.toy else SMALL).config()
    config.vocab_size = max(config.vocab_size, len(pico_tokenizer()))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(options.device)


def write_text(path: Path, documents: int) -> Path:
    """Write generated sentences as documents of text."""
    make = maker(Source.model_validate(TASKS[-1]), Random(0), pico_tokenizer())
    lines = (json.dumps({"text": "\n".join(make().text.strip() for _ in range(DOCUMENT))}) for _ in range(documents))
    path.write_text("\n".join(lines) + "\n")
    return path


def nine_sources(text: Path, factor: int, options: Options) -> list[dict[str, Any]]:
    """The recipe's `sources`."""
    tokens = 256 if options.toy else TEXT_TOKENS
    data = {
        "data": {"path": str(text), "columns": {"text": "text"}},
        "tokens": factor * tokens,
        "max_tokens": ROW,
        "weights": {"lm": 1.0},
    }
    return [data, *({**task, "rows": 1 if options.toy else factor * task["rows"]} for task in TASKS)]


def toolkit(model: PreTrainedModel, sources: list[dict[str, Any]], steps: tuple[int, int]) -> tuple[float, int]:
    """Tokens per second of the toolkit's loop after warm-up, and the tokens of a step."""
    optimizer = {"lr": 1e-3, "weight_decay": 0.1, "warmup": 1, "schedule": "constant"}
    section = {"steps": sum(steps), "precision": "bf16", "optimizer": optimizer, "sources": sources}
    times: dict[int, float] = {}

    def on_step(step: int, _: Any) -> None:
        if step in (steps[0], sum(steps)):
            times[step] = _now(model)

    history = train_model(model, pico_tokenizer(), Train.model_validate(section), on_step=on_step)
    tokens = sum(entry["tokens"] for entry in history[steps[0] :])
    return tokens / (times[sum(steps)] - times[steps[0]]), round(tokens / steps[1])


def packed_rows(sources: list[dict[str, Any]], text: Path, count: int, options: Options) -> Tensor:
    """(count, ROW) tokens on the device: documents of all sources after one another, cut into rows."""
    tokenizer, ids = pico_tokenizer(), []
    for words in _documents(sources, text):
        ids += [*tokenizer(words, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if len(ids) >= count * ROW:
            return torch.tensor(ids[: count * ROW], device=options.device).view(count, ROW)
    raise AssertionError("documents never end")


def _documents(sources: list[dict[str, Any]], text: Path) -> Iterator[str]:
    """A text, then a document of each task, again and again."""
    lines, rng = [json.loads(line)["text"] for line in text.read_text().splitlines()], Random(0)
    while True:
        yield rng.choice(lines)
        for source in sources[1:]:
            yield maker(Source.model_validate(source), rng, pico_tokenizer())().text


def plain_loop(model: PreTrainedModel, ids_BT: Tensor, steps: tuple[int, int], options: Options) -> float:
    """Tokens per second of a loop that does nothing but train."""
    cuda = options.device == "cuda"
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, weight_decay=0.1, fused=cuda)
    start = _now(model)
    for step in range(sum(steps)):
        if step == steps[0]:
            start = _now(model)
        with torch.autocast(options.device, torch.bfloat16):
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        F.cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), ids_BT[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return steps[1] * ids_BT.numel() / (_now(model) - start)


def _now(model: PreTrainedModel) -> float:
    """The time after all work on the device so far."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
