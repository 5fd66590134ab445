"""Measure the preparation of a training step: generate, tokenize, encode and pack the documents of nine sources.

    python -m bench.speed.steps [--tokenizer FOLDER] [--text FILE] [--out FILE] [--quick]

The sources are a text and eight tasks of a pretraining. Time is CPU milliseconds of one thread, median over steps.
Encoding includes tokenizing, which is also timed alone.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import ENGLISH, ROOT, parser, quiet_on_one_thread
from surgery.data.offsets import tokenized
from surgery.data.user import open_source
from surgery.models.loading import load_tokenizer
from surgery.recipe import Base, Source
from surgery.train.micro_batches import StepSplit

FAR = {"filler": (0, 10), "weights": {"answer": 1.0}}
ENDED = {"train_eos": True, "weights": {"answer": 1.0}}
TASKS: tuple[dict[str, Any], ...] = (
    {"task": "kv_repeated", "rows": 24, "pairs": (8, 16), **FAR},
    {"task": "kv_retrieval", "rows": 12, "pairs": (24, 40), "questions": 16, "train_eos": True, **FAR},
    {"task": "kv_retrieval", "rows": 12, "pairs": (4, 32), "questions": 8, **ENDED},
    {"task": "records", "rows": 12, "pairs": (2, 8), "questions": 8, **ENDED},
    {"task": "phonebook", "rows": 12, "pairs": (4, 16), "questions": 6, "value_digits": (2, 6), **ENDED},
    {"task": "multi_hop", "rows": 8, "pairs": (4, 8), **ENDED},
    {"task": "key_echo", "rows": 8, "pairs": (4, 8), **FAR},
    {"task": "closed_book", "rows": 24, "weights": {"answer": 1.0}},
)


def sources(text: Path) -> list[Source]:
    """The sources of a step: rows of `text`, and documents of the tasks."""
    data = {"path": str(text), "columns": {"text": "text"}}
    of_text = {"data": data, "tokens": 8192, "max_tokens": 1024, "weights": {"lm": 1.0}}
    return [Source.model_validate(given) for given in (of_text, *TASKS)]


@contextmanager
def text_of_docs() -> Iterator[Path]:
    """A file of text rows: the paragraphs of the documentation."""
    with tempfile.TemporaryDirectory() as folder:
        paragraphs = [p for page in sorted((ROOT / "docs").glob("*.md")) for p in page.read_text().split("\n\n")]
        path = Path(folder) / "text.jsonl"
        path.write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs if p.strip()))
        yield path


def measure(text: Path, folder: Path, steps: int) -> tuple[dict[str, float], list[int]]:
    """Median CPU milliseconds of each part, and the tokens of every step."""
    tokenizer = load_tokenizer(Base(model=str(folder)))
    given = sources(text)
    streams = [open_source(source, tokenizer, 0, index) for index, source in enumerate(given)]
    split = StepSplit(given, packing=True)
    times: dict[str, list[float]] = {}
    tokens = []

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = work()
        times.setdefault(name, []).append(1000 * (time.process_time() - began))
        return result

    for step in range(steps + 1):  # the first is for warming up
        documents = timed("generate", lambda step=step: [stream.step(step) for stream in streams])
        texts = [document.text for drawn in documents for document in drawn]
        timed("tokenize", lambda texts=texts: tokenized(tokenizer, texts))
        passes = timed("encode and pack", lambda documents=documents: split(documents, tokenizer))
        tokens.append(sum(int(part.batch.attention_mask.sum()) for part in passes))
    found = {name: median(values[1:]) for name, values in times.items()}
    return {**found, "a step": found["generate"] + found["encode and pack"]}, tokens[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times."""
    options = parser(__doc__)
    options.add_argument("--tokenizer", type=Path, default=ENGLISH, help="folder of a tokenizer")
    options.add_argument("--text", type=Path, help="JSONL with a column `text`; by default this documentation")
    options.add_argument("--quick", action="store_true", help="two steps: tests the script only")
    options.add_argument("--out", type=Path, help="JSON file for the numbers")
    asked = options.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    quiet_on_one_thread()
    with text_of_docs() as path:
        found, tokens = measure(asked.text or path, asked.tokenizer, 2 if asked.quick else 40)
    print(f"{min(tokens)} to {max(tokens)} tokens a step, CPU ms:", ", ".join(f"{k} {v:.1f}" for k, v in found.items()))
    if asked.out:
        asked.out.write_text(json.dumps({"tokens": tokens, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
