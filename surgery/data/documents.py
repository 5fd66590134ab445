"""Turn rows of the user's own data into documents, and check them.

The form of a document follows from the columns of the recipe:

prompt, answer     the text is the prompt followed by the answer; the answer includes the end token
answer_span        also gives the place of the answer in the prompt; the segment is the line that contains it.
                   With `auto`, the place of rows without a span is found in the prompt
messages           the prompt is the chat template over all messages but the last; the last is the answer
text               plain text without a question; texts longer than `max_tokens` are cut between tokens
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from surgery.data.answer_spans import find_answer
from surgery.data.columns import names_of_columns
from surgery.data.files import Row, rows_in_order
from surgery.data.offsets import Tokens, before_text, tokenized
from surgery.data.pieces import Piece, cut, part
from surgery.data.positions import positions_of
from surgery.errors import DataError, ProbeError, short_repr
from surgery.probes.documents import Document, Question, Span
from surgery.recipe import Data

_LONGEST = 2**23  # characters of a row: a tokenizer that runs out of memory ends the process
_TOKENIZE_TOGETHER = 64  # rows to tokenize at once


@dataclass
class Reader:
    """Turn rows into documents. Unusable rows raise an error or are skipped.

    Attributes:
        max_tokens: maximum tokens of a document; no limit if None.
        context: maximum tokens of the model; no limit if None.
        vocab_size: rows of the model's embedding; not checked if None.
        held_out: read the rows that `data.holdout` keeps from training, instead of the others.
        skipped: rows skipped so far.
        first_error: error of the first skipped row.
        spans: with `answer_span: auto`, the number of rows that `read` yielded so far: `found`, `ambiguous`, `missing`
            (see `find_answer`), and `marked` for rows with a span of their own.

    Raises:
        DataError: the tokenizer has no end token, or no chat template, and the data needs one.
    """

    data: Data
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int | None = None
    context: int | None = None
    vocab_size: int | None = None
    held_out: bool = False
    skipped: int = 0
    first_error: DataError | None = None
    spans: Counter[str] = field(default_factory=Counter)
    task: str = field(init=False)
    end: str = field(init=False)

    def __post_init__(self) -> None:
        self.task = self.data.public_name
        self.end = _end(self.tokenizer) if self.data.end else ""
        messages = self.data.columns.messages
        if (self.data.chat_template or messages is not None) and not self.tokenizer.chat_template:
            name, value = ("data.chat_template", True) if messages is None else ("data.columns.messages", messages)
            hint = "This tokenizer has no chat template. Use prompt and answer, or set base.tokenizer to a copy with "
            raise DataError(name, value, hint + "one.")

    def document(self, row: Row) -> Document:
        """Turn a row into a document, without tokenizing it.

        Raises:
            DataError: a column is missing or has the wrong type, a text is empty, or the span is wrong.
        """
        return self._parsed(row)[0]

    def read(self, rows: Iterable[Row]) -> Iterator[Piece]:
        """Yield the documents of all rows, in order.

        Raises:
            DataError: a row is unusable and `on_bad_row` is `error`. Otherwise it is counted in `skipped`.
        """
        numbered = enumerate(rows)
        while chunk := list(islice(numbered, _TOKENIZE_TOGETHER)):
            parsed = []
            for number, row in chunk:
                try:
                    document, origin, content = self._parsed(row)
                except DataError as error:
                    self._skip(error)
                    continue
                if is_held_out(content, self.data.holdout) == self.held_out:
                    parsed.append((number, row, document, origin))
            encoded = tokenized(self.tokenizer, [document.text for _, _, document, _ in parsed]) if parsed else []
            for (number, row, document, origin), tokens in zip(parsed, encoded, strict=True):
                try:
                    pieces = self._fit(row, document, tokens)
                except DataError as error:
                    self._skip(error)
                    continue
                self.spans.update([origin] if origin else ())
                for span, length in pieces:
                    yield Piece(part(document, span), number, span, length)

    def empty_error(self) -> DataError:
        """The error for data without a usable row."""
        path, share = self.data.path, self.data.holdout
        if self.first_error is not None:
            value = f"none of its {self.skipped} rows can be used"
            return DataError(path, value, f"Error of the first: {self.first_error}")
        if share and next(rows_in_order(self.data), None) is not None:
            side = "held out" if self.held_out else "left for training"
            return DataError(path, f"no row is {side}", f"`holdout` is {share:g}. Add rows, or set another share.")
        return DataError(path, "no rows", "Add at least one.")

    def _skip(self, error: DataError) -> None:
        """Count an unusable row, or raise its error."""
        if self.data.on_bad_row == "error":
            raise error
        self.first_error = self.first_error or error
        self.skipped += 1

    def _parsed(self, row: Row) -> tuple[Document, str, str]:
        """Turn a row into a document.

        Returns:
            The document; the key of `spans` that counts it, empty without `auto`; and the text that decides whether the
            row is held out. It has nothing of a chat template, which may print the date.
        """
        fields, columns = row.fields(), self.data.columns
        if columns.text is not None:
            text = self._whole(row, self._text(row, fields, "text"))
            return Document(self.task, text), "", text
        if columns.messages is not None or self.data.chat_template:
            messages = self._messages(row, fields)
            request, answer = messages[-2]["content"], messages[-1]["content"]
            content = request if len(messages) == 2 else json.dumps(messages[:-1], ensure_ascii=False)
            try:
                prompt = str(
                    self.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
                )
            except (TemplateError, ValueError, TypeError, KeyError) as error:
                hint = "Use the roles, and their order, that the template expects."
                raise DataError(row.where, f"the chat template refuses it: {error}", hint) from None
        else:
            content = request = prompt = self._text(row, fields, "prompt")
            answer = self._text(row, fields, "answer")
        answer = answer.removesuffix(self.end)
        if not answer.strip():
            raise DataError(row.where, "the answer is empty", "Add one, or remove the row.")
        if not prompt:
            hint = "An answer needs a token before it. Add a prompt, or set `data.columns.text`."
            raise DataError(row.where, "the prompt is empty", hint)
        text = self._whole(row, prompt + answer)
        origin, value, segment = "", None, None
        span = fields.get(columns.span_column) if columns.span_column is not None else None
        if columns.finds_spans and span is None:
            origin, value = find_answer(prompt, answer)
        elif columns.span_column is not None:
            if columns.span_column not in fields:
                hint = f"The row has {names_of_columns(fields, 'answer_span')} `auto` finds it in the prompt."
                raise DataError(row.where, f"`{columns.span_column}` is missing", hint)
            origin = "marked" if columns.finds_spans else ""
            value = _value(row, span, request, prompt, answer)
        if value is not None:
            line_end = prompt.find("\n", value[1] - 1)
            end = line_end + 1 if line_end >= 0 else len(prompt)
            if not prompt[end:].strip():  # the line goes on to the query, which cannot read itself
                end = value[1]
            segment = prompt.rfind("\n", 0, value[0]) + 1, end
        question = Question((len(prompt), len(text)), (), -1, segment, value)
        return Document(self.task, text, (question,)), origin, content

    def _field(self, row: Row, fields: Mapping[str, Any], key: str) -> Any:
        """Value of the column that `data.columns.KEY` names."""
        name = getattr(self.data.columns, key)
        if name not in fields:
            raise DataError(row.where, f"`{name}` is missing", f"The row has {names_of_columns(fields, key)}")
        if fields[name] is None:
            raise DataError(row.where, f"`{name}` is null", "Write a value, or remove the row.")
        return fields[name]

    def _text(self, row: Row, fields: Mapping[str, Any], key: str) -> str:
        value = self._field(row, fields, key)
        if not isinstance(value, str):
            name, hint = getattr(self.data.columns, key), f"It has type {type(value).__name__}. Use text, in quotes."
            raise DataError(row.where, f"`{name}`: {short_repr(value)}", hint)
        return value

    def _whole(self, row: Row, text: str) -> str:
        """End a text with the end token. Raise DataError if the text is empty or cannot be encoded."""
        if not text.strip():
            raise DataError(row.where, "the text is empty", "Remove the row.")
        if len(text) > _LONGEST:
            hint = f"Cut it into rows of at most {_LONGEST:,}."
            raise DataError(row.where, f"a text of {len(text):,} characters", hint)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(row.where, f"not Unicode text: {error.reason}", "Remove the lone surrogate.") from None
        return text.removesuffix(self.end) + self.end

    def _messages(self, row: Row, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Read a chat: two messages or more, the last one of the assistant."""
        name = self.data.columns.messages
        if name is None:
            prompt, answer = self._text(row, fields, "prompt"), self._text(row, fields, "answer")
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        value = self._field(row, fields, "messages")
        hint = "Use a list of {role, content}, both text, whose last message has the role assistant."
        if not isinstance(value, list) or len(value) < 2 or not all(isinstance(m, dict) for m in value):
            raise DataError(row.where, f"`{name}`: {short_repr(value)}", hint)
        messages = [{k: v for k, v in m.items() if v is not None} for m in value]  # Arrow adds None for missing keys
        for m in messages:
            if not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
                raise DataError(row.where, f"message {short_repr(m)}", hint)
        if messages[-1]["role"] != "assistant":
            raise DataError(row.where, f"the last message has the role {messages[-1]['role']!r}", hint)
        return messages

    def _fit(self, row: Row, document: Document, tokens: Tokens) -> list[tuple[Span, int]]:
        """Return characters and tokens of each piece. Only a long plain text has more than one."""
        _check_tokens(row.where, document, tokens, self.vocab_size)
        ids = tokens.ids
        limit = min((n for n in (self.max_tokens, self.context) if n is not None), default=len(ids))
        if len(ids) <= limit:
            return [((0, len(document.text)), len(ids))]
        if document.questions:
            reason = "The model takes at most" if limit == self.context else "`max_tokens` is"
            raise DataError(row.where, f"{len(ids)} tokens", f"{reason} {limit}. Shorten the row, or remove it.")
        begun = len(before_text(self.tokenizer))  # tokens before each piece
        skip = min(begun, bisect_right(tokens.ends, 0))  # those before the text, if it does not have them itself

        def tokens_of(text: str) -> list[int]:
            return tokenized(self.tokenizer, [text], whole=False)[0].ids

        pieces = cut(document.text, ids[skip:], tokens.offsets[skip:], limit - begun, tokens_of)
        return [(span, length + begun) for span, length in pieces]


def is_held_out(prompt: str, share: float) -> bool:
    """Whether a prompt is held out from training. Its hash decides, so equal prompts stay together.

    Args:
        share: share of all prompts to hold out, from 0 to 1.
    """
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") < share * 2**64


def check_documents(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None = None,
    context: int | None = None,
) -> None:
    """Raise DataError for the first document that does not fit the model's vocabulary or context."""
    rows = tokenized(tokenizer, [document.text for document in documents])
    for document, tokens in zip(documents, rows, strict=True):
        where = f"{document.task}, {short_repr(document.text)}"
        _check_tokens(where, document, tokens, vocab_size)
        if context is not None and len(tokens.ids) > context:
            raise DataError(where, f"{len(tokens.ids)} tokens", f"The model takes at most {context}. Shorten it.")


def _check_tokens(where: str, document: Document, tokens: Tokens, vocab_size: int | None) -> None:
    """Raise DataError for tokens outside the vocabulary, and for an answer that starts inside a token."""
    if not tokens.ids:
        raise DataError(where, "the text has no tokens", "Remove the row.")
    if vocab_size is not None and max(tokens.ids) >= vocab_size:
        hint = f"The model has {vocab_size} tokens. Set base.tokenizer to the tokenizer that it was trained with."
        raise DataError(where, f"token {max(tokens.ids)} is outside the vocabulary", hint)
    for question in document.questions:
        try:
            positions_of(question, document, tokens)
        except ProbeError as error:
            raise DataError(where, str(error.value), error.hint) from None


def _end(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the end-of-text token. Raise DataError if there is none, or if a text encodes it as several tokens."""
    hint = "Set `data.end: false`, or use a tokenizer that has one."
    if tokenizer.eos_token is None:
        raise DataError("data.end", "the tokenizer has no end token", hint)
    end = str(tokenizer.eos_token)
    ids = tokenizer(["a", f"a{end}"], add_special_tokens=False)["input_ids"]
    if ids[1] != [*ids[0], tokenizer.eos_token_id]:
        raise DataError("data.end", f"{end!r} is not a single token in a text", hint)
    return end


def _value(row: Row, span: Any, request: str, prompt: str, answer: str) -> Span:
    """Find the characters of the answer in the prompt, from the span in a row.

    The span must contain exactly the answer, since a head learns to read this place. Whitespace at its ends is ignored,
    and the value starts after it.

    Args:
        span: [start, end) in `request`, from the row.
        request: the prompt, or the message of a chat that `prompt` contains.
    """
    if not (isinstance(span, (list, tuple)) and len(span) == 2 and all(type(n) is int for n in span)):
        auto = ", or set `data.columns.answer_span: auto`" if span is None else ""
        raise DataError(row.where, f"the span is {short_repr(span)}", f"Use [start, end), two integers{auto}.")
    start, end = span
    if not 0 <= start < end <= len(request):
        hint = f"It must be inside the prompt of {len(request)} characters, and not empty."
        raise DataError(row.where, f"the span is [{start}, {end})", hint)
    text, expected = request[start:end], answer.strip()
    if text.strip() != expected:
        at = request.find(expected)
        place = f"has the answer at [{at}, {at + len(expected)})" if at >= 0 else "does not contain the answer"
        value = f"the span [{start}, {end}) is {short_repr(text)}, but the answer is {short_repr(answer)}"
        raise DataError(row.where, value, f"The prompt {place}. Correct the span, or remove the row.")
    start += len(text) - len(text.lstrip())
    lead = len(request) - len(request.lstrip())
    shift = prompt.rfind(request.strip()) - lead  # templates strip messages, and put them last
    if prompt[start + shift : end + shift] != request[start:end] or shift < -lead:
        raise DataError(row.where, "the chat template changes the prompt", "Remove the span: it cannot be found again.")
    return start + shift, end + shift
