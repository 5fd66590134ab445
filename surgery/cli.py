"""The command line. Owns: parsing, printing, exit codes. Must never know: how anything is done.

A `SurgeryError` becomes one line on standard error and exit code 2, without a traceback.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from surgery import __version__
from surgery.errors import SurgeryError
from surgery.recipe import Base, PretrainRecipe, Recipe, is_pretraining, load_recipe, to_yaml

app = typer.Typer(
    help="Give a Mamba a memory: locate its retrieval heads, splice attention in there, train briefly, export.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
out = Console(width=None if sys.stdout.isatty() else 140)  # a pipe has no width: do not cut names

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file, such as recipes/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as train.steps=100.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what another recipe left in the folder.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where run folders are.")]


class Bars:
    """One bar a stage that says what is being done; plain lines where there is no terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def start(self, stage: str, what: str) -> None:
        """A stage begins."""
        if not out.is_terminal:
            out.print(f"{stage:>9}  {what} ...", highlight=False)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=out, transient=True)
        self._task = self._bar.add_task(f"{stage:>9}  {what}", total=None, note="")
        self._bar.start()

    def progress(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` units of work."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, note=note)
        elif total >= 50 and done * 10 // total > (done - 1) * 10 // total:
            out.print(f"{'':>9}  {done} of {total}  {note}", highlight=False)

    def stop(self) -> None:
        """Removes the bar, also after an error."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def finish(self, stage: str, seconds: float) -> None:
        """A stage is done."""
        self.stop()
        out.print(f"{stage:>9}  done in {seconds:.1f} s", highlight=False)

    def skip(self, stage: str, why: str) -> None:
        """A stage is not run."""
        out.print(f"{stage:>9}  skipped: {why}", highlight=False)


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    first: Annotated[str | None, typer.Option("--from", help="Run this stage again, and begin there.")] = None,
    last: Annotated[str | None, typer.Option("--to", help="Stop after this stage.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; load no weights.")] = False,
    overwrite: Overwrite = False,
    runs: Runs = Path("runs"),
) -> None:
    """Carry out a recipe, all stages, into RUNS/NAME."""
    _run(recipe, overrides, first, last, overwrite, runs, dry_run)


def _run(
    path: Path,
    overrides: list[str] | None,
    first: str | None,
    last: str | None,
    overwrite: bool,
    runs: Path,
    dry: bool = False,
) -> None:
    loaded = load_recipe(path, overrides or ())
    from surgery import pipeline

    folder = runs / loaded.name
    if dry:
        _print_plan(pipeline.dry_run(loaded, folder))
        return
    bars = Bars()
    try:
        done = pipeline.run_pipeline(loaded, folder, first, last, overwrite, bars)
        if done.accelerator.is_main_process and "evaluate" in done.stages:
            _print_results(folder)
        done.accelerator.end_training()
    finally:
        bars.stop()


def _stage_command(name: str, what: str) -> None:
    def command(
        recipe: RecipePath, overrides: Overrides = None, overwrite: Overwrite = False, runs: Runs = Path("runs")
    ) -> None:
        _run(recipe, overrides, name, name, overwrite, runs)

    command.__doc__ = f"{what}. This stage alone, again if it is finished."
    app.command(name)(command)


for _name, _what in {
    "locate": "Measure every head, write heads.json",
    "plan": "From heads.json to plan.json",
    "splice": "From plan.json to a hybrid, untrained",
    "train": "Train the hybrid, or go on with it",
    "control": "Train the control, without a splice",
    "evaluate": "Score every arm, write results.json",
    "export": "Write the checkpoint folder, verified",
}.items():
    _stage_command(_name, _what)


@app.command()
def validate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Check a recipe and print it with all defaults."""
    if is_pretraining(recipe):
        print(to_yaml(load_recipe(recipe, overrides or (), PretrainRecipe)), end="")
    else:
        print(to_yaml(load_recipe(recipe, overrides or ())), end="")


@app.command()
def schema(pretrain: Annotated[bool, typer.Option("--pretrain", help="Of pretraining recipes.")] = False) -> None:
    """Print the JSON schema of recipes, for editors."""
    print(json.dumps((PretrainRecipe if pretrain else Recipe).model_json_schema(), indent=1))


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code it brings.")] = False,
) -> None:
    """Mixers, heads, parameters, state and KV bytes of a model."""
    from surgery.checkpoint import load_config
    from surgery.families import family_of, geometry_of
    from surgery.sizes import meta_model, sizes_of

    config = load_config(Base(model=model, revision=revision, trust_remote_code=trust_remote_code))
    family = family_of(config)
    sizes = sizes_of(meta_model(config, trust_remote_code))
    out.print(f"{model}: {config.model_type}, family {family.name}, geometry {geometry_of(config)}", highlight=False)
    new = f", {sizes.new_parameters:,} of them in spliced heads" if sizes.new_parameters else ""
    out.print(f"{sizes.parameters:,} parameters{new}", highlight=False)
    spliced = {site["layer"]: site for site in getattr(config, "splice", None) or []}
    table = Table("layer", "mixer", "heads", "head width", "groups", "state", "spliced heads")
    for spec in family.mixers(config):
        site = spliced.get(spec.layer)
        note = f"{site['heads']} {site['mode']}, init {site['init']}" if site else ""
        table.add_row(*map(str, (spec.layer, spec.path, spec.num_heads, spec.head_dim, spec.num_groups,
                                 spec.state_size, note)))  # fmt: skip
    out.print(table)
    table = Table("tokens", "state bytes", "KV bytes", title="Kept for one sequence, fp32")
    for label, tokens in (("1k", 1024), ("32k", 32 * 1024), ("1M", 1024 * 1024)):
        table.add_row(label, f"{sizes.state_bytes:,}", f"{sizes.kv_bytes(tokens):,}")
    out.print(table)


@app.command()
def generate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder or a Hub id.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to go on from; \\n is a new line.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 16,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of taking the likeliest.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code it brings.")] = False,
) -> None:
    """Let a checkpoint go on with a text."""
    from surgery.checkpoint import load_model, load_tokenizer

    base = Base(model=checkpoint, dtype="auto", trust_remote_code=trust_remote_code)
    model, tokenizer = load_model(base), load_tokenizer(base)
    inputs = tokenizer(prompt.replace("\\n", "\n"), return_tensors="pt", add_special_tokens=False)
    if inputs["input_ids"].shape[1] == 0:
        raise SurgeryError("PROMPT", repr(prompt), "Give at least one token to go on from.")
    tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=sample)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


@app.command()
def pretrain(
    recipe: RecipePath,
    overrides: Overrides = None,
    to: Annotated[Path, typer.Option("--to", help="The checkpoint folder to write.")] = Path("runs/pretrained"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")] = False,
) -> None:
    """Train a small base from nothing, as the shipped one was."""
    loaded = load_recipe(recipe, overrides or (), PretrainRecipe)
    from surgery.train.pretrain import pretrain as work

    bars = Bars()
    bars.start("pretrain", f"training {loaded.name}")
    try:
        work(loaded, to, bars.progress, overwrite)
    finally:
        bars.stop()
    out.print(f"wrote {to}", highlight=False)


def _print_plan(found: dict[str, Any]) -> None:
    table = Table(title="What the run would do", show_header=False)
    located = "as located" if found["located"] else "not located yet: counted as if they were"
    table.add_row("heads", f"{', '.join(found['heads'])} ({located})")
    for site in found["sites"]:
        text = f"{len(site['heads'])} heads, {site['mode']}, init {site['init']}, query/key {site['qk_width']}, "
        table.add_row(f"layer {site['layer']}", text + f"value {site['v_width']}")
    for key in ("parameters", "new_parameters", "trainable_parameters", "kv_bytes_per_token", "steps", "documents"):
        table.add_row(key.replace("_", " "), f"{found[key]:,}")
    table.add_row("state bytes", f"base {found['state_bytes']['base']:,}, hybrid {found['state_bytes']['hybrid']:,}")
    out.print(table)


def _print_results(folder: Path) -> None:
    """The summary table of a finished run."""
    path = folder / "results.json"
    if not path.is_file():
        return
    results = json.loads(path.read_text(encoding="utf-8"))
    arms = results["arms"]
    table = Table(title=f"{folder}: heads {', '.join(results['heads'])}")
    table.add_column("")
    for name in arms:
        table.add_column(name.replace("_", " "), justify="right")
    for pairs in next(iter(arms.values()))["kv_retrieval"]:
        table.add_row(f"KV, {pairs} pairs", *(f"{arm['kv_retrieval'][pairs]['accuracy']:.3f}" for arm in arms.values()))
    for task in ("letter_choice", "option_text", "closed_book", "closed_book_seen"):
        table.add_row(task.replace("_", " "), *(f"{arm[task]['accuracy']:.3f}" for arm in arms.values()))
    for key in ("perplexity", "perplexity_seen"):
        table.add_row(key.replace("_", " "), *(f"{arm[key]:.3f}" for arm in arms.values()))
    out.print(table)
    if (folder / "export").is_dir():
        out.print(f"hybrid checkpoint: {folder / 'export'}; figures: {folder / 'figures'}", highlight=False)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


def main() -> None:
    """Entry point: quiet libraries, and errors in one line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    try:
        app()
    except (SurgeryError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
