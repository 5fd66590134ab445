"""The stage locate: measure every head, and choose the heads to splice."""

from __future__ import annotations

from functools import partial

from surgery.data.offsets import tokenized
from surgery.errors import PlanError, RecipeError
from surgery.files.atomic import new_folder, write_json
from surgery.locate.hidden_attention import prompt_attention
from surgery.locate.locating import locate_heads
from surgery.models.config_checks import check_unquantized
from surgery.models.lookup import family_of
from surgery.recipe.methods import METHODS, is_greedy
from surgery.recipe.public import public_name
from surgery.report.heads_page import write_csv, write_page
from surgery.run.context import Run, located_prompts, own_located_prompts
from surgery.run.stage import Stage
from surgery.splice.plan import check_in_range, check_not_spliced
from surgery.types import HeadId, HeadSet, to_json

_PAGE_PROMPTS = 3  # on the page of the heads
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
    """Write the outputs of the stage locate."""
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
