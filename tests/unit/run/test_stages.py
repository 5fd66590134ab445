"""Stages read files of the run folder that people may edit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surgery.errors import RunError
from surgery.files.atomic import write_json
from surgery.recipe import Recipe, load_recipe
from surgery.registry import load_plugins
from surgery.report.figures import curves
from surgery.run import stages, train_stages
from surgery.run.context import Run
from surgery.run.export_stage import ExportStage
from surgery.train.training import make_accelerator
from surgery.types import to_json
from tests.integration.conftest import RECIPE
from tests.support.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer


@pytest.mark.parametrize("results", [{"arms": {"base": 3}}, {"arms": []}, [], 3, {}])
def test_results_of_another_form_are_named(tmp_path: Path, results: Any) -> None:
    write_json(tmp_path / "results.json", results)
    run: Any = SimpleNamespace(folder=tmp_path, recipe=load_recipe(RECIPE), heads=lambda: None, plan=lambda: None)
    with pytest.raises(RunError, match=r"results\.json.*run the stage evaluate"):
        ExportStage().work(run, "key")


def bare_run(recipe: Recipe, folder: Path, **revisions: str) -> Any:
    """The fields of a run that the keys of its stages depend on."""
    plain = {"revision": "r", "control_revision": "", "data_revision": "", "prompts_revision": ""}
    return SimpleNamespace(recipe=recipe, folder=folder, **{**plain, **revisions})


def keys_of(recipe: Recipe, folder: Path, **revisions: str) -> dict[str, str]:
    """The key of every stage, in a folder with what the stages read."""
    for name in ("heads.json", "plan.json", "spliced", "trained", "no_splice", "results.json", "report.html"):
        if not (folder / name).exists():
            (folder / name).write_text(name)
    return {stage.name: stage.key(bare_run(recipe, folder, **revisions)) for stage in stages.stages_of(recipe)}


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one if one[name] != other[name]}


def test_keys_of_stages_know_the_content_of_own_prompts(tmp_path: Path) -> None:
    one, other = (keys_of(load_recipe(RECIPE), tmp_path, prompts_revision=hash) for hash in ("one", "two"))
    assert changed(one, other) == {"locate", "splice", "evaluate", "export"}


def test_keys_of_stages_know_the_code_of_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An objective of a plugin that was edited trains again."""
    (tmp_path / "own_code").mkdir()
    file = tmp_path / "own_code" / "edited_plugin.py"
    file.write_text("SCALE = 1\n")
    monkeypatch.syspath_prepend(str(file.parent))
    load_plugins(["edited_plugin"])
    recipe = load_recipe(RECIPE).model_copy(update={"plugins": ("edited_plugin",)})
    before = keys_of(recipe, tmp_path)
    assert before == keys_of(recipe, tmp_path)
    file.write_text("SCALE = 2\n")
    assert changed(before, keys_of(recipe, tmp_path)) == set(before)


def test_scores_of_heads_in_the_report_are_those_of_the_last_locate(tmp_path: Path) -> None:
    before = keys_of(load_recipe(RECIPE), tmp_path)
    (tmp_path / "heads.json").write_text("other scores, the same heads")
    assert "evaluate" in changed(before, keys_of(load_recipe(RECIPE), tmp_path))


def test_keys_of_stages_know_the_form_of_located_prompts_only_where_it_is_set(tmp_path: Path) -> None:
    """A recipe without `locate.filler` keeps its finished stages."""
    recipe = load_recipe(RECIPE, ["locate.filler=null"])

    def keys(**locate: Any) -> dict[str, str]:
        given = recipe.model_copy(update={"locate": recipe.locate.model_copy(update=locate)})
        return keys_of(given, tmp_path)

    plain = keys()
    assert plain == keys(filler=None, value_digits=None)
    for more in ({"filler": (1, 2)}, {"value_digits": (3, 4)}, {"task": "phonebook"}):
        assert changed(plain, keys(**more)) == {"locate", "splice", "evaluate", "export"}


def test_keys_of_stages_know_the_state_only_where_it_is_cut(tmp_path: Path) -> None:
    """A recipe without `splice.state_size` keeps its finished stages. The cut depends on the located prompts."""
    recipe = load_recipe(RECIPE)

    def keys(examples: int = 8, task: str = "kv_retrieval", **splice: Any) -> dict[str, str]:
        parts = {
            "splice": recipe.splice and recipe.splice.model_copy(update=splice),
            "locate": recipe.locate.model_copy(update={"examples": examples, "task": task}),
        }
        given = recipe.model_copy(update=parts)
        return keys_of(given, tmp_path)

    plain, cut = keys(), keys(state_size=4)
    assert plain == keys(state_size=None)
    assert changed(plain, cut) == {"plan", "splice", "control", "export"}
    assert changed(cut, keys(state_size=2)) == {"plan", "splice", "control", "export"}
    assert changed(plain, keys(examples=9)) == {"locate", "export"}
    assert changed(cut, keys(examples=9, state_size=4)) == {"locate", "splice", "control", "export"}
    other = keys(task="phonebook", state_size=4)
    assert changed(cut, other) == {"locate", "splice", "control", "evaluate", "export"}
    assert "control" not in changed(cut, keys(state_size=4, num_heads=2)), "one control for any number of heads"


def test_the_key_of_the_export_knows_the_text_of_a_chat_template(tmp_path: Path) -> None:
    """A recipe without `export.chat_template` keeps its finished export."""
    recipe, template = load_recipe(RECIPE), tmp_path / ".chat.jinja"
    template.write_text("one")

    def keys(name: str | None) -> dict[str, str]:
        given = recipe.model_copy(update={"export": recipe.export.model_copy(update={"chat_template": name})})
        return keys_of(given, tmp_path)

    found = [keys(name) for name in (None, "plain", str(template))]
    template.write_text("two")
    found.append(keys(str(template)))
    assert len({key["export"] for key in found}) == 4
    assert all({**key, "export": ""} == {**found[0], "export": ""} for key in found)


def test_the_channels_of_the_state_are_read_from_the_folder(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, ["splice.state_size=4"])
    run = Run(recipe, tmp_path, make_accelerator())
    with pytest.raises(RunError, match=r"state\.json: This file is missing"):
        run.state_cut()
    write_json(tmp_path / "state.json", {"state_size": 4, "kept": {"L0H": 3}})
    with pytest.raises(RunError, match=r"state\.json.*Run the stage splice"):
        run.state_cut()
    assert Run(load_recipe(RECIPE), tmp_path, make_accelerator()).state_cut() is None


def test_keys_of_stages_know_the_width_of_copies_and_locate_only_if_it_trains_them(tmp_path: Path) -> None:
    """Without new channels the keys are those of recipes from before `splice.min_width`."""

    def differ(*overrides: str, methods: str = "") -> set[str]:
        given = [f"locate.methods={methods}"] if methods else []
        recipes = (load_recipe(RECIPE, [*given, *more]) for more in (("splice.min_width=null",), overrides))
        return changed(*(keys_of(recipe, tmp_path) for recipe in recipes))

    assert differ("splice.min_width=32") == differ("splice.min_width=64") == {"plan", "splice", "export"}
    for methods in ("[patching,sharpen,trial]", "[patching,gates]"):
        assert differ("splice.min_width=64", methods=methods) == {"locate", "plan", "splice", "export"}
        cut = differ("splice.min_width=null", "splice.state_size=4", methods=methods)
        assert cut == {"plan", "splice", "control", "export"}
        assert "locate" in differ("splice.min_width=null", "splice.mode=replace", methods=methods)


def test_the_control_depends_on_the_steps_of_the_hybrid_only_with_a_plateau(tmp_path: Path) -> None:
    """Without one, all hybrids of a sweep share a control."""
    ends = load_recipe(RECIPE, ["train.plateau={}", "train.optimizer.schedule=wsd"])
    fixed = load_recipe(RECIPE)

    def keys(recipe: Recipe, steps: int) -> dict[str, str]:
        write_json(tmp_path / "plateau.json", {"finetune": {"steps": steps}})
        return keys_of(recipe, tmp_path)

    assert changed(keys(ends, 200), keys(ends, 225)) == {"control"}
    assert keys(fixed, 200) == keys(fixed, 225)
    train, control = (stage for stage in stages.STAGES if stage.name in ("train", "control"))
    run = Run(ends, tmp_path, make_accelerator())
    assert "plateau.json" in set(train.outputs(ends)) & set(control.inputs(ends))
    assert run.as_trained() == ends.train.with_steps([225])
    assert "plateau.json" not in train.outputs(fixed)


@pytest.mark.parametrize("text", ["{}", "[]", '{"finetune": 3}', '{"finetune": {}}'])
def test_a_file_of_steps_of_another_form_is_named(tmp_path: Path, text: str) -> None:
    ends = load_recipe(RECIPE, ["train.plateau={}", "train.optimizer.schedule=wsd"])
    (tmp_path / "plateau.json").write_text(text)
    with pytest.raises(RunError, match=r"plateau\.json.*Run the stage train"):
        Run(ends, tmp_path, make_accelerator()).as_trained()


@pytest.mark.parametrize(
    ("quantization", "with_base", "held"), [("nf4", False, False), ("nf4", True, True), (None, False, True)]
)
def test_qlora_trains_without_the_unquantized_base_if_no_objective_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None, with_base: bool, held: bool
) -> None:
    """The base was loaded by an earlier stage."""

    class Reached(Exception):
        pass

    def train_model(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr(train_stages, "train_model", train_model)
    weights = {"answer": 1.0, **({"base_kl": 1.0} if with_base else {})}
    train = {
        "trainable": "lora",
        "lora": {"quantization": quantization},
        "sources": [{"task": "kv_retrieval", "rows": 2, "weights": weights}],
    }
    plain = load_recipe(RECIPE)
    recipe = plain.model_copy(update={"train": type(plain.train).model_validate(train)})
    run = Run(recipe, tmp_path, make_accelerator())
    run._base, run._tokenizer = base, _ = pico_base(), pico_tokenizer()
    monkeypatch.setattr(Run, "plan", lambda self: None)
    with pytest.raises(Reached):
        train_stages.train_arm(run, "key", pico_base(), lambda: base, "trained", "training")
    assert (run._base is not None) == held


def test_the_plan_of_a_hybrid_names_the_teacher_of_its_heads(tmp_path: Path) -> None:
    """Its license applies to the fine-tuned model too."""
    hybrid = tmp_path / "hybrid"
    config = pico_hybrid([pico_site(0)]).config
    config.save_pretrained(hybrid)
    recipe = load_recipe(RECIPE, ["splice=null"])
    recipe = recipe.model_copy(update={"base": recipe.base.model_copy(update={"model": str(hybrid)})})
    run = Run(recipe, tmp_path / "run", make_accelerator())
    plan = run.plan()
    assert plan.teacher == ""
    write_json(hybrid / "plan.json", to_json(replace(plan, teacher="owner/donor")))
    assert run.plan() == replace(plan, teacher="owner/donor")


@pytest.mark.parametrize(
    ("resumes", "name", "kept"), [(False, "trained", False), (True, "trained", True), (False, "no_splice", True)]
)
def test_a_new_training_of_the_hybrid_removes_the_adapters_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool, name: str, kept: bool
) -> None:
    monkeypatch.setattr(train_stages, "train_model", lambda *_, **__: [])
    monkeypatch.setattr(curves, "training_curve", lambda *_: None)
    monkeypatch.setattr(Run, "plan", lambda self: None)
    monkeypatch.setattr(Run, "save", lambda *_: None)
    adapters = tmp_path / "adapters" / "adapter_config.json"
    write_json(adapters, {})
    if resumes:
        (tmp_path / "steps" / "key" / "step_000001").mkdir(parents=True)
    made = Run(load_recipe(RECIPE), tmp_path, make_accelerator())
    train_stages.train_arm(made, "key", pico_base(), pico_base, name, "training")
    assert adapters.exists() == kept
