"""The stages locate, plan and splice: choose heads, group them by layer, and splice attention in beside them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surgery.data.offsets import tokenized
from surgery.errors import PlanError, RecipeError
from surgery.files.atomic import delete, new_folder, write_json
from surgery.locate.hidden_attention import prompt_attention
from surgery.locate.locating import locate_heads
from surgery.models.config_checks import check_unquantized
from surgery.models.donors import donor_mixers
from surgery.models.lookup import family_of
from surgery.recipe import Recipe
from surgery.recipe.methods import METHODS, is_greedy
from surgery.recipe.public import public_name
from surgery.report.heads_page import write_csv, write_page
from surgery.run.context import SPLICE_TEACHER, STATE, Run, located_prompts, own_located_prompts, sample_batch
from surgery.run.stage import PROMPTS, Stage
from surgery.splice.graft import splice_model, step_zero_gap
from surgery.splice.plan import check_base, check_in_range, check_not_spliced, make_plan
from surgery.splice.state_size import StateCut, choose_channels, cut_to_json, state_contributions
from surgery.types import HeadId, HeadSet, to_json

_PAGE_PROMPTS = 3  # on the page of the heads
_PAIR_PROMPTS, _PAIR_PROMPT_SIZE = 16, 32
_PAGE_TOKENS = 512  # of an own prompt there, which has T^2 numbers a head


class LocateStage(Stage):
    name, what = "locate", "measuring every head"
    sections = ("base", "locate", "splice.select", "splice.num_heads", "splice.heads")
    writes = ("heads.json", "heads.csv", "locate.html", "locate.json", "figures/locate")
    together, version = True, 3

    def check_configs(self, run: Run) -> None:
        recipe, splice, config = run.recipe, run.recipe.splice, run.config
        assert splice is not None
        check_unquantized(config)
        check_not_spliced(config)
        num_heads = sum(spec.num_heads for spec in family_of(config).sites(config))
        if num_heads == 0:
            return  # it can still be located; the stage plan says why it cannot be spliced
        reading = [name for name, method in METHODS.items() if method.measures_reads]
        if run.stages[-1] != self.name and not set(reading) & set(recipe.locate.methods):
            hint = f"Add {' or '.join(reading)}: it measures which position a spliced head reads. "
            hint += "Only `surgery locate` runs without it."
            raise RecipeError("locate.methods", list(recipe.locate.methods), hint)
        for head in map(HeadId.parse, splice.heads):
            check_in_range(head, config, "splice.heads")
        hint = ""
        if splice.num_heads > num_heads:
            hint = f"The model has only {num_heads} heads. Set a smaller number."
        elif is_greedy(splice.select) and splice.num_heads > recipe.locate.top_k:
            hint = f"Set locate.top_k to at least {splice.num_heads}."
        if hint:
            raise PlanError("splice.num_heads", splice.num_heads, hint)

    def check_data(self, run: Run) -> None:
        own_located_prompts(run)

    def work(self, run: Run, key: str) -> None:
        recipe = run.recipe
        assert recipe.splice is not None
        name, note = public_name(recipe.base.model), partial(run.reporter.note, "memory")
        given = (run.base(), run.tokenizer(), recipe.locate, recipe.splice, recipe.seed, name, run.revision)
        heads = locate_heads(*given, run.reporter.progress, note=note)
        if run.accelerator.is_main_process:
            write_heads(run, heads)


def write_heads(run: Run, heads: HeadSet) -> None:
    from surgery.report.figures.heatmaps import head_maps  # matplotlib is slow to import

    write_json(run.folder / "locate.json", heads.cost)
    write_json(run.folder / "heads.json", to_json(heads))  # first, since figures and the page could fail
    write_csv(heads, run.folder / "heads.csv")
    with new_folder(run.folder / "figures" / "locate") as figures:
        head_maps(heads, figures)
    # The best heads have their hidden attention in full on the first prompt; all matrices would make the page large.
    section = run.recipe.locate
    shortest = sorted(own_located_prompts(run), key=lambda document: len(document.text))[:_PAGE_PROMPTS]
    shortest = [d for d in shortest if len(tokenized(run.tokenizer(), [d.text])[0].ids) <= _PAGE_TOKENS]
    first, *others = shortest or located_prompts(run, "sample", _PAGE_PROMPTS, min(16, section.pairs))
    full = dict.fromkeys([s.head for s in heads.chosen] + [s.head for s in heads.heads[:6]])
    specs = family_of(run.base().config).mixers(run.base().config)
    in_full = prompt_attention(run.base(), run.tokenizer(), [first], specs, list(full))
    at_query = prompt_attention(run.base(), run.tokenizer(), others, specs)
    write_page(heads, [*in_full, *at_query], run.folder / "locate.html")


_PROMPTS = ("examples", "pairs", "filler", "value_digits", "task", "data", "generated")  # keys of `locate`


def state_parts(settings: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the channels of the state to keep follow from. Empty if the state is not cut. See `Stage.depends_on`."""
    if settings.state_size is None:
        return {}
    return {"state": [settings.state_size, *(values["locate"][name] for name in _PROMPTS)]}


class PlanStage(Stage):
    name, what = "plan", "planning the splice"
    sections, reads, writes = ("base", "splice"), ("heads.json",), ("plan.json",)

    def check_configs(self, run: Run) -> None:
        base, splice, config = run.recipe.base, run.recipe.splice, run.config
        assert splice is not None
        check_base(config, splice, config.dtype if base.dtype == "auto" else getattr(torch, base.dtype))
        teacher = run.teacher_config()
        if teacher is not None:
            donor_mixers(teacher)

    def work(self, run: Run, key: str) -> None:
        heads = run.heads()
        assert heads is not None
        plan = make_plan(heads, run.base().config, run.recipe.splice, run.recipe.seed, run.teacher_config())
        write_json(run.folder / "plan.json", to_json(plan))


class SpliceStage(Stage):
    name, what = "splice", "splicing"
    sections, reads, writes = ("base", "splice", *PROMPTS), ("plan.json",), ("spliced", "splice.json")
    loads = (SPLICE_TEACHER,)

    def outputs(self, recipe: Recipe) -> tuple[str, ...]:
        return (*self.writes, STATE) if recipe.state_size is not None else self.writes

    def depends_on(self, settings: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
        return state_parts(settings, values)

    def work(self, run: Run, key: str) -> None:
        plan = run.plan()
        given = (run.recipe.splice, run.teacher(), _choose_state(run), _prompts_of_pairs(run))
        run.save(splice_model(run.base(), plan, *given), "spliced")
        hybrid = run.model("spliced")  # from its files, as it will be trained
        batch = sample_batch(run, min(8, run.recipe.locate.batch_size))
        gap = step_zero_gap(run.base(), hybrid, plan, batch.input_ids, batch.attention_mask)
        write_json(run.folder / "splice.json", {"max_logit": gap.max_logit, "kl": gap.kl, "same_top": gap.same_top})


def _prompts_of_pairs(run: Run) -> list[Tensor]:
    """Prompts that pairs are fitted to, with `output: copy`; (1,T) ids each."""
    splice, section = run.recipe.splice, run.recipe.locate
    if splice is None or (splice.form, splice.output) != ("pair", "copy"):
        return []
    batch = sample_batch(run, _PAIR_PROMPTS, min(section.pairs, _PAIR_PROMPT_SIZE))
    return [ids[mask.bool()][None] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


def _choose_state(run: Run) -> StateCut | None:
    """Choose the channels of the state to keep, and write state.json. None if the state is not cut."""
    size, section = run.recipe.state_size, run.recipe.locate
    if size is None:
        delete(run.folder / STATE)
        return None
    own = own_located_prompts(run)
    documents = [*own, *located_prompts(run, "locate", section.generated if own else section.examples, section.pairs)]
    contributions = state_contributions(run.base(), run.tokenizer(), documents, section.batch_size)
    cut = choose_channels(contributions, size)
    write_json(run.folder / STATE, cut_to_json(cut, contributions))
    return cut
