"""Measure hybrids from 256 to 32,768 tokens: time, memory, and accuracy.

    python -m bench.studies.lengths               run the arms that are not finished, then write tables and figure
    python -m bench.studies.lengths --report      write tables and figure of the finished arms

Each arm is one file in `--folder`:

- `cost-WAY-LENGTH`: base and hybrid of random weights, 4 of 24 layers of the shape of mamba2-130m, one spliced head.
  Prefill and decoding in CPU seconds of one thread, peak bytes without the weights. The ways of prefill: `whole`, one
  call with the scan of transformers; `segments`, calls of 1,024 tokens that continue the cache; `library`, one call
  with the scans of surgery.models.torch_scans.
- `CONDITION-MODEL-LENGTH`: right answers of checkpoints/pico-far, its control and the hybrid of the quickstart, the
  attention of the spliced head on the value, and the norm of the stream after the first layer at the question. The
  control is read from `--control`, the folder of a finished quickstart; without it, its arms are skipped.
- `train-MODEL`: control and hybrid trained as in the quickstart, for 150 steps, with two documents of up to 2,048
  tokens in each. They are saved in `--models`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Mamba2Config, PreTrainedModel

from bench.common import (
    CHECKPOINTS,
    FAR,
    ROOT,
    RUNS,
    accuracy_cell,
    as_digits,
    finished,
    load,
    markdown_table,
    parser,
    quiet_on_one_thread,
    save,
    spliced_at,
)
from bench.studies.lengths.prompts import CONDITIONS, LongDictionary, prompt
from bench.studies.site_selection.tables import fill
from surgery.data.choice_scores import arguments
from surgery.data.ranking import choice_scores, query_batches
from surgery.files.atomic import fingerprint, read_json
from surgery.models.cache import cache_tensors
from surgery.models.loading import load_model, load_tokenizer
from surgery.models.lookup import block_of, family_of
from surgery.models.meters import Meter, belongings
from surgery.models.torch_scans import torch_scans
from surgery.probes.registry import register_probe
from surgery.recipe import Base, Train, load_recipe
from surgery.report.figures.canvas import (
    BLUE,
    GREY,
    OCHRE,
    ORANGE,
    SKY,
    add_axes,
    add_heading,
    new_figure,
    plain_log_ticks,
    style,
)
from surgery.report.figures.canvas import save as save_figure
from surgery.splice.graft import splice_model
from surgery.stats import wilson
from surgery.train.training import train_model
from surgery.types import HeadId, plan_from_json

LENGTHS = tuple(2**n for n in range(10, 16))
SHORT_TOO = (256, 512, *LENGTHS)
WAYS = ("whole", "segments", "library")
SEGMENT = 1024
LAYERS, NEW_TOKENS = 4, 16
MODELS = ("base", "control", "hybrid", "control-2k", "hybrid-2k")
LONG_SOURCE = {
    "task": "long_dictionary", "pairs": [8, 32], "filler": [0, 12], "questions": 12, "max_tokens": 2048, "rows": 2,
    "train_eos": True, "weights": {"answer": 2.0, "attention": 1.0},
}  # fmt: skip
EXAMPLES = {4096: 50, 8192: 50, 16384: 50, 32768: 25}  # prompts; 100 of shorter lengths
STEPS = 150  # of training with long documents
PAGE = ROOT / "paper" / "LENGTHS.md"
PUBLISHED = ROOT / "paper" / "evidence" / "lengths"
VERSION = 1  # increase it when an arm is measured in another way


def random_models() -> dict[str, PreTrainedModel]:
    """A base of random weights, and its hybrid with one head in the middle layer."""
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=768, num_hidden_layers=LAYERS, num_heads=24, head_dim=64, state_size=128, n_groups=1,
        vocab_size=50288, tie_word_embeddings=True,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    hybrid, _ = spliced_at(base, HeadId(LAYERS // 2, 0))
    return {"base": base, "hybrid": hybrid}


@torch.no_grad()
def prefill(model: PreTrainedModel, ids_BT: Tensor, segment: int) -> tuple[Tensor, Any]:
    """Run a prompt in segments. Returns the likeliest next token (B,1) and the cache."""
    cache = None
    for start in range(0, ids_BT.shape[1], segment):
        given = arguments(model, ids_BT[:, start : start + segment], None, start)
        output = model(**given, cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache
    return output.logits[:, -1:].argmax(-1), cache


@torch.no_grad()
def decode(model: PreTrainedModel, token_B1: Tensor, cache: Any, past: int) -> None:
    """Decode greedily after a prompt of `past` tokens."""
    for step in range(NEW_TOKENS):
        output = model(**arguments(model, token_B1, None, past + step), cache=cache, use_cache=True)
        token_B1 = output.logits[:, -1:].argmax(-1)


def run_cost(way: str, length: int) -> dict[str, Any]:
    """Time and memory of base and hybrid at one length: medians of three passes up to 4,096 tokens, else of one."""
    models = random_models()
    ids_BT = torch.randint(50288, (1, length), generator=torch.Generator().manual_seed(0))
    outcome: dict[str, Any] = {}
    for name, model in models.items():
        segment = SEGMENT if way == "segments" else length
        with torch_scans(model) if way == "library" else nullcontext():
            first, later = [], []
            for _ in range(3 if length <= 4096 else 1):
                began = time.process_time()
                with Meter(belongings(model)) as meter:
                    token, cache = prefill(model, ids_BT, segment)
                halfway = time.process_time()
                states, keys_values = (sum(t.nbytes for t in tensors) for tensors in cache_tensors(cache))
                began_decoding = time.process_time()
                decode(model, token, cache, length)
                first.append(halfway - began)
                later.append((time.process_time() - began_decoding) / NEW_TOKENS)
        outcome[name] = {
            "prefill": median(first),
            "decode": median(later),
            "peak_bytes": meter.peak,
            "state_bytes": states,
            "kv_bytes": keys_values,
        }
    return {**outcome, "resident_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


@torch.no_grad()
def run_accuracy(condition: str, folder: Path, length: int) -> dict[str, Any]:
    """Rank the values of the prompts of one length, each in a batch of its own, so that none is padded."""
    model, tokenizer = load_model(Base(model=str(folder))).eval(), load_tokenizer(Base(model=str(FAR)))
    correct, masses, tokens, depths = [], [], [], []
    norms: list[float] = []
    first = block_of(model, 0, family_of(model.config).mixers(model.config)[0])
    first.register_forward_hook(lambda _, __, out: norms.append(round(float(out[0, -1].norm()), 3)))
    began = time.process_time()
    with torch_scans(model):
        for number in range(EXAMPLES.get(length, 100)):
            (batch,) = query_batches([prompt(condition, length, number, tokenizer)], tokenizer, 1)
            rows = {} if not getattr(model.config, "splice", None) else {"splice_queries": batch.query}
            output = model(batch.input_ids, use_cache=False, logits_to_keep=1, **rows)
            correct.append(bool(choice_scores(output.logits[:, -1], batch).correct))
            tokens.append(batch.input_ids.shape[1])
            depths.append(int(batch.answer_token))
            if rows:
                (row_BHQS,) = output.splice_attentions
                masses.append(round(float(row_BHQS[0, 0, 0, batch.answer_token[0, 0]]), 5))
    return {
        "correct": as_digits(correct),
        "tokens": sum(tokens) / len(tokens),
        "value_at": depths,
        "stream": norms,
        **({"attention": masses} if masses else {}),
        "seconds": time.process_time() - began,
    }


def run_training(name: str, folder: Path) -> dict[str, Any]:
    """Train a model with long documents, and save it. An interrupted training resumes."""
    register_probe("long_dictionary")(LongDictionary)
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml")
    assert recipe.splice is not None
    sources = [LONG_SOURCE, *(source.model_dump() for source in recipe.train.sources)]
    section = Train.model_validate({**recipe.train.model_dump(), "sources": sources, "steps": STEPS})
    plan = plan_from_json(read_json(CHECKPOINTS / "quickstart" / "plan.json"))
    (base, tokenizer), is_control = load(FAR), name.startswith("control")
    model = load(FAR)[0] if is_control else splice_model(base, plan, recipe.splice)
    steps = folder.with_name(f"{folder.name}-steps")
    history = train_model(model, tokenizer, section, plan, base, recipe.seed, steps, control=is_control)
    model.save_pretrained(folder)
    return {"losses": {loss: [round(entry[loss], 4) for entry in history] for loss in ("answer", "base_kl")}}


def experiments(control: Path, models: Path) -> dict[str, partial[dict[str, Any]]]:
    """All arms by name, the short ones first."""
    folders = {"base": FAR, "control": control / "no_splice", "hybrid": CHECKPOINTS / "quickstart" / "export"}
    found: dict[str, partial[dict[str, Any]]] = {}
    for name in ("hybrid-2k", "control-2k"):
        folders[name] = models / name
        found[f"train-{name}"] = partial(run_training, name, models / name)
    for length in SHORT_TOO:
        for condition in CONDITIONS:
            for name, folder in folders.items():
                found[f"{condition}-{name}-{length}"] = partial(run_accuracy, condition, folder, length)
        for way in WAYS if length in LENGTHS else ():
            found[f"cost-{way}-{length}"] = partial(run_cost, way, length)
    return found


def key_of(name: str) -> str:
    """Hash of the definition of an arm."""
    return fingerprint([VERSION, name, LAYERS, NEW_TOKENS, SEGMENT])


def tables(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Markdown tables of the finished arms, by their place in the page."""
    made = {}
    rows = []
    for length in LENGTHS:
        costs = {way: results.get(f"cost-{way}-{length}") for way in WAYS}
        for way, cost in costs.items():
            if cost is not None:
                base, hybrid = cost["base"], cost["hybrid"]
                rows.append([
                    f"{length:,}", f"`{way}`",
                    *(f"{arm['prefill']:.2f}" for arm in (base, hybrid)),
                    *(f"{arm['decode'] * 1000:.0f}" for arm in (base, hybrid)),
                    *(f"{arm['peak_bytes'] / 2**20:,.0f}" for arm in (base, hybrid)),
                    f"{hybrid['kv_bytes'] / 2**20:.1f}",
                ])  # fmt: skip
    if rows:
        header = ["tokens", "prefill", "base, s", "hybrid, s", "base, ms a token", "hybrid, ms a token",
                  "base, peak MiB", "hybrid, peak MiB", "hybrid, KV MiB"]  # fmt: skip
        made["lengths-cost"] = markdown_table(header, rows) + "\n"
    rows = []
    for condition, label in CONDITIONS.items():
        for length in SHORT_TOO:
            arms = [results.get(f"{condition}-{name}-{length}") for name in MODELS]
            if any(arms):
                cells = [accuracy_cell(arm["correct"]) if arm else "" for arm in arms]
                rows.append([label, f"{length:,}", *cells])
    if rows:
        header = ["prompt", "tokens", *MODELS]
        made["lengths-accuracy"] = markdown_table(header, rows) + "\n"
    return made


@style()
def figure(results: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Draw accuracy, prefill, decoding and memory by length: `lengths.*`."""
    canvas = new_figure(9.4, 5.4)
    note = "Left: checkpoints/pico-far, 95% intervals. Right: random weights, 4 of mamba2-130m's 24 layers; CPU time."
    add_heading(canvas, "Accuracy, time and memory from 256 to 32,768 tokens", note)
    looks = dict(zip(MODELS, ((GREY, "s"), (ORANGE, "^"), (BLUE, "o"), (OCHRE, "v"), (SKY, "D")), strict=True))
    rows: list[list[Any]] = []
    for place, (condition, label) in enumerate(CONDITIONS.items()):
        axes = add_axes(canvas, 0.6, 0.85 + 2.3 * place, 2.9, 1.5)
        axes.set_title(f"accuracy: {label}", size=9)
        for name, (colour, marker) in looks.items():
            arms = {n: results[key] for n in SHORT_TOO if (key := f"{condition}-{name}-{n}") in results}
            values = {n: wilson(arm["correct"].count("1"), len(arm["correct"])) for n, arm in arms.items()}
            axes.plot(
                list(values), [v.value for v in values.values()], color=colour, marker=marker, markersize=4, label=name
            )
            for n, v in values.items():
                axes.plot([n, n], [v.low, v.high], color=colour, linewidth=0.9)
                rows.append(["accuracy", condition, name, n, v.value])
        axes.set_ylim(0, 1.02)
        _by_length(axes, SHORT_TOO)
        if place == 0:
            axes.legend(fontsize=8, loc="lower left")
    panels = (
        ("prefill, CPU s", "prefill", 1.0),
        ("peak memory, MiB", "peak_bytes", 2.0**-20),
        ("decoding, CPU ms a token", "decode", 1e3),
    )
    colours = {"whole": ORANGE, "segments": BLUE, "library": SKY}
    for place, (title, field, factor) in enumerate(panels):
        axes = add_axes(canvas, 4.3 + 2.6 * (place % 2), 0.85 + 2.3 * (place // 2), 1.9, 1.5)
        axes.set_title(title, size=9)
        for way, colour in colours.items():
            for name, line in (("base", ":"), ("hybrid", "-")):
                arms = {n: results[key] for n in LENGTHS if (key := f"cost-{way}-{n}") in results}
                values = [arm[name][field] * factor for arm in arms.values()]
                if values:
                    label = f"{way}, {name}"
                    axes.plot(list(arms), values, line, color=colour, linewidth=1.2, label=label)
                rows += [[field, way, name, n, value] for n, value in zip(arms, values, strict=True)]
        if field == "decode":
            axes.set_ylim(0)
        else:
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis)
        _by_length(axes, LENGTHS)
    canvas.legend(*axes.get_legend_handles_labels(), loc=(0.75, 0.16), fontsize=8, ncols=1)
    save_figure(canvas, folder, "lengths", ["what", "condition", "model", "tokens", "value"], rows)


def _by_length(axes: Any, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axes.set_xticks(lengths[::2], [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths[::2]])
    axes.set_xlabel("tokens", size=8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the arms, and write the report."""
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, default=PUBLISHED)
    options.add_argument("--control", type=Path, default=RUNS / "quickstart")
    options.add_argument("--models", type=Path, default=RUNS / "lengths", help="folder of the trained models")
    options.add_argument("--report", action="store_true", help="run nothing")
    options.add_argument("--only", metavar="ARM", help="run one arm in this process, such as cost-whole-1024")
    options.add_argument("--kind", default="", help="run the arms whose names begin so, such as cost")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    arms = experiments(args.control, args.models)
    if args.only is not None:
        save(args.folder / f"{args.only}.json", {"key": key_of(args.only), **arms[args.only]()})
        return 0
    for name, arm in () if args.report else arms.items():
        if not name.startswith(args.kind) or finished(args.folder / f"{name}.json", key_of(name)) is not None:
            continue
        if arm.func is run_accuracy and not arm.args[1].is_dir():
            print(f"{name} skipped: there is no {arm.args[1]}", flush=True)
            continue
        if arm.func is run_cost:  # in a process of its own, for the resident memory
            command = [sys.executable, "-m", "bench.studies.lengths", "--only", name, "--folder", str(args.folder)]
            subprocess.run(command, check=True)
        else:
            save(args.folder / f"{name}.json", {"key": key_of(name), **arm()})
        print(f"{name} finished", flush=True)
    files = {path.stem: path for path in args.folder.glob("*-*.json")}
    found = {name: read_json(path) for name, path in files.items()}
    made = tables(found)
    print("\n".join(made.values()))
    if found:
        figure(found, args.folder)
    if args.folder == PUBLISHED:
        fill(PAGE, made)
    return 0
