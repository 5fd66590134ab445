"""Which heads write the first token of a value, and which the second: scores of heads on prompts cut before each.

    python -m bench.studies.scale.second_token BASE

Prompts have values of four digits in two tokens. The second question is the prompt with the first token of the answer
after it; its choices are the second tokens of all values. Locating asks for the first token alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from bench.common import load, markdown_table, parser, quiet_on_one_thread
from surgery.data.ranking import query_batches
from surgery.locate.locating import locate_heads
from surgery.probes.documents import Document, rng_of
from surgery.probes.registry import PROBES, Options
from surgery.recipe import Locate, Splice

DIGITS = 2  # of a token


def cut(document: Document, second: bool) -> Document:
    """The document with a question about the first or the second half of its value."""
    (question,) = document.questions
    (start, stop), choices = question.answer, question.choices
    answer, value = document.text[start:stop].rstrip(), question.value
    assert value is not None
    middle = start + len(answer) - DIGITS
    if second:
        parts = sorted({choice.rstrip()[-DIGITS:] for choice in choices})
        asked = replace(question, answer=(middle, middle + DIGITS), value=(value[1] - DIGITS, value[1]))
    else:
        parts = sorted({choice.rstrip()[:-DIGITS] for choice in choices})
        asked = replace(question, answer=(start, middle), value=(value[0], value[1] - DIGITS))
    part = document.text[slice(*asked.answer)]
    return replace(document, questions=(replace(asked, choices=tuple(parts), gold=parts.index(part)),))


def prompts(tokenizer: PreTrainedTokenizerBase, count: int, pairs: int) -> list[Document]:
    """Prompts whose answers have two tokens."""
    options = Options(pairs=pairs, questions=1, filler=(0, 20), value_digits=(4, 4), tokenizer=tokenizer)
    return [PROBES["kv_retrieval"].generate(rng_of("second", i), "eval", options) for i in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("base", type=Path)
    options.add_argument("--pairs", type=int, default=24)
    options.add_argument("--prompts", type=int, default=64)
    args = options.parse_args(arguments)
    quiet_on_one_thread()
    model, tokenizer = load(args.base)
    documents = prompts(tokenizer, args.prompts, args.pairs)
    section = Locate.model_validate({"methods": ["query", "sharpen"]})
    for second in (False, True):
        batches = query_batches([cut(document, second) for document in documents], tokenizer, 8)
        heads = locate_heads(model, tokenizer, section, Splice(select="aggregate"), batches=batches, any_accuracy=True)
        rows = []
        for column in ("query", "segment_end", "answer_token"):
            best = sorted(heads.heads, key=lambda head: -head.scores[column].value)[:5]
            rows.append([column, *(f"{head.head} {head.scores[column].value:+.2f}" for head in best)])
        accuracy = heads.clean["accuracy"].value
        print(f"\n{'second' if second else 'first'} token, the base answers {accuracy:.2f}\n")
        print(markdown_table(["logits lost or gained", *"12345"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
