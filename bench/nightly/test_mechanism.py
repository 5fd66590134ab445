"""The study of a base's mechanism, on a model with a planted Gather and a planted Aggregate head."""

from __future__ import annotations

from bench.studies.mechanism import head_sets, removals, tables
from surgery.locate.batches import PromptBatches
from surgery.locate.locating import locate_heads
from surgery.recipe import Locate, Splice
from tests.support.planted import plant, planted_prompts, planted_tokenizer

SECTION = Locate.model_validate({"methods": ["query", "context"]})


def test_removals_of_planted_heads() -> None:
    planted, tokenizer = plant(0), planted_tokenizer()
    splice = Splice(select="aggregate")
    found = locate_heads(planted.model, tokenizer, SECTION, splice, batches=[planted_prompts(0, 24, 5)])
    sets = head_sets(found)
    assert sets[f"{planted.gather} (Gather) removed"] == [planted.gather]
    assert sets["all Aggregate heads removed"] == [planted.aggregate]
    kept = sets["only the named heads kept, all others removed"]
    assert len(kept) == len(found.heads) - 2 and not {*kept} & {*planted.heads}

    prompts = PromptBatches(planted.model, tokenizer, SECTION, 1, [planted_prompts(100, 48, 5)])
    shares = dict(removals(found, prompts))
    clean = shares["nothing removed"]
    assert clean > 0.9
    assert shares["all Gather heads removed"] < clean / 2 and shares["all Aggregate heads removed"] < clean / 2
    assert shares["only the named heads kept, all others removed"] > 0.8 * clean


def test_tables() -> None:
    formats = [["two-hop", 8, 0.5, 0.25, 100], ["facts", None, 1.0, 0.5, 50]]
    text = tables({"examples": 100, "formats": formats, "removals": [["none", 1.0]], "layers": [[2, 0.5]]})
    assert "| two-hop | 8 | 0.500 [0.404, 0.596] | 0.250 [0.175, 0.343] |" in text
    assert "| facts |  | 1.000 [0.929, 1.000] | 0.500 [0.366, 0.634] |" in text
