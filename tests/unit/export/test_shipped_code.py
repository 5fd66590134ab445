"""What loading an export imports; tests/integration/test_foreign_code.py has folders that would run other code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

import surgery.hybrid
from surgery.errors import ModelError
from surgery.export import shipped_code, transformers_folder
from surgery.export.earlier_modules import EARLIER
from surgery.export.folder import export_model
from surgery.export.reload import prompt_ids, reload
from surgery.export.shipped_code import _check_keys, check_code, private_copy
from surgery.hybrid.cache_name import RENAMED
from surgery.testing.pico import pico_tokenizer
from tests.support.battery import every_spliced, logits, trained
from tests.support.exports import in_this_process

LIBRARY = Path(surgery.hybrid.__file__).parent
SUPPORT = Path(__file__).parents[2] / "support"


def exported(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(transformers_folder, "reload", in_this_process)
    model = trained(name)
    export_model(model, pico_tokenizer(), folder)
    return model


@every_spliced
def test_what_is_written_is_what_is_expected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every family `auto_map` and the modules are those that are computed; one more is refused."""
    model = exported(tmp_path / "export", name, monkeypatch)
    check_code(tmp_path / "export", model.config)
    other = next(p for p in LIBRARY.glob("*.py") if not (tmp_path / "export" / p.name).exists())
    (tmp_path / "export" / other.name).write_bytes(other.read_bytes())
    with pytest.raises(ModelError, match=other.name):
        check_code(tmp_path / "export", model.config)


@every_spliced
def test_a_copy_holds_configs_tokenizer_modules_and_weights_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "export"
    model = exported(folder, name, monkeypatch)
    modules = check_code(folder, model.config)
    assert set(modules) == {path.name for path in folder.glob("*.py")}
    for path in folder.glob("*.py"):
        path.write_text("raise SystemExit")
    (folder / "custom_generate").mkdir()
    with private_copy(folder, model.config, modules) as copy:
        plain = {path.name for path in copy.iterdir() if not path.is_symlink()}
        linked = {path.name for path in copy.iterdir() if path.is_symlink()}
        assert plain == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", *modules}
        assert linked == {"model.safetensors"}
        assert all((copy / name).read_bytes() == (LIBRARY / name).read_bytes() for name in modules)
        assert json.loads((copy / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "data",
    [
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"a": [{"b": {"auto_map": "a.B"}}]},
        {"auto_map": True},
        {"a": {"attn_implementation": "org/kernel"}},
        {"_attn_implementation_internal": "flash_attention_2"},
        {"experts_implementation": {"text": "org/kernel"}},
        {"_experts_implementation": ["org/kernel"]},
        {"attribute_map": {"a": "b"}},
    ],
    ids=repr,
)
def test_keys_that_name_code_are_refused_at_any_depth(data: Any) -> None:
    with pytest.raises(ModelError, match=r"^a.json: "):
        _check_keys("a.json", data, set())


@pytest.mark.parametrize(
    "data",
    [
        {"auto_map": 17, "use_kernels": 4, "attn_implementation": 5},  # a vocabulary
        {"auto_map": None, "quantization_config": {}, "use_kernels": False},
        {"attn_implementation": "sdpa", "a": {"_attn_implementation": None, "experts_implementation": "eager"}},
        [{"b": "auto_map"}],
        5,
    ],
    ids=repr,
)
def test_keys_that_name_none_pass(data: Any) -> None:
    _check_keys("a.json", data, set())


class TestEarlierVersions:
    """An export of 0.1.0: its modelling files are in modules_0.1.0.zip, as it shipped them."""

    @pytest.fixture
    def old(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
        model = exported(tmp_path / "export", "mamba2", monkeypatch)
        for path in (tmp_path / "export").glob("*.py"):
            path.unlink()
        with ZipFile(SUPPORT / "modules_0.1.0.zip") as archive:
            archive.extractall(tmp_path / "export")
        return tmp_path / "export", model

    def test_its_modules_are_known(self, old: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """They run from a private copy, as a stranger would run them, with this library's logits. Not since 5.24."""
        folder, model = old
        monkeypatch.setattr(shipped_code, "RENAMED", False)
        modules = check_code(folder, model.config)
        assert "mixins.py" in modules and set(modules) < set(EARLIER["0.1.0"])
        monkeypatch.setattr(shipped_code, "RENAMED", True)
        with pytest.raises(ModelError, match=r"^modelling files: those of version 0\.1\.0\. They do not run on transf"):
            check_code(folder, model.config)
        if RENAMED:
            return
        ids = prompt_ids(model.config.vocab_size)
        with private_copy(folder, model.config, modules) as copy:
            outputs = reload(copy, ids, ("float32",))
        assert torch.equal(outputs["float32.logits"], logits(model, ids))

    def test_a_changed_one_is_not(self, old: tuple[Path, Any]) -> None:
        folder, model = old
        with open(folder / "mixins.py", "a") as file:
            file.write("\n")
        with pytest.raises(ModelError, match=r"^attention\.py: not the module of this library"):
            check_code(folder, model.config)

    def test_versions_do_not_mix(self, old: tuple[Path, Any]) -> None:
        folder, model = old
        (folder / "packing.py").write_bytes((LIBRARY / "packing.py").read_bytes())
        with pytest.raises(ModelError, match=r"attention\.py: not the module of this library"):
            check_code(folder, model.config)
