"""Names of models and data sets in recipes."""

from __future__ import annotations

import pytest

from surgery.recipe.public import finetune_name


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("tickets.jsonl", "finetune-tickets"),
        ("/a/b/my tickets.PARQUET", "finetune-my-tickets"),
        ("data/", "finetune-data"),
        ("owner/name-1.5", "finetune-name-1.5"),
        ("a.b.json", "finetune-a.b"),
        ("données 😀.jsonl", "finetune-donn-es"),
        ("数据.jsonl", "finetune-data"),
        ("..", "finetune-data"),
        ("x" * 300, f"finetune-{'x' * 191}"),
    ],
)
def test_a_fine_tuning_is_named_after_its_data(data: str, name: str) -> None:
    assert finetune_name(data) == name
