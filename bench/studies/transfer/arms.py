"""Transfer on a base that has learned several formats: arms spliced at the head that KV-retrieval chose.

    surgery pretrain bench/studies/transfer/base.yaml --to runs/transfer/base
    python -m bench.studies.transfer.arms            run the arms that have no result, then print the table
    python -m bench.studies.transfer.arms --table    print the table of the finished arms

For each seed one head is located on KV-retrieval alone. Nine arms: no splice, a splice at that head, a splice at a
random other head; each trained on KV-retrieval only, on all formats, and on phonebooks only (there the head reads the
number instead of the line's end: `READS`). Each arm is one file, written when the arm is finished. The budget is that
of the site selection study; the prompts are those of the transfer study.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import (
    RUNS,
    accuracy_cell,
    as_digits,
    finished,
    load,
    parser,
    quiet_on_one_thread,
    save,
    share,
)
from bench.studies.experiment import in_short_chunks
from bench.studies.site_selection.arms import Arm, Budget
from bench.studies.site_selection.train import prepared
from bench.studies.transfer.study import Task, line, measured, tasks
from surgery.data.encoding import encode
from surgery.data.ranking import answer_choices
from surgery.files.atomic import fingerprint, read_json, write_json
from surgery.locate.locating import locate_heads
from surgery.models.loading import revision_of
from surgery.probes.documents import rng_of
from surgery.recipe import Base, Locate, Source, Splice, Train, Weights
from surgery.stats import holm, mcnemar
from surgery.train.targets import Targets
from surgery.train.trainer import StageTrainer
from surgery.train.training import make_accelerator
from surgery.types import HeadSet, Reads, ScoredHead, head_set_from_json, to_json

Trained = Literal["kv", "formats", "phonebook"]
Site = Literal["none", "chosen", "other"]
TRAINED: tuple[Trained, ...] = ("kv", "formats", "phonebook")
# Where not the column that a head gained more from on KV-retrieval: what the best heads gain from on that format.
READS: dict[Trained, Reads] = {"phonebook": "answer_token"}
SITES: tuple[Site, ...] = ("none", "chosen", "other")
SIZES = (8, 16)
VERSION, BATCH, PROMPTS_SEED = 1, 32, 900
_SHOWN = 4  # best heads of a task that are kept on disk


@dataclass(frozen=True)
class Experiment:
    """A base, the budget of its arms, and the folder of their results."""

    base: Path
    folder: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    examples: int = 200
    budget: Budget = field(default_factory=lambda: Budget(pairs=(8, 16), locate_pairs=16))

    def section(self, trained: Trained, spliced: bool) -> Train:
        """Training of the site selection study. Other formats are added to KV-retrieval, or phonebooks replace it."""
        alone = self.budget.train(attention=spliced)
        if trained == "kv":
            return alone
        if trained == "phonebook":
            first = alone.sources[0].model_copy(update={"task": "phonebook"})
            return alone.model_copy(update={"sources": (first, *alone.sources[1:])})
        weights, (low, high), rows = alone.sources[0].weights, self.budget.pairs, self.budget.rows
        return alone.model_copy(update={"sources": (*alone.sources, *other_formats(weights, low, high, rows))})

    def arm_file(self, trained: Trained, site: Site, seed: int) -> Path:
        return self.folder / "arms" / f"{trained}-{site}_seed{seed}.json"


def other_formats(weights: Weights, low: int, high: int, rows: int) -> tuple[Source, ...]:
    """What all formats have beside KV-retrieval: half as many documents of each as there are dictionaries; a quarter
    of the JSON, which is long."""
    half, middle = max(1, rows // 2), (low + high) // 2
    return (
        Source(task="phonebook", pairs=(low, middle), questions=4, rows=half, weights=weights),
        Source(
            task="json_kv",
            groups=(4,),
            pairs=(low // 2, high // 2),
            questions=4,
            rows=max(1, rows // 4),
            weights=weights,
        ),
        Source(task="mqar", pairs=(low, high), questions=8, rows=half, weights=weights),
        Source(task="letter_choice", rows=half, weights=weights),
    )


def asked(tokenizer: PreTrainedTokenizerBase, examples: int) -> list[Task]:
    """Tasks of the transfer study on which the base was trained, at the sizes to compare."""
    found = tasks(tokenizer, examples, PROMPTS_SEED)
    return [t for t in found if (t.choices in SIZES or t.name == "letter_choice") and t.name not in UNTRAINED]


UNTRAINED = ("phonebook, no examples", "json_kv, uuid")


def located(experiment: Experiment, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> HeadSet:
    """Oracle-read gain of every head on KV-retrieval, and the chosen head. Measured once per seed."""
    path, budget = experiment.folder / f"heads_seed{seed}.json", experiment.budget
    if not path.is_file():
        section = Locate(methods=("query", "sharpen"), pairs=budget.locate_pairs, examples=budget.locate_examples)
        found = locate_heads(
            model, tokenizer, section, Splice(select="sharpen"), seed, "base", revision_of(_given(experiment))
        )
        write_json(path, to_json(found))
    return head_set_from_json(read_json(path))


def gains(
    experiment: Experiment,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asking: Sequence[Task],
    seed: int,
) -> list[dict[str, Any]]:
    """Rank of the chosen head by its oracle-read gain on each task, with the best heads. Measured once."""
    path, chosen = experiment.folder / f"gains_seed{seed}.json", located(experiment, model, tokenizer, seed)
    if not path.is_file():
        rows = []
        for task in asking:
            row, _ = measured(model, tokenizer, task, chosen, BATCH)
            best = sorted(row["heads"], key=lambda h: -max(c["value"] for c in row["heads"][h].values()))
            shown = dict.fromkeys([str(s.head) for s in chosen.chosen] + best[:_SHOWN])
            rows.append({**row, "heads": {head: row["heads"][head] for head in shown}})
        write_json(path, rows)
    found: list[dict[str, Any]] = read_json(path)
    return found


def _given(experiment: Experiment) -> Base:
    return Base(model=str(experiment.base))


def arm_of(heads: HeadSet, trained: Trained, site: Site, seed: int) -> Arm:
    """The arm of one training and one site; each head reads the column that it gained more from."""
    if site == "none":
        return Arm("transfer", f"{trained}-none", seed)
    chosen = heads.chosen[0]
    head = chosen if site == "chosen" else another(heads, chosen, seed)
    reads = READS.get(trained, head.reads or "answer_token")
    return Arm("transfer", f"{trained}-{site}", seed, (str(head.head),), (reads,), "softmax")


def another(heads: HeadSet, chosen: ScoredHead, seed: int) -> ScoredHead:
    """A random head that is not the chosen one."""
    others = sorted((h for h in heads.heads if h.head != chosen.head), key=lambda h: h.head)
    return rng_of("random heads", seed).choice(others)


@torch.no_grad()
def on_gold(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, arm: Arm) -> float:
    """Attention of the spliced head on the position that it should read, mean over the task's prompts."""
    found = []
    for start in range(0, len(task.documents), BATCH):
        batch = encode(task.documents[start : start + BATCH], tokenizer, padding_side="left", until_answer=True)
        last = (batch.query >= 0).sum(1, keepdim=True) - 1
        query, gold = (x.gather(1, last) for x in (batch.query, _gold(arm, batch)))
        output = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, splice_queries=query
        )
        rows_BT = output.splice_attentions[0][:, 0, 0]
        found.append(rows_BT.gather(1, gold)[:, 0])
    return float(torch.cat(found).mean())


def _gold(arm: Arm, batch: Any) -> torch.Tensor:
    return batch.segment_end if arm.reads[0] == "segment_end" else batch.answer_token


def scored(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asking: Sequence[Task]) -> dict[str, str]:
    """Right and wrong by prompt, one character each."""
    found = {}
    for task in asking:
        correct = answer_choices(model, tokenizer, task.documents, BATCH).correct
        found[f"{task.name}/{task.choices}"] = as_digits(correct)
    return found


def run_arm(
    experiment: Experiment,
    arm: Arm,
    section: Train,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asking: Sequence[Task],
) -> dict[str, Any]:
    """Train the arm and evaluate it on every prompt."""
    began = time.perf_counter()
    with prepared(arm, base, experiment.budget) as (model, supervision):
        targets = Targets(base=base, **supervision)
        history = StageTrainer(model, tokenizer, section, arm.seed, make_accelerator(), targets).run()
    halfway = time.perf_counter()
    model.eval()
    gold = {f"{t.name}/{t.choices}": round(on_gold(model, tokenizer, t, arm), 4) for t in asking} if arm.heads else {}
    return {
        "arm": asdict(arm),
        "correct": scored(model, tokenizer, asking),
        "on_gold": gold,
        "loss": round(sum(h["loss"] for h in history[-10:]) / len(history[-10:]), 4),
        "seconds": {"train": round(halfway - began, 1), "evaluate": round(time.perf_counter() - halfway, 1)},
    }


def run(experiment: Experiment, most: int | None = None, only: Trained | None = None) -> int:
    """Run at most `most` arms that have no result, of the training `only`. Returns the number of arms that ran."""
    given = _given(experiment)
    (base, tokenizer), revision = load(experiment.base), revision_of(given)
    base = in_short_chunks(base)
    asking, ran = asked(tokenizer, experiment.examples), 0
    clean = experiment.folder / "arms" / "base.json"
    if finished(clean, revision) is None:
        save(clean, {"key": revision, "correct": scored(base, tokenizer, asking)})
    for seed in experiment.seeds:
        heads = located(experiment, base, tokenizer, seed)
        if seed == experiment.seeds[0]:
            for row in gains(experiment, base, tokenizer, asking, seed):
                print(line({**row, "arms": {}}), flush=True)
        for trained in [t for t in TRAINED if only in (None, t)]:
            for site in SITES:
                arm, section = arm_of(heads, trained, site, seed), experiment.section(trained, site != "none")
                shown = section.model_dump(mode="json")
                key = fingerprint([VERSION, asdict(arm), shown, revision, experiment.examples])
                path = experiment.arm_file(trained, site, seed)
                if ran == most or finished(path, key) is not None:
                    continue
                outcome = run_arm(experiment, arm, section, base, tokenizer, asking)
                save(path, {"key": key, **outcome})
                ran += 1
                accuracies = {name: round(share(digits), 3) for name, digits in outcome["correct"].items()}
                print(trained, site, list(arm.heads), "seed", seed, accuracies, outcome["seconds"], flush=True)
    return ran


Right = Mapping[int, Mapping[str, str]]  # seed -> task -> right and wrong


def collected(experiment: Experiment) -> dict[tuple[Trained, Site], Right]:
    """Finished results by arm."""
    found: dict[tuple[Trained, Site], Right] = {}
    for trained in TRAINED:
        for site in SITES:
            paths = {seed: experiment.arm_file(trained, site, seed) for seed in experiment.seeds}
            found[trained, site] = {seed: read_json(p)["correct"] for seed, p in paths.items() if p.is_file()}
    return found


def pooled(one: Right, task: str, seeds: Sequence[int]) -> str:
    """Answers of all seeds, in order of the seeds, as `1` and `0`."""
    return "".join(one[seed][task] for seed in seeds)


def table(experiment: Experiment) -> Iterator[str]:
    """One row a task: accuracy of every arm with Wilson's interval, pooled over seeds, and what is tested.

    `>none`, `>other`: the chosen head's arm is right more often than that one (exact one-sided McNemar over prompts and
    seeds, Holm over the tasks of a column: `*`). `<`: less often.
    """
    clean, arms = read_json(experiment.folder / "arms" / "base.json")["correct"], collected(experiment)
    names = list(clean)
    for trained in TRAINED:
        seeds = sorted(set.intersection(*(set(arms[trained, site]) for site in SITES)))
        if not seeds:
            continue
        yield f"trained on {trained}, seeds {seeds}, {len(clean[names[0]])} prompts a seed"
        right = {(site, task): pooled(arms[trained, site], task, seeds) for site in SITES for task in names}
        tests = {
            f"{sign}{rival}": [_p(right["chosen", task], right[rival, task], sign) for task in names]
            for rival in ("none", "other")
            for sign in "><"
        }
        falls = {name: holm(values) for name, values in tests.items()}
        yield f"| task | base | {' | '.join(SITES)} | {' | '.join(tests)} |"
        for i, task in enumerate(names):
            cells = [accuracy_cell(clean[task])]
            cells += [accuracy_cell(right[site, task]) for site in SITES]
            cells += [f"{values[i]:.1e}{'*' if falls[name][i] else ''}" for name, values in tests.items()]
            yield f"| {task} | {' | '.join(cells)} |"


def _p(chosen: str, rival: str, sign: str) -> float:
    first, second = (np.array(list(digits)) == "1" for digits in (chosen, rival))
    return mcnemar(first, second) if sign == ">" else mcnemar(second, first)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--base", type=Path, default=RUNS / "transfer" / "base")
    options.add_argument("--folder", type=Path, default=RUNS / "transfer")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--examples", type=int, default=200)
    options.add_argument("--only", choices=TRAINED, help="run only the arms with this training")
    options.add_argument("--most", type=int, help="stop after this many arms")
    options.add_argument("--table", action="store_true", help="print the table of the finished arms")
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    experiment = Experiment(args.base, args.folder, tuple(args.seeds), args.examples)
    if not args.table:
        run(experiment, args.most, args.only)
    print("\n".join(table(experiment)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
