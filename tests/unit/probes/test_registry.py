"""What is derived from a probe's class: names, labels, the schema, prompts, lm-eval groups."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from random import Random

import pytest
from pydantic import ValidationError

from surgery.errors import ProbeError, RecipeError, SurgeryError
from surgery.evaluate.lm_eval_files import lm_eval_groups
from surgery.evaluate.prompts import make_prompts
from surgery.probes.documents import Document, Question, Split, draw, rng_of
from surgery.probes.registry import PROBES, Options, Probe, register_probe
from surgery.recipe import Evaluate, EvaluationTask, Source
from surgery.report.results import label_of
from tests.unit.probes.test_unchanged import DIGESTS


class Planted(Probe):
    """A copying probe of another name."""

    scoring = "generation"
    pairs = (3, 20)

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """A string, twice."""
        rng.random()
        return PROBES["copying"].document(rng, split, options)


@pytest.fixture
def planted() -> Iterator[Probe]:
    assert register_probe("planted_copy")(Planted) is Planted
    yield PROBES["planted_copy"]
    del PROBES._entries["planted_copy"]


def test_the_order_of_probes_does_not_depend_on_what_is_imported_first() -> None:
    for first in ("surgery.probes.needle", "surgery.probes.registry"):
        code = (
            f"import sys, {first}\nfrom surgery.probes.registry import PROBES\n"
            "print(*PROBES)\nprint(*sorted({'torch', 'transformers'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        names, heavy = done.stdout.split("\n")[:2]
        assert names.split() == list(DIGESTS) and heavy == "", first


def test_every_training_task_about_facts_is_one_that_an_evaluation_of_facts_is_held_out_from() -> None:
    halved = {name for name, probe in PROBES.items() if probe.trains and "half" in probe.options}
    assert set(PROBES["closed_book"].held_out_from) == halved - {"sentence"}  # other sentences are evaluated


def test_names_and_labels_come_from_the_class(planted: Probe) -> None:
    assert (planted.name, planted.label, planted.short_label) == ("planted_copy", "planted copy", "planted copy")
    assert label_of(("planted_copy", "4"), {}) == "planted copy, 4"
    assert label_of(("kv_retrieval", "4"), {}) == "KV-retrieval, 4 pairs"
    assert label_of(("not_loaded", "4"), {}) == "not loaded, 4"
    assert not hasattr(Planted, "name"), "a subclass that is registered too has a name of its own"


def test_an_attribute_of_another_form_is_refused() -> None:
    for attribute, value, hint in (
        ("scoring", "rank", "choices, generation, perplexity"),
        ("pairs", 5, "smallest, largest"),
        ("pairs", (5, 2), "smallest, largest"),
        ("options", "hops", "questions, groups, hops"),
        ("options", ("lenght",), "questions, groups, hops"),
        ("lm_eval_sizes", 4, "tuple of sizes"),
    ):
        with pytest.raises(RecipeError, match=rf"task wrong: {attribute}: .*{hint}"):
            register_probe("wrong")(type("Wrong", (Planted,), {attribute: value}))
    with pytest.raises(RecipeError, match=r"task wrong: int. Make it a subclass of surgery.probes.registry.Probe"):
        register_probe("wrong")(int)  # type: ignore[type-var]
    assert "wrong" not in PROBES


def test_the_schema_has_its_name_and_its_bounds(planted: Probe) -> None:
    row = {"rows": 1, "weights": {"answer": 1.0}}
    assert Source.model_validate({"task": "planted_copy", "pairs": [3, 20], **row}).probe is planted
    with pytest.raises(ValidationError, match=r"planted_copy takes 3 to 20 `pairs`, not 2 to 16. Change `pairs`"):
        Source.model_validate({"task": "planted_copy", **row})
    with pytest.raises(ValidationError, match="planted_copy takes 3 to 20 `pairs`, not 4 to 64"):
        Evaluate.model_validate({"tasks": ["planted_copy"]})
    with pytest.raises(ValidationError, match="planted_copy does not use `questions`"):
        Source.model_validate({"task": "planted_copy", "pairs": [3, 4], "questions": 2, **row})
    for section in (Source, EvaluationTask):
        assert "planted_copy" in str(section.model_json_schema())


def test_evaluation_and_lm_eval_have_its_documents(planted: Probe) -> None:
    entry = {"task": "planted_copy", "pairs": [5]}
    prompts = make_prompts(Evaluate.model_validate({"tasks": [entry], "examples": 2}), 3)
    rng = rng_of("evaluate", 3, "planted_copy5", 1)
    assert prompts.generation["planted_copy/5"][1] == planted.document(rng, "eval", Options(pairs=5))
    makers = lm_eval_groups()["retrieval"]
    assert "planted_copy_8" in makers and "planted_copy_32" not in makers, "32 pairs are out of its bounds"
    assert makers["planted_copy_8"](rng_of(0)) == planted.document(rng_of(0), "eval", Options(pairs=8))


def test_a_document_has_what_its_class_announces(planted: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    for attributes, question, message in (
        ({"scoring": "choices"}, {}, "question: no choices. Set `Question.choices` and `Question.gold`, or `scoring"),
        ({"gold_position": True}, {"segment": (0, 9)}, "question: no segment or no value. With `gold_position` every"),
        ({"gold_position": True}, {"value": (0, 9)}, "question: no segment or no value"),
        ({}, {"choices": ("red", " blue")}, r"choices: \['red', ' blue'\]. `choices\[gold\]` must be .*, ' red', with"),
        ({}, {"choices": (" blue", " red")}, "choices"),
        ({}, {"choices": (" red",), "gold": 1}, "choices"),
        ({}, "Colour: red", "document: str. Return a `Document`"),
        ({}, None, "questions: none. Give the document questions, or set"),
    ):
        asked = (Question((7, 11), **question),) if isinstance(question, dict) else ()
        made = question if isinstance(question, str) else Document("planted_copy", "Colour: red", asked)
        with monkeypatch.context() as patch, pytest.raises(ProbeError, match=f"^planted_copy {message}"):
            patch.setattr(Planted, "document", lambda *_, made=made: made)
            for name, value in attributes.items():
                patch.setattr(Planted, name, value)
            planted.generate(rng_of(0), "train", Options(pairs=4))


def test_an_error_of_a_probes_code_has_its_name_and_place(planted: Probe) -> None:
    with pytest.raises(SurgeryError, match=r"^probe planted_copy: .*'random'. It comes from the plugin: .*, line \d+"):
        planted.generate(None, "train", Options(pairs=4))  # type: ignore[arg-type]


def test_a_drawn_text_is_a_string() -> None:
    with pytest.raises(ProbeError, match=r"draw: list\. Its function has"):
        draw("train", lambda: ["red"])  # type: ignore[arg-type, return-value]
