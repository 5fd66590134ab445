"""Documents of an export that name the spliced heads."""

from __future__ import annotations

from pathlib import Path

from surgery.export.documents import check_documents
from surgery.files.atomic import write_json
from surgery.recipe import Splice
from surgery.splice.plan import make_plan
from surgery.types import to_json
from tests.support.pico import pico_base
from tests.unit.splice.test_plan import chosen


def test_a_block_reads_a_position_of_its_own(tmp_path: Path) -> None:
    """Whichever the SSM head of its place was located with."""
    config = pico_base().config
    heads = chosen("L1H2", reads="segment_end", config=config)
    plan = make_plan(heads, config, Splice.model_validate({"form": "block"}))
    write_json(tmp_path / "heads.json", to_json(heads))
    assert plan.grafts[0].reads == ("answer_token",)
    assert check_documents(tmp_path, ("config.json", plan))[0] == ["config.json", "heads.json"]
    agree, absent = check_documents(tmp_path, None)
    assert agree == [] and absent == ["plan.json: not in the folder, so heads.json and README.md were not compared"]
