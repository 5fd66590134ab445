"""Helpers of the benchmarks and studies: paths, arguments, shipped models, results with versions, tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from surgery.files.atomic import read_json, write_json
from surgery.models.loading import load_model, load_tokenizer
from surgery.models.lookup import geometry_of
from surgery.recipe import Base, Splice
from surgery.run.evaluate_stage import versions
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.stats import wilson
from surgery.types import HeadId, HeadSet, Plan, Reads, ScoredHead

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ROOT / "checkpoints"
SHIPPED = CHECKPOINTS / "pico-mamba2"
FAR = CHECKPOINTS / "pico-far"
TRANSFORMER = CHECKPOINTS / "pico-transformer"
ENGLISH = CHECKPOINTS / "pico-english"
FAR_AGAIN = CHECKPOINTS / "pico-far-again"
MAMBA1 = CHECKPOINTS / "pico-mamba1"
RUNS = ROOT / "runs"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser whose help is the script's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def quiet_on_one_thread() -> None:
    """Compute on one thread, and silence transformers."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def load(folder: Path | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of a checkpoint, in evaluation mode, and its tokenizer."""
    base = Base(model=str(folder))
    return load_model(base).eval(), load_tokenizer(base)


def spliced_at(
    base: PreTrainedModel, head: HeadId, reads: Reads = "answer_token", seed: int = 0
) -> tuple[PreTrainedModel, Plan]:
    """Hybrid with one attention head added beside this head, and its plan."""
    scored = ScoredHead(head, "neither", reads, {})
    heads = HeadSet("base", "", geometry_of(base.config), (scored,), (scored,), "list", seed)
    section = Splice(select="list", heads=(str(head),), min_width=None)
    plan = make_plan(heads, base.config, section, seed)
    return splice_model(base, plan, section), plan


def finished(path: Path, key: str) -> dict[str, Any] | None:
    """Read the result of an earlier run.

    Args:
        path: file that `save` wrote.
        key: fingerprint of the experiment's definition.

    Returns:
        The result; None if there is no file, or if it holds the result of another definition.
    """
    if not path.is_file():
        return None
    result: dict[str, Any] = read_json(path)
    return result if result["key"] == key else None


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, with the versions of Python and of the libraries."""
    write_json(path, {**result, "versions": versions()})


def as_digits(correct: Iterable[Any]) -> str:
    """Encode the answers by prompt: `1` for right, `0` for wrong."""
    return "".join("01"[int(x)] for x in correct)


def share(digits: str) -> float:
    """Accuracy of answers that `as_digits` wrote."""
    return digits.count("1") / len(digits)


def accuracy_cell(digits: str) -> str:
    """Accuracy with its 95% Wilson interval, as `0.835 [0.803, 0.863]`."""
    return share_cell(share(digits), len(digits))


def share_cell(accuracy: float, n: int) -> str:
    """Accuracy over n prompts with its 95% Wilson interval, as `0.835 [0.803, 0.863]`."""
    interval = wilson(round(accuracy * n), n)
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
