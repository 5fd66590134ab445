"""Pairs that begin with the values, the gate and the output of the heads that they copy.

    python -m bench.studies.scale.gated_pairs BASE --heads heads.json --texts base_text.jsonl --folder runs/pairs

It splices pairs with `init: ssm` before the layers of the located heads, fits them to the heads, trains where they read
(250 steps of `reads`), and then all weights for 60 steps, on the documents of `surgery init`. Measure the result with
`python -m bench.studies.scale BASE --heads heads.json --contexts 8 --only --measure FOLDER`.

An attention block has no gate, so it adds what it reads at every token of a text too, where the gate of an SSM head is
closed. Here the first token is the gate: its values are 0, and a head attends to it where the SSM head's gate is
closed. Everything is in the weights, so the model stays a Nemotron-H of transformers. Found by `fit`:

    values   the Gather layer copies x of the heads, with their convolution, as principal directions on some prompts.
             Its scan passes them (D = 0, a decay of e^-30) with `C_t B_t = 1`, where B reads the token before: at the
             first token there is none, and values are 0
    key      a channel that is not 0 at the first token alone
    query    `20 - 40 k` for the openness k of the gate, in [0, 1], by ridge regression from what the block reads. k is
             the projection of gate, norm and norm's weight on their mean at the queries, as a share of it
    output   the head's columns of `out_proj`, times that mean, times `--size`

Shape legend: T tokens, D channels that the block reads, I inner width and P head width of the base.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import load, parser, quiet_on_one_thread
from bench.studies.scale.prompts import texts_of
from surgery.files.atomic import read_json
from surgery.models.inserted import head_slots, inserted_entries
from surgery.probes.documents import rng_of
from surgery.probes.registry import PROBES, Options
from surgery.recipe import Splice, Train
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.train.training import train_model
from surgery.types import head_set_from_json

SIDE, SINK = 128, 20.0
READS, STEPS = 250, 60
MARK = 40.0  # the constant that the mark is made of has an error of .1 to .3
SHORT = {"filler": [0, 12], "train_eos": True, "weights": {"answer": 2.0, "attention": 1.0}}
SOURCES: tuple[dict[str, Any], ...] = (
    {"task": "kv_retrieval", "pairs": [50, 100], "questions": 48, "rows": 1, **SHORT},
    {"task": "kv_retrieval", "pairs": [16, 40], "value_digits": [3, 6], "questions": 16, "rows": 1, **SHORT},
    {"task": "records", "pairs": [16, 24], "value_digits": [3, 6], "questions": 16, "rows": 1, **SHORT},
    {"task": "closed_book", "split": 0, "rows": 2, "weights": {"base_kl": 1.0}},
    {"task": "statement", "split": 0, "rows": 1, "weights": {"base_kl": 1.0}},
    {"base_text": 64, "rows": 2, "max_tokens": 256, "weights": {"base_kl": 4.0}},
)


@dataclass
class HeadTrace:
    """What the SSM heads of one layer hold on a prompt: x after the convolution, and the factor of y, both (T,I)."""

    x: Tensor
    factor: Tensor


def head_trace(base: PreTrainedModel, layer: int, ids: Tensor) -> HeadTrace:
    """Run a Mamba-2 on (1,T) and take x and `silu(gate) * norm * weight of the norm` in one layer."""
    mixer = base.backbone.layers[layer].mixer
    seen: dict[str, Any] = {}
    hooks = [
        mixer.in_proj.register_forward_hook(lambda _, __, output: seen.update(projected=output)),
        mixer.norm.register_forward_pre_hook(lambda _, args, kwargs: seen.update(y=args[0]), with_kwargs=True),
    ]
    base(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    gate, xBC, _ = seen["projected"].split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], -1)
    x = F.silu(mixer.conv1d(xBC.mT)[0, : mixer.intermediate_size, : ids.shape[1]].T)
    opened = F.silu(gate.float())
    mean_square = (seen["y"] * opened).square().mean(-1, keepdim=True)
    factor = opened * torch.rsqrt(mean_square + mixer.norm.variance_epsilon) * mixer.norm.weight
    return HeadTrace(x, factor[0])


def block_input(hybrid: PreTrainedModel, entry: dict[str, Any], ids: Tensor) -> Tensor:
    """(T,D) what the block of a pair reads, after its norm."""
    seen: list[Tensor] = []
    projection = hybrid.get_submodule(f"model.layers.{entry['layers'][-1]}").mixer.v_proj
    hook = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    hybrid(ids, use_cache=False)
    hook.remove()
    return seen[0][0]


def ridge(inputs: Tensor, targets: Tensor, share: float) -> Tensor:
    """(N,A) and (N,B) -> (A,B), with a ridge as a share of the mean square of the inputs."""
    x, y = inputs.double(), targets.double()
    gram = x.T @ x / len(x)
    gram += share * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram, x.T @ y / len(x)).float()


@torch.no_grad()
def hold_values(hybrid: PreTrainedModel, base: PreTrainedModel, prompts: Sequence[Tensor]) -> None:
    """Let the second half of a pair's side channels hold principal directions of x of its heads.

    They are 0 at the first token, and the last channel, the mark, is 0 at all others.
    """
    for entry in inserted_entries(hybrid.config):
        source = base.backbone.layers[entry["site"]]
        gather = hybrid.get_submodule(f"model.layers.{entry['layers'][0]}").mixer
        constant = _constant(base, entry["before"])
        I, N, P, K = gather.intermediate_size, gather.ssm_state_size, gather.head_dim, gather.conv_kernel_size  # noqa: E741
        width = source.mixer.head_dim
        theirs = torch.tensor([head * width + p for head in entry["heads"] for p in range(width)])
        if width % P or 2 * N % P or 2 * N + len(theirs) >= I:
            raise SystemExit(f"layer {entry['site']}: {len(theirs)} channels of x do not fit whole heads of the layer.")
        ours = 2 * N + torch.arange(len(theirs))  # behind the copies of B and C
        gather.in_proj.weight[:I, : len(constant)] = 2 * constant  # the gate
        gather.in_proj.weight[I + ours] = 0
        gather.in_proj.weight[I + ours, : source.norm.weight.numel()] = (
            source.mixer.in_proj.weight[source.mixer.intermediate_size + theirs] * source.norm.weight
        )
        gather.conv1d.weight[ours] = source.mixer.conv1d.weight[theirs]
        gather.conv1d.bias[ours] = source.mixer.conv1d.bias[theirs]
        first, end = entry["channels"]
        rows = gather.out_proj.weight[(first + end) // 2 : end]
        x = torch.cat([head_trace(base, entry["site"], ids).x[:, theirs] for ids in prompts]).double()
        directions = torch.linalg.eigh(x.T @ x / len(x)).eigenvectors.flip(1)[:, : len(rows) - 1]
        rows.zero_()
        kept = directions.shape[1]
        size = x.square().mean().sqrt() * (kept / len(theirs)) ** 0.5 * 2
        rows[:kept, ours] = (directions.T / size).float()
        _gate_by_the_scan(gather, constant, slice(2 * N // P, (2 * N + len(theirs)) // P), K)
        _mark_the_first_token(gather, constant, rows, K)


def _constant(base: PreTrainedModel, layer: int) -> Tensor:
    """(D,) whose product with the normed input of a layer is about 1, at first tokens too: on 64 short random rows."""
    seen: list[Tensor] = []
    hook = base.backbone.layers[layer].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    base(torch.randint(base.config.vocab_size, (64, 32), generator=torch.Generator().manual_seed(0)), use_cache=False)
    hook.remove()
    normed = F.rms_norm(seen[0], seen[0].shape[-1:], eps=base.config.layer_norm_epsilon).flatten(0, 1)
    return ridge(normed, torch.ones(len(normed), 1), 1e-3)[:, 0]


def _gate_by_the_scan(gather: nn.Module, constant: Tensor, heads: slice, kernel: int) -> None:
    """Pass x of these heads by the scan, with a factor of 0 at the first token and of about 1 at others."""
    I, N = gather.intermediate_size, gather.ssm_state_size  # noqa: E741
    gather.dt_bias[:] = -20  # off, for the others
    gather.dt_bias[heads] = math.log(math.e - 1)  # a step of 1
    gather.A_log[heads] = math.log(30)
    gather.D[heads] = 0
    for channel, tap in ((I, kernel - 2), (I + N, kernel - 1)):  # B of the token before, C
        gather.in_proj.weight[I + channel, : len(constant)] = 1.2784645 * constant  # silu(1.278) = 1
        gather.conv1d.weight[channel] = 0
        gather.conv1d.weight[channel, 0, tap] = 1
        gather.conv1d.bias[channel] = 0


def _mark_the_first_token(gather: nn.Module, constant: Tensor, rows: Tensor, kernel: int) -> None:
    """silu(MARK * (1/4 - constant of the token before)): MARK / 4 at the first token, and about 0 at others."""
    last = gather.intermediate_size - 1
    gather.in_proj.weight[gather.intermediate_size + last, : len(constant)] = MARK * constant
    gather.conv1d.weight[last] = 0
    gather.conv1d.weight[last, 0, kernel - 2] = -1
    gather.conv1d.bias[last] = MARK / 4
    gather.out_proj.weight[:, last] = 0
    rows[-1, last] = 4 / MARK


@torch.no_grad()
def fit(
    hybrid: PreTrainedModel, base: PreTrainedModel, prompts: Sequence[Tensor], texts: Sequence[Tensor], size: float
) -> None:
    """Fit values, gate and output of every pair, from below, and print how well.

    Args:
        prompts: (1,T) each, up to a query.
        texts: (1,T) each, of other kinds: the gate is fitted on them too.
        size: factor of the output.
    """
    for entry in inserted_entries(hybrid.config):
        attention = hybrid.get_submodule(f"model.layers.{entry['layers'][-1]}").mixer
        source = base.backbone.layers[entry["site"]].mixer
        first, end = entry["channels"]
        held = torch.arange((first + end) // 2, end - 1)
        traces = [head_trace(base, entry["site"], ids) for ids in (*prompts, *texts)]
        inputs = [block_input(hybrid, entry, ids) for ids in (*prompts, *texts)]
        x = torch.cat([trace.x for trace in traces[: len(prompts)]])
        read = torch.cat(inputs[: len(prompts)])[:, held]
        values = ridge(read, x, 1e-4)
        explained = 1 - (read @ values - x).square().mean(0) / x.var(0)
        at_query = torch.stack([trace.factor[-1] for trace in traces[: len(prompts)]]).mean(0)
        mark = torch.stack([part[0, end - 1] for part in inputs]).mean()
        scale = math.sqrt(hybrid.config.hidden_size / base.config.hidden_size)
        for slot, head in zip(head_slots(len(entry["heads"]), attention), entry["heads"], strict=True):
            own = slice(head * source.head_dim, (head + 1) * source.head_dim)
            opened = (
                torch.cat([trace.factor[:, own] @ at_query[own] for trace in traces]) / at_query[own].square().sum()
            )
            scores = SINK - 2 * SINK * opened.clamp(0, 1)
            query = ridge(torch.cat(inputs), scores[:, None], 1e-3)[:, 0]
            key_slot, dim = slot // attention.num_key_value_groups, attention.head_dim
            rows = slice(key_slot * dim, (key_slot + 1) * dim)
            attention.v_proj.weight[rows] = 0
            attention.v_proj.weight[rows, held] = values[:, own].T
            attention.k_proj.weight[rows.stop - 1] = 0
            attention.k_proj.weight[rows.stop - 1, end - 1] = dim**0.5 / mark
            attention.q_proj.weight[(slot + 1) * dim - 1] = query
            columns = slice(slot * dim, (slot + 1) * dim)
            attention.o_proj.weight[: base.config.hidden_size, columns] = (
                source.out_proj.weight[:, own] * at_query[own] * scale * size
            )
            scored = [part @ query for part in inputs]
            fitted = float(explained[own].mean())
            at_queries = sum(float(part[-1]) for part in scored[: len(prompts)]) / len(prompts)
            elsewhere = float(torch.cat(scored).mean())
            print(
                f"L{entry['site']}H{head}: R2 of values {fitted:.2f}, first token {at_queries:.1f} at queries, "
                f"{elsewhere:.1f} on average",
                flush=True,
            )


def fitting_prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[Tensor]:
    """Training prompts of 32 pairs, up to the answer, half of them with values of several tokens."""
    found = []
    for digits in (None, (3, 6)):
        options = Options(pairs=32, questions=1, filler=(0, 12), tokenizer=tokenizer, value_digits=digits)
        for number in range(count):
            document = PROBES["kv_retrieval"].generate(rng_of("fit", number), "train", options)
            text = document.text[: document.questions[0].answer[0]]
            found.append(tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("base", type=Path)
    options.add_argument("--heads", type=Path, required=True, help="heads.json of a run of `surgery init`'s recipe")
    options.add_argument("--texts", type=Path, required=True, help="base_text.jsonl of that run")
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--size", type=float, default=0.25)
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    base, tokenizer = load(args.base)
    heads = head_set_from_json(read_json(args.heads))
    shape = {"side_channels": SIDE, "head_dim": base.config.head_dim}
    splice = Splice(form="pair", init="ssm", num_heads=len(heads.chosen), **shape)
    plan = make_plan(heads, base.config, splice, 0)
    hybrid = splice_model(base, plan, splice)
    prompts = fitting_prompts(tokenizer, 8)
    hold_values(hybrid, base, prompts[::2])
    rows = texts_of(args.texts, 12)
    texts = [tokenizer(row.text, return_tensors="pt")["input_ids"][:, :256] for row in rows]
    fit(hybrid, base, prompts, texts, args.size)
    train_model(hybrid, tokenizer, _stages(), plan, base, 0, None, on_step=_show, texts=args.texts)
    hybrid.eval().save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{args.folder}: {time.process_time():.0f} CPU seconds")
    return 0


def _stages() -> Train:
    given = {"trainable": "all", "sources": SOURCES, "read_steps": READS, "steps": STEPS}
    read, answers = Train.model_validate(given).sequence
    # 5e-4 for the new layers loses the gate within ten steps.
    rates = ({"lr": 1e-4, "new_heads_lr": 2.8e-3, "warmup": 20}, {"lr": 1e-4, "new_heads_lr": 1e-4, "warmup": 5})
    stages = zip((read, answers), rates, strict=True)
    return Train(stages=[{**stage.changed, "optimizer": rate} for stage, rate in stages])


def _show(step: int, history: Sequence[dict[str, float]]) -> None:
    if step % 10 == 0:
        print(step, {name: round(value, 3) for name, value in history[-1].items()}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
