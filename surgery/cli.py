"""Command line: parse arguments, print results, set exit codes.

A `SurgeryError` prints one line on standard error and exits with code 2. Any other error is a fault of this library: it
prints one line and exits with code 1. `--debug` adds the traceback.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from surgery import __version__
from surgery.commands import tables
from surgery.commands.arguments import (
    AnalysisPath,
    DryRun,
    First,
    Last,
    Overrides,
    Overwrite,
    PretrainPath,
    RecipePath,
    Runs,
    TrustRemoteCode,
)
from surgery.commands.checkpoints import compare, convert, generate, inspect, publish, verify
from surgery.commands.init import BaseOption, DataFile, Tokenizer, init, recipe_of_base, recipe_without_base
from surgery.commands.progress import NO_READER, Bars, PlainStream, out, show_progress, silence_libraries
from surgery.commands.shipped import examples, recipes, validate
from surgery.commands.show import show
from surgery.commands.threads import set_up_cpu
from surgery.errors import SurgeryError, is_out_of_memory, naming, summary
from surgery.files.atomic import is_full
from surgery.recipe import AnalysisRecipe, PretrainRecipe, Recipe, load_recipe, shipped
from surgery.recipe.public import finetune_name
from surgery.registry import load_plugins


class _Commands(TyperGroup):
    """The commands. An option that belongs before the command is refused with the command to use."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:  # typer has no public name for the error of an unknown option
            option = getattr(error, "option_name", None)
            if option is not None and any(option in parameter.opts for parameter in self.params):
                hint = f"Put it before the command: surgery {option} {ctx.invoked_subcommand} ..."
            elif option is not None and ctx.invoked_subcommand == "generate":
                near = "".join(f" Did you mean {name}?" for name in getattr(error, "possibilities", None) or ())
                hint = f"No such option.{near} Before a prompt with a dash write --: generate CHECKPOINT -- PROMPT"
            else:
                raise
            raise SurgeryError(option, None, hint) from error


app = typer.Typer(
    cls=_Commands,
    help="Turn a pretrained Mamba into a hybrid: locate its retrieval heads, splice in attention, train, export.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_DEBUG = "SURGERY_DEBUG"
_STOPPED = "stopped; run the same command to go on"


@app.command()
def run(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe file, or a shipped recipe's name. Not with --base.")
    ] = None,
    overrides: Overrides = None,
    first: First = None,
    last: Last = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    runs: Runs = Path("runs"),
    base: BaseOption = None,
    data: DataFile = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run all stages of a recipe in RUNS/NAME. With --base, measure a model and write its recipe first."""
    if base is not None:
        if recipe is not None:  # the first override stands where a recipe would
            if "=" not in recipe:
                raise SurgeryError("RECIPE", recipe, "--base writes the recipe. Remove RECIPE, or remove --base.")
            overrides = [recipe, *(overrides or ())]
        path = recipe_of_base(base, data, tokenizer, trust_remote_code, runs, overwrite)
    else:
        path = recipe_without_base(recipe, data, tokenizer, trust_remote_code)
    _run(path, overrides, first, last, overwrite, runs, dry_run)


def _run(
    path: Path,
    overrides: list[str] | None,
    first: str | None,
    last: str | None,
    overwrite: bool,
    runs: Path,
    dry: bool = False,
) -> None:
    if not dry:
        set_up_cpu()
    loaded = load_recipe(path, overrides or ())
    folder = runs / loaded.name
    if dry:
        from surgery.run.dry_run import dry_run
        from surgery.run.pipeline import choose_stages

        choose_stages(loaded, first, last)
        tables.print_plan(dry_run(loaded, folder, path, overwrite))
        return
    from surgery.run.pipeline import run_pipeline

    with Bars() as bars:
        done = run_pipeline(loaded, folder, first, last, overwrite, bars, path)
        if done.accelerator.is_main_process and "evaluate" in done.stages:
            tables.print_results(folder, loaded)
        elif done.accelerator.is_main_process and "locate" in done.stages:
            tables.print_heads(folder)
        done.accelerator.end_training()


@app.command()
def finetune(
    hybrid: Annotated[str, typer.Argument(metavar="HYBRID", help="A hybrid: a checkpoint folder or a Hub id.")],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="Prompts with answers: JSONL, Parquet, a folder, or a Hub id.")
    ],
    overrides: Overrides = None,
    first: First = None,
    last: Last = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    runs: Runs = Path("runs"),
) -> None:
    """Fine-tune a hybrid on your data with the recipe finetune, in RUNS/finetune-DATA."""
    if not data.strip():
        raise SurgeryError("DATA", repr(data), "Name a file, a folder or a data set on the Hub.")
    model, path = (json.dumps(word, ensure_ascii=False) for word in (hybrid, data))
    settings = [f"name={finetune_name(data)}", f"base.model={model}", f"train.sources.0.data.path={path}"]
    with naming("HYBRID", "base.model"), naming("DATA", "data.path"):
        _run(shipped("finetune"), [*settings, *(overrides or ())], first, last, overwrite, runs, dry_run)


@app.command()
def sweep(
    recipe: RecipePath,
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE,VALUE... [KEY=VALUE]...", help="Values of keys to sweep, then other values to set."
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print which stages would run, and which would be shared.")
    ] = False,
    overwrite: Overwrite = False,
    runs: Runs = Path("runs"),
) -> None:
    """Run a recipe with several values of a key, such as splice.num_heads=0,1,2, in RUNS/NAME-sweep."""
    from surgery.recipe.grid import load_grid

    if not dry_run:
        set_up_cpu()
    grid = load_grid(recipe, values)
    folder = runs / f"{grid.name}-sweep"
    from surgery.run.recipe_sweep import plan_sweep, run_sweep
    from surgery.train.training import make_accelerator

    if dry_run:
        tables.print_sweep_plan(plan_sweep(grid, folder, overwrite, recipe), folder)
        return
    with Bars() as bars:
        summary = run_sweep(grid, folder, overwrite, bars, recipe)
        if summary:
            tables.print_sweep(summary, folder)
        make_accelerator().end_training()


def _stage_command(name: str) -> Callable[..., None]:
    def command(
        recipe: RecipePath, overrides: Overrides = None, overwrite: Overwrite = False, runs: Runs = Path("runs")
    ) -> None:
        _run(recipe, overrides, name, name, overwrite, runs)

    return command


for _name, _what in {
    "locate": "Measure every head and write heads.json",
    "plan": "Choose heads from heads.json and write plan.json",
    "splice": "Splice the heads of plan.json into the base, untrained",
    "text": "Let the base write the texts of `base_text`",
    "train": "Train the hybrid, or resume its training",
    "control": "Train the control: the base without a splice",
    "evaluate": "Evaluate base, control and hybrid and write results.json",
    "export": "Export the hybrid and verify the export",
}.items():
    app.command(_name, help=f"{_what}. Runs this stage only, even if it is finished.")(_stage_command(_name))


@app.command()
def schema(
    pretrain: Annotated[bool, typer.Option("--pretrain", help="Print the schema of pretraining recipes.")] = False,
    analysis: Annotated[bool, typer.Option("--analysis", help="Print the schema of analysis recipes.")] = False,
) -> None:
    """Print the JSON schema of recipes, for use in editors."""
    if pretrain and analysis:
        raise SurgeryError("--pretrain", "and --analysis", "Use one of them.")
    kind = AnalysisRecipe if analysis else PretrainRecipe if pretrain else Recipe
    load_plugins()
    print(json.dumps(kind.model_json_schema(), indent=1))


@app.command()
def analyse(
    recipe: AnalysisPath,
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier analysis.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Evaluate a model with heads disabled, layers dropped or attention masked. Trains nothing."""
    set_up_cpu()
    loaded = load_recipe(recipe, overrides or (), AnalysisRecipe)
    from surgery.run.analysis import analyse as work

    with Bars() as bars:
        results = work(loaded, runs / loaded.name, overwrite, bars, recipe)
    tables.print_analysis(results, runs / loaded.name)


@app.command()
def pretrain(
    recipe: PretrainPath,
    overrides: Overrides = None,
    to: Annotated[Path, typer.Option("--to", help="Checkpoint folder to write.")] = Path("runs/pretrained"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that this toolkit wrote.")] = False,
) -> None:
    """Pretrain a small base model from scratch."""
    set_up_cpu()
    loaded = load_recipe(recipe, overrides or (), PretrainRecipe)
    from surgery.run.pretrain import pretrain as work

    with Bars() as bars:
        work(loaded, to, bars, overwrite, recipe)
    out.print(f"wrote {to}")


for _command in (validate, show, inspect, generate, convert, compare, verify, publish, examples, init):
    app.command()(_command)
app.add_typer(recipes, name="recipes")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Print the traceback of an error. Also set by {_DEBUG}=1.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors, but no progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print a line for every step.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()
    if context.invoked_subcommand is None:
        context.fail("Missing command.")
    if debug:
        os.environ[_DEBUG] = "1"
    if quiet and verbose:
        raise SurgeryError("--quiet", "and --verbose", "Use one of them.")
    show_progress("quiet" if quiet else "verbose" if verbose else "normal")


def main() -> None:
    """Run the command line. Silences libraries, and prints an error in one line."""
    silence_libraries()
    streams = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            streams.append(PlainStream(stream))
            setattr(sys, name, streams[-1])
    if os.environ.get("WORLD_SIZE", "1") == "1":  # else exiting could block in a collective operation
        signal.signal(signal.SIGTERM, _stop)
    code, line = _run_command()
    try:
        if line:
            print(line, file=sys.stderr)
    except SystemExit:  # standard error has no reader
        code = NO_READER
    except SurgeryError:  # it is full
        pass
    raise SystemExit(max([code, *(stream.last_flush() for stream in streams)]))


def _run_command() -> tuple[int, str]:
    """Run the command. Return its exit code and the line to print on standard error, if any."""
    try:
        for word in sys.argv[1:]:
            if any("\ud800" <= letter <= "\udfff" for letter in word):  # it cannot be written to recipes and cards
                hint = "The argument is not UTF-8. Rename the file, or set a UTF-8 locale."
                raise SurgeryError("argument", ascii(word), hint)
        app()
        return 0, ""
    except SystemExit as end:
        if end.code in (128 + signal.SIGINT, 128 + signal.SIGTERM):  # typer exits so after an interrupt
            return end.code, _STOPPED
        return (end.code or 0, "") if isinstance(end.code, int | None) else (1, str(end.code))  # as Python does
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, _STOPPED
    except BaseException as error:
        if os.environ.get(_DEBUG, "0") != "0":
            with suppress(SurgeryError):  # standard error is full
                traceback.print_exc()
        code, line = _verdict(error)
        return code, " ".join(line.splitlines())


def _stop(number: int, _: object) -> None:
    """Exit with cleanup on SIGTERM, so that no half-written file remains. A second signal kills the process."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _verdict(error: BaseException) -> tuple[int, str]:
    """Map an error that ends a command to its exit code and its message."""
    if isinstance(error, SurgeryError):
        return 2, f"error: {error}"
    if is_full(error):
        return 2, f"error: the disk is full: {summary(error)}. Free some space and run the same command again."
    if isinstance(error, OSError):
        denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        hint = " Set a file or folder that you can read and write." if denied else ""
        named = error.filename is not None and error.strerror
        return 2, f"error: {error.filename}: {error.strerror}.{hint}" if named else f"error: {error}"
    if is_out_of_memory(error):
        hint = "Reduce locate.batch_size, train.micro_batch or evaluate.batch_size, or set a smaller dtype."
        return 2, f"error: out of memory: {summary(error)}. {hint}"
    hint = "Run `surgery --debug` with the same arguments and report the traceback."
    return 1, f"internal error: {summary(error)}. {hint}"
