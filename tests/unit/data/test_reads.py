"""Where a new head reads each token of an answer."""

from __future__ import annotations

from itertools import product

import torch
from transformers import PreTrainedTokenizerFast

from surgery.data.documents import Reader
from surgery.data.encoding import EncodedBatch, encode
from surgery.data.files import Row
from surgery.data.generated import with_ends
from surgery.probes.documents import Document, Question, Writer, rng_of
from surgery.recipe import Data
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.long_choices import digit_tokenizer
from tests.support.pico import pico_tokenizer, prompts
from tests.support.samples import RETRIEVING, sample, several_questions

PAIRS = {"read_query": "query", "read_segment_end": "segment_end", "read_answer_token": "answer_token"}


def looked_up(answer: str, value: str | None = None, after: str = "") -> Document:
    """A line with the value, another line, and a question."""
    writer = Writer()
    writer.add("b:90\n")
    start, _ = writer.add("a:")
    place = writer.add(answer.strip() if value is None else value)
    _, end = writer.add("\n")
    writer.add("c:34\na>")
    span = writer.add(answer + after)
    return Document("made_up", writer.text, (Question(span, (), -1, (start, end), place),))


def reads(batch: EncodedBatch, row: int = 0) -> list[tuple[int, int, int]]:
    """(query, place at the end of the segment, token of the value) of the reads of a row."""
    columns = (getattr(batch, name)[row].tolist() for name in PAIRS)
    return [read for read in zip(*columns, strict=True) if read[0] >= 0]


def shown(document: Document, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """(the token that a query has to predict, the token that it reads), as text."""
    batch = encode([document], tokenizer)
    text = [tokenizer.decode([i]) for i in batch.input_ids[0].tolist()]
    last = int(batch.segment_end[0, 0])
    assert all(end == (min(place + 1, last) if place >= 0 else -1) for _, end, place in reads(batch))
    return [(text[query + 1], text[place] if place >= 0 else "") for query, _, place in reads(batch)]


def test_reads_of_one_token_are_the_questions() -> None:
    documents = {task: sample(task) for task in RETRIEVING}
    documents["several"] = several_questions()
    documents["ended"] = [with_ends(document) for document in several_questions()]
    data = Data.model_validate({"path": "none", "columns": {"answer_span": "at"}})
    row = Row("here", {"prompt": "red:4\nblue:71\nblue is", "answer": "71", "at": [11, 13]})
    documents["of the user, with its end token"] = [Reader(data, pico_tokenizer()).document(row)]
    for name, made in documents.items():
        for until_answer, side in product((False, True), ("left", "right")):
            batch = encode(made, pico_tokenizer(), side, until_answer)  # type: ignore[arg-type]
            for read, question in PAIRS.items():
                assert torch.equal(getattr(batch, read), getattr(batch, question)), name
    by_hand = prompts()
    assert all(getattr(by_hand, read) is getattr(by_hand, question) for read, question in PAIRS.items())
    assert encode(sample("sentence"), pico_tokenizer()).read_query.tolist() == [[-1]] * 4


def test_text_after_the_value() -> None:
    """The read is the token after the value's; at the segment's end only if the key follows the value."""
    for line, expected in (("a:712 and more\n", "12 "), ("712 for a\n", " a\n")):
        writer = Writer()
        writer.add("b:90\n")
        segment = writer.add(line)
        first = segment[0] + line.index("712")
        writer.add("a>")
        question = Question(writer.add("712"), (), -1, segment, (first, first + 3))
        batch = encode([Document("made_up", writer.text, (question,))], byte_tokenizer())
        places = [end for _, end, _ in reads(batch)]
        assert "".join(writer.text[place] for place in places) == expected
        assert batch.last_read("segment_end").tolist() == places[:1]
        assert batch.last_read("answer_token").tolist() == [first]


def test_each_token_of_an_answer_reads_one_of_the_value() -> None:
    """A token that begins inside another one of the value is held by it; nothing after the answer is read."""
    spaced, lined = byte_tokenizer(("Ġ", "5"), ("Ġ5", "1"), ("1", "2")), byte_tokenizer(("1", "Ċ"))
    keyed, plain = byte_tokenizer((":", "5"), (":5", "1"), ("1", "2")), byte_tokenizer()
    ended, both = byte_tokenizer(end=True), [("7", "7"), ("1", "1")]
    for document, tokenizer, expected in (
        (looked_up(" 512"), spaced, [(" 51", "5"), ("2", "12")]),
        (looked_up(" 5123"), spaced, [(" 51", "5"), ("2", "12"), ("3", "3")]),
        (looked_up("512"), keyed, [("5", ":51"), ("12", ":51")]),
        *((looked_up("71", after=after), ended, both) for after in ("\n", "<end>", " \n<end>")),
        (looked_up("71", after="<end>"), plain, [*both, *((c, "") for c in "<end>")]),
        (looked_up("71 km", "71"), lined, [("7", "7"), ("1", "1\n"), *((c, "") for c in " km")]),
        (looked_up(" 71", " 71"), plain, both),
        (looked_up("71", " 71"), plain, [("7", " "), ("1", "1")]),
        (looked_up(" Red", "red"), plain, [("R", "r"), ("e", ""), ("d", "")]),
    ):
        assert shown(document, tokenizer) == expected, document.text


def test_left_padding_moves_all_positions() -> None:
    documents = [looked_up("712"), looked_up("8"), looked_up("90123")]
    left, right = (encode(documents, digit_tokenizer(), side) for side in ("left", "right"))  # type: ignore[arg-type]
    shift_B1 = (left.attention_mask == 0).sum(1, keepdim=True)
    assert shift_B1.unique().numel() > 1 and left.read_query.shape == (3, 5)
    for name in PAIRS:
        there, moved = getattr(right, name), getattr(left, name)
        assert torch.equal(moved, there.where(there < 0, there + shift_B1))


def test_of_random_texts() -> None:
    """A token is held by one that covers its first character; equal tokens in both places correspond one to one."""
    rng = rng_of("reads")
    letters = "abc12 é漢🙂"
    merges = (("a", "b"), ("Ġ", "1"), ("1", "2"), ("Ã", "©"), ("2", "1"), ("c", "Ġ"))
    for _ in range(40):
        tokenizer = byte_tokenizer(*rng.sample(merges, 4))
        answer = rng.choice(("", " ")) + "x" + "".join(rng.choice(letters) for _ in range(rng.randint(1, 9))) + "x"
        document = looked_up(answer, after=rng.choice(("", "\n")))
        (question,) = document.questions
        assert question.value is not None
        batch = encode([document], tokenizer)
        offsets = tokenizer(document.text, return_offsets_mapping=True)["offset_mapping"]
        ids = batch.input_ids[0].tolist()
        shift = question.value[0] - question.answer[0] - (len(answer) - len(answer.lstrip()))
        places = []
        for query, _, place in reads(batch):
            begin = max(offsets[query + 1][0], question.value[0] - shift)
            assert offsets[place][0] <= begin + shift < offsets[place][1]
            places.append((query + 1, place))
        assert [token for token, _ in places] == list(range(places[0][0], places[0][0] + len(places)))
        first, count = int(batch.answer_token[0, 0]), len(places)
        if ids[first : first + count] == ids[places[0][0] : places[0][0] + count]:
            assert [place for _, place in places] == list(range(first, first + count))
