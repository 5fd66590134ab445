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
from surgery.recipe import AnalysisRecipe, Base, PretrainRecipe, Recipe, load_any, load_recipe, to_yaml

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
    folder = runs / loaded.name
    if dry:
        from surgery.dryrun import dry_run

        _print_plan(dry_run(loaded, folder, path))
        return
    from surgery import pipeline

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
    print(to_yaml(load_any(recipe, overrides or ())), end="")


@app.command()
def schema(
    pretrain: Annotated[bool, typer.Option("--pretrain", help="Of pretraining recipes.")] = False,
    analysis: Annotated[bool, typer.Option("--analysis", help="Of analysis recipes.")] = False,
) -> None:
    """Print the JSON schema of recipes, for editors."""
    kind = AnalysisRecipe if analysis else PretrainRecipe if pretrain else Recipe
    print(json.dumps(kind.model_json_schema(), indent=1))


@app.command()
def analyse(
    recipe: RecipePath,
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Score a model with parts of it gone: heads off, layers dropped, attention masked. Nothing is trained."""
    loaded = load_recipe(recipe, overrides or (), AnalysisRecipe)
    from surgery.analyse import analyse as work

    bars = Bars()
    bars.start("analyse", "scoring every arm")
    try:
        found = work(loaded, runs / loaded.name, overwrite, bars.progress)
    finally:
        bars.stop()
    tasks = list(found["chance"])
    table = Table("arm", *(task.replace("_", " ") for task in tasks), "perplexity", title=f"{runs / loaded.name}")
    for name, scores in found["tasks"].items():
        cells = (f"{scores[t]['accuracy']:.3f}{' *' if scores[t].get('worse') else ''}" for t in tasks)
        table.add_row(name, *cells, f"{scores['perplexity']:.3f}")
    table.add_row("chance", *(f"{found['chance'][task]:.3f}" for task in tasks), "")
    out.print(table)
    out.print("* worse than the base: exact McNemar at 0.05, Holm-corrected over the arms", highlight=False)
    if found["minimal"] is not None:
        text = "minimal model: {layers} of {of} layers; KV {accuracy:.3f} against {base:.3f} (p = {p_value:.2g})"
        out.print(text.format(**found["minimal"]), highlight=False)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code it brings.")] = False,
) -> None:
    """Family, mixers, heads, parameters, state and KV bytes of a model."""
    from surgery.checkpoint import load_config
    from surgery.families import family_of, geometry_of
    from surgery.sizes import meta_model, sizes_of

    config = load_config(Base(model=model, revision=revision, trust_remote_code=trust_remote_code))
    family = family_of(config)
    sizes = sizes_of(meta_model(config, trust_remote_code))
    out.print(f"{model}: {config.model_type}, family {family.name}, geometry {geometry_of(config)}", highlight=False)
    new = f", {sizes.new_parameters:,} of them in spliced heads" if sizes.new_parameters else ""
    out.print(f"{sizes.parameters:,} parameters{new}", highlight=False)
    sites = family.sites(config)
    where = f"into {len(sites)} of its layers" if sites else f"nowhere: {family.refuses}"
    out.print(f"attention can be spliced {where}", highlight=False)
    spliced = {site["layer"]: site for site in getattr(config, "splice", None) or []}
    table = Table("mixer", "module", "kind", "heads", "head width", "groups", "state", "spliced heads")
    for spec in family.mixers(config):
        site = spliced.get(spec.layer) if spec.is_ssm else None
        note = f"{site['heads']} {site['mode']}, init {site['init']}" if site else ""
        heads = str(spec.num_heads) if spec.native_heads else f"{spec.num_heads} groups of channels"
        table.add_row(spec.name, spec.path, spec.kind, heads, str(spec.head_dim), str(spec.num_groups),
                      str(spec.state_size), note)  # fmt: skip
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


@app.command()
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a Hub id; repo@revision too.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The checkpoint folder to write.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as stored if not given.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")] = False,
) -> None:
    """Rewrite a checkpoint, mamba_ssm's format too, as safetensors for transformers."""
    from surgery.convert import convert as work

    done = work(Base(model=model), folder, dtype, overwrite)
    out.print(f"wrote {folder}: {done.tensors} tensors in {done.shards} file(s)", highlight=False)


def _print_plan(found: dict[str, Any]) -> None:
    """What a dry run found: the plan, what a step costs, memory, cache."""
    table = Table(title="What the run would do", show_header=False)
    if found["shapes_from"]:
        table.add_row("shapes", f"from {found['shapes_from']}; the checkpoint itself is not at hand")
    origin = (
        "not located yet: counted in the middle layer" if found["heads_from"] == "stand-in" else found["heads_from"]
    )
    heads = found["heads"] if len(found["heads"]) <= 8 else [*found["heads"][:8], f"... {len(found['heads'])} in all"]
    table.add_row("heads", f"{', '.join(heads)} ({origin})")
    for site in found["sites"]:
        text = f"{len(site['heads'])} heads, {site['mode']}, init {site['init']}, query/key {site['qk_width']}, "
        table.add_row(f"layer {site['layer']}", text + f"value {site['v_width']}")
    for key in ("parameters", "new_parameters", "trainable_parameters", "steps", "documents"):
        table.add_row(key.replace("_", " "), f"{found[key]:,}")
    tokens, flops = found["tokens"], found["flops"]
    arms = ", the control included" if found["arms"] > 1 else ""
    table.add_row("tokens", f"{tokens['step']:,} a step, {tokens['run']:,} in all{arms}")
    table.add_row("", f"counted with {found['tokens_counted_with']}")
    table.add_row("FLOPs", f"{flops['step']:.2e} a step, {flops['run']:.2e} in all{arms}; no elementwise work")
    out.print(table, highlight=False)
    _print_memory(found)
    lengths = [key for key in found["cache"]["base"] if key not in ("state", "kv_per_token")]
    out.print("Kept for one sequence while decoding:", highlight=False)
    table = Table("", "states", "KV a token", *(f"{length} tokens" for length in lengths))
    for name, cache in found["cache"].items():
        table.add_row(name, *(_size(cache[key]) for key in ("state", "kv_per_token", *lengths)))
    out.print(table, highlight=False)


def _print_memory(found: dict[str, Any]) -> None:
    """The memory table, and whether it fits."""
    largest, fits = found["largest"], found["fits"]
    batch = f"{largest['rows']} documents of {largest['tokens']} tokens ({largest['source']})"
    out.print(f"Memory of one device while training; largest micro-batch: {batch}:", highlight=False)
    table = Table(show_header=False)
    notes = {
        "optimizer": "AdamW's two moments, fp32",
        "activations": "kept for the backward pass, without kernels",
        "temporaries": "beside them at the worst moment, without kernels",
    }
    for key, size in found["memory"].items():
        table.add_row(key.replace("_", " "), _size(size), notes.get(key, ""))
    out.print(table, highlight=False)
    if fits is None:
        out.print("hardware.memory_gib is not given: whether it fits is not said.", highlight=False)
        return
    verdict = f"fits, {_size(fits['left'])} left" if fits["fits"] else f"does not fit: {_size(-fits['left'])} too much"
    out.print(f"{fits['count']} x {fits['gpu']}, {fits['memory_gib']:g} GiB each: {verdict}.", highlight=False)


def _size(count: int) -> str:
    """Bytes as a person reads them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,} B"


def _print_results(folder: Path) -> None:
    """The summary table of a finished run."""
    path = folder / "results.json"
    if not path.is_file():
        return
    results = json.loads(path.read_text(encoding="utf-8"))
    _print_arms(f"{folder}: heads {', '.join(results['heads'])}", results["arms"])
    if (folder / "export").is_dir():
        out.print(f"hybrid checkpoint: {folder / 'export'}; figures: {folder / 'figures'}", highlight=False)


def _print_arms(title: str, arms: dict[str, Any]) -> None:
    """Every task by arm."""
    table = Table(title=title)
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


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


def quiet() -> None:
    """Libraries say what matters alone; to be called before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def main() -> None:
    """Entry point: quiet libraries, and errors in one line."""
    quiet()
    try:
        app()
    except (SurgeryError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
