"""Documents stay as they are: trained checkpoints and every measured number depend on them."""

from __future__ import annotations

import hashlib
from typing import Any

from surgery.probes.documents import rng_of
from surgery.probes.registry import PROBES, Options
from tests.support.pico import pico_tokenizer

# First digits of the SHA-256 of 24 documents of each task, text and questions. Without a tokenizer mqar has none.
DIGESTS = {
    "kv_retrieval": "483796c2a8cd8406",
    "phonebook": "9b31346e29ee6dd2",
    "json_kv": "faf60373c47566b3",
    "mqar": "c60de8138ff28ffb",
    "multi_hop": "a5e11bbbb0b10519",
    "copying": "8e2f470e7f8ffe7b",
    "sentence": "422840d81fcb858e",
    "perplexity": "ca320a6169b61a11",
    "perplexity_seen": "18564a3ddda5b383",
    "needle_single": "f0319551f46895cb",
    "needle_multi_key": "c5f70db21e4d0dce",
    "needle_multi_value": "86da43d75487df48",
    "needle_multi_query": "0d9c9bfd50785343",
    "letter_choice": "073a120f1f10d080",
    "option_text": "e893b69a5675a76c",
    "closed_book": "34fd53e2e3b22e15",
    "closed_book_seen": "d2db0d86c6a96a1f",
    "statement": "24859420ffeb7437",
    "records": "89540be105f3468e",
    "key_echo": "7affd42511f1ab7c",
    "kv_repeated": "fb6921e982b3291b",
}
SIZES: dict[str, dict[str, Any]] = {"multi_hop": {"hops": 3, "pairs": 9}, "json_kv": {"groups": (4,)}}


def test_documents_are_those_of_before() -> None:
    for task, digest in DIGESTS.items():
        documents = []
        for tokenizer in (pico_tokenizer(),) if task == "mqar" else (None, pico_tokenizer()):
            for split in ("train", "eval"):
                rng = rng_of("unchanged", task, split)
                for pairs in (4, 9):
                    given = {
                        "pairs": pairs,
                        "questions": 2,
                        "tokens": 900,
                        "tokenizer": tokenizer,
                        **SIZES.get(task, {}),
                    }
                    documents += [repr(PROBES[task].generate(rng, split, Options(**given))) for _ in range(3)]
        assert hashlib.sha256("\n".join(documents).encode()).hexdigest()[:16] == digest, task
