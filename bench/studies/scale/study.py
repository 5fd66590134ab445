"""Splice at size: which head, which form and which training make a base of 24 million weights retrieve.

    python -m bench.studies.scale BASE --heads heads.json --folder runs/scale          run the arms without a result
    python -m bench.studies.scale BASE --heads heads.json --folder runs/scale --table  print the table of all results

Each arm is trained alone and is one file in FOLDER/arms, with its weights in FOLDER/models; an interrupted arm resumes
from its checkpoint. The prompts have the keys of the evaluation split, which no training has. All numbers of a row are
from the same prompts.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import RUNS, finished, load, markdown_table, parser, quiet_on_one_thread, save
from bench.studies.scale.arms import Arm, first_round
from bench.studies.scale.prompts import KINDS, identity, measured, texts_of
from surgery.data.ranking import answer_choices, perplexity
from surgery.files.atomic import read_json
from surgery.models.loading import revision_of
from surgery.models.torch_scans import torch_scans
from surgery.probes.documents import rng_of
from surgery.probes.registry import PROBES, Options
from surgery.recipe import Base
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.stats import bootstrap_mean
from surgery.train.training import train_model
from surgery.types import HeadSet, Plan, head_set_from_json

FACTS, TEXTS = 100, 48


@dataclass
class Experiment:
    """A base, its located heads, and the folder of results."""

    base: Path
    heads: HeadSet
    folder: Path
    contexts: int
    questions: int

    def measure(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Answers by kind of prompt, each a list of contexts with strings of `1` and `0` by question."""
        with torch_scans(model):
            return self._measured(model, tokenizer)

    def _measured(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for kind, contexts in measured(model, tokenizer, KINDS, self.contexts, self.questions):
            columns = ("exact", "first", "ranked") if kind.one_token else ("exact", "first")
            found[kind.name] = {
                column: ["".join("01"[getattr(answer, column)] for answer in answers) for answers in contexts]
                for column in columns
            }
        options = Options(half=1, tokenizer=tokenizer)
        facts = [PROBES["closed_book"].generate(rng_of("scale facts", i), "eval", options) for i in range(FACTS)]
        found["facts"] = float(answer_choices(model, tokenizer, facts, 25).correct.double().mean())
        text = self.base / "held_out_text.jsonl"
        if text.is_file():
            found["perplexity"] = perplexity(model, tokenizer, texts_of(text, TEXTS), 4)
        return found

    def weights(self, arm: Arm) -> Path:
        """File of an arm's trained weights."""
        return self.folder / "models" / arm.file.replace(".json", ".safetensors")

    def run_arm(self, arm: Arm, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Train and measure."""
        began = time.process_time()
        model, plan = built(arm, base, self.heads)
        if arm.after:
            load_weights(model, self.weights(replace(arm, name=arm.after, seed=arm.seed - 1)))
        texts = self.base / "train_text_sample.jsonl"
        history = train_model(
            model,
            tokenizer,
            arm.train(texts if texts.is_file() else None),
            plan,
            base,
            arm.seed,
            self.folder / "training" / arm.file.removesuffix(".json"),
            on_step=_printed(arm),
            control=plan is None,
        )
        trained = time.process_time()
        model.eval()
        weights = self.weights(arm)
        weights.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(model.named_parameters()), weights)
        result = {"arm": asdict(arm), "measured": self.measure(model, tokenizer)}
        losses = sorted({name for row in history for name in row if "loss" in name or name in ("answer", "attention")})
        curve = {name: [round(float(row[name]), 4) for row in history if name in row] for name in losses}
        seconds = {"train": round(trained - began), "measure": round(time.process_time() - trained)}
        return {**result, "curve": curve, "cpu_seconds": seconds}


def built(arm: Arm, base: PreTrainedModel, heads: HeadSet) -> tuple[PreTrainedModel, Plan | None]:
    """The model before training, and its plan; a copy of the base, and None, for a control."""
    if arm.form == "none":
        return copy.deepcopy(base), None
    by_name = {str(head.head): head for head in heads.heads}
    chosen = tuple(by_name[name] for name in arm.heads)
    plan = make_plan(replace(heads, chosen=chosen), base.config, arm.splice, arm.seed)
    return splice_model(base, plan, arm.splice), plan


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Load the weights that `run_arm` saved: all of this model and no others."""
    saved, own = load_file(path), dict(model.named_parameters())
    if saved.keys() != own.keys():
        raise SystemExit(f"{path} holds the weights of another splice: {sorted(saved.keys() ^ own.keys())[:3]}")
    model.load_state_dict(saved, strict=False)  # tied weights have one name in the file


def _printed(arm: Arm) -> Any:
    def on_step(step: int, history: Sequence[Mapping[str, float]]) -> None:
        if step % 10 == 0 or step == 1:
            print(arm.name, step, {k: round(v, 3) for k, v in history[-1].items()}, flush=True)

    return on_step


def run(experiment: Experiment, arms: Sequence[Arm], more: Sequence[Path] = ()) -> None:
    """Run the arms that have no result, and measure the base and models of other runs."""
    base, tokenizer = load(experiment.base)
    others = (revision_of(Base(model=str(experiment.base))), identity(experiment.contexts, experiment.questions))
    folder = experiment.folder / "arms"
    for arm in arms:
        path, key = folder / arm.file, arm.identity(*others)
        if finished(path, key) is None:
            save(path, {"key": key, **experiment.run_arm(arm, base, tokenizer)})
            print(f"{arm.name}: {path}", flush=True)
    for model in (experiment.base, *more):
        name = "base" if model == experiment.base else "-".join(model.parts[-2:])
        path, key = folder / f"{name}.json", revision_of(Base(model=str(model))) + others[1]
        if finished(path, key) is None:
            given = (base, tokenizer) if model == experiment.base else load(model)
            save(path, {"key": key, "arm": {"name": name}, "measured": experiment.measure(*given)})


def table(folder: Path) -> Iterator[str]:
    """One row an arm: share of exact greedy answers, with the 95% bootstrap interval over contexts."""
    results = [read_json(path) for path in sorted((folder / "arms").glob("*.json"))]
    names = [kind.name for kind in KINDS]
    rows = []
    for result in results:
        measured_here, arm = result["measured"], result["arm"]
        cells = [cell(measured_here[name]["exact"]) for name in names]
        cells += [f"{measured_here['facts']:.2f}", f"{measured_here.get('perplexity', float('nan')):.2f}"]
        rows.append([arm["name"], str(arm.get("seed", "")), str(arm.get("steps", "")), *cells])
    yield markdown_table(["arm", "seed", "steps", *names, "facts", "perplexity"], rows)


def cell(contexts: Sequence[str]) -> str:
    """Share of `1`, and its interval over contexts: questions about one context are not independent."""
    shares = np.array([[digits.count("1") / len(digits) for digits in contexts]])
    (interval,) = bootstrap_mean(shares, 0)
    return f"{interval.value:.3f} [{interval.low:.2f}, {interval.high:.2f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("base", type=Path, help="folder of the base, with held_out_text.jsonl if its text is measured")
    options.add_argument("--heads", type=Path, required=True, help="located heads of the base")
    options.add_argument("--folder", type=Path, default=RUNS / "scale")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--contexts", type=int, default=16, help="contexts of each kind of prompt")
    options.add_argument("--questions", type=int, default=16, help="questions about a context")
    options.add_argument("--only", nargs="*", help="names of arms")
    options.add_argument(
        "--measure", nargs="*", type=Path, default=[], help="models of other runs, measured on the same prompts"
    )
    options.add_argument("--seed", type=int, default=0, help="added to the seed of every arm")
    options.add_argument("--list", action="store_true", help="print the names of the arms")
    options.add_argument("--table", action="store_true", help="print the table of all results")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    heads = head_set_from_json(read_json(args.heads))
    arms = [replace(arm, seed=arm.seed + args.seed) for arm in first_round(heads, args.steps)]
    arms = [arm for arm in arms if args.only is None or arm.name in args.only]
    if args.list:
        print("\n".join(arm.name for arm in arms))
    elif args.table:
        print("\n".join(table(args.folder)))
    else:
        run(Experiment(args.base, heads, args.folder, args.contexts, args.questions), arms, args.measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
