"""What an export format may not be is refused when it is registered, not after a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surgery.errors import ModelError, RecipeError
from surgery.export.formats import ExportFormat, register_export
from surgery.export.verify import verify_folder
from surgery.files.atomic import write_json
from surgery.recipe.export import EXPORT_FORMATS


class Whole(ExportFormat):
    """A format with everything that one needs."""

    summary = "nothing"
    usage = "Do not."

    def write(self, *arguments: Any) -> None:
        """Write nothing."""

    def verify(self, folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
        """Check nothing."""
        return {}


def test_what_lacks_something_is_refused() -> None:
    refused: list[tuple[tuple[type, ...], dict[str, Any], str]] = [
        ((ExportFormat,), {"summary": "x", "usage": "x"}, "export format wrong: Wrong. Add its methods: verify, write"),
        ((Whole,), {"summary": None}, "wrong: summary: missing"),
        ((Whole,), {"usage": 3}, "wrong: usage: missing"),
        ((Whole,), {"limits": "one sentence"}, "wrong: limits: 'one sentence'. Use a tuple"),
        ((Whole,), {"loadable": ".gguf"}, "wrong: loadable: '.gguf'. Use a tuple of suffixes"),
        ((Whole,), {"loadable": ("gguf",)}, "wrong: loadable"),
        ((Whole,), {"loadable": (".",)}, "wrong: loadable"),
        ((), {}, "Make it a subclass of surgery.export.formats.ExportFormat"),
    ]
    for bases, attributes, message in refused:
        with pytest.raises(RecipeError) as error:
            register_export("wrong")(type("Wrong", bases, attributes))
        assert message in str(error.value) and "wrong" not in EXPORT_FORMATS


@pytest.mark.parametrize("method", ["read_plan", "verify"])
def test_an_exception_of_a_plugin_names_its_format(method: str, tmp_path: Path) -> None:
    def fail(*arguments: Any) -> Any:
        raise KeyError("splice")

    write_json(tmp_path / "export.json", {"format": "planted_failing", "files": {}})
    assert register_export("planted_failing")(type("Failing", (Whole,), {method: fail})).name == "planted_failing"
    try:
        with pytest.raises(ModelError, match="format planted_failing: KeyError: 'splice'"):
            verify_folder(tmp_path)
    finally:
        del EXPORT_FORMATS._entries["planted_failing"]
