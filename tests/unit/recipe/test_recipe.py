"""The recipe: defaults, refusals that name the field, overrides, round trip, notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from surgery.errors import RecipeError
from surgery.probes.registry import prompts_of
from surgery.recipe import (
    AnalysisRecipe,
    Data,
    Evaluate,
    Locate,
    PretrainRecipe,
    Recipe,
    Source,
    Splice,
    check_recipe,
    load_any,
    load_recipe,
    shipped,
    to_yaml,
)
from surgery.recipe.yaml import apply, load_yaml
from tests.support.cases import each
from tests.support.pico import pico_tokenizer

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
MINIMAL = """
name: tiny
base:
  model: some/folder
train:
  sources:
    - task: kv_retrieval
      rows: 4
      weights: {answer: 1}
    - {task: sentence, rows: 2, weights: {base_kl: 1}}
"""
KV: dict[str, Any] = {"task": "kv_retrieval", "rows": 2, "weights": {"answer": 1.0}}


def recipe(*overrides: str) -> Recipe:
    data = yaml.safe_load(MINIMAL)
    for override in overrides:
        apply(data, override)
    return check_recipe(data)


def refused(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe(*overrides)
    return str(caught.value)


# An override or several, and what the error says. Nothing of pydantic's own wording.
REFUSED = {
    "splicee=1": "splicee: 1. Unknown key",
    "locate.colour=red": "locate.colour: 'red'. Unknown key",
    "train.tokens=100": "train: set `steps` or `tokens`, not both",
    "train.optimizer.lr=5": "train.optimizer.lr: 5. It must be less than or equal to 1",
    "train.optimizer.lr=.nan": "train.optimizer.lr: nan. ",
    "train.sources=[5]": "train.sources.0: 5. It must be a section with keys, such as {task: kv_",
    "train.sources=[{}]": "train.sources.0: {}. set one of `task` (a probe), `data`",
    "train.sources=[{base_text: 8, weights: {base_kl: 1.0}}]": "base_text needs `max_tokens`",
    "train.sources=[{base_text: 8, max_tokens: 9, weights: {answer: 1.0}}]": "plain text has no answers",
    "train.sources=[{base_text: 8, max_tokens: 9, weights: {base_kl: 1.0}}, "
    "{base_text: 8, max_tokens: 5, weights: {base_kl: 1.0}}]": "read the same texts",
    "train.sources.0.weights.answer=-1": "train.sources.0.weights.answer: -1. It must be a number of 0 or more",
    "train.sources.1.task=poetry": "train.sources.1.task: 'poetry'. ",
    "train.sources.0.pairs=[8,4]": "train.sources.0.pairs: [8, 4]. ",
    "train.sources.0.pairs=[4]": "a range [low, high]",
    "train.align.heads=5": "train.align.heads: 5. It must be a section with keys, such as {L17H3",
    "train.align.layers={a: 1}": "train.align.layers.a: 'a'. It must be a valid integer",
    "seed=-1": "seed: -1. ",
    "name=a/b": "name: 'a/b'. Use letters, digits, dots",
    f"name={'x' * 201}": "hyphens and underscores, at most 200, and begin",
    f"train={{stages: [{{name: {'x' * 101}, sources: [{{task: records}}]}}]}}": "and underscores, at most 100",
    "base=my/model": "base: 'my/model'. It must be a section with keys, such as {model: my/model}",
    "evaluate.tasks=[]": "evaluate.tasks: []. It must have at least 1 item, not 0",
    "evaluate.pairs=4-8": "evaluate.pairs: '4-8'. It must be a list, such as [4, 8]",
    "evaluate.generate=5": "evaluate.generate: 5. It must be true, false, or a list of tasks",
    "export.format=nemotron_h": "needs splice.form block or pair",
    "control={model: some/base}": "`splice: null`",
    "locate.pairs=[4, 8]": "Use one number",
    "locate.filler=5": "locate.filler: 5. It must be a list, such as [0, 20]",
    "locate.methods=[sharpen, sharpen]": "twice",
    "locate.methods=[sharpness]": "Did you mean sharpen?",
    "locate.methods=[attribution]": "Unknown locating method. Add bench.plugins.baselines to `plugins`, and set",
    "locate.task=common_words": "Unknown task. Add bench.plugins.ruler to `plugins`",
    "locate.task=closed_book": "Unknown task",
    "locate={task: mqar, filler: [0, 1]}": "mqar does not use `filler`",
    "locate={task: phonebook, pairs: 95}": "2 to 90",
    "locate={fill: mean, examples: 33}": "batch_size",
    "locate.where=nowhere": "everywhere",
    "splice.state_size=true": "splice.state_size: True. ",
    "splice.heads=5": "splice.heads: 5. It must be a list, such as [L1H2]",
    "splice={select: list}": "`heads`: list some",
    "splice={select: list, heads: [L1H2, L0H3], num_heads: 3}": "remove `num_heads`",
    "splice={select: sharpen, heads: [L1H2]}": "`heads` needs `select: list`",
    "splice={select: list, heads: [L1H2, L1H2]}": "lists a head twice",
    "splice={select: list, heads: ['1.2']}": "splice.heads.0: '1.2'. Use L<layer>H<head>",
    "splice={init: teacher}": "init: teacher` needs `teacher`",
    "splice={teacher: {model: a/b}}": "init: ssm` does not use `teacher`",
    "splice={init: teacher, teacher: {model: a/b}, unit: layer}": "mode: replace",
    "splice={init: teacher, teacher: {model: a/b}, with_block: true}": "unit: layer",
    "splice={init: teacher, teacher: {model: a/b, donors: {L1H1: head}}}": "L<layer>H<head>",
    "splice={init: ssm, random_width: 8}": "`random_width` is for",
    "splice={form: block, random_width: 8}": "`random_width` is for",
    "splice.before=1": "`before` needs `form: block`",
    "splice={form: pair, init: teacher}": "or `init: ssm`",
    "splice={form: block, init: ssm}": "set `init: random`",
    "splice={form: pair, init: ssm, side_channels: 0}": "needs `side_channels`",
    "splice={form: pair, mode: replace}": "set `mode: add`",
    "splice={form: block, output: copy}": "`output: copy` needs `form: head`",
    "splice={form: pair, init: ssm, output: copy, before: 1}": "remove `before`",
    "splice={mode: replace, output: copy}": "`output: copy` needs `form: head` or `pair`, `mode: add`",
    "splice={form: pair, state_size: 4}": "set `form: head`",
    "splice.form=pair & export.format=transformers": "export.format: nemotron_h",
    "splice={form: pair, init: [ssm]}": "splice.init: ['ssm']. ",
    "splice.form=pair & train.trainable=lora": "trainable: lora. Set all or new_heads",
    "splice.form=pair & train.compile=true": "train.compile",
    "splice.form=pair & train={teacher: {model: t}, sources: [{task: records, weights: {hidden_mse: 1}}]}": (
        "(model.hidden_states)"
    ),
    "name.a.b=1": "inside a scalar",
    "train.sources.2.rows=8": "override: train.sources.2.rows. '2' is not an index of this list. Use 0 to 1",
    "train.steps=": "train.steps: no value. Write a value after =, or train.steps=null",
    "train.steps": "override: 'train.steps'. Use key.path=value",
}


def test_a_bad_value_is_refused_by_field_and_value() -> None:
    for override, says in REFUSED.items():
        assert says in refused("train.steps=5", *override.split(" & ")), override


def test_the_cause_of_several_faults_comes_first_and_the_others_are_counted() -> None:
    """Unknown keys before the keys that they were meant for. A list is no fault of its own if one of its items is."""
    assert refused("seed=-1", "train.steps=0", "splice.mode=glue").endswith("(2 more: splice.mode, train.steps)")
    unknown = refused("evaluate.tasks=[{tsak: kv_retrieval}]")
    assert unknown.startswith("evaluate.tasks.0.tsak: ") and unknown.endswith("(1 more: evaluate.tasks.0.task)")
    only = refused("evaluate.tasks=[{task: kv_retrieval, pairs: x}]")
    assert only == "evaluate.tasks.0.pairs: 'x'. It must be a list, such as [4, 8]"
    assert refused("base={revision: main}") == "base.model: missing. This key is required"


def test_null_is_named_where_a_number_may_be_left_out() -> None:
    assert refused("train.read_steps=0") == "train.read_steps: 0. It must be greater than 0, or null"
    assert refused("train.steps=x").endswith("It must be a valid integer, or null")
    assert refused("train.save_every=0") == "train.save_every: 0. It must be greater than 0"
    assert not refused("evaluate.tasks=[{task: records, pairs: [1]}]").endswith("null")


def test_overrides_reach_nested_keys_lists_and_absent_sections(tmp_path: Path) -> None:
    second = "train.sources.1={task: statement, rows: 3, weights: {lm: 1}}"
    overrides = ("train.steps=7", "train.sources.0.rows=8", second, "locate.pairs=5", "splice.heads=[L1H2]",
                 "splice.select=list", "train.optimizer.lr=1e-3")  # fmt: skip
    (tmp_path / "x.yaml").write_text(MINIMAL)
    made = load_recipe(tmp_path / "x.yaml", overrides)
    assert made == recipe(*overrides) != recipe()
    assert [(s.task, s.rows) for s in made.train.sources] == [("kv_retrieval", 8), ("statement", 3)]
    assert made.splice is not None and made.splice.heads == ("L1H2",)
    assert (made.train.steps, made.train.optimizer.lr, made.locate.pairs) == (7, 1e-3, 5)
    assert recipe("train.steps=null").train.steps is None
    for text in ("1E-3", "0.001", "+1e-3", "1.0e-3", "1.e-3"):
        assert recipe(f"train.optimizer.lr={text}").train.optimizer.lr == 1e-3


def test_a_recipe_is_written_with_every_default_and_read_again(tmp_path: Path) -> None:
    made = recipe("seed=3", "train.optimizer.lr=3e-7", "splice={select: list, heads: [L0H1, L2H0]}")
    data = load_yaml(to_yaml(made))
    assert check_recipe(data) == made and list(data) == list(Recipe.model_fields)
    assert data["train"]["optimizer"]["warmup"] == 20
    text = "name: p\nmodel: {hidden_size: 32}\ntrain: {sources: [{task: sentence, rows: 1, weights: {lm: 1}}]}\n"
    (tmp_path / "p.yaml").write_text(text)
    pretrain = load_recipe(tmp_path / "p.yaml", ["model.num_hidden_layers=2"], PretrainRecipe)
    assert (pretrain.model.hidden_size, pretrain.model.num_hidden_layers) == (32, 2)
    assert check_recipe(load_yaml(to_yaml(pretrain)), PretrainRecipe) == pretrain
    with pytest.raises(RecipeError, match=r"^model\.hidden_size: 0\."):
        load_recipe(tmp_path / "p.yaml", ["model.hidden_size=0"], PretrainRecipe)
    for section, name in ((made, "seed"), (made.train, "steps"), (made.train.sources[0].weights, "answer")):
        with pytest.raises(ValidationError):
            setattr(section, name, 1)


def test_one_kind_of_recipe_is_refused_as_the_other(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(MINIMAL)
    with pytest.raises(RecipeError, match=r"recipe of `surgery run`, not of `surgery pretrain`: surgery run .*\.yaml"):
        load_recipe(path, kind=PretrainRecipe)
    with pytest.raises(RecipeError, match=r"surgery analyse pico-reproduce$"):
        load_recipe("pico-reproduce")
    path.write_text("name: a\nmodel: some/folder\n")  # no section: `base` was meant
    with pytest.raises(RecipeError, match="model"):
        load_recipe(path)
    path.write_text("name: a\nbase: {model: m}\n")
    assert load_recipe(path, ["changes=[{name: a, disable: [L0H0]}]"], AnalysisRecipe).changes


@each("path", RECIPES)
def test_every_shipped_recipe_is_valid_and_gets_no_note(path: Path) -> None:
    made = load_any(path)
    assert check_recipe(load_yaml(to_yaml(made)), type(made)) == made  # type: ignore[type-var]
    assert not isinstance(made, Recipe) or made.notes == ()


def test_the_shipped_recipe_is_the_one_of_the_checkout() -> None:
    source = load_recipe(shipped("finetune")).train.sources[0]
    assert shipped("finetune") in RECIPES and source.data is not None
    assert source.data.holdout > 0, "what it learns is shown on rows that it was not trained on"
    with pytest.raises(RecipeError, match="installation is incomplete"):
        shipped("no-such-recipe")


@each(("select", "needed"), [("ablation", "ablation"), ("gather", "context")])
def test_what_is_not_measured_cannot_choose(select: str, needed: str) -> None:
    hint = "Add it, or set splice.select to aggregate or sharpen"
    says = f"{select} needs {needed} in locate.methods. {hint}"
    assert says in refused(f"splice.select={select}", "locate.methods=[query, sharpen]")
    assert recipe(f"splice.select={select}", f"locate.methods=[query, sharpen, {needed}]").splice


def test_a_hybrid_is_trained_further_with_a_control_if_one_is_named() -> None:
    beside = recipe("splice=null", "control={model: some/base}")
    assert [r.has_control for r in (recipe(), recipe("splice=null"), beside)] == [True, False, True]
    assert not recipe("splice=null", "control={model: some/base}", "train.control=false").has_control


def test_without_its_heads_a_hybrid_of_a_frozen_base_is_the_base() -> None:
    new = "train.trainable=new_heads"
    assert recipe(new).keeps_base
    others = (
        (),
        (new, "splice.mode=replace"),
        (new, "splice.state_size=4"),
        (new, "splice=null"),
        (new, "splice.form=block"),
    )
    assert not any(recipe(*more).keeps_base for more in others)


@each("form", ["block", "pair"])
def test_init_and_export_format_follow_the_form(form: str) -> None:
    made = recipe(f"splice.form={form}", "export.dtype=bfloat16")
    assert made.splice is not None and made.splice.init == "random" and made.export.format == "nemotron_h"
    assert check_recipe(load_yaml(to_yaml(made))) == made
    by_class = Recipe(name="x", base={"model": "m"}, splice=Splice(form=form), train={"sources": [KV]})
    assert by_class.export.format == "nemotron_h"
    copies = recipe("splice={form: pair, init: ssm}")
    assert copies.splice is not None and copies.splice.min_width is None
    reads = "train={trainable: reads, sources: [{task: records, weights: {attention: 1}}]}"
    assert recipe(f"splice.form={form}", reads).train.trainable == "reads"


def test_one_name_or_number_stands_for_a_list_of_one() -> None:
    made = recipe("locate.methods=query", "splice={select: list, heads: L1H2}", "train.trackers=tensorboard",
                  "evaluate={tasks: {task: phonebook, pairs: 8}, generate: phonebook, pairs: 4}")  # fmt: skip
    assert (made.locate.methods, made.splice and made.splice.heads) == (("query",), ("L1H2",))
    assert (made.train.trackers, made.evaluate.generate) == (("tensorboard",), ("phonebook",))
    assert (made.evaluate.pairs, made.evaluate.tasks[0].pairs) == ((4,), (8,))
    assert Source.model_validate({**KV, "pairs": 8}) == Source.model_validate({**KV, "pairs": [8, 8]})
    for pairs in (True, "8"):
        with pytest.raises(ValidationError):
            Evaluate.model_validate({"pairs": pairs})


def test_a_path_alone_is_own_prompts_whose_places_are_found() -> None:
    expected = Data(path="my.jsonl", columns={"answer_span": "auto"})
    assert recipe("locate.data=my.jsonl", "locate.generated=4").locate.data == expected


def test_the_sizes_of_located_prompts_are_those_of_the_probe() -> None:
    section = Locate(task="phonebook", pairs=8, value_digits=(3, 3))
    (document,) = prompts_of(section.probe, "locate", 0, 1, section.options(tokenizer=pico_tokenizer()))
    assert document.task == "phonebook" and len(document.questions[0].choices) == 8


@each(
    ("train", "says"),
    [
        ({"weights": {"answer": 1.0}}, "no source supervises the attention of the new heads"),
        ({"lora": {"rank": 4}}, "train.lora has no effect without `trainable: lora`"),
        (
            {"distil": {"temperature": 2.0}, "weights": {"attention": 1.0}},
            "train.distil has no effect without a weight",
        ),
        ({"align": {"heads": {"L0H0": "L1H1"}}}, "train.align has no effect without an objective on a teacher's"),
        ({"distil": {"cache": True, "top_k": 8}}, "train.distil.cache has no effect without a weight of `distil`"),
        ({"optimizer": {"decay": 0.5}}, "train.optimizer.decay has no effect without `schedule: wsd`"),
        ({"optimizer": {"floor": 0.5, "schedule": "constant"}}, "train.optimizer.floor has no effect with"),
        ({"optimizer": {"lora_lr": 1e-3}}, "train.optimizer.lora_lr has no effect without `trainable: lora`"),
        ({"optimizer": {"lr": 1e-4, "lr_factor": 0.5}}, "train.optimizer.lr_factor has no effect with `lr`"),
        (
            {
                "optimizer": {"floor": 0.5, "schedule": "constant", "lora_lr": 1e-3},
                "trainable": "lora",
                "read_steps": 99,
            },
            "train.optimizer.floor has no effect with",
        ),
        ({"optimizer": {"warmup": 30}, "steps": 30}, "train.optimizer.warmup: 30, but training has 30 steps"),
        ({"trainable": "new_heads", "control": {"model": "b"}}, "control.model has no effect"),
    ],
)
def test_settings_without_effect_get_a_note(train: dict[str, Any], says: str) -> None:
    weights = train.pop("weights", {"answer": 1.0, "attention": 1.0, "base_kl": 1.0})
    tuned = {"splice": None, "control": train.pop("control")} if "control" in train else {}
    sources = [{"task": "kv_retrieval", "weights": weights}]
    given = {"name": "a", "base": {"model": "m"}, "train": {"sources": sources, **train}, **tuned}
    (note,) = check_recipe(given).notes
    assert note.startswith(f"train.sources: {says}") or note.startswith(says)
