"""What loading an export imports; tests/integration/test_foreign_code.py has folders that would run other code."""

from __future__ import annotations

from pathlib import Path

import pytest

import surgery.hybrid
from surgery.errors import ModelError
from surgery.export.folder import export_model
from surgery.export.shipped_code import _check_keys, check_code, private_copy
from tests.support.battery import every_spliced, trained
from tests.support.pico import pico_tokenizer

LIBRARY = Path(surgery.hybrid.__file__).parent


@every_spliced
def test_what_is_written_is_what_is_expected(name: str, tmp_path: Path) -> None:
    """In every family `auto_map` and the modules are those that are computed; one more is refused.

    The private copy stays as it was checked, whatever the folder holds by then.
    """
    model, folder = trained(name), tmp_path / "export"
    export_model(model, pico_tokenizer(), folder)
    with private_copy(folder) as copy:
        for path in folder.glob("*.py"):
            path.write_text("raise SystemExit")
        check_code(copy, model.config)
        assert (copy / "model.safetensors").is_symlink()
        other = next(p for p in LIBRARY.glob("*.py") if not (copy / p.name).exists())
        (copy / other.name).write_bytes(other.read_bytes())
        with pytest.raises(ModelError, match=other.name):
            check_code(copy, model.config)


def test_keys_that_name_none_pass() -> None:
    built_in = {"attn_implementation": "sdpa", "a": {"_attn_implementation": None, "experts_implementation": "eager"}}
    vocabulary, unset = {"auto_map": 17, "attn_implementation": 5}, {"auto_map": None, "quantization_config": {}}
    for data in (vocabulary, unset, built_in, [{"b": "auto_map"}], 5):
        _check_keys("a.json", data, set())
