"""Names of models and data sets in recipes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surgery.recipe import Data
from surgery.recipe.public import finetune_name, is_hub_id, public_name
from tests.support.cases import each


@each(
    ("data", "name"),
    [
        ("tickets.jsonl", "finetune-tickets"),
        ("/a/b/my tickets.PARQUET", "finetune-my-tickets"),
        ("data/", "finetune-data"),
        ("owner/name-1.5", "finetune-name-1.5"),
        ("données 😀.jsonl", "finetune-donn-es"),
        ("x" * 300, f"finetune-{'x' * 191}"),
    ],
)
def test_a_fine_tuning_is_named_after_its_data(data: str, name: str) -> None:
    assert finetune_name(data) == name


@each(
    ("path", "name", "is_on_hub"),
    [
        ("owner/tickets", "owner/tickets", True),
        ("private/tickets.jsonl", "tickets.jsonl", False),  # a file that does not exist any more
        ("private/of/tickets", "tickets", False),
        ("~nobody-here/tickets", "tickets", False),  # a user without a home
        ("/private/tickets", "tickets", False),
        ("here/tickets", "tickets", False),  # a folder that exists
        (".", "work", False),
        ("here/..", "work", False),
    ],
)
def test_a_local_path_is_never_published_as_an_id_of_the_hub(
    path: str, name: str, is_on_hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    (folder / "here" / "tickets").mkdir(parents=True)
    monkeypatch.chdir(folder)
    data = Data(path=path)
    assert (data.public_name, data.is_on_hub) == (name, is_on_hub)
    assert data.place == (path if is_on_hub else os.path.realpath(os.path.expanduser(path)))
    assert path[0] != "~" or (is_hub_id(path), public_name(path)) == (False, name)
