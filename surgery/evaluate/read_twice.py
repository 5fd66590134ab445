"""Prompts that contain their text twice: a control that improves retrieval without attention.

A recurrent model has to choose what it keeps before it knows the question. At the second reading it knows (Just Read
Twice, arXiv 2407.05483).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from surgery.evaluate.prompts import PromptSet
from surgery.probes.documents import Document, Span, answer_list

READ_TWICE = "_read_twice"  # end of an arm's name


def prompts_twice(prompts: PromptSet, begin: str | None = None) -> PromptSet:
    """Repeat every prompt with an answer. Texts for perplexity are left out. `begin`: as of `read_twice`."""

    def twice(tasks: Mapping[str, Sequence[Document]]) -> dict[str, list[Document]]:
        return {
            task: [read_twice(document, begin) for document in documents]
            for task, documents in tasks.items()
            if documents[0].questions
        }

    return PromptSet(twice(prompts.choices), {}, twice(prompts.held_out), twice(prompts.generation))


def read_twice(document: Document, begin: str | None = None) -> Document:
    """Put the prompt of a document, its question included, and a newline before its text.

    Args:
        begin: BOS, which a chat template may write at the start of a text. It stays there alone.
    """
    prompt, text = document.text[: answer_list(document)[0].answer[0]] + "\n", document.text.removeprefix(begin or "")
    shift = len(prompt) + len(text) - len(document.text)

    def moved(span: Span) -> Span:
        return span[0] + shift, span[1] + shift

    questions = tuple(
        replace(q, answer=moved(q.answer), segment=q.segment and moved(q.segment), value=q.value and moved(q.value))
        for q in document.questions
    )
    return Document(document.task, prompt + text, questions)
