"""A row as a document, or what is wrong with it. Owns: what the columns mean, every check of a row, cutting texts.

Must never know: models, losses, file formats (`rows.py`), the order of training.

    prompt, answer     the text is one after the other; the answer is the question's, with the end token
    answer_span        where the prompt holds the answer; its segment is that line, with the newline
    messages           a chat template over all but the last message; the last is the answer
    text               no question; longer than `max_tokens`: cut between tokens
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from surgery.data.files import Row
from surgery.errors import DataError
from surgery.probes.documents import Document, Question, Span
from surgery.recipe import Data

_TOGETHER = 64  # rows tokenized at a time
_TRIES = 32  # token boundaries that are tried for a cut whose pieces keep their tokens
_BEHIND = 8  # tokens behind a cut that show whether the next piece begins with a token of the whole


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a longer one.

    Attributes:
        row: number of its row among those that were read, from 0.
        span: its place in the row's whole text, in characters.
        tokens: how many it has.
    """

    document: Document
    row: int
    span: Span
    tokens: int


@dataclass
class Reader:
    """Makes documents of rows, and refuses those that cannot be used.

    Attributes:
        held_out: read what `data.holdout` takes out of training, rather than what it leaves.
        skipped: rows left out so far.

    Raises:
        DataError: when it is made: the tokenizer has no end token, or no chat template, and one is asked for.
    """

    data: Data
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int | None = None
    context: int | None = None
    vocab_size: int | None = None
    held_out: bool = False
    skipped: int = 0
    first: DataError | None = None
    task: str = field(init=False)
    end: str = field(init=False)

    def __post_init__(self) -> None:
        path = Path(self.data.path).expanduser()
        self.task = path.name if path.exists() else self.data.path
        self.end = _end(self.tokenizer) if self.data.end else ""
        chat = self.data.chat_template or self.data.columns.messages is not None
        if chat and not self.tokenizer.chat_template:
            raise DataError("data.chat_template", "none", "This tokenizer has no chat template; use prompt and answer.")

    def document(self, row: Row) -> Document:
        """The whole row as a document. Raises DataError where that shows without tokens."""
        fields, columns = row.fields(), self.data.columns
        if columns.text is not None:
            return Document(self.task, self._whole(row, _string(row, fields, columns.text)))
        if columns.messages is not None or self.data.chat_template:
            messages = self._messages(row, fields)
            asked, answer = messages[-2]["content"], messages[-1]["content"]
            prompt = self._chat(row, messages[:-1])
        else:
            asked = prompt = _string(row, fields, columns.prompt)
            answer = _string(row, fields, columns.answer)
        if not answer.strip():
            raise DataError(row.where, "the answer is empty", "Give it one, or leave the row out.")
        if not prompt:
            raise DataError(row.where, "the prompt is empty", "An answer needs a token before it; use plain `text`.")
        text = self._whole(row, prompt + answer)
        segment = value = None
        if columns.answer_span is not None:
            value = _value(row, fields.get(columns.answer_span), asked, prompt, answer)
            segment = _line(prompt, value)
        return Document(self.task, text, (Question((len(prompt), len(text)), (), -1, segment, value),))

    def read(self, rows: Iterable[Row]) -> Iterator[Piece]:
        """The documents of all rows, in order. A bad row raises DataError, or is counted in `skipped`."""
        numbered = enumerate(rows)
        while chunk := list(islice(numbered, _TOGETHER)):
            made = [(number, row, self._document(row)) for number, row in chunk]
            good = [(number, row, d) for number, row, d in made if d is not None and self._is_asked(d)]
            if not good:
                continue
            encoded = self._tokens([document.text for _, _, document in good])
            for (number, row, document), ids, offsets in zip(good, *encoded, strict=True):
                try:
                    pieces = self._fit(row, document, ids, offsets)
                except DataError as error:
                    self._bad(error)
                    continue
                for span, tokens in pieces:
                    yield Piece(part(document, span), number, span, tokens)

    def nothing(self) -> DataError:
        """What to raise where no row was left."""
        if self.first is None and self.data.holdout:
            left = "held out" if self.held_out else "left to train on"
            hint = f"`holdout` is {self.data.holdout:g}. Give more rows, or another share."
            return DataError(self.data.path, f"no row is {left}", hint)
        if self.first is None:
            return DataError(self.data.path, "no rows", "Give it at least one.")
        return DataError(self.data.path, f"none of its {self.skipped} rows can be used", f"The first: {self.first}")

    def _is_asked(self, document: Document) -> bool:
        """Whether the document is on this reader's side of `holdout`: by its prompt, or by a plain text."""
        asked = document.questions[-1].answer[0] if document.questions else len(document.text)
        return is_held_out(document.text[:asked], self.data.holdout) == self.held_out

    def _document(self, row: Row) -> Document | None:
        try:
            return self.document(row)
        except DataError as error:
            self._bad(error)
            return None

    def _bad(self, error: DataError) -> None:
        if self.data.on_bad_row == "error":
            raise error
        self.first = self.first or error
        self.skipped += 1

    def _whole(self, row: Row, text: str) -> str:
        """The text with its end token. Raises DataError for what cannot be encoded."""
        if not text.strip():
            raise DataError(row.where, "the text is empty", "Leave the row out.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(row.where, f"not Unicode text: {error.reason}", "Remove the lone surrogate.") from None
        return text + self.end

    def _messages(self, row: Row, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A chat of two messages at least, the last one the assistant's."""
        columns = self.data.columns
        if columns.messages is None:
            prompt, answer = _string(row, fields, columns.prompt), _string(row, fields, columns.answer)
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        found = _field(row, fields, columns.messages)
        hint = "A chat is a list of {role, content}, both text; the last is the assistant's answer."
        if not isinstance(found, list) or len(found) < 2 or not all(isinstance(m, dict) for m in found):
            raise DataError(row.where, f"`{columns.messages}`: {_short(found)}", hint)
        messages = [{k: v for k, v in m.items() if v is not None} for m in found]  # Arrow fills what is not there
        for m in messages:
            if not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
                raise DataError(row.where, f"a message {_short(m)}", hint)
        if messages[-1]["role"] != "assistant":
            raise DataError(row.where, f"the last message is of {messages[-1]['role']!r}", hint)
        return messages

    def _chat(self, row: Row, messages: list[dict[str, Any]]) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            hint = "Give the roles in the order that the template wants."
            raise DataError(row.where, f"the chat template refuses it: {error}", hint) from None

    def _tokens(self, texts: list[str]) -> tuple[list[list[int]], list[list[Span]]]:
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _fit(self, row: Row, document: Document, ids: list[int], offsets: Sequence[Span]) -> list[tuple[Span, int]]:
        """The pieces of a document that are short enough: itself, unless it is a long plain text."""
        _check_tokens(row.where, document, ids, offsets, self.vocab_size)
        limit = min((n for n in (self.max_tokens, self.context) if n is not None), default=len(ids))
        if len(ids) <= limit:
            return [((0, len(document.text)), len(ids))]
        if document.questions:
            said = "The model takes" if limit == self.context else "`max_tokens` is"
            raise DataError(row.where, f"{len(ids)} tokens", f"{said} {limit}. Shorten it, or leave it out.")
        return cut(document.text, ids, offsets, limit, lambda text: self._tokens([text])[0][0])


def is_held_out(prompt: str, share: float) -> bool:
    """Whether a prompt is among the `share` that is never trained on: by its hash, so equal prompts go together."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") < share * 2**64


def part(document: Document, span: Span) -> Document:
    """The document, or a piece of a plain text."""
    if span == (0, len(document.text)):
        return document
    return Document(document.task, document.text[slice(*span)])


def cut(
    text: str, ids: Sequence[int], offsets: Sequence[Span], limit: int, tokens: Callable[[str], list[int]]
) -> list[tuple[Span, int]]:
    """Cuts a text into pieces of at most `limit` tokens that have, one after the other, the tokens of the whole.

    Of the boundaries before the limit the last such is taken. Where none is near (some tokenizers begin every text
    with a space), the piece is as long as fits, with tokens of its own.

    Args:
        ids, offsets: of the whole text.
        tokens: from a text to ids.

    Returns:
        (characters [start, end), tokens) of every piece; together they are the text.
    """
    pieces: list[tuple[Span, int]] = []
    start, at = 0, 0  # token, character
    while start < len(ids):
        best: tuple[int, int, int] | None = None
        ends = (e for e in range(min(start + limit, len(ids)), start, -1) if _between(offsets, e))
        for end in islice(ends, _TRIES):
            stop = offsets[end][0] if end < len(ids) else len(text)
            found = tokens(text[at:stop])
            behind = text[stop : offsets[min(end + _BEHIND, len(ids)) - 1][1]]
            if found == list(ids[start:end]) and tokens(behind)[:1] == list(ids[end : end + 1]):
                best = (end, stop, len(found))
                break
            if best is None and len(found) <= limit:
                best = (end, stop, len(found))
        if best is None:
            raise DataError("max_tokens", limit, f"Too few to cut {_short(text[at:])} between its tokens.")
        pieces.append(((at, best[1]), best[2]))
        start, at = best[:2]
    return pieces


def _between(offsets: Sequence[Span], end: int) -> bool:
    """Whether the token before `end` and the one at it share no character."""
    return end == len(offsets) or offsets[end - 1][1] <= offsets[end][0]


def check_documents(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None = None,
    context: int | None = None,
) -> None:
    """Raises DataError for the first that a model of this vocabulary and context cannot be trained on."""
    encoded = tokenizer([d.text for d in documents], add_special_tokens=False, return_offsets_mapping=True)
    for document, ids, offsets in zip(documents, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        where = f"{document.task}, {_short(document.text)}"
        _check_tokens(where, document, ids, offsets, vocab_size)
        if context is not None and len(ids) > context:
            raise DataError(where, f"{len(ids)} tokens", f"The model takes {context}.")


def _check_tokens(
    where: str, document: Document, ids: Sequence[int], offsets: Sequence[Span], vocab_size: int | None
) -> None:
    """Raises DataError for tokens that a model does not have, and for an answer that does not begin with a token."""
    if not ids:
        raise DataError(where, "no token", "Leave the row out.")
    if vocab_size is not None and max(ids) >= vocab_size:
        hint = f"The model has {vocab_size}: the tokenizer is not the model's, or tokens were added to it."
        raise DataError(where, f"token {max(ids)} is outside the vocabulary", hint)
    starts = [start for start, _ in offsets]
    for question in document.questions:
        first = _covering(where, starts, offsets, question.answer[0])
        if starts[first] < question.answer[0]:
            held = document.text[slice(*offsets[first])]
            hint = "Move the space between them, or end the prompt with a newline."
            raise DataError(where, f"the token {held!r} holds the prompt's end and the answer's beginning", hint)
        for char in (question.answer[1] - 1, *(question.value or ()), *(question.segment or ())):
            _covering(where, starts, offsets, min(char, len(document.text) - 1))


def _covering(where: str, starts: Sequence[int], offsets: Sequence[Span], char: int) -> int:
    """The first token that covers a character: several do where its bytes are split."""
    found = bisect_right(starts, char) - 1
    if found < 0 or offsets[found][1] <= char:
        raise DataError(where, f"no token covers character {char}", "This tokenizer drops text.")
    while found and offsets[found - 1][1] > char:
        found -= 1
    return found


def _end(tokenizer: PreTrainedTokenizerBase) -> str:
    """The end-of-text token. Raises DataError where there is none that text can hold."""
    hint = "Set `data.end: false`, or use a tokenizer that has one."
    if tokenizer.eos_token is None:
        raise DataError("data.end", "the tokenizer has no end token", hint)
    end = str(tokenizer.eos_token)
    ids = tokenizer(["a", f"a{end}"], add_special_tokens=False)["input_ids"]
    if ids[1] != [*ids[0], tokenizer.eos_token_id]:
        raise DataError("data.end", f"{end!r} is not one token in a text", hint)
    return end


def _field(row: Row, fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        hint = f"The row has {', '.join(map(str, fields)) or 'nothing'}. Say in `data.columns` which of them is what."
        raise DataError(row.where, f"`{name}` is missing", hint)
    return fields[name]


def _string(row: Row, fields: Mapping[str, Any], name: str) -> str:
    found = _field(row, fields, name)
    if not isinstance(found, str):
        hint = f"It is of type {type(found).__name__}; give text, in quotes."
        raise DataError(row.where, f"`{name}`: {_short(found)}", hint)
    return found


def _value(row: Row, span: Any, asked: str, prompt: str, answer: str) -> Span:
    """The value's place in the prompt, from its place in `asked`, which the prompt (of a chat) may hold within.

    The span has to hold the answer: a head that is shown another place learns to read that one. Whitespace at the ends
    of either does not count, since whose the space is depends on how a prompt is written; the value begins behind it.
    """
    where = row.where
    if not (isinstance(span, (list, tuple)) and len(span) == 2 and all(type(n) is int for n in span)):
        raise DataError(where, f"the span is {_short(span)}", "Give [start, end), two whole numbers.")
    start, end = span
    if not 0 <= start < end <= len(asked):
        hint = f"It is to lie in the prompt, which has {len(asked)} characters, and to be longer than 0."
        raise DataError(where, f"the span is [{start}, {end})", hint)
    held, wanted = asked[start:end], answer.strip()
    if held.strip() != wanted:
        at = asked.find(wanted)
        hint = (
            f"The prompt holds it at [{at}, {at + len(wanted)})." if at >= 0 else "The prompt does not hold it at all."
        )
        value = f"the span [{start}, {end}) holds {_short(held)}, the answer is {_short(answer)}"
        raise DataError(where, value, f"{hint} Correct the span, or leave the row out.")
    start += len(held) - len(held.lstrip())
    lead = len(asked) - len(asked.lstrip())
    shift = prompt.rfind(asked.strip()) - lead  # templates strip messages, and put them last
    if prompt[start + shift : end + shift] != asked[start:end] or shift < -lead:
        raise DataError(where, "the chat template changes the prompt", "The span cannot be found again: leave it out.")
    return start + shift, end + shift


def _line(prompt: str, value: Span) -> Span:
    """The line that holds the value, or the lines, with the newline at the end."""
    end = prompt.find("\n", value[1] - 1)
    return prompt.rfind("\n", 0, value[0]) + 1, end + 1 if end >= 0 else len(prompt)


def _short(value: object) -> str:
    """How a message shows what was found."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
