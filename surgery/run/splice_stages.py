"""The stages plan and splice: group the chosen heads by layer, and splice attention in beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from surgery.files.atomic import delete, write_json
from surgery.models.donors import donor_mixers
from surgery.recipe import Recipe
from surgery.run.context import SPLICE_TEACHER, STATE, Run, located_prompts, own_located_prompts, sample_batch
from surgery.run.stage import PROMPTS, Stage
from surgery.splice.graft import splice_model, step_zero_gap
from surgery.splice.plan import check_base, make_plan
from surgery.splice.state_size import StateCut, choose_channels, cut_to_json, state_contributions
from surgery.types import to_json

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
        run.save(splice_model(run.base(), plan, run.recipe.splice, run.teacher(), _choose_state(run)), "spliced")
        hybrid = run.model("spliced")  # from its files, as it will be trained
        batch = sample_batch(run, min(8, run.recipe.locate.batch_size))
        gap = step_zero_gap(run.base(), hybrid, plan, batch.input_ids, batch.attention_mask)
        write_json(run.folder / "splice.json", {"max_logit": gap.max_logit, "kl": gap.kl, "same_top": gap.same_top})


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
