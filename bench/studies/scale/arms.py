"""Arms of the study: what is spliced where, what trains, and on which documents. Imports no torch.

Sites come from a file of located heads (`surgery locate`, or `heads.json` of a run), so a base of any shape has the
same arms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from surgery.files.atomic import fingerprint
from surgery.recipe import Splice, Train
from surgery.types import HeadSet, ScoredHead

VERSION = 3  # raised when an arm's result changes for the same definition
Form = Literal["none", "head", "block", "pair"]
Trains = Literal["all", "new_heads", "lora"]
Mixture = Literal["hard", "dense", "answered", "told twice", "digits"]
QUESTIONS = 16
READS = 250  # steps of `reads`, which take an eighth of the time of others


@dataclass(frozen=True)
class Arm:
    """One training.

    Attributes:
        form: of the splice; `none` trains the base in the same way, as the control.
        output: of the branch before training.
        init: of the branch. With `form: head`, `ssm` copies the SSM head and `random` has random projections.
        heads: names of the spliced heads; the inserted forms go before the layer of the first.
        trains: as `train.trainable`.
        after: name of the arm with whose weights it begins, that of the seed before.
        reads: as `train.read_steps`.
        mixture: `hard` has prompts that the base fails, `dense` the same with more questions each, `answered` prompts
            that it answers, `told twice` the dense ones and dictionaries that are listed twice, `digits` short prompts
            with values of several tokens alone.
    """

    name: str
    form: Form = "none"
    init: Literal["ssm", "random"] = "ssm"
    heads: tuple[str, ...] = ()
    trains: Trains = "all"
    mixture: Mixture = "dense"
    steps: int = 100
    seed: int = 0
    lr: float = 1.0e-4  # 3e-4 disturbs what the base can do
    new_heads_lr: float = 3.0e-3
    after: str = ""
    reads: int = 0
    output: Literal["zero", "copy"] = "zero"

    @property
    def file(self) -> str:
        return f"{self.name.replace(' ', '-')}_seed{self.seed}.json"

    def identity(self, *others: str) -> str:
        """Hash of all that the result depends on; `others` identify base and prompts."""
        return fingerprint([VERSION, asdict(self), MIXTURES[self.mixture], KEPT, *others])

    @property
    def splice(self) -> Splice:
        """The recipe's section `splice`."""
        fields = {"form": self.form, "init": self.init, "output": self.output}
        return Splice.model_validate({"select": "list", "heads": self.heads, **fields})

    def train(self, texts: Path | None) -> Train:
        """The recipe's section `train`.

        Args:
            texts: JSONL file with the column `text`, on which the base's predictions are kept.
        """
        weights = {"answer": 1.0} if self.form == "none" else {"answer": 1.0, "attention": 1.0}
        sources = [{**source, "train_eos": True, "weights": weights} for source in MIXTURES[self.mixture]]
        stage = {
            "read_steps": self.reads or None,
            "steps": self.steps,
            "trainable": self.trains,
            "sources": [*sources, *KEPT, *([] if texts is None else [_prose(texts)])],
            "optimizer": {"lr": self.lr, "new_heads_lr": self.new_heads_lr, "warmup": 10},
        }
        return Train.model_validate(stage)


_LONG = {"task": "kv_retrieval", "questions": QUESTIONS}
_DIGITS = (3, 6)
HARD: tuple[dict[str, Any], ...] = (
    {**_LONG, "pairs": (64, 100), "filler": (0, 20), "rows": 2},
    {**_LONG, "pairs": (24, 64), "filler": (20, 60), "rows": 1},
    {**_LONG, "pairs": (16, 48), "filler": (0, 20), "value_digits": _DIGITS, "rows": 1},
    {"task": "records", "questions": 8, "pairs": (8, 24), "value_digits": _DIGITS, "rows": 1},
)
ANSWERED: tuple[dict[str, Any], ...] = (
    {**_LONG, "pairs": (16, 48), "filler": (0, 12), "rows": 6},
    {"task": "records", "questions": 8, "pairs": (4, 8), "rows": 1},
)
DIGITS: tuple[dict[str, Any], ...] = (
    {"task": "records", "questions": 8, "pairs": (6, 16), "value_digits": _DIGITS, "rows": 4},
    {**_LONG, "questions": 8, "pairs": (8, 24), "filler": (0, 8), "value_digits": _DIGITS, "rows": 2},
)
# Many questions about each context: a read costs little beside the context.
DENSE: tuple[dict[str, Any], ...] = (
    {**_LONG, "pairs": (48, 100), "filler": (0, 20), "questions": 48, "rows": 2},
    {**_LONG, "pairs": (24, 48), "filler": (20, 60), "questions": 24, "rows": 1},
    {**_LONG, "pairs": (16, 40), "filler": (0, 20), "value_digits": _DIGITS, "questions": 16, "rows": 1},
    {"task": "records", "questions": 16, "pairs": (16, 24), "value_digits": _DIGITS, "rows": 1},
)
MIXTURES: dict[Mixture, tuple[dict[str, Any], ...]] = {
    "hard": HARD,
    "dense": DENSE,
    "answered": ANSWERED,
    "digits": DIGITS,
    "told twice": (*DENSE, {"task": "kv_repeated", "pairs": (16, 48), "filler": (0, 20), "rows": 1}),
}
# What the base can do is to stay: facts and language.
KEPT: tuple[dict[str, Any], ...] = (
    {"task": "closed_book", "split": 0, "rows": 4, "weights": {"base_kl": 1.0}},
    {"task": "sentence", "split": 0, "rows": 4, "weights": {"base_kl": 1.0}},
)


def _prose(texts: Path) -> dict[str, Any]:
    data = {"path": str(texts), "columns": {"text": "text"}}
    return {"data": data, "rows": 2, "max_tokens": 256, "weights": {"base_kl": 1.0}}


def ranked(heads: HeadSet, by: str = "patching") -> list[ScoredHead]:
    """Heads by a score, the highest first."""
    return sorted(heads.heads, key=lambda head: -head.scores[by].value)


def first_round(heads: HeadSet, steps: int) -> Iterator[Arm]:
    """Arms with one seed: the controls, one to eight heads, and each form at each layer that reads."""
    best = [str(head.head) for head in ranked(heads)]
    reader = reading_head(heads)
    by_layer: dict[int, str] = {}
    for head in ranked(heads):
        by_layer.setdefault(head.head.layer, str(head.head))

    def frozen(name: str, form: Form, names: Sequence[str], **fields: Any) -> Arm:
        return Arm(name, form, heads=tuple(names), trains="new_heads", steps=steps, **fields)

    mixtures: tuple[Mixture, ...] = ("hard", "answered", "told twice", "digits")
    yield Arm("control", steps=steps)
    yield Arm("control, again", steps=steps, seed=1, after="control")
    yield Arm("control, LoRA", trains="lora", steps=steps)
    for mixture in mixtures:
        yield Arm(f"control, {mixture}", mixture=mixture, steps=steps)
        yield frozen(f"head {reader}, {mixture}", "head", [reader], mixture=mixture)
    others = [str(head.head) for head in ranked(heads)[2:] if head.reads == "answer_token"]
    for names in (best[:2], [*best[:2], *others[:1]], best[:4], best[:8]):
        first = f"{len(names)} heads, read first"
        yield frozen(f"{len(names)} heads", "head", names)
        yield frozen(first, "head", names, reads=READS, new_heads_lr=2.0e-3, output="copy")
        then = {"seed": 1, "after": first, "new_heads_lr": 1.0e-3, "output": "copy"}
        yield Arm(f"{len(names)} heads, then all", "head", heads=tuple(names), steps=steps, **then)
    yield Arm(f"head {reader}, all", "head", heads=(reader,), steps=steps)
    yield Arm(f"head {reader}, LoRA", "head", heads=(reader,), trains="lora", steps=steps)
    yield frozen(f"head {reader}, random", "head", [reader], init="random")
    yield frozen(f"pair {reader}", "pair", [reader])
    for layer in [layer for layer in by_layer if 1 <= layer <= 5][:5]:
        name = reader if layer == int(reader[1:].split("H")[0]) else by_layer[layer]
        yield frozen(f"head {name}", "head", [name])
        yield frozen(f"block {name}", "block", [name], init="random", reads=READS)


def reading_head(heads: HeadSet) -> str:
    """The head that loses most at the query, among those that lose less than half of that in the context.

    A head that loses as much in the context gathers too: it is not the reader.
    """
    by_query = ranked(heads, "query")
    readers = [h for h in by_query if h.scores["context"].value < h.scores["query"].value / 2]
    return str((readers or by_query)[0].head)
