"""Choose llama.cpp's rule for splitting text into words, by comparing the tokens that it gives.

A GGUF file stores the vocabulary and the merges of a byte-level BPE tokenizer. For the regular expression that splits
text before merging, it only names one of llama.cpp's own rules. Its converter knows the rules of published tokenizers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerBase

from surgery.errors import ModelError, reading

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"'(?i:[sdmt]|ll|ve|re)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Names in llama.cpp and their regular expressions, applied one after the other (src/llama-vocab.cpp).
RULES: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "starcoder": (r"\p{N}", _GPT2),
    "smaug-bpe": (rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",),
    "qwen2": (rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",),
}

_RANDOM_TEXTS = 2000
_WRITTEN = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n",
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 12:34 1,234,567.89 007 2026-11-22 x1y22z333 ²³ ½ ٣٤٥",
    "''''''```````\"\"\"\"......!!!!!!?????? (normal) [x](y) {a: b} <tag/> a_b-c/d\\e @f #g $5 50% a&b a+b=c ~/.x",
    "I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL don't",
    "🚀 😶‍🌫️ ✅ 🦙🦙 កាន់តែពិសេសអាច ?我想在apple工作1314151天～ ------======= нещо на Български e\u0301 é ﬁ Å Å",
    "def f(x):\n\treturn {'a': 1}\r\n\r\n    # done\u00a0\u2003end  two   three    ",
    "CamelCase camelCase UPPER lower MiXeD http://example.org/a?b=c&d=1 name@example.org ...and—then–so…",
)


def nearest_rule(tokenizer: PreTrainedTokenizerBase) -> tuple[str, float, str]:
    """Find the rule that gives the tokens of a tokenizer most often, in texts of its vocabulary and of many scripts.

    Returns its name in llama.cpp, the share of texts with equal tokens, and the shortest text with other tokens or "".
    Raises ModelError if the tokenizer is no byte-level BPE.
    """
    own = _backend(tokenizer)
    texts = list(_texts(own))
    expected = own.encode_batch(texts, add_special_tokens=False)
    best = ("", -1.0, "")
    for name in RULES:
        found = _with_rule(own, name).encode_batch(texts, add_special_tokens=False)
        wrong = [text for text, one, other in zip(texts, expected, found, strict=True) if one.ids != other.ids]
        share = 1 - len(wrong) / len(texts)
        if share > best[1]:
            best = (name, share, min(wrong, key=len, default=""))
    return best


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the tokenizer of the library `tokenizers`. Raises ModelError if it is no byte-level BPE."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    hint = "llama.cpp's converter reads byte-level BPE here. Set base.tokenizer to one, or export.format: nemotron_h."
    if backend is None:
        raise ModelError("base.tokenizer", type(tokenizer).__name__, hint)
    with reading("base.tokenizer", None, hint):
        data = json.loads(backend.to_str())
    decoder = data.get("decoder") or {}
    kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
    if data["model"].get("type") != "BPE" or "ByteLevel" not in kinds:
        value = f"{data['model'].get('type')} with decoder {decoder.get('type')}"
        raise ModelError("base.tokenizer", value, hint)
    return backend


def _with_rule(own: Tokenizer, name: str) -> Tokenizer:
    """Copy a tokenizer as llama.cpp has it: one of its rules, and no normalizer."""
    data: dict[str, Any] = json.loads(own.to_str())
    data |= {"normalizer": None, "post_processor": None, "truncation": None, "padding": None}
    data["model"]["ignore_merges"] = False
    copy = Tokenizer.from_str(json.dumps(data))
    splits = [Split(Regex(pattern), "isolated") for pattern in RULES[name]]
    copy.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    return copy


def _texts(own: Tokenizer) -> Iterator[str]:
    """Yield texts of digits, punctuation, spaces and many scripts, and random sequences of the vocabulary's tokens."""
    yield from _WRITTEN
    yield from (f"{before}{number}" for number in (*range(1100), 12345, 987654) for before in ("", " ", "x", "-"))
    rng = random.Random(0)
    size = own.get_vocab_size(with_added_tokens=False)
    for _ in range(_RANDOM_TEXTS):
        yield own.decode([rng.randrange(size) for _ in range(rng.randrange(1, 24))])
