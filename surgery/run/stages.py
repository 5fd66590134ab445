"""The stages of a run: what each one reads, calls and writes in the run folder."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import __version__ as accelerate_version
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from surgery import __version__
from surgery.data.encoding import encode
from surgery.errors import RunError, reading
from surgery.evaluate.efficiency import efficiency
from surgery.evaluate.evaluation import Arm, compare_arms, evaluate_model, held_out_documents, p_values
from surgery.evaluate.held_out import advice_of, side_by_side
from surgery.evaluate.prompts import make_prompts
from surgery.export.chat_template import template_revision
from surgery.export.folder import export_model
from surgery.export.model_card import card_of, model_card
from surgery.files.atomic import digest, fingerprint, new_folder, read_json, write_json
from surgery.interventions.heads_off import HEADS_OFF, heads_off
from surgery.locate.hidden_attention import prompt_attention
from surgery.locate.locating import locate_heads
from surgery.models.loading import load_model, load_tokenizer
from surgery.models.lookup import family_of
from surgery.probes.documents import Document
from surgery.probes.kv_retrieval import kv_prompts
from surgery.recipe import Recipe, as_base, to_yaml
from surgery.recipe.public import public_name, public_recipe
from surgery.recipe.section import keys_of_0_1
from surgery.report.figures.attention import attention_map
from surgery.report.figures.costs import costs_by_length
from surgery.report.figures.curves import accuracy_by_pairs, training_curve
from surgery.report.figures.heatmaps import head_maps
from surgery.report.heads_page import PromptAttention, write_csv, write_page
from surgery.report.run_report import ReportInputs, write_report
from surgery.run.context import STATE, Run
from surgery.scoring.ranking import answer_choices
from surgery.splice.graft import splice_model, step_zero_gap
from surgery.splice.plan import make_plan
from surgery.splice.state_size import StateCut, choose_channels, cut_to_json, state_contributions
from surgery.train.training import train_model
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
        work: runs the stage. Takes the run and the stage's key.
        together: True if every process takes part, False for rank 0 only.
        version: increased when the result changes for the same inputs.
    """

    name: str
    what: str
    sections: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    work: Callable[[Run, str], None]
    together: bool = False
    version: int = 1

    def key(self, run: Run, settings: Recipe | None = None, inputs: Mapping[str, str] | None = None) -> str:
        """Hash everything that the result depends on: sections of the recipe, inputs and revisions.

        Args:
            run: the run.
            settings: other settings for the same base, teachers and data. By default the recipe of the run.
            inputs: hash by name of what earlier stages write. By default of the files in the run folder.
        """
        settings = settings or run.recipe
        recipe = keys_of_0_1(Recipe, settings.model_dump(mode="json"))
        for unused in ("no_splice", "save_every"):
            recipe["train"].pop(unused)
        recipe["train"]["control"] = settings.has_control and self.name in ("control", "evaluate", "export")
        parts = {}
        for part in ("seed", *self.sections):
            section, _, name = part.partition(".")
            if not name:
                parts[part] = recipe[section]
            elif name in recipe[section]:  # keys newer than 0.1 are left out at their default
                parts[part] = recipe[section][name]
        if "control" in parts:
            parts["control revision"] = run.control_revision
        if "export" in parts and settings.export.chat_template is not None:
            parts["chat template"] = template_revision(settings.export.chat_template)
        if "train" in parts and run.data_revision:
            parts["data revision"] = run.data_revision
        if self.name in ("splice", "control") and settings.state_size is not None:
            # The channels to keep follow from these, so the control does not depend on the spliced heads.
            parts["state"] = [settings.state_size, *(recipe["locate"].get(name) for name in _MEASURED)]
        reads = self.reads
        if self.name == "control" and settings.splice is not None and settings.train.trains_spliced_layers:
            reads = ("plan.json",)  # the control trains the layers that have spliced heads in the hybrid
        hashes = {r: digest(run.folder / r) if inputs is None else inputs.get(r, "") for r in reads}
        return fingerprint([self.name, self.version, run.revision, parts, hashes])

    def outputs(self, run: Run) -> list[Path]:
        """Files and folders that the stage writes for this recipe."""
        more: tuple[str, ...] = ()
        if self.name == "control" and run.recipe.has_control:
            more = _CONTROL
        if self.name == "splice" and run.recipe.state_size is not None:
            more = (STATE,)
        return [run.folder / name for name in (*self.writes, *more)]


_MEASURED = ("examples", "pairs", "filler", "value_digits")  # keys of `locate` for the prompts
_CONTROL = ("no_splice", "no_splice_training.json", "figures/no_splice_training")


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
    )
    if run.accelerator.is_main_process:
        write_heads(run, heads)


def write_heads(run: Run, heads: HeadSet) -> None:
    """Write the outputs of the stage locate."""
    write_json(run.folder / "locate.json", heads.cost)
    write_json(run.folder / "heads.json", to_json(heads))  # first, since figures and the page could fail
    write_csv(heads, run.folder / "heads.csv")
    with new_folder(run.folder / "figures" / "locate") as figures:
        head_maps(heads, figures)
    write_page(heads, _hidden_attention(run, heads), run.folder / "locate.html")


def _hidden_attention(run: Run, heads: HeadSet) -> PromptAttention:
    """Compute the hidden attention at the query of one short prompt for every head, and in full for the best heads."""
    documents = _prompts(run, "sample", 1, min(16, run.recipe.locate.pairs))
    full = dict.fromkeys([s.head for s in heads.chosen] + [s.head for s in heads.heads[:6]])
    specs = family_of(run.base().config).mixers(run.base().config)
    return prompt_attention(run.base(), run.tokenizer(), documents, specs, list(full))


def _plan(run: Run, key: str) -> None:
    heads = run.heads()
    assert heads is not None
    plan = make_plan(heads, run.base().config, run.recipe.splice, run.recipe.seed, run.teacher_config())
    write_json(run.folder / "plan.json", to_json(plan))


def _splice(run: Run, key: str) -> None:
    hybrid = splice_model(run.base(), run.plan(), run.recipe.splice, run.teacher(), _choose_state(run))
    batch = _sample(run, 8)
    gap = step_zero_gap(run.base(), hybrid, batch.input_ids, batch.attention_mask)
    run.save(hybrid, "spliced")
    write_json(run.folder / "splice.json", {"max_logit": gap.max_logit, "kl": gap.kl, "same_top": gap.same_top})


def _choose_state(run: Run) -> StateCut | None:
    """Choose the channels of the state to keep, and write state.json. None if the state is not cut."""
    size, section = run.recipe.state_size, run.recipe.locate
    if size is None:
        (run.folder / STATE).unlink(missing_ok=True)
        return None
    documents = _prompts(run, "locate", section.examples, section.pairs)
    contributions = state_contributions(run.base(), run.tokenizer(), documents, section.batch_size)
    cut = choose_channels(contributions, size)
    write_json(run.folder / STATE, cut_to_json(cut, contributions))
    return cut


def _prompts(run: Run, purpose: str, count: int, pairs: int) -> list[Document]:
    """Generate evaluation prompts of the form that locating uses."""
    section = run.recipe.locate
    return kv_prompts(purpose, run.recipe.seed, count, pairs, section.filler, section.value_digits)


def _sample(run: Run, count: int, pairs: int = 0) -> Any:
    """Encode a few evaluation prompts of the size that locating uses, on the device."""
    documents = _prompts(run, "sample", count, pairs or run.recipe.locate.pairs)
    return encode(documents, run.tokenizer(), until_answer=True).to(run.accelerator.device)


def _train(run: Run, key: str) -> None:
    _train_arm(run, key, run.untrained(), run.base, "trained", "training")


def _control(run: Run, key: str) -> None:
    if run.recipe.has_control:
        # The reference of `base_kl` is the untrained control.
        reference = run.base if run.recipe.splice is not None else run.untrained_control
        _train_arm(run, key, run.untrained_control(), reference, "no_splice", "no_splice_training")
    elif run.accelerator.is_main_process:
        for name in _CONTROL:
            path = run.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _train_arm(
    run: Run, key: str, model: PreTrainedModel, reference: Callable[[], PreTrainedModel], name: str, curve: str
) -> None:
    """Train one arm, resuming from its newest checkpoint with this key. Writes the model and its losses.

    Args:
        reference: loads the frozen model for the objective `base_kl`.
    """
    section, steps = run.recipe.train, run.folder / "steps"
    checkpoints = steps / key[:16]
    if run.accelerator.is_main_process and steps.is_dir():
        for other in steps.iterdir():
            if other != checkpoints:
                shutil.rmtree(other)
    history = train_model(
        model,
        run.tokenizer(),
        section,
        run.plan(),
        reference() if "base.logits" in section.needs else None,
        run.recipe.seed,
        checkpoints,
        run.accelerator,
        _Watch(run, model, name),
        control=name == "no_splice",
        outputs=run.folder,
    )
    if run.accelerator.is_main_process:
        run.save(model, name)
        write_json(run.folder / f"{curve}.json", history)
        with new_folder(run.folder / "figures" / curve) as figures:
            training_curve(history, figures, curve)
        shutil.rmtree(steps, ignore_errors=True)


_WATCHED = 64  # prompts of one measurement during training


class _Watch:
    """Report the progress of training, with held-out KV accuracy every `train.check_every` steps."""

    def __init__(self, run: Run, model: PreTrainedModel, name: str) -> None:
        self.run, self.model, self.name = run, model, name
        self.accuracy = ""
        self.prompts = _prompts(run, "watch", _WATCHED, run.recipe.locate.pairs)
        self._recent: list[tuple[float, float]] = []

    def __call__(self, step: int, losses: dict[str, float]) -> None:
        section, recipe = self.run.recipe.train, self.run.recipe
        if section.check_every and step % section.check_every == 0 and self.run.accelerator.is_main_process:
            self.model.eval()
            scores = answer_choices(self.model, self.run.tokenizer(), self.prompts, recipe.evaluate.batch_size)
            self.model.train()
            self.accuracy = f", KV {scores.correct.float().mean():.2f}"
        self._recent = [*self._recent[-9:], (losses["tokens"], losses["seconds"])]
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        parts = " ".join(f"{k} {v:.3f}" for k, v in losses.items() if k not in ("step", "tokens", "seconds"))
        note = f"{parts}{self.accuracy}, {tokens / max(seconds, 1e-9):.0f} tokens/s"
        self.run.reporter.progress(step, section.num_all_steps, note)


def _evaluate(run: Run, key: str) -> None:
    began = time.perf_counter()
    recipe = run.recipe
    held_out = held_out_documents(recipe.train, run.tokenizer(), recipe.evaluate.examples)
    prompts = make_prompts(recipe.evaluate, recipe.seed, held_out, run.tokenizer())
    models: dict[str, Callable[[], PreTrainedModel]] = {"base": run.base}
    if recipe.has_control:
        models["no_splice"] = lambda: run.model("no_splice")
    models |= {name: lambda: run.model("trained") for name in (HEADS_OFF, "hybrid")}
    teacher, skipped = _teacher_arm(run)
    models |= teacher
    arms: dict[str, Arm] = {}
    for index, (name, load) in enumerate(models.items()):

        def progress(done: int, total: int, name: str = name, index: int = index) -> None:
            run.reporter.progress(index * total + done, len(models) * total, name)

        model = load()
        with heads_off(model) if name == HEADS_OFF else nullcontext():
            arms[name] = evaluate_model(model, run.tokenizer(), recipe.evaluate, recipe.seed, prompts, progress)
    _write_results(run, arms, began, skipped)


def _teacher_arm(run: Run) -> tuple[dict[str, Callable[[], PreTrainedModel]], dict[str, str]]:
    """Return the teacher (of training, or of the splice) as an arm, or the reason to skip it, by the arm's name."""
    teacher = run.recipe.train.teacher or run.recipe.teacher
    if teacher is None:
        return {}, {}
    vocabularies = [tokenizer.get_vocab() for tokenizer in (load_tokenizer(as_base(teacher)), run.tokenizer())]
    if vocabularies[0] != vocabularies[1]:
        return {}, {"teacher": "its tokenizer differs from the base's, so the prompts would be different tokens"}
    return {"teacher": lambda: load_model(as_base(teacher)).to(run.accelerator.device)}, {}


def _write_results(run: Run, arms: dict[str, Arm], began: float, skipped: dict[str, str]) -> None:
    recipe = run.recipe
    summaries = {name: arm.summary for name, arm in arms.items()}
    sources = [source for stage in recipe.train.sequence for source in stage.sources]
    trained = [source.pairs for source in sources if source.task == "kv_retrieval" and source.weights.uses("answer")]
    span = (min(p[0] for p in trained), max(p[1] for p in trained)) if trained else None
    with new_folder(run.folder / "figures" / "evaluate") as figures:
        if summaries["base"]["kv_retrieval"]:
            accuracy_by_pairs({name: arm["kv_retrieval"] for name, arm in summaries.items()}, figures, span)
        _draw_attention(run, figures)
        costs = _efficiency(run, figures)
    before = [stage.name for stage in stages_of(recipe) if stage.name not in ("evaluate", "export")]
    seconds = {name: (run.rundir.manifest(name) or {}).get("seconds", 0.0) for name in before}
    inserted = [{"form": g.form, "before": g.before} for g in run.plan().grafts if g.form != "head"]
    results = {
        "heads": [str(h) for h in run.plan().heads],
        **({"inserted": inserted} if inserted else {}),
        "arms": summaries,
        "p_values": p_values(arms, "base"),
        **compare_arms(arms, recipe.seed),
        **({"skipped": skipped} if skipped else {}),
        **{key: value for key, value in _own_data(run, arms).items() if value},
        "step_zero_gap": read_json(run.folder / "splice.json") if recipe.splice is not None else None,
        "seconds": {**seconds, "evaluate": round(time.perf_counter() - began, 2)},
        "seed": recipe.seed,
        "versions": versions(),
        **({"efficiency": costs} if costs else {}),
    }
    write_json(run.folder / "results.json", results)
    write_report(
        ReportInputs(recipe, run.plan(), run.heads(), results, run.folder / "figures"), run.folder / "report.html"
    )


def _own_data(run: Run, arms: Mapping[str, Arm]) -> dict[str, Any]:
    """Entries of results.json on the user's data, in addition to the accuracies. They may be empty."""
    summaries = {name: arm.summary for name, arm in arms.items()}
    return {
        "answer_spans": run.answer_spans,
        "advice": advice_of(run.recipe.train, summaries, run.answer_spans),
        "held_out_examples": side_by_side({name: arm.examples for name, arm in arms.items()}),
    }


def _efficiency(run: Run, figures: Path) -> dict[str, Any] | None:
    """Measure time and memory of the base, the hybrid and a Transformer, if `evaluate.efficiency` is set."""
    section = run.recipe.evaluate.efficiency
    if section is None:
        return None
    costs = efficiency({"base": run.base(), "hybrid": run.model("trained")}, section)
    costs_by_length(costs["arms"], figures, costs["where"])
    return costs


def _draw_attention(run: Run, figures: Path) -> None:
    """Draw the attention of the first spliced head from the query over one prompt, before and after training."""
    batch = _sample(run, 1, pairs=min(16, run.recipe.locate.pairs))
    plan, rows = run.plan(), {}
    before = run.base if run.recipe.splice is None else partial(run.model, "spliced")
    for label, load in (("before training", before), ("after training", partial(run.model, "trained"))):
        with torch.no_grad():
            output = load()(batch.input_ids, use_cache=False, splice_queries=batch.query)
        rows[label] = output.splice_attentions[0][0, 0, 0].cpu().numpy()
    tokens = [run.tokenizer().decode([i]) for i in batch.input_ids[0].tolist()]
    marks = {"segment end": batch.segment_end, "answer token": batch.answer_token, "query": batch.query}
    places = {name: int(position[0, 0]) for name, position in marks.items()}
    attention_map(rows, tokens, places, figures, str(plan.heads[0]))


def _export(run: Run, key: str) -> None:
    heads, plan = run.heads(), run.plan()
    base, path = run.recipe.base, run.folder / "results.json"
    results, base_card = read_json(path), card_of(base.model, base.revision)
    with TemporaryDirectory() as folder:
        page = run.folder / "report.html"
        with reading(str(path), None, "Delete the file and run the stage evaluate.", RunError):
            card = model_card(run.recipe, heads, plan, results, base_card)
            if results.pop("held_out_examples", None):  # an export can be published, so it holds no rows of the data
                inputs = ReportInputs(run.recipe, plan, heads, results, run.folder / "figures")
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


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    return {
        "surgery": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "accelerate": accelerate_version,
    }


_PROMPTS = ("locate.pairs", "locate.filler", "locate.value_digits")  # for the figure of the attention
STAGES: tuple[Stage, ...] = (
    Stage("locate", "measuring every head",
          ("base", "locate", "splice.select", "splice.num_heads", "splice.heads"),
          (), ("heads.json", "heads.csv", "locate.html", "locate.json", "figures/locate"), _locate,
          together=True, version=2),
    Stage("plan", "planning the grafts", ("base", "splice"), ("heads.json",), ("plan.json",), _plan),
    Stage("splice", "splicing", ("base", "splice"), ("plan.json",), ("spliced", "splice.json"), _splice),
    Stage("train", "training the hybrid", ("base", "train"), ("spliced", "plan.json"),
          ("trained", "training.json", "figures/training"), _train, together=True),
    Stage("control", "training the control", ("base", "train"), (), (), _control, together=True),
    Stage("evaluate", "evaluating every arm", ("base", "train", *_PROMPTS, "evaluate"),
          ("trained", "no_splice", "spliced", "plan.json"), ("results.json", "report.html", "figures/evaluate"),
          _evaluate, version=2),
    Stage("export", "exporting", ("base", "locate", "splice", "train", "evaluate", "export"),
          ("trained", "results.json", "report.html", "plan.json", "heads.json"), ("export",), _export, version=2),
)  # fmt: skip
# Stages for a base that is a hybrid already (`splice: null`).
TUNING: tuple[Stage, ...] = (
    Stage("train", "training the hybrid", ("base", "train"), (), ("trained", "training.json", "figures/training"),
          _train, together=True),
    Stage("control", "training the control", ("base", "control", "train"), (), (), _control, together=True),
    Stage("evaluate", "evaluating every arm", ("base", "control", "train", *_PROMPTS, "evaluate"),
          ("trained", "no_splice"), ("results.json", "report.html", "figures/evaluate"), _evaluate,
          version=2),
    Stage("export", "exporting", ("base", "control", "splice", "train", "evaluate", "export"),
          ("trained", "results.json", "report.html"), ("export",), _export, version=2),
)  # fmt: skip


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """Stages of a recipe, in order."""
    return TUNING if recipe.splice is None else STAGES
