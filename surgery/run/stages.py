"""The stages of a run: what each one reads, calls and writes in the run folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from surgery.errors import RunError, reading
from surgery.export.chat_template import template_revision
from surgery.export.folder import export_model
from surgery.export.model_card import card_of, model_card
from surgery.files.atomic import delete, digest, fingerprint, new_folder, read_json, write_json
from surgery.locate.hidden_attention import prompt_attention
from surgery.locate.locating import locate_heads
from surgery.models.lookup import family_of
from surgery.recipe import Recipe, to_yaml
from surgery.recipe.methods import METHODS
from surgery.recipe.public import public_name, public_recipe
from surgery.report.heads_page import PromptAttention, write_csv, write_page
from surgery.report.run_report import ReportInputs, write_report
from surgery.run.context import PLATEAU, STATE, Run
from surgery.run.evaluate_stage import evaluate_run
from surgery.run.located_prompts import located_prompts, page_prompts, sample_batch
from surgery.run.watch import Watch
from surgery.splice.graft import check_kept, splice_model, step_zero_gap
from surgery.splice.plan import make_plan
from surgery.splice.state_size import StateCut, choose_channels, cut_to_json, state_contributions
from surgery.train.lora import adapter_targets, refused_by_peft
from surgery.train.optimizer import learning_rates_text
from surgery.train.plateau import plateau_to_json
from surgery.train.training import ADAPTERS, train_model
from surgery.types import HeadSet, to_json


@dataclass(frozen=True)
class Stage:
    """One stage of a run.

    Attributes:
        name: the name of its command.
        what: description for the progress line.
        sections: sections of the recipe, or their fields, that the result depends on.
        reads: files and folders of the run folder that it reads.
        writes: files and folders of the run folder that it writes.
        work: runs the stage. Takes the run and the stage's key. Returns the seconds of what it resumed from, the work
            of earlier sessions; None if the stage never resumes.
        together: True if every process takes part, False for rank 0 only.
        version: increased when the result changes for the same inputs.
        extras: files and folders that it writes for some recipes, and that no later stage reads.
    """

    name: str
    what: str
    sections: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    work: Callable[[Run, str], float | None]
    together: bool = False
    version: int = 1
    extras: tuple[str, ...] = ()

    def key(self, run: Run, settings: Recipe | None = None, inputs: Mapping[str, str] | None = None) -> str:
        """Hash everything that the result depends on: sections of the recipe, inputs and revisions.

        Args:
            run: the run.
            settings: other settings for the same base, teachers and data. By default the recipe of the run.
            inputs: hash by name of what earlier stages write. By default of the files in the run folder.
        """
        settings = settings or run.recipe
        recipe = settings.model_dump(mode="json")
        for unused in ("save_every", "workers"):
            del recipe["train"][unused]
        recipe["train"]["control"] = settings.has_control and self.name in ("control", "evaluate", "export")
        parts = {}
        for part in ("seed", *self.sections):
            section, _, name = part.partition(".")
            parts[part] = recipe[section][name] if name else recipe[section]
        if self.name == "locate" and any(METHODS[method].trains for method in settings.locate.methods):
            parts |= {key: recipe["splice"][key] for key in _BRANCH}  # candidates train the recipe's branch
        if "control" in parts:
            parts["control revision"] = run.control_revision
        if "export" in parts and settings.export.chat_template is not None:
            parts["chat template"] = template_revision(settings.export.chat_template)
        if "train" in parts and run.data_revision:
            parts["data revision"] = run.data_revision
        if settings.plugins:
            parts["plugins"] = {name: _plugin_revision(name) for name in settings.plugins}
        if {"locate", "locate.pairs"} & parts.keys() and run.prompts_revision:
            parts["prompts revision"] = run.prompts_revision
        if self.name in ("splice", "control") and settings.state_size is not None:
            # The channels to keep follow from these, so the control does not depend on the spliced heads.
            parts["state"] = [settings.state_size, *(recipe["locate"][name] for name in _MEASURED)]
        hashes = {r: digest(run.folder / r) if inputs is None else inputs.get(r, "") for r in self.reads_with(settings)}
        return fingerprint([self.name, self.version, run.revision, parts, hashes])

    def reads_with(self, settings: Recipe) -> tuple[str, ...]:
        """Files and folders of the run folder that the stage reads for this recipe."""
        reads = self.reads
        if self.name == "control" and settings.splice is not None and settings.train.trains_spliced_layers:
            reads += ("plan.json",)  # the control trains the layers that have spliced heads in the hybrid
        if self.name == "control" and settings.train.has_plateau:
            reads += (PLATEAU,)  # the control trains as many steps as the hybrid
        return reads

    def outputs(self, run: Run) -> list[Path]:
        """Files and folders that the stage writes for this recipe."""
        more: tuple[str, ...] = ()
        if self.name == "train" and run.recipe.train.has_plateau:
            more = (PLATEAU,)
        if self.name == "control" and run.recipe.has_control:
            more = _CONTROL
        if self.name == "splice" and run.recipe.state_size is not None:
            more = (STATE,)
        return [run.folder / name for name in (*self.writes, *more)]


_BRANCH = ("mode", "init", "random_width", "min_width", "unit", "with_block", "teacher")  # keys of `splice`
_MEASURED = ("examples", "pairs", "filler", "value_digits", "task")  # keys of `locate` for the prompts
_CONTROL = ("no_splice", "no_splice_training.json", "figures/no_splice_training")


def _plugin_revision(module: str) -> str:
    """Hash of a plugin's code: its file, or the Python files of its package. Empty if it has none.

    Args:
        module: its name, as in `plugins` of a recipe. It is imported already.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return ""
    path = Path(file)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return digest(*files)


def _locate(run: Run, key: str) -> None:
    recipe = run.recipe
    assert recipe.splice is not None
    heads = locate_heads(
        run.base(),
        run.tokenizer(),
        recipe.locate,
        recipe.splice,
        recipe.seed,
        public_name(recipe.base.model),
        run.revision,
        run.reporter.progress,
        note=partial(run.reporter.note, "memory"),
    )
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
    write_page(heads, _hidden_attention(run, heads), run.folder / "locate.html")


def _hidden_attention(run: Run, heads: HeadSet) -> PromptAttention:
    """Compute the hidden attention at the query of a few short prompts for every head.

    The best heads have it in full on the first prompt; whole matrices of all prompts would make the page large.
    """
    first, *others = page_prompts(run)
    full = dict.fromkeys([s.head for s in heads.chosen] + [s.head for s in heads.heads[:6]])
    specs = family_of(run.base().config).mixers(run.base().config)
    in_full = prompt_attention(run.base(), run.tokenizer(), [first], specs, list(full))
    return PromptAttention(in_full.prompts + prompt_attention(run.base(), run.tokenizer(), others, specs).prompts)


def _plan(run: Run, key: str) -> None:
    heads = run.heads()
    assert heads is not None
    plan = make_plan(heads, run.base().config, run.recipe.splice, run.recipe.seed, run.teacher_config())
    write_json(run.folder / "plan.json", to_json(plan))


def _splice(run: Run, key: str) -> None:
    plan = run.plan()
    run.save(splice_model(run.base(), plan, run.recipe.splice, run.teacher(), _choose_state(run)), "spliced")
    hybrid, batch = run.model("spliced"), sample_batch(run, 8)  # from its files, as it will be trained
    check_kept(run.base(), hybrid, plan, batch.input_ids, batch.attention_mask)
    gap = step_zero_gap(run.base(), hybrid, batch.input_ids, batch.attention_mask)
    write_json(run.folder / "splice.json", {"max_logit": gap.max_logit, "kl": gap.kl, "same_top": gap.same_top})


def _choose_state(run: Run) -> StateCut | None:
    """Choose the channels of the state to keep, and write state.json. None if the state is not cut."""
    size, section = run.recipe.state_size, run.recipe.locate
    if size is None:
        delete(run.folder / STATE)
        return None
    documents = located_prompts(run, "locate", section.examples, section.pairs)
    contributions = state_contributions(run.base(), run.tokenizer(), documents, section.batch_size)
    cut = choose_channels(contributions, size)
    write_json(run.folder / STATE, cut_to_json(cut, contributions))
    return cut


def _train(run: Run, key: str) -> float:
    return _train_arm(run, key, run.untrained(), run.base, "trained", "training")


def _control(run: Run, key: str) -> float:
    if run.recipe.has_control:
        # The reference of `base_kl` is the untrained control.
        reference = run.base if run.recipe.splice is not None else run.untrained_control
        return _train_arm(run, key, run.untrained_control(), reference, "no_splice", "no_splice_training")
    if run.accelerator.is_main_process:
        for name in _CONTROL:
            delete(run.folder / name)
    return 0.0


def _train_arm(
    run: Run, key: str, model: PreTrainedModel, reference: Callable[[], PreTrainedModel], name: str, curve: str
) -> float:
    """Train one arm, resuming from its newest checkpoint with this key. Writes the model and its losses.

    Args:
        reference: loads the frozen model for the objective `base_kl`.

    Returns:
        Seconds of the steps that earlier sessions trained and the checkpoint has kept. 0 if there was none.
    """
    from surgery.report.figures.curves import training_curve  # matplotlib is slow to import

    is_control, steps = name == "no_splice", run.folder / "steps"
    section = run.as_trained() if is_control else run.recipe.train  # both train the same number of steps
    section = section.at_size(run.base_size)  # at the same rates
    if not is_control:
        run.reporter.note("rates", learning_rates_text(section))
        for stage in (stage for stage in section.sequence if stage.trainable == "lora"):
            count = len(adapter_targets(model, stage.lora))
            run.reporter.note("adapters", f"LoRA on {count} linear layers ({', '.join(stage.lora.targets)})")
            if refused := refused_by_peft(model, stage.lora):
                hint = "Use the export, which has them merged, or remove these targets from train.lora.targets."
                kind = f"{', '.join(refused)} for a {model.config.model_type}"
                run.reporter.note("adapters", f"PEFT loads no adapters of {kind}. {hint}")
    checkpoints = steps / key[:16]
    needs_base = "base.logits" in section.needs
    if not needs_base and any(stage.lora.quantization is not None for stage in section.sequence):
        run.release_base()
    if run.accelerator.is_main_process:
        for other in steps.iterdir() if steps.is_dir() and not steps.is_symlink() else ():
            if other != checkpoints:
                delete(other)
        if not is_control and not checkpoints.is_dir():
            delete(run.folder / ADAPTERS)  # of an earlier training
    watch = Watch(run, model, name, section)
    history = train_model(
        model,
        run.tokenizer(),
        section,
        run.plan(),
        reference() if needs_base else None,
        run.recipe.seed,
        checkpoints,
        run.accelerator,
        watch,
        control=is_control,
        outputs=run.folder,
    )
    if run.accelerator.is_main_process:
        run.save(model, name)
        write_json(run.folder / f"{curve}.json", history)
        if section.has_plateau:
            write_json(run.folder / PLATEAU, plateau_to_json(history, section))
        elif not is_control:
            delete(run.folder / PLATEAU)
        with new_folder(run.folder / "figures" / curve) as figures:
            training_curve(history, figures, curve)
        delete(steps)
    return sum(entry["seconds"] for entry in history[: len(history) - watch.num_steps])


def _evaluate(run: Run, key: str) -> None:
    evaluate_run(run, [stage.name for stage in stages_of(run.recipe) if stage.name not in ("evaluate", "export")])


def _export(run: Run, key: str) -> None:
    heads, plan = run.heads(), run.plan()
    base, path = run.recipe.base, run.folder / "results.json"
    results, base_card = read_json(path), card_of(base.model, base.revision)
    with TemporaryDirectory() as folder:
        with reading(str(path), None, "Delete the file and run the stage evaluate.", RunError):
            card = model_card(run.recipe, heads, plan, results, base_card)
            results.pop("held_out_examples", None)  # an export can be published, so it holds no rows of the data
            results.pop("recipe", None)  # nor local paths; recipe.yaml has none
            files = ("README.md", *(("heads.json",) if heads else ()), "plan.json", "results.json", "recipe.yaml")
            inputs = ReportInputs(run.recipe, plan, heads, results, run.folder / "figures", files)
            page = write_report(inputs, Path(folder) / "report.html")
        export_model(
            run.model("trained"),
            run.tokenizer(),
            run.folder / "export",
            run.recipe.export,
            card,
            plan,
            heads,
            to_yaml(public_recipe(run.recipe)),
            results,
            run.folder / "figures",
            page=page,
        )


_PROMPTS = tuple(f"locate.{key}" for key in ("task", "pairs", "filler", "value_digits", "data", "generated"))
STAGES: tuple[Stage, ...] = (
    Stage("locate", "measuring every head",
          ("base", "locate", "splice.select", "splice.num_heads", "splice.heads"),
          (), ("heads.json", "heads.csv", "locate.html", "locate.json", "figures/locate"), _locate,
          together=True, version=2),
    Stage("plan", "planning the splice", ("base", "splice"), ("heads.json",), ("plan.json",), _plan),
    Stage("splice", "splicing", ("base", "splice", *_PROMPTS), ("plan.json",), ("spliced", "splice.json"), _splice),
    Stage("train", "training the hybrid", ("base", "train"), ("spliced", "plan.json"),
          ("trained", "training.json", "figures/training"), _train, together=True, extras=(ADAPTERS,)),
    Stage("control", "training the control", ("base", "train"), (), (), _control, together=True),
    Stage("evaluate", "evaluating every arm", ("base", "train", *_PROMPTS, "evaluate"),
          ("trained", "no_splice", "spliced", "plan.json", "heads.json"),
          ("results.json", "report.html", "figures/evaluate"), _evaluate, version=2),
    Stage("export", "exporting", ("base", "locate", "splice", "train", "evaluate", "export"),
          ("trained", "results.json", "report.html", "plan.json", "heads.json"), ("export",), _export, version=3),
)  # fmt: skip
# Stages for a base that is a hybrid already (`splice: null`).
TUNING: tuple[Stage, ...] = (
    Stage("train", "training the hybrid", ("base", "train"), (), ("trained", "training.json", "figures/training"),
          _train, together=True, extras=(ADAPTERS,)),
    Stage("control", "training the control", ("base", "control", "train"), (), (), _control, together=True),
    Stage("evaluate", "evaluating every arm", ("base", "control", "train", *_PROMPTS, "evaluate"),
          ("trained", "no_splice"), ("results.json", "report.html", "figures/evaluate"), _evaluate,
          version=2),
    Stage("export", "exporting", ("base", "control", "splice", "train", "evaluate", "export"),
          ("trained", "results.json", "report.html"), ("export",), _export, version=3),
)  # fmt: skip


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """Stages of a recipe, in order."""
    return TUNING if recipe.splice is None else STAGES
