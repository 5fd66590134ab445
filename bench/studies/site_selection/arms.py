"""Arms of the study: their definitions, budget and order. Imports no torch.

An arm is one training of one model. Each site is trained once for each seed; a method points to the arm of its
site. `Arm` holds the whole definition, so that its hash tells whether a result on disk is that of this arm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from surgery.files.atomic import fingerprint
from surgery.recipe import Evaluate, Optimizer, Source, Train, Weights
from surgery.types import Reads

Kind = Literal["none", "softmax", "linear", "hidden"]
Trains = Literal["all", "new_heads", "lora"]
Choices = Mapping[str, Any]

VERSION = 1  # raised when an arm's result changes for the same definition
SHIPPED, SECOND, AGAIN, TRANSFORMER = "shipped", "second", "again", "transformer"
STATE = {SHIPPED: 8, SECOND: 16, AGAIN: 16}  # state size of SSM heads, and so the query and key width of their copies
PROMPTS_SEED = 900  # of the evaluation. Neither site selection nor training uses it


@dataclass(frozen=True)
class Budget:
    """Training and evaluation settings, the same for every arm.

    Attributes:
        rows, keep_rows: documents a step with dictionaries, and of each kind that is to be kept.
        locate_pairs, locate_examples: the prompts that sites are chosen on.
    """

    steps: int = 100
    warmup: int = 10
    lr: float = 2e-3
    new_heads_lr: float = 2e-2
    rows: int = 16
    keep_rows: int = 8
    pairs: tuple[int, int] = (8, 32)
    lora_rank: int = 8
    evaluate_pairs: tuple[int, ...] = (8, 16, 32, 48)
    examples: int = 200
    sentences: int = 200
    locate_pairs: int = 24
    locate_examples: int = 128

    def train(self, attention: bool, trains: Trains = "all") -> Train:
        """Make the library's training section. `attention` enables its own supervision of spliced heads."""
        weights = Weights(answer=1.0, attention=1.0 if attention else 0.0)
        kept = Weights(base_kl=1.0)
        sources = (
            Source(task="kv_retrieval", pairs=self.pairs, questions=4, rows=self.rows, weights=weights),
            Source(task="closed_book", split=0, rows=self.keep_rows, weights=kept),
            Source(task="sentence", split=0, rows=self.keep_rows, weights=kept),
        )
        optimizer = Optimizer(lr=self.lr, new_heads_lr=self.new_heads_lr, warmup=self.warmup)
        lora = {"rank": self.lora_rank, "alpha": 2 * self.lora_rank}  # at `new_heads_lr`
        return Train(steps=self.steps, trainable=trains, lora=lora, sources=sources, optimizer=optimizer)

    @property
    def evaluate(self) -> Evaluate:
        return Evaluate(pairs=self.evaluate_pairs, examples=self.examples, sentences=self.sentences)


@dataclass(frozen=True)
class Arm:
    """One training.

    Attributes:
        name: what the report calls it; unique within a base and seed.
        base: which pretrained model.
        heads, reads: the sites, and what each is to read.
        width: of query and key. With copies it includes new channels. None for the library's.
        kind: `none` trains without a splice; `hidden` too, but supervises the SSM head's own hidden attention.
    """

    base: str
    name: str
    seed: int
    heads: tuple[str, ...] = ()
    reads: tuple[Reads, ...] = ()
    kind: Kind = "none"
    mode: Literal["add", "replace"] = "add"
    init: Literal["ssm", "random"] = "ssm"
    supervised: bool = True
    trains: Trains = "all"
    width: int | None = None

    @property
    def file(self) -> str:
        return f"{self.base}-{self.name}_seed{self.seed}.json"

    def identity(self, budget: Budget, revision: str) -> str:
        """Hash of everything that the result depends on; `revision` identifies the base's weights."""
        given = {k: v for k, v in asdict(self).items() if k != "width" or v is not None}
        return fingerprint([VERSION, given, asdict(budget), revision, PROMPTS_SEED])


def site_arm(choices: Choices, base: str, seed: int, name: str, heads: Sequence[str], **more: Any) -> Arm:
    """Arm with a splice at these heads. Each reads the position with the larger oracle-read gain."""
    reads = tuple(choices["reads"][head] for head in heads)
    return Arm(base, name, seed, tuple(heads), reads, **{"kind": "softmax", **more})


def head_name(head: str) -> str:
    """The arm of a single site."""
    return f"site-{head}"


def layer_name(layer: int) -> str:
    """The arm of all heads of a layer."""
    return f"layer-{layer}"


METHODS = ("sharpen", "ablation", "attribution", "random")  # each chooses one head
LAYER_METHODS = ("divergence", "uniform", "sharpen_layer")  # each chooses one layer


def main_arms(choices: Choices, base: str, seed: int) -> Iterator[Arm]:
    """Arms without a splice, and at every site that a method chose. Methods with the same choice share an arm."""
    yield Arm(base, "no-splice", seed)
    for head in dict.fromkeys(choices["methods"][method][0] for method in METHODS):
        yield site_arm(choices, base, seed, head_name(head), [head])
    for layer in dict.fromkeys(layer_chosen(choices, method) for method in LAYER_METHODS):
        yield site_arm(choices, base, seed, layer_name(layer), _heads_of(choices, layer))


def variant_arms(choices: Choices, base: str, seed: int) -> Iterator[Arm]:
    """Arms at the site that `sharpen` chose, with other branches, initialisations, supervision and trained weights."""
    ranked = choices["methods"]["sharpen"]
    best = ranked[:1]

    def arm(name: str, heads: Sequence[str] = best, **more: Any) -> Arm:
        return site_arm(choices, base, seed, name, heads, **more)

    yield arm("unsupervised", supervised=False)
    yield arm("random-init", init="random")
    if base in STATE:
        yield arm("random-init-narrow", init="random", width=STATE[base])
    yield arm("replace", mode="replace")
    yield arm("linear", kind="linear")
    yield arm("hidden-supervised", kind="hidden")
    yield arm("new-heads-only", trains="new_heads")
    yield arm("lora", trains="lora")
    yield arm("two-heads", ranked[:2])
    yield arm("four-heads", ranked[:4])
    yield arm("random-init-unsupervised", init="random", supervised=False)
    yield arm("linear-unsupervised", kind="linear", supervised=False)
    yield arm("replace-random-init", mode="replace", init="random")
    if base in STATE:
        for width in (2 * STATE[base], 4 * STATE[base], 8 * STATE[base]):
            yield arm(f"widened-{width}", width=width)
        yield arm(f"replace-widened-{4 * STATE[base]}", mode="replace", width=4 * STATE[base])


def every_site(choices: Choices, base: str, seed: int, each: int | None = None) -> Iterator[Arm]:
    """Arms of single heads: all heads of the layer that `sharpen` chose, and the first `each` (None: all) of others."""
    winning = layer_of(choices["methods"]["sharpen"][0])
    for layer in sorted({layer_of(head) for head in choices["scores"]}, key=lambda k: (k != winning, k)):
        heads = _heads_of(choices, layer)
        for head in heads if layer == winning else heads[:each]:
            yield site_arm(choices, base, seed, head_name(head), [head])


def layer_chosen(choices: Choices, method: str) -> int:
    """Layer that one of `LAYER_METHODS` chooses. `sharpen_layer` is the whole layer of sharpen's head."""
    return layer_of(choices["methods"]["sharpen"][0]) if method == "sharpen_layer" else choices["layers"][method]


def layer_of(head: str) -> int:
    return int(head[1:].split("H")[0])


def _heads_of(choices: Choices, layer: int) -> list[str]:
    return sorted((h for h in choices["scores"] if layer_of(h) == layer), key=lambda h: int(h.split("H")[1]))
