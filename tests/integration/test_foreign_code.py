"""Folders whose code would leave a mark if it ran: `verify` and `publish` refuse each of them in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from surgery.errors import ModelError
from surgery.export import transformers_folder
from surgery.export.publish import publish
from surgery.export.reload import prompt_ids, reload
from surgery.export.verify import verify_folder
from tests.integration.conftest import surgery as command
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


def absolute_path(trap: Trap) -> None:
    trap.auto_map(f"{trap.outside}/")


def linked_folder(trap: Trap) -> None:
    (trap.folder / "code").symlink_to(trap.outside)
    trap.auto_map("code/")


def linked_generate(trap: Trap) -> None:
    (trap.folder / "custom_generate").symlink_to(trap.outside)


def plain_generate(trap: Trap) -> None:
    trap.module(trap.folder / "custom_generate")


def path_above(trap: Trap) -> None:
    trap.auto_map(f"../{trap.outside.name}/")


def hidden_folder(trap: Trap) -> None:
    trap.module(trap.folder / ".code")
    trap.auto_map(".code/")


def folder_below(trap: Trap) -> None:
    trap.module(trap.folder / "code")
    trap.auto_map("code/")


def compiled_folder(trap: Trap) -> None:
    trap.module(trap.folder / "__pycache__")
    trap.auto_map("__pycache__/")


def other_repository(trap: Trap) -> None:
    trap.auto_map(f"{trap.outside}--")


def edited_module(trap: Trap) -> None:
    with open(trap.folder / "attention.py", "a") as file:
        file.write(trap.code)


def linked_module(trap: Trap) -> None:
    (trap.folder / f"{MODULE}.py").unlink()
    (trap.folder / f"{MODULE}.py").symlink_to(trap.outside / f"{MODULE}.py")


def linked_module_that_is_equal(trap: Trap) -> None:
    """Nothing but the link is wrong: what it points to may change after the check."""
    (trap.folder / "attention.py").rename(trap.outside / "equal.py")
    (trap.folder / "attention.py").symlink_to(trap.outside / "equal.py")


def another_module(trap: Trap) -> None:
    shutil.copy(trap.outside / f"{MODULE}.py", trap.folder / "modeling_other.py")
    edit(trap.folder, "config.json", lambda c: c["auto_map"].update(AutoModel="modeling_other.Mamba2HybridModel"))


def another_class(trap: Trap) -> None:
    edit(trap.folder, "config.json", lambda c: c["auto_map"].update(AutoConfig="attention.SplicedAttention"))


def another_task(trap: Trap) -> None:
    edit(
        trap.folder, "config.json", lambda c: c["auto_map"].update(AutoTokenizer=[None, f"{trap.outside}/m.Tokenizer"])
    )


def a_list_of_classes(trap: Trap) -> None:
    edit(trap.folder, "config.json", lambda c: c["auto_map"].update(AutoConfig=[f"{trap.outside}/{MODULE}.A"]))


def auto_map_that_is_a_list(trap: Trap) -> None:
    trap.config(auto_map=[f"{trap.outside}/{MODULE}.A"])


def tokenizer_code(trap: Trap) -> None:
    trap.json("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, f"{trap.outside}/generate.A"]}})


def processor_code(trap: Trap) -> None:
    trap.json("processor_config.json", {"auto_map": {"AutoProcessor": f"{trap.outside}/generate.A"}})


def nested_code(trap: Trap) -> None:
    trap.config(text_config={"deep": [{"auto_map": {"AutoConfig": f"{trap.outside}/generate.A"}}]})


def pipeline_code(trap: Trap) -> None:
    trap.config(custom_pipelines={"text-generation": {"impl": f"{trap.outside}/generate.A", "pt": ["A"]}})


def other_config(trap: Trap) -> None:
    trap.json("config.1.0.0.json", {"auto_map": {}})
    trap.config(configuration_files=["config.1.0.0.json"])


def kernel_from_the_hub(trap: Trap) -> None:
    trap.config(_attn_implementation="kernels-community/flash-attn2")


def kernel_for_a_part(trap: Trap) -> None:
    trap.config(attn_implementation={"": "sdpa", "text_config": "someone/kernel:call"})


def kernel_by_another_name(trap: Trap) -> None:
    trap.config(attribute_map={"harmless": "_attn_implementation"}, harmless="someone/kernel")


def kernel_where_flash_attention_is_missing(trap: Trap) -> None:
    trap.config(attn_implementation="flash_attention_2")


def quantiser(trap: Trap) -> None:
    trap.config(quantization_config={"quant_method": "mxfp4"})


def generation_code(trap: Trap) -> None:
    trap.json("generation_config.json", {"custom_generate": str(trap.outside), "trust_remote_code": True})


def other_weights(trap: Trap) -> None:
    trap.config(transformers_weights="other.safetensors")


def weights_that_go_first(trap: Trap) -> None:
    name = "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(trap.folder / "model.safetensors", trap.folder / name)


def adapter(trap: Trap) -> None:
    trap.json("adapter_config.json", {"base_model_name_or_path": str(trap.outside), "peft_type": "LORA"})


def dangling_link(trap: Trap) -> None:
    (trap.folder / "figures").mkdir(exist_ok=True)
    (trap.folder / "figures" / "curve.png").symlink_to(trap.outside / "nowhere")


def loop(trap: Trap) -> None:
    (trap.folder / "again").symlink_to(trap.folder)


def hidden_link(trap: Trap) -> None:
    (trap.folder / ".cache").mkdir()
    (trap.folder / ".cache" / "code").symlink_to(trap.outside)


def linked_weights(trap: Trap) -> None:
    (trap.folder / "model.safetensors").rename(trap.outside / "model.safetensors")
    (trap.folder / "model.safetensors").symlink_to(trap.outside / "model.safetensors")


def pipe(trap: Trap) -> None:
    os.mkfifo(trap.folder / "generation.json")


RUNS = (absolute_path, linked_folder, linked_generate, plain_generate, folder_below, compiled_folder)
RUNS = (*RUNS, other_repository, edited_module, linked_module)
NAMES = (
    path_above,
    hidden_folder,
    another_module,
    another_class,
    another_task,
    a_list_of_classes,
    auto_map_that_is_a_list,
    tokenizer_code,
)
NAMES = (*NAMES, processor_code, nested_code, pipeline_code, other_config, kernel_from_the_hub, kernel_for_a_part)
NAMES = (*NAMES, kernel_by_another_name, kernel_where_flash_attention_is_missing, quantiser, generation_code)
NAMES = (*NAMES, other_weights, weights_that_go_first, adapter)
LINKS = (linked_module_that_is_equal, dangling_link, loop, hidden_link, linked_weights, pipe)
THE_ISSUES = (absolute_path, linked_folder, linked_generate)
each = pytest.mark.parametrize("lay", [*RUNS, *NAMES, *LINKS], ids=lambda lay: lay.__name__)


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


def refused(call: Callable[[], Any], trap: Trap) -> None:
    with pytest.raises(ModelError) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1 and not trap.mark.exists()


@each
@pytest.mark.parametrize("is_listed", [True, False])
def test_it_is_refused_and_nothing_of_it_runs(
    lay: Callable[[Trap], None], is_listed: bool, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether export.json is right about the folder, or as old ones lists nothing."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    lay(trap)
    if is_listed:
        list_again(trap.folder)
    else:
        (trap.folder / "export.json").write_text("{}")
    refused(lambda: verify_folder(trap.folder), trap)
    refused(lambda: publish(trap.folder, "someone/hybrid", endpoint="http://127.0.0.1:9"), trap)


@pytest.mark.parametrize("lay", THE_ISSUES, ids=lambda lay: lay.__name__)
def test_the_command_says_so_in_one_line(lay: Callable[[Trap], None], trap: Trap, tmp_path: Path) -> None:
    lay(trap)
    list_again(trap.folder)
    done = command("verify", str(trap.folder), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert not trap.mark.exists()


@pytest.mark.parametrize("lay", RUNS, ids=lambda lay: lay.__name__)
def test_stock_transformers_would_run_it(lay: Callable[[Trap], None], trap: Trap) -> None:
    """Or the tests above could not fail."""
    lay(trap)
    with suppress(ModelError):  # it ran, and then something else failed
        reload(trap.folder, prompt_ids(50), ("float32",))
    assert trap.mark.exists()


@pytest.mark.parametrize("lay", LINKS, ids=lambda lay: lay.__name__)
def test_links_are_refused_with_trust_as_well(lay: Callable[[Trap], None], trap: Trap) -> None:
    lay(trap)
    refused(lambda: verify_folder(trap.folder, trust_remote_code=True), trap)


def test_what_changes_after_the_check_is_not_run(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder turns bad between the check and the load."""

    def late(*given: Any) -> Any:
        for lay in (edited_module, plain_generate, absolute_path):
            lay(trap)
        return reload(*given)

    monkeypatch.setattr(transformers_folder, "reload", late)
    assert verify_folder(trap.folder)["generated_tokens"] == 8
    assert not trap.mark.exists()


def test_code_that_is_trusted_sees_no_secrets(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs with this environment, but for the variables that are named as secrets are."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, "nothing-like-a-token")
    monkeypatch.setenv("HARMLESS", "kept")
    with open(trap.folder / "attention.py", "a") as file:
        file.write(f"import os\nopen({str(trap.mark)!r}, 'w').write(repr(dict(os.environ)))\n")
    list_again(trap.folder)
    verify_folder(trap.folder, trust_remote_code=True)
    seen = trap.mark.read_text()
    assert "'HARMLESS': 'kept'" in seen and "nothing-like-a-token" not in seen
