"""The registry of locating methods: what is derived from an entry, and what an entry may not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from surgery.errors import ModelError, ProbeError, RecipeError, SurgeryError
from surgery.locate.locating import locate_heads
from surgery.locate.methods import METHODS, Column, LocateBatch, register_method
from surgery.recipe import Locate, Splice
from surgery.recipe.methods import RANKINGS
from tests.support.cases import each
from tests.support.pico import pico_base, pico_tokenizer, prompts

SECTION = Locate(pairs=4, examples=4, batch_size=2)
LOSS = Column("a", "", effect="loss")


@pytest.fixture
def registered() -> Iterator[None]:
    """What a test registers is removed after it."""
    before = [dict(registry.items()) for registry in (METHODS, RANKINGS)]
    yield
    for registry, entries in zip((METHODS, RANKINGS), before, strict=True):
        registry._entries = entries


def located(*methods: str, **more: Any) -> Any:
    section, splice = SECTION.model_copy(update={"methods": methods}), more.pop("splice", Splice(select="random"))
    model = pico_base(vocab_size=1024, layers=2)
    return locate_heads(model, pico_tokenizer(), section, splice, any_accuracy=True, **more)


def size(batch: LocateBatch) -> dict[str, Any]:
    """Length of each head's output at the query."""
    heads = []
    for spec in batch.run.specs:
        u_BHP = batch.run.prompt.activations.heads[spec.name][:, -1].unflatten(-1, (spec.num_heads, -1))
        heads.append(u_BHP.norm(dim=-1).T)
    return {"size": torch.cat(heads)}


@pytest.mark.usefixtures("registered")
class TestRegister:
    def test_its_column_is_measured_ranked_and_in_the_schema(self) -> None:
        register_method("size", [Column("size", "length of its output", unit="length")], ranks=True, passes=2)(size)
        heads = located("size", splice=Splice(select="size", num_heads=2))
        values = [head.scores["size"].value for head in heads.heads]
        assert values == sorted(values, reverse=True) and min(values) > 0
        assert heads.chosen == heads.heads[:2] and heads.method == "size"
        assert heads.cost["passes"] == 4 * (2 + 2), "two clean passes a prompt, and the declared ones"
        assert "size" in Locate.model_json_schema()["properties"]["methods"]["anyOf"][1]["items"]["enum"]
        assert "size" in Splice.model_json_schema()["properties"]["select"]["enum"]

    def test_an_effect_is_the_margin_lost_or_gained(self) -> None:
        for effect in ("loss", "gain"):
            columns = [Column(effect, "removed", effect=effect)]
            register_method(effect, columns)(
                lambda batch, name=effect: {name: METHODS["query"].measure(batch)["query"]}
            )
        heads = located("query", "loss", "gain")
        for head in heads.heads:
            assert head.scores["loss"] == head.scores["query"]
            assert head.scores["loss_accuracy"] == head.scores["query_accuracy"]
            assert head.scores["gain"].value == -head.scores["query"].value

    @each(
        ("returned", "message"),
        [
            ({"other": torch.zeros(8, 2)}, "size returned other. It was registered with the columns size"),
            (torch.zeros(8, 2), "size returned Tensor. Return a dict with the columns size"),
            ({"size": torch.zeros(2, 8)}, r"size returned shape \(2, 8\). .*shape \(8, 2\)"),
        ],
    )
    def test_wrong_results_are_refused(self, returned: Any, message: str) -> None:
        register_method("size", [Column("size", "")])(lambda batch: returned)
        with pytest.raises(ModelError, match=message):
            located("size")

    @each("wrong", [lambda scores: scores[:3], lambda scores: torch.zeros(len(scores), 2)])
    def test_an_effect_needs_scores_of_every_item(self, wrong: Any) -> None:
        columns = [Column("gone", "removed", effect="loss")]
        register_method("gone", columns)(lambda batch: {"gone": wrong(METHODS["query"].measure(batch)["query"])})
        with pytest.raises(ModelError, match=r"gone returned something else. .* a list of 8 `ChoiceScores`"):
            located("gone")

    def test_an_error_of_its_code_has_its_name_and_place(self) -> None:
        register_method("size", [Column("size", "")])(lambda batch: {"size": batch.run.missing})
        with pytest.raises(SurgeryError, match=r"^locating method size: AttributeError: .*test_methods.py, line \d+"):
            located("size")

    @each(
        ("name", "columns", "more", "says"),
        [
            ("wrong", [], {}, r"locating method: wrong\. Pass at least one column"),
            ("wrong", [LOSS, Column("b", "")], {}, r"locating method: wrong\. Pass at least one column"),
            ("query", [Column("query", "")], {}, r"surgery\.locate\.built_in\.query has this name already"),
            ("query", [Column("query", "")], {"ranks": "length"}, "locating method: query"),
            *(
                ("size", [Column("size", "")], {"ranks": name}, f"way to select heads: {name}")
                for name in ("gather", "random", "uniform", "list")
            ),
            *(
                ("size", [Column(name, "", effect="gain")], {}, rf"size: column: {name}\. The method \w+ has a column")
                for name in ("ablation", "segment_end", "query_accuracy")
            ),
        ],
    )
    def test_a_refusal_changes_no_registry(self, name: str, columns: Any, more: dict[str, Any], says: str) -> None:
        before = [dict(registry.items()) for registry in (METHODS, RANKINGS)]
        with pytest.raises(RecipeError, match=says):
            register_method(name, columns, **more)(size)
        assert [dict(registry.items()) for registry in (METHODS, RANKINGS)] == before


@pytest.mark.usefixtures("registered")
def test_methods_that_read_text_need_documents() -> None:
    register_method("size", [Column("size", "length of its output")], needs_text=True)(size)
    with pytest.raises(ProbeError, match=r"locate.methods: size. It reads the text"):
        located("query", "size", batches=[prompts()])
