"""What the key of a stage depends on, and what stages read from a run folder that people may edit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surgery.errors import RunError
from surgery.files.atomic import write_json
from surgery.recipe import Recipe, check_recipe, load_recipe
from surgery.registry import load_plugins
from surgery.report.figures import curves
from surgery.run import train_stages
from surgery.run.context import Run
from surgery.run.export_stage import ExportStage
from surgery.run.pipeline import choose_stages, stages_of
from surgery.train.training import make_accelerator
from surgery.types import to_json
from tests.integration.conftest import RECIPE
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer

READ = ("heads.json", "plan.json", "spliced", "trained", "no_splice", "results.json", "report.html", "plateau.json")
REVISIONS = {"revision": "r", "control_revision": "", "data_revision": "", "prompts_revision": ""}
WSD = ("train.plateau={}", "train.optimizer.schedule=wsd")


def keys_of(recipe: Recipe, files: Mapping[str, str], folder: Path, **revisions: str) -> dict[str, str]:
    """The key of every stage, in a folder with these contents of what the stages read."""
    for name in READ:
        (folder / name).write_text(files.get(name, name))
    run: Any = SimpleNamespace(recipe=recipe, folder=folder, **{**REVISIONS, **revisions})
    return {stage.name: stage.key(run) for stage in stages_of(recipe)}


def test_what_runs_again_after_a_change(tmp_path: Path) -> None:
    """A change is a recipe's value, the content of a file, or a revision. Every other stage stays finished."""
    cut = ("splice.state_size=4",)
    template, other = tmp_path / ".one.jinja", tmp_path / ".two.jinja"
    template.write_text("one")
    other.write_text("two")
    prompts = "locate splice evaluate export"
    for given, change, expected in (
        ((), ("locate.examples=9",), "locate export"),
        ((), ("locate.value_digits=[3,4]",), prompts),
        ((), ("locate.task=phonebook",), prompts),
        (("locate.filler=null",), ("locate.filler=[1,2]",), prompts),
        ((), {"prompts_revision": "other"}, prompts),
        ((), ("splice.num_heads=2",), "locate plan splice export"),
        ((), cut, "plan splice control export"),
        (cut, ("splice.state_size=2",), "plan splice control export"),
        (cut, ("locate.examples=9",), "locate splice control export"),
        (cut, ("locate.data={path: x.jsonl, columns: {answer_span: auto}}",), "locate splice control evaluate export"),
        (cut, {"prompts_revision": "other"}, "locate splice control evaluate export"),
        (cut, ("splice.num_heads=2",), "locate plan splice export"),  # one control for any number of heads
        (("splice.min_width=null",), ("splice.min_width=32",), "plan splice export"),
        ((), {"data_revision": "other"}, "train control evaluate export"),
        ((), ("train.control=false",), "control evaluate export"),
        ((), ("train.save_every=7", "train.trackers=[tensorboard]", "train.check_every=3"), ""),
        ((), {"revision": "other"}, "locate plan splice train control evaluate export"),
        ((), {"heads.json": "other scores, the same heads"}, "plan evaluate export"),
        ((), {"plan.json": "other"}, "splice train evaluate export"),
        (("train.trainable=spliced_layers",), {"plan.json": "other"}, "splice train control evaluate export"),
        ((), {"plateau.json": "other"}, ""),  # all hybrids of a sweep share a control
        (WSD, {"plateau.json": "other"}, "control"),
        ((), ("export.chat_template=plain",), "export"),
        ((f"export.chat_template={template}",), (f"export.chat_template={other}",), "export"),
    ):
        files = change if isinstance(change, dict) else {}
        more = change if isinstance(change, tuple) else ()
        before = keys_of(load_recipe(RECIPE, given), {}, tmp_path)
        revisions = {name: value for name, value in files.items() if name in REVISIONS}
        after = keys_of(load_recipe(RECIPE, [*given, *more]), files, tmp_path, **revisions)
        assert " ".join(name for name in before if before[name] != after[name]) == expected, (given, change)


def test_keys_know_the_code_of_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An objective of a plugin that was edited trains again."""
    (tmp_path / "own_code").mkdir()
    file = tmp_path / "own_code" / "edited_plugin.py"
    file.write_text("SCALE = 1\n")
    monkeypatch.syspath_prepend(str(file.parent))
    load_plugins(["edited_plugin"])
    recipe = load_recipe(RECIPE).model_copy(update={"plugins": ("edited_plugin",)})
    before = keys_of(recipe, {}, tmp_path)
    assert before == keys_of(recipe, {}, tmp_path)
    file.write_text("SCALE = 2\n")
    assert not before.items() & keys_of(recipe, {}, tmp_path).items()


def test_stages_are_named_in_order() -> None:
    recipe = check_recipe({"name": "x", "base": {"model": "owner/name"}}, Recipe)
    assert [stage.name for stage in choose_stages(recipe, "plan", "train")] == ["plan", "splice", "train"]
    assert len(choose_stages(recipe, None, None)) == 7
    for first, last, words in (
        ("trian", None, "--from: trian"),
        (None, "no", "--to: no"),
        ("train", "plan", "before train"),
    ):
        with pytest.raises(RunError, match=words):
            choose_stages(recipe, first, last)
    with pytest.raises(RunError, match=r"--from: locate.*the base is a hybrid already"):
        choose_stages(recipe.model_copy(update={"splice": None}), "locate", None)


def test_files_of_another_form_name_the_stage_that_writes_them(tmp_path: Path) -> None:
    for results in ({"arms": {"base": 3}}, {"arms": []}, [], 3, {}):
        write_json(tmp_path / "results.json", results)
        run: Any = SimpleNamespace(folder=tmp_path, recipe=load_recipe(RECIPE), heads=lambda: None, plan=lambda: None)
        with pytest.raises(RunError, match=r"results\.json.*run the stage evaluate"):
            ExportStage().work(run, "key")
    cut = Run(load_recipe(RECIPE, ["splice.state_size=4"]), tmp_path, make_accelerator())
    with pytest.raises(RunError, match=r"state\.json: This file is missing"):
        cut.untrained_control()
    write_json(tmp_path / "state.json", {"state_size": 4, "kept": {"L0H": 3}})
    with pytest.raises(RunError, match=r"state\.json.*Run the stage splice"):
        cut.untrained_control()
    ends = Run(load_recipe(RECIPE, WSD), tmp_path, make_accelerator())
    for text in ("{}", "[]", '{"finetune": 3}', '{"finetune": {"steps": "x"}}'):
        (tmp_path / "plateau.json").write_text(text)
        with pytest.raises(RunError, match=r"plateau\.json.*Run the stage train"):
            ends.trained_steps()


def test_the_plan_of_a_hybrid_names_the_teacher_of_its_heads(tmp_path: Path) -> None:
    """Its license applies to the fine-tuned model too."""
    hybrid = tmp_path / "hybrid"
    pico_hybrid([pico_site(0)]).config.save_pretrained(hybrid)
    recipe = load_recipe(RECIPE, ["splice=null"])
    recipe = recipe.model_copy(update={"base": recipe.base.model_copy(update={"model": str(hybrid)})})
    run = Run(recipe, tmp_path / "run", make_accelerator())
    plan = run.plan()
    assert plan.teacher == ""
    write_json(hybrid / "plan.json", to_json(replace(plan, teacher="owner/donor")))
    assert run.plan() == replace(plan, teacher="owner/donor")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings end at once."""
    monkeypatch.setattr(train_stages, "train_model", lambda *_, **__: [])
    monkeypatch.setattr(curves, "training_curve", lambda *_: None)
    monkeypatch.setattr(Run, "plan", lambda self: None)
    monkeypatch.setattr(Run, "save", lambda *_: None)


@pytest.mark.usefixtures("trained")
def test_qlora_trains_without_the_unquantized_base_if_no_objective_needs_it(tmp_path: Path) -> None:
    """The base was loaded by an earlier stage."""
    for quantization, more, held in (("nf4", {}, False), ("nf4", {"base_kl": 1.0}, True), (None, {}, True)):
        source = {"task": "kv_retrieval", "rows": 2, "weights": {"answer": 1.0, **more}}
        train = {"trainable": "lora", "lora": {"quantization": quantization}, "sources": [source]}
        recipe = check_recipe({"name": "x", "base": {"model": "m"}, "train": train, "locate": {"pairs": 2}})
        run = Run(recipe, tmp_path, make_accelerator())
        run.__dict__.update(_base=pico_base(), _tokenizer=pico_tokenizer(), base_size=1000)
        train_stages.train_arm(run, "key", pico_base(), pico_base)
        assert (run._base is not None) == held, (quantization, more)


@pytest.mark.usefixtures("trained")
def test_a_new_training_of_the_hybrid_removes_the_adapters_of_the_last(tmp_path: Path) -> None:
    for resumes, is_control, kept in ((False, False, False), (True, False, True), (False, True, True)):
        adapters = tmp_path / "adapters" / "adapter_config.json"
        write_json(adapters, {})
        if resumes:
            (tmp_path / "steps" / "key" / "step_000001").mkdir(parents=True)
        run = Run(load_recipe(RECIPE), tmp_path, make_accelerator())
        train_stages.train_arm(run, "key", pico_base(), pico_base, is_control)
        assert adapters.exists() == kept, (resumes, is_control)
