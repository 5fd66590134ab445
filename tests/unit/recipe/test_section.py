"""Sections of recipes: what importing them loads, and keys that several sections share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from surgery.probes.registry import prompts_of
from surgery.recipe import Evaluate, Locate, Source
from surgery.recipe.section import Section
from tests.support.cases import each
from tests.support.pico import pico_tokenizer

ROOT = Path(__file__).parents[3]
KV: dict[str, Any] = {"task": "kv_retrieval", "rows": 2, "weights": {"answer": 1.0}}


def test_a_recipe_is_validated_without_torch() -> None:
    """Objectives are described by their classes, which import torch when they compute."""
    code = (
        "import sys, surgery.recipe as r\n"
        "loaded = r.load_recipe('recipes/quickstart.yaml')\n"
        "assert loaded.train.needs == {'answers', 'gold_positions', 'model.attention', 'base.logits'}\n"
        "assert 'base_kl' in str(r.Recipe.model_json_schema())\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


class TestPairs:
    """`pairs` is one number in `locate`, a range in a source, a list in an evaluation. One number fits all three."""

    def test_one_number_fits_everywhere(self) -> None:
        assert Locate.model_validate({"pairs": 8}).pairs == 8
        assert Source.model_validate({**KV, "pairs": 8}) == Source.model_validate({**KV, "pairs": [8, 8]})
        evaluate = Evaluate.model_validate({"pairs": 8, "tasks": [{"task": "records", "pairs": 4}]})
        assert (evaluate.pairs, evaluate.tasks[0].pairs) == ((8,), (4,))

    @each(
        ("kind", "pairs", "hint"),
        [
            (Locate, [4, 8], "Use one number"),
            (Source, [4, 8, 16], r"a range \[low, high\]"),
            (Source, [4], r"a range \[low, high\]"),
            (Source, True, "integer|tuple"),
            (Evaluate, "8", "tuple"),
        ],
    )
    def test_another_form_is_refused_with_the_right_one(self, kind: type[Section], pairs: Any, hint: str) -> None:
        with pytest.raises(ValidationError, match=hint):
            kind.model_validate({**(KV if kind is Source else {}), "pairs": pairs})


class TestLocatedTask:
    def test_the_sizes_are_those_of_the_probe(self) -> None:
        section = Locate(task="phonebook", pairs=8, value_digits=(3, 3))
        (document,) = prompts_of(section.probe, "locate", 0, 1, section.options(tokenizer=pico_tokenizer()))
        assert document.task == "phonebook" and len(document.questions[0].choices) == 8

    @each(
        ("more", "hint"),
        [
            ({"task": "closed_book"}, "Unknown task"),
            ({"task": "key_echo"}, "Unknown task"),
            ({"task": "mqar", "filler": [0, 1]}, "mqar does not use `filler`"),
            ({"task": "phonebook", "pairs": 95}, "2 to 90"),
        ],
    )
    def test_what_cannot_be_located_is_refused(self, more: dict[str, Any], hint: str) -> None:
        with pytest.raises(ValidationError, match=hint):
            Locate.model_validate(more)
