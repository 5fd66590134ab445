"""Which heads carry the answer's value to the query? Exchange it, and patch one head's output at the query.

    python -m bench.studies.head_choice.swap        write docs/evidence/head_choice/swap.json (two minutes on one core)

Every prompt has a twin with the same question, in which the gold value and that of another line have changed places.
A head's output at the query token is replaced by its output in the twin. A head that reads the answer loses margin. One
that gathers the key of the question has the same output in both, and loses nothing. This is an interchange intervention
(arXiv 2106.02997). The column `zero` is ablation at the query, as the chooser `aggregate` measures it.

Shape legend: N prompts, T tokens, P channels of a head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.common import ROOT, load, parser, quiet_on_one_thread, save
from bench.studies.experiment import in_short_chunks
from bench.studies.head_choice.bases import BASES
from surgery.data.encoding import encode
from surgery.interventions.hooks import record
from surgery.models.lookup import family_of, mixer_of, structure_of
from surgery.probes.documents import Document
from surgery.probes.kv_retrieval import kv_prompts
from surgery.scoring.ranking import ranked
from surgery.types import MixerSpec

RESULTS = ROOT / "docs" / "evidence" / "head_choice" / "swap.json"
KEPT = ("shipped", "far", "again", "english")  # bases whose checkpoints are in the repository
PROMPTS = 48


def twin_of(document: Document) -> Document:
    """Exchange the gold value with the value of the first other line that is as long."""
    question = document.questions[-1]
    assert question.value is not None
    start, end = question.value
    values = [match.span(1) for match in re.finditer(r":(\d+)\n", document.text[: question.answer[0]])]
    text = document.text
    first, last = next(
        (span for span in values if span != (start, end) and span[1] - span[0] == end - start), (start, end)
    )
    exchanged = list(text)
    exchanged[start:end], exchanged[first:last] = text[first:last], text[start:end]
    return replace(document, text="".join(exchanged))


@contextmanager
def patched(model: PreTrainedModel, spec: MixerSpec, columns: Any, values_NP: Tensor) -> Iterator[None]:
    """Replace a head's input of `out_proj` at the last token."""

    def patch(module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        u_NTI = arguments[0].clone()
        u_NTI[:, -1, columns] = values_NP
        return (u_NTI,)

    handle = structure_of(spec).out_proj(mixer_of(model, spec)).register_forward_pre_hook(patch)
    try:
        yield
    finally:
        handle.remove()


def scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: list[Document]
) -> dict[str, dict[str, float]]:
    """Head -> mean margin lost with the twin's output at the query (`swap`), and with zeros (`zero`)."""
    batch, twins = (
        encode(found, tokenizer, "left", until_answer=True) for found in (documents, [twin_of(d) for d in documents])
    )
    assert torch.equal(batch.attention_mask, twins.attention_mask), "a value has another number of tokens"
    specs = family_of(model.config).mixers(model.config)
    with record(model, specs) as activations:
        ranked(model, [twins])
    clean, found = ranked(model, [batch]).margin, {}
    for spec in specs:
        for head in spec.heads:
            columns = structure_of(spec).weight_slices(spec, head.head).out
            swap = activations.heads[spec.name][:, -1, columns]
            lost = {}
            for name, values in (("swap", swap), ("zero", torch.zeros_like(swap))):
                with patched(model, spec, columns, values):
                    lost[name] = round(float((clean - ranked(model, [batch]).margin).mean()), 3)
            found[str(head)] = lost
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure all bases and write the results."""
    parser(__doc__).parse_args(arguments)
    quiet_on_one_thread()
    results: dict[str, Any] = {"prompts": PROMPTS, "bases": {}}
    for name in KEPT:
        options = BASES[name].options
        documents = list(kv_prompts("swap", 0, PROMPTS, options["locate_pairs"], filler=options.get("filler")))
        model, tokenizer = load(BASES[name].folder)
        results["bases"][name] = scores(in_short_chunks(model), tokenizer, documents)
        for column in ("swap", "zero"):
            best = sorted(results["bases"][name].items(), key=lambda item: -item[1][column])[:4]
            print(name, column, ", ".join(f"{head} {lost[column]:.2f}" for head, lost in best), flush=True)
    save(RESULTS, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
