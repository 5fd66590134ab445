"""Models with planted Gather and Aggregate heads, and their tokenizer.

    planted = plant(seed=3)                 a Mamba-2 of 4 layers x 4 heads; `planted.gather`, `planted.aggregate`
    plant(3, n_groups=4)                    heads with B and C of their own
    plant(3, backup=True)                   the Aggregate head twice, in different layers
    plant(3, "mamba")                       Mamba-1: a "head" is a group of 48 channels

They answer the KV-retrieval prompt of the paper (`probes/kv_retrieval.py`). The tokenizer has one token for each key,
number and word of the template, so a line is `key : value \\n` and the prompt ends in `' key ' is`.

- The Gather head moves key and value of a line to its last token by its state: a key resets the state, a value is
  added, other tokens do not change it. Its gate is open at the end of a line only. There it writes both codes into
  dimensions of the residual stream that no other head reads.
- The Aggregate head's C is the key two tokens before (by its short convolution, which reaches `key ' is`), its B the
  gathered key, its x the gathered value; it does not decay. It writes the value's code where the unembedding reads it.
- A decoy in the Aggregate head's layer has that head's attention and values, but its `out_proj` is zero.
- All other heads are random. The layer and the number of each planted head are random too.

Keys and values are sparse codes, so linear attention confuses some keys: accuracy is below 1, as in a real SSM.
Layout of the residual stream: [key | value | flags | gathered key | gathered value | answer | noise].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from surgery.data.encoding import EncodedBatch, encode
from surgery.data.ranking import ChoiceScores, choice_scores
from surgery.locate.locating import locate_heads
from surgery.probes.documents import rng_of
from surgery.probes.kv_retrieval import HEADER, NUM_VALUES, kv_document
from surgery.probes.words import key_words
from surgery.recipe import Locate, Splice
from surgery.types import HeadId, ScoredHead

LAYERS, HEADS, WIDTH = 4, 4, 48
INNER = HIDDEN = HEADS * WIDTH
KEY, VALUE = 24, 20  # widths of the codes; each has 4 ones
STATE = KEY
STEPS = 3  # Mamba-1's `time_step_rank`


def _after(before: int, width: int) -> slice:
    return slice(before, before + width)


key_at = _after(0, KEY)
value_at = _after(key_at.stop, VALUE)
ALWAYS, IS_KEY, IS_VALUE, IS_END = range(value_at.stop, value_at.stop + 4)
gathered_key_at = _after(value_at.stop + 4, KEY)
gathered_value_at = _after(gathered_key_at.stop, VALUE)
answer_at = _after(gathered_value_at.stop, VALUE)
noise_at = slice(answer_at.stop, HIDDEN)

Family = Literal["mamba2", "mamba"]


@dataclass(frozen=True)
class Planted:
    """A model with its planted heads. `aggregates` has two heads if one is the backup of the other."""

    model: PreTrainedModel
    gather: HeadId
    aggregates: tuple[HeadId, ...]
    decoy: HeadId

    @property
    def aggregate(self) -> HeadId:
        return self.aggregates[0]

    @property
    def heads(self) -> tuple[HeadId, ...]:
        """All heads that retrieval depends on."""
        return (self.gather, *self.aggregates)


@cache
def planted_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one token for each word, number and punctuation mark of the KV-retrieval prompts."""
    pieces = r" ?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]|\s"
    template = HEADER + "The value of the key 'x' is"
    splitter = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    words = [piece for piece, _ in splitter.pre_tokenize_str(template)]
    entries = ["<pad>", *dict.fromkeys([*words, *key_words("eval"), *map(str, range(NUM_VALUES))])]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(entries)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left")


def planted_prompts(seed: int, examples: int = 24, pairs: int = 5) -> EncodedBatch:
    """KV-retrieval prompts, left-padded and ending at the query."""
    documents = [kv_document(rng_of("planted", seed, i), pairs, split="eval") for i in range(examples)]
    return encode(documents, planted_tokenizer(), padding_side="left", until_answer=True)


@torch.no_grad()
def plant(seed: int, family: Family = "mamba2", n_groups: int = 1, backup: bool = False) -> Planted:
    """Build a model with planted heads among random ones.

    Args:
        seed: seed of the places and of the random heads.
        family: Mamba-2 or Mamba-1.
        n_groups: groups of B and C (Mamba-2 only).
        backup: plant the Aggregate head twice, in different layers.
    """
    rng = rng_of("plant", seed)
    layers = sorted(rng.sample(range(LAYERS), 3 if backup else 2))
    places = [rng.sample(range(HEADS), 3) for _ in layers]
    gather, *aggregates = [HeadId(layer, place[0]) for layer, place in zip(layers, places, strict=True)]
    decoy_head = HeadId(aggregates[0].layer, places[1][1])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _random(family, n_groups)
    _write_tokens(model, rng)
    scale, answer_scale = _scales(family, n_groups)
    planted = [*zip((gather, *aggregates), places, strict=True), (decoy_head, places[1])]
    for head, place in planted:
        mixer = model.backbone.layers[head.layer].mixer
        if family == "mamba2":
            _write_mamba2(mixer, head.head, gathers=head == gather)
        else:
            _write_mamba1(mixer, head.head, place[2], gathers=head == gather)
        own = _after(head.head * WIDTH, WIDTH)
        mixer.out_proj.weight[:, own] = 0
        if head == gather:
            _copy(mixer.out_proj.weight, gathered_key_at, _after(own.start, KEY), scale)
            _copy(mixer.out_proj.weight, gathered_value_at, _after(own.start + KEY, VALUE), scale)
        elif head != decoy_head:
            _copy(mixer.out_proj.weight, answer_at, _after(own.start, VALUE), answer_scale)
    return Planted(model.eval(), gather, tuple(aggregates), decoy_head)


def _random(family: Family, n_groups: int) -> PreTrainedModel:
    """A model of random heads: they read all dimensions and write a little to all, except for the flags."""
    tokens = {"vocab_size": len(planted_tokenizer()), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    shape = {"hidden_size": HIDDEN, "expand": 1, "state_size": STATE, "num_hidden_layers": LAYERS}
    given: dict[str, Any] = {**tokens, **shape, "tie_word_embeddings": False}
    if family == "mamba2":
        heads = {"num_heads": HEADS, "head_dim": WIDTH, "n_groups": n_groups, "chunk_size": 40}
        model: PreTrainedModel = Mamba2ForCausalLM(Mamba2Config(**given, **heads))
    else:
        model = MambaForCausalLM(MambaConfig(**given, time_step_rank=STEPS, channels_per_head=WIDTH))
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith(".D"):
            p.fill_(1)
        elif name.endswith("A_log"):
            p.uniform_(0, 2)
        elif name.endswith("out_proj.weight"):
            p.normal_(0, 0.01)
            p[[ALWAYS, IS_KEY, IS_VALUE, IS_END]] = 0
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            p.normal_(-2, 1)
        elif name.endswith("conv1d.weight"):
            p.normal_(0, 0.3)
        elif p.ndim == 1:
            p.zero_()
        else:
            p.normal_(0, 0.1)
    return model


def _write_tokens(model: PreTrainedModel, rng: Random) -> None:
    """Write codes, flags and noise into the embeddings. The unembedding compares the answer with the values' codes."""
    tokenizer, table, out = planted_tokenizer(), model.get_input_embeddings().weight, model.lm_head.weight
    table.zero_()
    out.zero_()
    table[:, noise_at].normal_(0, 0.5, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    table[:, ALWAYS] = 3
    keys, values = list(key_words("eval")), [str(v) for v in range(NUM_VALUES)]
    for words, at, flag in ((keys, key_at, IS_KEY), (values, value_at, IS_VALUE)):
        ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(words)))
        codes = _codes(len(words), at.stop - at.start, rng)
        table[ids, at] = 3 * codes
        table[ids, flag] = 3
        if flag == IS_VALUE:
            out[ids, answer_at] = codes
    table[tokenizer.convert_tokens_to_ids("\n"), IS_END] = 3


def _codes(number: int, width: int, rng: Random) -> Tensor:
    """Draw different rows with four ones each: (number,width)."""
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < number:
        drawn[tuple(sorted(rng.sample(range(width), 4)))] = None
    codes = torch.zeros(number, width)
    return codes.scatter_(1, torch.tensor(list(drawn)), 1.0)


def _copy(weight: Tensor, rows: slice, columns: slice, scale: float = 1.0) -> None:
    """Set `weight[rows, columns]` to a multiple of the identity."""
    weight[rows, columns] = scale * torch.eye(rows.stop - rows.start)


def _tap(conv: nn.Conv1d, channels: slice, ago: int = 0) -> None:
    """Let the short convolution of these channels read only the token `ago` steps back."""
    conv.weight[channels] = 0
    conv.weight[channels, 0, -1 - ago] = 1


def _write_gate(rows: Tensor, gathers: bool) -> None:
    """Write a gate that is always open, or (`gathers`) at the end of a line only."""
    rows.zero_()
    rows[:, ALWAYS] = -1.5 if gathers else 1.0
    rows[:, IS_END] = 3.0 if gathers else 0.0


def _write_mamba2(mixer: nn.Module, head: int, gathers: bool) -> None:
    """Write a head. Rows of in_proj: [z | x | B | C | dt]; channels of the convolution: [x | B | C]."""
    rows, own = mixer.in_proj.weight, _after(head * WIDTH, WIDTH)
    x = _after(INNER + own.start, WIDTH)
    group = STATE * (head * mixer.n_groups // HEADS)
    key = _after(2 * INNER + group, STATE)
    query = _after(key.start + STATE * mixer.n_groups, STATE)
    step = rows[2 * INNER + 2 * STATE * mixer.n_groups + head]
    _write_gate(rows[own], gathers)
    for part in (rows[x], rows[key], rows[query], step):
        part.zero_()
    for part, ago in ((x, 0), (key, 0), (query, 0 if gathers else 2)):
        _tap(mixer.conv1d, slice(part.start - INNER, part.stop - INNER), ago)
    mixer.D[head] = 0
    if gathers:
        _copy(rows, _after(x.start, KEY), key_at)
        _copy(rows, _after(x.start + KEY, VALUE), value_at)
        rows[key.start, ALWAYS] = rows[query.start, ALWAYS] = 0.3
        step[IS_KEY], step[IS_VALUE] = 2.5, 1.0
        mixer.dt_bias[head], mixer.A_log[head] = -4.0, 0.0
    else:
        _copy(rows, _after(x.start, VALUE), gathered_value_at)
        _copy(rows, key, gathered_key_at)
        _copy(rows, query, key_at)
        mixer.dt_bias[head], mixer.A_log[head] = 0.5, -8.0


def _write_mamba1(mixer: nn.Module, head: int, carrier: int, gathers: bool) -> None:
    """Write a head. Rows of in_proj: [x | z]; rows of x_proj: [dt | B | C].

    x_proj reads all channels after the convolution. So the keys and queries of an Aggregate head pass through the
    channels of another head, the carrier, whose own output stays noise.
    """
    rows, own = mixer.in_proj.weight, _after(head * WIDTH, WIDTH)
    _write_gate(rows[INNER + own.start : INNER + own.stop], gathers)
    rows[own] = 0
    _tap(mixer.conv1d, own)
    mixer.x_proj.weight.zero_()
    mixer.D[own] = 0
    key, query = mixer.x_proj.weight[STEPS : STEPS + STATE], mixer.x_proj.weight[STEPS + STATE :]
    if gathers:
        _copy(rows, _after(own.start, KEY), key_at)
        _copy(rows, _after(own.start + KEY, VALUE), value_at)
        always, is_key, is_value = range(own.stop - 4, own.stop - 1)
        rows[always, ALWAYS], rows[is_key, IS_KEY], rows[is_value, IS_VALUE] = 0.3, 1.0, 1.0
        key[0, always] = query[0, always] = 1.0
        mixer.x_proj.weight[0, is_key], mixer.x_proj.weight[0, is_value] = 2.5, 1.0
        mixer.dt_proj.weight[own, 0] = 1.0
        mixer.dt_proj.bias[own], mixer.A_log[own] = -4.0, 0.0
        return
    _copy(rows, _after(own.start, VALUE), gathered_value_at)
    mixer.dt_proj.bias[own], mixer.A_log[own] = 0.5, -8.0
    for part, at, ago, into in ((0, gathered_key_at, 0, key), (KEY, key_at, 2, query)):
        channels = _after(carrier * WIDTH + part, KEY)
        rows[channels] = 0
        _copy(rows, channels, at)
        _tap(mixer.conv1d, channels, ago)
        _copy(into, slice(0, KEY), channels)
    mixer.dt_proj.bias[_after(carrier * WIDTH, WIDTH)] = -10.0


def _scales(family: Family, n_groups: int) -> tuple[float, float]:
    """Return the output scales of Gather and Aggregate heads that give codes a size of about 3 in the residual stream.

    The gated norm of Mamba-2 sets the mean square over a group's channels to 1, of which 8 and about 4 are not zero.
    """
    if family == "mamba":
        return 0.02, 0.002
    return 3 * (8 * n_groups / INNER) ** 0.5, 3 * (4 * n_groups / INNER) ** 0.5


@torch.no_grad()
def answers(model: PreTrainedModel, batch: EncodedBatch, off: Sequence[HeadId] = ()) -> ChoiceScores:
    """Score the choices without some heads. Sets their columns of `out_proj` to zero instead of using hooks."""
    weights = {head.layer: model.backbone.layers[head.layer].mixer.out_proj.weight for head in off}
    kept = {layer: weight.clone() for layer, weight in weights.items()}
    for head in off:
        weights[head.layer][:, _after(head.head * WIDTH, WIDTH)] = 0
    logits = model(batch.input_ids, attention_mask=batch.attention_mask, logits_to_keep=1).logits[:, -1]
    for layer, weight in weights.items():
        weight.copy_(kept[layer])
    return choice_scores(logits, batch)


def scored_heads(
    model: PreTrainedModel,
    batches: Sequence[EncodedBatch],
    seed: int = 0,
    methods: Sequence[str] = ("ablation", "query", "context", "sharpen"),
) -> tuple[ScoredHead, ...]:
    """Measure every head with `locate_heads`, at any accuracy of the model."""
    section, splice = Locate(methods=tuple(methods)), Splice(select="aggregate")
    return locate_heads(model, planted_tokenizer(), section, splice, seed, batches=batches, any_accuracy=True).heads
