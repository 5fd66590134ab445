"""Folders whose code would leave a mark if it ran: `verify` and `publish` refuse each of them in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from surgery.errors import ModelError
from surgery.export import transformers_folder
from surgery.export.publish import publish
from surgery.export.reload import prompt_ids, reload
from surgery.export.verify import verify_folder
from tests.integration.conftest import refused
from tests.support.exports import edit, in_this_process, list_again, written

MODULE = "modeling_mamba2_hybrid"


@dataclass
class Trap:
    """A copy of an export, and a folder of code outside that leaves a mark."""

    folder: Path
    outside: Path
    mark: Path

    @property
    def code(self) -> str:
        return f"open({str(self.mark)!r}, 'w').close()\n"

    def module(self, folder: Path) -> None:
        """The library's modules, marked, and a custom `generate`."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.py"):
            (folder / path.name).write_text(self.code + path.read_text())
        (folder / "generate.py").write_text(
            self.code + "def generate(model, *a, **k):\n    return model.generate(*a)\n"
        )

    def auto_map(self, prefix: str) -> None:
        """Puts something before the module's name in every entry."""
        edit(self.folder, "config.json", lambda c: c.update(auto_map={k: prefix + v for k, v in c["auto_map"].items()}))

    def config(self, **fields: Any) -> None:
        edit(self.folder, "config.json", lambda config: config.update(fields))

    def json(self, name: str, data: Any) -> None:
        path = self.folder / name
        old = json.loads(path.read_text()) if path.is_file() else {}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**old, **data}))


def moved_and_linked(path: Path, to: Path) -> None:
    path.rename(to)
    path.symlink_to(to)


def linked(path: Path, to: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def with_module(trap: Trap, folder: str) -> None:
    trap.module(trap.folder / folder)
    trap.auto_map(f"{folder}/")


def with_auto_map(trap: Trap, **entries: Any) -> None:
    edit(trap.folder, "config.json", lambda config: config["auto_map"].update(entries))


def edited_module(trap: Trap) -> None:
    with open(trap.folder / "modeling_hybrid.py", "a") as file:
        file.write(trap.code)


Lay = Callable[[Trap], object]
A = "{0.outside}/generate.A"
# Code that stock transformers would run.
RUNS: dict[str, Lay] = {
    "absolute path": lambda t: t.auto_map(f"{t.outside}/"),
    "linked folder": lambda t: (linked(t.folder / "code", t.outside), t.auto_map("code/")),
    "linked generate": lambda t: linked(t.folder / "custom_generate", t.outside),
    "plain generate": lambda t: t.module(t.folder / "custom_generate"),
    "folder below": lambda t: with_module(t, "code"),
    "compiled folder": lambda t: with_module(t, "__pycache__"),
    "other repository": lambda t: t.auto_map(f"{t.outside}--"),
    "edited module": edited_module,
    "linked module": lambda t: linked(t.folder / f"{MODULE}.py", t.outside / f"{MODULE}.py"),
}
# Names of code, kernels and files that something else could load.
NAMES: dict[str, Lay] = {
    "path above": lambda t: t.auto_map(f"../{t.outside.name}/"),
    "hidden folder": lambda t: with_module(t, ".code"),
    "another module": lambda t: (shutil.copy(t.outside / f"{MODULE}.py", t.folder / "modeling_other.py"),
                                 with_auto_map(t, AutoModel="modeling_other.Mamba2HybridModel")),
    "another class": lambda t: with_auto_map(t, AutoConfig="modeling_hybrid.SplicedAttention"),
    "another task": lambda t: with_auto_map(t, AutoTokenizer=[None, f"{t.outside}/m.Tokenizer"]),
    "a list of classes": lambda t: with_auto_map(t, AutoConfig=[f"{t.outside}/{MODULE}.A"]),
    "auto_map that is a list": lambda t: t.config(auto_map=[f"{t.outside}/{MODULE}.A"]),
    "tokenizer code": lambda t: t.json("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, A.format(t)]}}),
    "processor code": lambda t: t.json("processor_config.json", {"auto_map": {"AutoProcessor": A.format(t)}}),
    "nested code": lambda t: t.config(text_config={"deep": [{"auto_map": {"AutoConfig": A.format(t)}}]}),
    "pipeline code": lambda t: t.config(custom_pipelines={"text-generation": {"impl": A.format(t), "pt": ["A"]}}),
    "other config": lambda t: (t.json("config.1.0.0.json", {"auto_map": {}}),
                               t.config(configuration_files=["config.1.0.0.json"])),
    "kernel from the Hub": lambda t: t.config(_attn_implementation="kernels-community/flash-attn2"),
    "kernel for a part": lambda t: t.config(attn_implementation={"": "sdpa", "text_config": "someone/kernel:call"}),
    "kernel by another name": lambda t: t.config(attribute_map={"harmless": "_attn_implementation"},
                                                 harmless="someone/kernel"),
    "kernel of experts": lambda t: t.config(experts_implementation={"text": "org/kernel"}),
    "kernel of experts, saved": lambda t: t.config(_experts_implementation=["org/kernel"]),
    "flash attention, saved": lambda t: t.config(_attn_implementation_internal="flash_attention_2"),
    "flash attention": lambda t: t.config(attn_implementation="flash_attention_2"),
    "quantiser": lambda t: t.config(quantization_config={"quant_method": "mxfp4"}),
    "generation code": lambda t: t.json("generation_config.json", {"custom_generate": str(t.outside),
                                                                   "trust_remote_code": True}),
    "other weights": lambda t: t.config(transformers_weights="other.safetensors"),
    "weights that go first": lambda t: shutil.copy(t.folder / "model.safetensors",
                                                   t.folder / "shard-00001-model-00001-of-00001.safetensors"),
    "adapter": lambda t: t.json("adapter_config.json", {"base_model_name_or_path": str(t.outside),
                                                        "peft_type": "LORA"}),
}  # fmt: skip
# The first is equal to the module, and what it points to may change after the check. Unit tests of files have more.
LINKS: dict[str, Lay] = {
    "linked module that is equal": lambda t: moved_and_linked(t.folder / "modeling_hybrid.py", t.outside / "equal.py"),
    "linked weights": lambda t: moved_and_linked(t.folder / "model.safetensors", t.outside / "model.safetensors"),
    "pipe": lambda t: os.mkfifo(t.folder / "generation.json"),
}
LAYS = {**RUNS, **NAMES, **LINKS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_folder, "reload", in_this_process)
        return written(tmp_path_factory.mktemp("foreign") / "export")


@pytest.fixture
def trap(whole: Path, tmp_path: Path) -> Trap:
    made = Trap(Path(shutil.copytree(whole, tmp_path / "export")), tmp_path / "outside", tmp_path / "it ran")
    made.module(made.outside)
    return made


@pytest.mark.parametrize("name", LAYS)
def test_it_is_refused_and_nothing_of_it_runs(trap: Trap, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether export.json is right about the folder or lists nothing. Links are refused with trust as well."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    calls = [verify_folder, partial(publish, repo_id="someone/hybrid", endpoint="http://127.0.0.1:9")]
    if name in LINKS:
        calls.append(partial(verify_folder, trust_remote_code=True))
    LAYS[name](trap)
    list_again(trap.folder)
    for text in ((trap.folder / "export.json").read_text(), "{}"):
        (trap.folder / "export.json").write_text(text)
        for call in calls:
            with pytest.raises(ModelError) as caught:
                call(trap.folder)
            assert len(str(caught.value).splitlines()) == 1 and not trap.mark.exists()


@pytest.mark.parametrize("name", RUNS)
def test_stock_transformers_would_run_it(trap: Trap, name: str, tmp_path: Path) -> None:
    """Or the test above could not fail. The command, too, says so in one line."""
    RUNS[name](trap)
    list_again(trap.folder)
    assert refused("verify", str(trap.folder), cwd=tmp_path) and not trap.mark.exists()
    with suppress(ModelError):  # it ran, and then something else failed
        reload(trap.folder, prompt_ids(50), ("float32",))
    assert trap.mark.exists()


def test_what_changes_after_the_check_is_not_run(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder turns bad between the check and the load."""

    def late(*given: Any) -> Any:
        for lay in ("edited module", "plain generate", "absolute path"):
            LAYS[lay](trap)
        return reload(*given)

    monkeypatch.setattr(transformers_folder, "reload", late)
    assert verify_folder(trap.folder)["generated_tokens"] == 8
    assert not trap.mark.exists()


def test_code_that_is_trusted_sees_no_secrets(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs with this environment, but for the variables that are named as secrets are."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, "nothing-like-a-token")
    monkeypatch.setenv("HARMLESS", "kept")
    with open(trap.folder / "modeling_hybrid.py", "a") as file:
        file.write(f"import os\nopen({str(trap.mark)!r}, 'w').write(repr(dict(os.environ)))\n")
    list_again(trap.folder)
    verify_folder(trap.folder, trust_remote_code=True)
    seen = trap.mark.read_text()
    assert "'HARMLESS': 'kept'" in seen and "nothing-like-a-token" not in seen
