"""The stages train and control: train the hybrid, and a model without a splice for as many steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from transformers import PreTrainedModel

from surgery.data.base_text import write_texts
from surgery.data.offsets import encode_alike
from surgery.data.ranking import answer_choices
from surgery.data.user import IndexedDocuments, named_data, open_source
from surgery.errors import PlanError, RecipeError
from surgery.evaluate.evaluation import held_out_documents
from surgery.files.atomic import delete, new_folder, write_json
from surgery.models.config_checks import check_unquantized
from surgery.models.inserted import has_inserted
from surgery.models.loading import check_vocabulary, has_tokenizer, load_config, load_tokenizer
from surgery.models.sizes import meta_model
from surgery.models.spliced import plan_of_hybrid
from surgery.recipe import Recipe, Train
from surgery.run.context import CONTROL, PLATEAU, TRAIN_TEACHER, Run, located_prompts
from surgery.run.locate_stages import state_parts
from surgery.run.stage import Stage
from surgery.run.without_weights import check_installed
from surgery.splice.plan import check_not_spliced
from surgery.train.lora import adapter_targets, refused_by_peft
from surgery.train.numerics import autocast, check_compiler, precision_of
from surgery.train.optimizer import learning_rates_text
from surgery.train.plateau import LAST_STEP, plateau_to_json, stage_lengths
from surgery.train.teacher import check_teacher, check_tokenizers
from surgery.train.training import ADAPTERS, train_model

BASE_TEXT = "base_text.jsonl"  # what the base writes for `base_text`
_WATCHED = 64  # prompts of one measurement during training
_CONTROL = ("no_splice", "no_splice_training.json", "figures/no_splice_training")


class TextStage(Stage):
    name, what = "text", "letting the base write text"
    sections, writes, version = ("base",), (BASE_TEXT,), 2

    def depends_on(self, settings: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"texts": settings.train.base_texts}

    def work(self, run: Run, key: str) -> None:
        assert run.recipe.train.base_texts is not None
        count, tokens = run.recipe.train.base_texts
        path, seed = run.folder / BASE_TEXT, run.recipe.seed
        write_texts(path, run.base(), run.tokenizer(), count, tokens, seed, run.reporter.progress)


class TrainStage(Stage):
    name, what = "train", "training the hybrid"
    sections, reads = ("base", "train"), ("spliced", "plan.json")
    writes, extras = ("trained", "training.json", "figures/training"), (ADAPTERS,)
    together, loads = True, (TRAIN_TEACHER,)

    def inputs(self, recipe: Recipe) -> tuple[str, ...]:
        return (*super().inputs(recipe), *_texts(recipe))

    def outputs(self, recipe: Recipe) -> tuple[str, ...]:
        return (*self.writes, PLATEAU) if recipe.train.has_plateau else self.writes

    def check_configs(self, run: Run) -> None:
        recipe = run.recipe
        if recipe.splice is None:
            check_unquantized(run.config)
            plan_of_hybrid(run.config, recipe.base.model)
        for stage in recipe.train.sequence:
            if stage.trainable == "spliced_layers" and has_inserted(run.config):
                hint = "The attention of this hybrid is in layers of its own. Set all or new_heads."
                raise RecipeError("train.trainable", stage.trainable, hint)
            if stage.trainable == "lora":
                adapter_targets(meta_model(run.config, recipe.base.trust_remote_code), stage.lora)

    def check_machine(self, run: Run) -> None:
        check_installed(run.recipe)
        super().check_machine(run)
        if TRAIN_TEACHER in run.others:
            load_tokenizer(run.others[TRAIN_TEACHER])
        if run.recipe.train.compile:
            check_compiler(run.accelerator.device)

    def check_tokenizers(self, run: Run) -> None:
        teacher = run.others.get(TRAIN_TEACHER)
        if teacher is None:
            return
        if has_tokenizer(teacher):  # `configs/` holds shapes alone
            check_tokenizers(run.tokenizer(), load_tokenizer(teacher))
        for stage in run.recipe.train.sequence:
            check_teacher(load_config(teacher), run.tokenizer(), run.config, stage.align, stage.needs)

    def check_data(self, run: Run) -> None:
        """Check the generated documents, every row of the user's data (not of streams), and the held-out rows.

        Reports the number of rows that `on_bad_row: skip` leaves out, if the data is not a stream.
        """
        train = run.recipe.train
        names = {source.data: name for source, name in named_data(train)}
        sources = [source for stage in train.sequence for source in stage.sources]
        read_once = {(source.data or source, source.max_tokens): source for source in sources}
        for source in read_once.values():
            documents = open_source(source, run.tokenizer(), run.recipe.seed, 0, *run.limits)
            if isinstance(documents, IndexedDocuments) and documents.skipped and source.data in names:
                text = f"{names.pop(source.data)}: {documents.skipped:,} rows cannot be used and are skipped. "
                run.reporter.note("data", f"{text}The first: {documents.reader.first_error}")
        held_out_documents(train, run.tokenizer(), run.recipe.evaluate.examples, *run.limits)

    def work(self, run: Run, key: str) -> float:
        return train_arm(run, key, run.untrained(), run.base)


def _texts(recipe: Recipe) -> tuple[str, ...]:
    return (BASE_TEXT,) if recipe.train.base_texts is not None else ()


class ControlStage(Stage):
    name, what = "control", "training the control"
    sections = ("base", "control", "train")
    together, loads = True, (CONTROL,)

    def inputs(self, recipe: Recipe) -> tuple[str, ...]:
        reads = _texts(recipe)
        if recipe.splice is not None and recipe.train.trains_spliced_layers:
            reads += ("plan.json",)  # it trains the layers that have spliced heads in the hybrid
        if recipe.train.has_plateau:
            reads += (PLATEAU,)  # it trains as many steps as the hybrid
        return reads

    def outputs(self, recipe: Recipe) -> tuple[str, ...]:
        return _CONTROL if recipe.has_control else ()

    def depends_on(self, settings: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
        return state_parts(settings, values)  # of the base, not of the plan: hybrids with other heads share a control

    def check_configs(self, run: Run) -> None:
        control = run.others.get(CONTROL)
        if control is None:
            return
        try:
            check_not_spliced(load_config(control))
        except PlanError:
            hint = "The control must be a model without a splice, and this is a hybrid. Name the hybrid's own base."
            raise PlanError(CONTROL, control.model, hint) from None
        # A checkpoint of mamba_ssm has no tokenizer: it is trained with the hybrid's.
        if has_tokenizer(control) and not encode_alike(load_tokenizer(run.recipe.base), load_tokenizer(control)):
            hint = "Its tokenizer differs from the hybrid's. Use a control with the same tokenizer."
            raise RecipeError(CONTROL, control.model, hint)

    def check_tokenizers(self, run: Run) -> None:
        if CONTROL in run.others:
            control = run.others[CONTROL]
            check_vocabulary(run.tokenizer(), load_config(control), control.model)

    def work(self, run: Run, key: str) -> float:
        if not run.recipe.has_control:
            if run.accelerator.is_main_process:
                for name in _CONTROL:
                    delete(run.folder / name)
            return 0.0
        # The reference of `base_kl` is the untrained control.
        reference = run.base if run.recipe.splice is not None else run.untrained_control
        return train_arm(run, key, run.untrained_control(), reference, is_control=True)


def train_arm(
    run: Run, key: str, model: PreTrainedModel, reference: Callable[[], PreTrainedModel], is_control: bool = False
) -> float:
    """Train one arm, resuming from its newest checkpoint with this key. Writes the model and its losses.

    `reference` loads the frozen model for the objective `base_kl`. Returns the seconds of the steps that earlier
    sessions trained and the checkpoint has kept; 0 if there was none.
    """
    from surgery.report.figures.curves import training_curve  # matplotlib is slow to import

    name, curve = ("no_splice", "no_splice_training") if is_control else ("trained", "training")
    section = run.recipe.train.at_size(run.base_size)  # the control has the same rates
    if is_control:  # and as many steps
        if trained := run.trained_steps():
            section = section.with_steps([stage["steps"] for stage in trained.values()])
    else:
        run.reporter.note("rates", learning_rates_text(section))
        for stage in (stage for stage in section.sequence if stage.trainable == "lora"):
            count = len(adapter_targets(model, stage.lora))
            run.reporter.note("adapters", f"LoRA on {count} linear layers ({', '.join(stage.lora.targets)})")
            if refused := refused_by_peft(model, stage.lora):
                hint = "Use the export, which has them merged, or remove these targets from train.lora.targets."
                kind = f"{', '.join(refused)} for a {model.config.model_type}"
                run.reporter.note("adapters", f"PEFT loads no adapters of {kind}. {hint}")
    steps = run.folder / "steps"
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
    watch = Watch(run, model, section)
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
        texts=run.folder / BASE_TEXT if section.base_texts is not None else None,
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


class Watch:
    """Report the progress of each stage of training, with held-out KV accuracy every `train.check_every` steps.

    Steps of one stage can take ten times as long as those of another. A stage has its largest number of steps until
    its plateau is found.

    Attributes:
        num_steps: number of steps that this session has trained.
    """

    def __init__(self, run: Run, model: PreTrainedModel, section: Train) -> None:
        self.run, self.model, self.section = run, model, section
        self.accuracy, self.num_steps = "", 0
        self.precision = precision_of(section, model)  # in training, the weights of a half base are fp32
        self.prompts = located_prompts(run, "watch", _WATCHED, run.recipe.locate.pairs)
        self._recent: list[tuple[float, float]] = []

    def __call__(self, step: int, history: list[dict[str, float]]) -> None:
        section, recipe, losses = self.section, self.run.recipe, history[-1]
        self.num_steps += 1
        if section.check_every and step % section.check_every == 0 and self.run.accelerator.is_main_process:
            self.model.eval()
            with autocast(self.precision, self.run.accelerator):
                scores = answer_choices(self.model, self.run.tokenizer(), self.prompts, recipe.evaluate.batch_size)
            self.model.train()
            self.accuracy = f", KV {scores.correct.float().mean():.2f}"
        self._recent = [*self._recent[-9:], (losses["tokens"], losses["seconds"])]
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        parts = " ".join(f"{k} {v:.3f}" for k, v in losses.items() if k not in ("step", "tokens", "seconds", LAST_STEP))
        note = f"{parts}{self.accuracy}, {tokens / max(seconds, 1e-9):.0f} tokens/s"
        lengths = stage_lengths(history, section)
        ends = list(accumulate(lengths))
        number = next(number for number, end in enumerate(ends) if step <= end)
        if section.sequence[number].plateau is not None:
            found = [entry["step"] for entry in history if entry.get(LAST_STEP) == ends[number]]
            note += f", plateau at step {found[0]}" if found else ", no plateau yet"
        if len(lengths) > 1:
            note = f"{section.sequence[number].name}: {note}"
        self.run.reporter.progress(step - ends[number] + lengths[number], lengths[number], note)
