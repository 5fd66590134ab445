"""Compare QLoRA with LoRA on checkpoints/pico-far, and measure the bytes of weights at the shape of mamba2-130m.

    python -m bench.studies.qlora              run the arms that are not finished, then write the tables
    python -m bench.studies.qlora --report     write the tables and the figure of the finished arms

It needs bitsandbytes (extra `qlora`). Each arm is one file in `--folder`:

- `METHOD_seedN`: the quickstart's splice and documents, with LoRA on in_proj and out_proj. Losses of every step, and
  right answers of the model before merging, after merging into the unquantized weights, and into dequantized ones.
- `locate`: heads located on the base, and on the base with its weights rounded to 4 bits. Locating reads columns of
  out_proj, so it does not run on quantized layers.
- `bytes`: weights of a random hybrid of the shape of mamba2-130m.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mamba2Config, PreTrainedModel, PreTrainedTokenizerBase

from bench.common import (
    CHECKPOINTS,
    FAR,
    ROOT,
    accuracy_cell,
    as_digits,
    finished,
    load,
    markdown_table,
    parser,
    quiet_on_one_thread,
    save,
)
from bench.studies.site_selection.tables import fill
from surgery.evaluate.evaluation import evaluate_model
from surgery.evaluate.prompts import make_prompts
from surgery.files.atomic import fingerprint, read_json
from surgery.locate.locating import locate_heads
from surgery.models.loading import revision_of
from surgery.models.lookup import geometry_of
from surgery.recipe import Base, Evaluate, Recipe, Splice, Train, load_recipe
from surgery.report.figures.canvas import BLUE, GREY, add_axes, add_heading, new_figure, plain_log_ticks, style
from surgery.report.figures.canvas import save as save_figure
from surgery.run.memory_estimate import weight_bytes
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.train.quantization import quantization_of, quantized
from surgery.train.training import train_model
from surgery.types import HeadId, HeadSet, ScoredHead, plan_from_json

METHODS = ("lora", "qlora")
SEEDS = (0, 1, 2)
RATES = {"lr": 2e-3, "new_heads_lr": 6e-3, "lora_lr": 2e-3, "warmup": 20}
VERSION = 1  # raised when an arm's result changes for the same definition, such as with the quickstart
PROMPTS_SEED = 1
WINDOW = 10  # steps of one point of a loss curve
PAGE = ROOT / "paper" / "QLORA.md"
PUBLISHED = ROOT / "paper" / "evidence" / "qlora"
MERGES = {"trained": "as trained", "merged": "merged", "dequantized": "merged into dequantized weights"}


def recipe_of(method: str) -> Recipe:
    """The quickstart with LoRA, on quantized weights or not."""
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml")
    adapters = {"rank": 8, "quantization": "nf4" if method == "qlora" else None}
    train = {**recipe.train.model_dump(), "trainable": "lora", "lora": adapters, "optimizer": RATES}
    task = {"task": "kv_retrieval", "pairs": (16, 32), "filler": (0, 20)}
    evaluate = Evaluate(tasks=(task, "closed_book", "perplexity"), examples=400, sentences=200, batch_size=8)
    return recipe.model_copy(update={"train": Train.model_validate(train), "evaluate": evaluate})


def scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: Evaluate) -> dict[str, Any]:
    """Right and wrong by prompt, and perplexity."""
    result = evaluate_model(model, tokenizer, section, 0, make_prompts(section, PROMPTS_SEED, tokenizer=tokenizer))
    correct = {task: as_digits(right) for task, right in result.correct.items()}
    return {"correct": correct, "perplexity": result.summary["perplexity"]}


def run_arm(method: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one arm."""
    recipe = recipe_of(method)
    base, tokenizer = load(FAR)
    plan = plan_from_json(read_json(CHECKPOINTS / "quickstart" / "plan.json"))
    model = splice_model(base, plan, recipe.splice)
    outcome: dict[str, Any] = {}
    dequantized: dict[str, Tensor] = {}

    def at_the_end(step: int, entries: list[dict[str, float]]) -> None:
        if step == recipe.train.num_all_steps:
            dequantized.update(merged_as_quantized(model))
            outcome["trained"] = scores(model, tokenizer, recipe.evaluate)

    began = time.process_time()
    history = train_model(model, tokenizer, recipe.train, plan, base, seed, on_step=at_the_end)
    outcome["merged"] = scores(model, tokenizer, recipe.evaluate)
    if dequantized:
        model.load_state_dict(dequantized, strict=False)
        outcome["dequantized"] = scores(model, tokenizer, recipe.evaluate)
    losses = {name: [round(entry[name], 5) for entry in history] for name in ("answer", "attention", "base_kl")}
    seconds = {"train": sum(entry["seconds"] for entry in history), "cpu": time.process_time() - began}
    return {"method": method, "seed": seed, "losses": losses, **outcome, "seconds": seconds}


@torch.no_grad()
def merged_as_quantized(model: nn.Module) -> dict[str, Tensor]:
    """Weights of quantized layers with their adapters, as the model computes with them. Empty without such layers."""
    return {
        f"{name}.weight": dequantized(layer) + module.get_delta_weight("default")
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not (layer := module.get_base_layer()).weight.is_floating_point()
    }


def dequantized(layer: nn.Module) -> Tensor:
    """Weight that a quantized layer computes with."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight


def run_locate() -> dict[str, Any]:
    """Locate heads on the base and on its rounded weights. Returns scores by column, and the chosen heads."""
    recipe = recipe_of("qlora")
    base, tokenizer = load(FAR)
    assert recipe.splice is not None
    outcome: dict[str, Any] = {}
    for method in METHODS:
        if method == "qlora":
            with quantized([base], quantization_of(recipe.train, recipe.train), base.device) as layers:
                rounded = {f"{name}.weight": dequantized(base.get_submodule(name)) for name in layers}
            base.load_state_dict(rounded, strict=False)
        located = locate_heads(base, tokenizer, recipe.locate, recipe.splice, recipe.seed)
        ranked = sorted(located.heads, key=lambda scored: scored.head)
        outcome[method] = {
            "chosen": [str(scored.head) for scored in located.chosen],
            "best": [str(scored.head) for scored in located.heads[:5]],
            "accuracy": located.clean["accuracy"].value,
            "scores": {name: [scored.scores[name].value for scored in ranked] for name in ranked[0].scores},
        }
    return outcome


def run_bytes() -> dict[str, Any]:
    """Count the bytes of the weights of a hybrid of the shape of mamba2-130m, in bf16 and with quantized layers."""
    config = Mamba2Config(
        hidden_size=768, num_hidden_layers=24, num_heads=24, head_dim=64, state_size=128, n_groups=1, vocab_size=50288,
        tie_word_embeddings=True,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    scored = (ScoredHead(HeadId(12, 0), "neither", "answer_token", {}),)
    splice = Splice(select="list", heads=("L12H0",))
    heads = HeadSet("", "", geometry_of(config), scored, scored, "list", 0)
    model = splice_model(base, make_plan(heads, config, splice, 0), splice)
    train = recipe_of("qlora").train
    outcome = {"bf16": tensor_bytes(model), "estimated": weight_bytes(model, is_quantized=True)}
    with quantized([model], quantization_of(train, train), model.device):
        outcome["nf4"] = tensor_bytes(model)
    return {**outcome, "parameters": sum(p.numel() for p in model.parameters())}


def tensor_bytes(model: nn.Module) -> int:
    """Count the bytes of all weights, buffers and scales of quantized layers. Tied weights count once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values() if torch.is_tensor(tensor)}
    return sum(tensors.values())


EXPERIMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "bytes": run_bytes,
    "locate": run_locate,
    **{f"{method}_seed{seed}": partial(run_arm, method, seed) for seed in SEEDS for method in METHODS},
}


def key_of(name: str) -> str:
    """Hash of everything that the result of an arm depends on."""
    return fingerprint([VERSION, name, RATES, PROMPTS_SEED, revision_of(Base(model=str(FAR)))])


def tables(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Markdown tables of the finished arms, by their place in the page."""
    arms = [result for name, result in results.items() if "_seed" in name]
    rows = []
    for arm in sorted(arms, key=lambda arm: (METHODS.index(arm["method"]), arm["seed"])):
        last = {name: mean(values[-25:]) for name, values in arm["losses"].items()}
        for kind in (kind for kind in MERGES if kind in arm and (kind, arm["method"]) != ("trained", "lora")):
            correct = arm[kind]["correct"]
            cells = [accuracy_cell(digits) for digits in correct.values()]
            perplexity = f"{arm[kind]['perplexity']:.3f}"
            curve = (
                [f"{last[name]:.3f}" for name in ("answer", "attention", "base_kl")] if kind == "merged" else [""] * 3
            )
            rows.append([arm["method"], str(arm["seed"]), MERGES[kind], *curve, *cells, perplexity])
    header = [
        "",
        "seed",
        "model",
        "`answer`",
        "`attention`",
        "`base_kl`",
        "16 pairs",
        "32 pairs",
        "facts",
        "perplexity",
    ]
    made = {"qlora-arms": markdown_table(header, rows) + "\n"} if rows else {}
    if "bytes" in results:
        found = results["bytes"]
        mib = [f"{found[name] / 2**20:.1f}" for name in ("bf16", "nf4", "estimated")]
        ratio = f"{found['bf16'] / found['nf4']:.2f}x"
        made["qlora-bytes"] = (
            markdown_table(["bf16, MiB", "nf4, MiB", "estimate of `--dry-run`", "ratio"], [[*mib, ratio]]) + "\n"
        )
    if "locate" in results:
        full, four = (results["locate"][method] for method in METHODS)
        rows = [
            [f"`{name}`", f"{spearmanr(values, four['scores'][name]).statistic:.3f}"]
            for name, values in full["scores"].items()
        ]
        rows += [[f"chosen, {label}", ", ".join(part["best"][:3])] for label, part in (("fp32", full), ("nf4", four))]
        rows += [[f"accuracy, {label}", f"{part['accuracy']:.3f}"] for label, part in (("fp32", full), ("nf4", four))]
        made["qlora-locate"] = markdown_table(["column", "Spearman's rank correlation"], rows) + "\n"
    return made


@style()
def curves(results: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Draw the losses of every arm, as means of ten steps."""
    figure = new_figure(8.4, 3.0)
    add_heading(figure, "Losses of LoRA and QLoRA", f"checkpoints/pico-far, three seeds; means of {WINDOW} steps")
    rows = []
    for place, name in enumerate(("answer", "attention", "base_kl")):
        axes = add_axes(figure, 0.6 + 2.7 * place, 0.85, 2.1, 1.6)
        axes.set_title(name, size=9)
        axes.set_xlabel("step")
        for arm in (result for key, result in results.items() if "_seed" in key):
            values = arm["losses"][name]
            steps = range(WINDOW, len(values) + 1, WINDOW)
            points = [mean(values[step - WINDOW : step]) for step in steps]
            colour = BLUE if arm["method"] == "qlora" else GREY
            label = {"qlora": "QLoRA (nf4)", "lora": "LoRA"}[arm["method"]] if arm["seed"] == 0 else None
            axes.plot(steps, points, color=colour, linewidth=1.1, label=label)
            rows += [[arm["method"], arm["seed"], name, step, point] for step, point in zip(steps, points, strict=True)]
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis)
    figure.legend(*axes.get_legend_handles_labels(), loc="upper right", ncols=2, fontsize=8.5)
    save_figure(figure, folder, "losses", ["method", "seed", "loss", "step", "value"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the arms, and write the report."""
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, default=PUBLISHED)
    options.add_argument("--report", action="store_true", help="run nothing")
    options.add_argument("--only", choices=tuple(EXPERIMENTS), metavar="ARM", help=f"one of {', '.join(EXPERIMENTS)}")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    for name, experiment in EXPERIMENTS.items():
        path, key = args.folder / f"{name}.json", key_of(name)
        if args.report or args.only not in (None, name) or finished(path, key) is not None:
            continue
        save(path, {"key": key, **experiment()})
        print(f"{name} finished", flush=True)
    found = {
        name: read_json(args.folder / f"{name}.json")
        for name in EXPERIMENTS
        if (args.folder / f"{name}.json").is_file()
    }
    if any("_seed" in name for name in found):
        curves(found, args.folder)
    made = tables(found)
    print("\n".join(made.values()))
    if args.folder == PUBLISHED:
        fill(PAGE, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
