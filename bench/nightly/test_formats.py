"""The study of formats against formats: what its arms train on and answer, and its table."""

from __future__ import annotations

import pytest

from bench.studies.formats import ALL, ARMS, FORMATS, ROWS, recipe_of, table


@pytest.mark.parametrize("arm", ARMS)
def test_arms_differ_in_their_retrieval_documents_alone(arm: str) -> None:
    recipe, other = recipe_of(arm), recipe_of(next(name for name in ARMS if name != arm))
    retrieval = [source for source in recipe.train.sources if source.weights.uses("answer")]
    trained = FORMATS if arm == ALL else [arm]
    assert [source.task for source in retrieval] == [FORMATS[name][1]["task"] for name in trained]
    assert sum(source.rows for source in retrieval) == ROWS
    kept = [source for source in recipe.train.sources if source not in retrieval]
    assert kept and all(source in other.train.sources for source in kept)
    assert recipe.evaluate == other.evaluate and recipe.splice == other.splice


def test_table() -> None:
    def arm(share: float) -> dict[str, object]:
        entry = {"generated": {"accuracy": share, "n": 200}}
        answers = {task["task"]: {str(task["pairs"][0]): entry} for _, _, task in FORMATS.values()}
        return {**answers, "closed_book": {"accuracy": 0.5}}

    arms = {"base": arm(0.25), "no_splice": arm(0.5), "hybrid": arm(1.0)}
    rows = table({"records": {"arms": arms}}).splitlines()
    assert rows[2].startswith("|  | base | 0.250 [0.195, 0.314]") and rows[2].endswith("| 0.500 |")
    assert [row.split(" | ")[:2] for row in rows[3:]] == [["| records", "control"], ["| records", "hybrid"]]
    assert rows[4].count("1.000 [0.981, 1.000]") == len(FORMATS)
