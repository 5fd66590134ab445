"""Dictionaries of any length: KV-retrieval with sentences between the lines.

Words between a key and its value stay at 0 to 20, as in the training of `checkpoints/pico-far`. Only the distance
between a line and the question grows. `LongDictionary` makes such documents for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from transformers import PreTrainedTokenizerBase

from surgery.probes.documents import Document, Question, Split, Writer, rng_of
from surgery.probes.kv_retrieval import HEADER, draw_values, write_lines
from surgery.probes.needle import token_count
from surgery.probes.pairs import fillers
from surgery.probes.registry import Options, Probe
from surgery.probes.sentences import sentence
from surgery.probes.words import key_words

FILLER = (0, 20)
PAIRS, MOST_PAIRS = 16, 96
CONDITIONS = {"text": "16 pairs among text", "pairs": "up to 96 pairs among text"}


def prompt(condition: str, length: int, number: int, tokenizer: PreTrainedTokenizerBase) -> Document:
    """Generate one prompt of at most `length` tokens. Sentences and their places are random.

    Args:
        condition: `text` has 16 pairs, `pairs` as many as fit, up to 96.
        length: number of tokens up to the answer.
        number: of the prompt. Prompts of one number and condition have the same first pairs at every length.
        tokenizer: counts tokens.
    """
    size, rng = token_count(tokenizer), rng_of("lengths", condition, number)
    keys = rng.sample(key_words("eval"), MOST_PAIRS)
    values, words = draw_values(rng, MOST_PAIRS, None), fillers(rng, MOST_PAIRS, FILLER)
    order = rng.sample(range(MOST_PAIRS), MOST_PAIRS)  # the question is about the first of these that is in the prompt
    room = length - size(HEADER) - size(f"The value of the key '{keys[0]}' is") - 2
    count = 0
    while count < (PAIRS if condition == "text" else MOST_PAIRS):
        room -= size(f"{keys[count]}{words[count]}:{values[count]}\n")
        if room < 0 and count >= 2:
            break
        count += 1
    lines = _sentences(rng, max(0, room), tokenizer)
    asked = [i for i in order if i < count][:1]
    return _document(keys[:count], words[:count], values[:count], lines, asked, rng)


class LongDictionary(Probe):
    """Dictionaries with sentences between the lines, of a random length up to `max_tokens`. Registered by the study."""

    pairs = (2, MOST_PAIRS)
    options = ("questions", "filler", "tokens")
    gold_position = newline_ends_answer = needs_tokenizer = True
    has_depth = False
    lm_eval_group = None

    def document(self, rng: Random, split: Split, options: Options) -> Document:
        """Generate a dictionary and questions about it."""
        assert options.tokenizer is not None
        size, count = token_count(options.tokenizer), options.pairs
        keys, values = rng.sample(key_words(split), count), draw_values(rng, count, None)
        words, asked = fillers(rng, count, options.filler), rng.sample(range(count), options.questions)
        room = rng.randint(0, options.tokens) - size(HEADER) - (size("The value of the key 'buge' is12\n") * len(asked))
        room -= size(
            "".join(f"{key}{between}:{value}\n" for key, between, value in zip(keys, words, values, strict=True))
        )
        lines = _sentences(rng, max(0, room), options.tokenizer, split)
        return _document(keys, words, values, lines, asked, rng)


def _sentences(rng: Random, room: int, tokenizer: PreTrainedTokenizerBase, split: Split = "eval") -> list[str]:
    """Draw sentences of at most `room` tokens in all, each with a newline."""
    size, found = token_count(tokenizer), []
    while room > 0:
        text = sentence(rng, split).text + "\n"
        room -= size(text)
        if room >= 0:
            found.append(text)
    return found


def _document(
    keys: Sequence[str],
    words: Sequence[str],
    values: tuple[str, ...],
    lines: Sequence[str],
    asked: Sequence[int],
    rng: Random,
) -> Document:
    places = sorted(rng.randrange(len(lines) + 1) for _ in keys)  # a pair stands before the line of this number
    writer, begun, spans = Writer(), 0, []
    writer.add(HEADER)
    for key, between, value, place in zip(keys, words, values, places, strict=True):
        writer.add("".join(lines[begun:place]))
        begun = place
        spans += write_lines(writer, [key], [between], [value])
    writer.add("".join(lines[begun:]))
    questions = []
    for number, index in enumerate(asked):
        writer.add(("\n" if number else "") + f"The value of the key '{keys[index]}' is")
        answer = writer.add(values[index])
        segment, value_span = spans[index]
        questions.append(Question(answer, values, index, segment, value_span))
    return Document("kv_retrieval", writer.text, tuple(questions))
