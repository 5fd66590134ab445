"""What `verify` finds in a folder."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surgery.errors import ModelError
from surgery.export import transformers_folder
from surgery.export.files import CARD, RECORD, REFERENCE, fingerprints
from surgery.export.folder import export_model
from surgery.export.reload import TOLERANCE, compare, make_reference, prompt_ids, read_reference
from surgery.export.verify import check_publishable, verify_folder
from tests.support.battery import base, trained
from tests.support.exports import edit, in_this_process, list_again, refusal, written
from tests.support.pico import pico_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("verify") / "export")


class TestWhole:
    def test_a_copy_verifies(self, whole: Path, copy: Path) -> None:
        """Wherever it lies; what download tools leave beside it does no harm."""
        (copy / ".cache").mkdir()
        (copy / ".cache" / "huggingface.json").write_text("{}")
        (copy / "picture.png").write_bytes(b"")
        found = verify_folder(str(copy))
        assert found["files"] == len([p for p in whole.rglob("*") if p.is_file()]) - 1
        assert found["agree"] == ["config.json", "plan.json", "heads.json", "README.md"]
        assert found["tensors"] == len(load_file(copy / "model.safetensors")) > 40
        assert found["max_logit_difference"] < TOLERANCE and found["generated_tokens"] == 8
        assert found["not_checked"] == [f"picture.png: not listed in {RECORD}"]
        assert {"surgery", "torch", "transformers"} <= json.loads((whole / RECORD).read_text())["versions"].keys()


class TestFiles:
    def test_a_card_may_be_edited_and_all_that_is_written_can_be_published(self, copy: Path) -> None:
        """But for its table, the splice of which is compared, and files that were added."""
        said: list[str] = []
        for text in ((copy / CARD).read_text(), "# My words\n"):
            (copy / CARD).write_text(text)
            names, _ = check_publishable(copy, say=said.append)
            assert set(names) == {p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()}
        assert "not checked: README.md: changed since the export" in said
        for name in (".env", ".cache/x", "notes.txt", "figures/more.zip", "__pycache__/a.pyc"):
            (copy / name).parent.mkdir(exist_ok=True)
            (copy / name).touch()
            with pytest.raises(ModelError, match=rf"^{re.escape(name)}: not listed in export\.json"):
                check_publishable(copy)
            (copy / name).unlink()

    def test_a_changed_byte_and_a_missing_file_are_named(self, whole: Path, copy: Path) -> None:
        for name in fingerprints(whole):
            if name != CARD:
                content = bytearray((whole / name).read_bytes())
                content[len(content) // 2] ^= 1
                (copy / name).write_bytes(content)
                message = refusal(copy)
                assert name in message and ("sha256" in message or (name == "config.json" and "not JSON" in message))
            (copy / name).unlink()
            message = refusal(copy)
            assert name in message and "missing" in message
            shutil.copy(whole / name, copy / name)

    def test_what_could_be_loaded_must_be_listed(self, copy: Path) -> None:
        for name in ("helper.py", "adapter_config.json", "pytorch_model.bin", "deeper/more.py"):
            (copy / name).parent.mkdir(exist_ok=True)
            (copy / name).write_text("{}")
            assert name in refusal(copy)
            (copy / name).unlink()
        (copy / "modeling_mamba2_hybrid.py").unlink()
        list_again(copy)
        for trust in (False, True):
            assert "modelling file is missing" in refusal(copy, trust_remote_code=trust)


class TestContent:
    def test_what_was_changed_is_found_though_it_is_listed_anew(self, whole: Path, copy: Path) -> None:
        """No numbers, a head that is not silent, a tensor too few, documents that disagree."""
        mixer, norm, weights = "backbone.layers.0.mixer", "backbone.layers.1.norm.weight", "model.safetensors"
        changes: list[tuple[str, Any, str]] = [
            (weights, lambda t: t[norm].__setitem__(3, torch.nan), norm),
            (weights, lambda t: t[f"{mixer}.out_proj.weight"][:, 16:32].add_(1), "L0H1: not silent"),
            (weights, lambda t: t.pop(f"{mixer}.out_proj.weight"), f"{mixer}.out_proj.weight: missing"),
            (weights, lambda t: t[f"{mixer}.attention.o_proj.weight"].zero_(), "logits differ"),
            ("plan.json", lambda plan: plan["grafts"][0].update(heads=[3, 2]), "plan.json"),
            ("plan.json", lambda plan: plan["grafts"][1].update(mode="add"), "plan.json"),
            ("plan.json", lambda plan: plan["grafts"].pop(), "plan.json"),
            ("plan.json", lambda plan: plan.update(geometry="other"), "plan.json"),
            ("plan.json", lambda plan: plan.pop("grafts"), "plan.json"),
            ("heads.json", lambda heads: heads["chosen"].pop(), "heads.json"),
            ("heads.json", lambda heads: heads["chosen"][0].update(reads="answer_token"), "heads.json"),
            ("heads.json", lambda heads: heads.update(geometry="other"), "heads.json"),
            ("config.json", lambda config: config["splice"][0].update(reads=["answer_token"] * 2), "plan.json"),
        ]
        for name, change, message in changes:
            edit(copy, name, change)
            list_again(copy)
            assert message in refusal(copy)
            shutil.copy(whole / name, copy)

    def test_a_splice_version_of_another_release(self, copy: Path) -> None:
        """An export without one is read as the first."""
        assert json.loads((copy / "config.json").read_text())["splice_version"] == 1
        edit(copy, "config.json", lambda config: config.update(splice_version=2))
        list_again(copy)
        message = refusal(copy)
        assert "config.json: splice_version" in message and "This release reads version 1." in message
        edit(copy, "config.json", lambda config: config.pop("splice_version"))
        list_again(copy)
        verify_folder(copy)

    def test_a_card_that_says_something_else(self, copy: Path) -> None:
        card = (copy / "README.md").read_text()
        changed = [card.replace(*words, 1) for words in (("L0H3", "L0H2"), ("| replace |", "| add |"))]
        changed += [card.replace("segment end", "answer token", 1)]
        changed += ["\n".join(line for line in card.splitlines() if "L0H3" not in line)]
        for text in changed:
            (copy / "README.md").write_text(text)
            assert "README.md: its table has" in refusal(copy)


class TestWriting:
    def test_a_tokenizer_that_changes_when_it_is_saved_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def other_tokens(*call: Any) -> dict[str, Tensor]:
            reloaded = in_this_process(*call)
            return {**reloaded, "tokenizer": reloaded["tokenizer"].flip(0)}

        monkeypatch.setattr(transformers_folder, "reload", other_tokens)
        with pytest.raises(ModelError, match="tokenizer: the reloaded tokenizer encodes"):
            export_model(trained("mamba2"), pico_tokenizer(), tmp_path / "export")
        assert not (tmp_path / "export").exists()

    def test_an_unknown_format_is_named_and_its_module_not_imported(self, copy: Path) -> None:
        """Only a module that the user passes is imported."""
        for plugin in (None, 5, "no module", "os", "a.b"):
            edit(copy, RECORD, lambda record: record.update(format="other", plugin=plugin))  # noqa: B023
            message = refusal(copy)
            assert message.startswith("export.json: unknown format 'other'. ")
            assert (f"--plugin {plugin}" in message) == (plugin in ("os", "a.b"))
            assert "a" not in sys.modules and len(message.splitlines()) == 1

    def test_what_is_no_export_is_called_what_it_is(self, tmp_path: Path) -> None:
        assert "no such folder" in refusal(tmp_path / "none")
        assert "config.json: missing" in refusal(tmp_path)
        (tmp_path / "config.json").write_text("[1]")
        assert "JSON object" in refusal(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "nemotron_h", "inserted": [{"form": "block"}]}))
        assert f"hybrid without {RECORD}" in refusal(tmp_path)
        base("mamba2").save_pretrained(tmp_path)
        assert "mamba2" in refusal(tmp_path) and "plain model" in refusal(tmp_path)
        trained("mamba2").save_pretrained(tmp_path)
        assert f"hybrid without {RECORD}" in refusal(tmp_path)


DOCUMENTS = (RECORD, "config.json", "plan.json", "heads.json", "generation_config.json", "tokenizer_config.json")
NO_JSON = (b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe\x00", b'{"a": "\xc3"}', b'{"a": ', b"", b"\0" * 9)


class TestMalformed:
    """Whatever a document holds, it is one line that names a file, and no traceback."""

    @pytest.fixture(autouse=True)
    def nothing_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise ModelError("reloading", "it got here", "Nothing is wrong with the documents.")

        monkeypatch.setattr(transformers_folder, "reload", refuse)

    def test_a_document_that_is_none_or_of_another_type(self, whole: Path, copy: Path) -> None:
        for name in DOCUMENTS:
            others = (b"[]", b"[1]", b"5", b'"text"', b"null", b"true") if name != "tokenizer_config.json" else ()
            for content in (*NO_JSON, *others):
                (copy / name).write_bytes(content)
                if name != RECORD:
                    list_again(copy)
                message = refusal(copy)
                assert message.startswith(f"{name}: ") and len(message.splitlines()) == 1, content[:9]
            shutil.copy(whole / name, copy)

    def test_a_reference_that_does_not_fit(self, whole: Path, copy: Path) -> None:
        """Other types and shapes, no numbers, and tokens that the model lacks."""
        lists = json.loads((whole / REFERENCE).read_text())
        wrong: list[dict[str, Any]] = [{"ids": x} for x in (None, "one", ["one"], [[1], [1, 2]], [10**99], {"0": 1})]
        for name, numbers in lists.items():
            tensor = torch.tensor(numbers)
            shapes = (tensor.to(torch.bool), tensor[:0], tensor[None], tensor.flatten()[0], torch.cat([tensor] * 99))
            wrong += [{name: changed.tolist()} for changed in shapes]
        wrong += [{name: [token, *lists[name][1:]]} for name in ("vocabulary", "text") for token in (-1, 10**9)]
        for changed in (*({**lists, **change} for change in wrong), {k: v for k, v in lists.items() if k != "text"}):
            (copy / REFERENCE).write_text(json.dumps(changed))
            with pytest.raises(ModelError, match=f"^{REFERENCE}: ") as error:
                read_reference(copy / REFERENCE, 1024)
            assert len(str(error.value).splitlines()) == 1
        list_again(copy)
        assert refusal(copy).startswith(f"{REFERENCE}: ")


class TestReference:
    """The rule by which another machine's rounding passes, and another model does not."""

    @staticmethod
    def _found(steps: Tensor) -> dict[str, Tensor]:
        ids = prompt_ids(50)
        logits_BTV = torch.randn(2, 24, 50, generator=torch.Generator().manual_seed(1))
        text = torch.cat([ids[:1], steps.argmax(-1)[None]], 1)
        return {"x.logits": logits_BTV, "x.text": text, "x.steps": steps}

    def test_rounding_passes_and_more_does_not(self) -> None:
        found = self._found(torch.eye(8, 50) * 5)
        reference = make_reference(prompt_ids(50), found, "x")
        spread = float(reference["logits"].std())
        for factor, fails in ((0.9, False), (1.1, True)):
            moved = found | {"x.logits": found["x.logits"] + factor * TOLERANCE * spread}
            if fails:
                with pytest.raises(ModelError, match=r"logits differ.*Rounding stays below"):
                    compare(reference, moved, "x")
            else:
                difference, agree = compare(reference, moved, "x")
                assert difference == pytest.approx(0.9 * TOLERANCE, rel=1e-2) and agree == 8
        with pytest.raises(ModelError):
            compare(reference, found | {"x.logits": found["x.logits"] * torch.nan}, "x")

    def test_a_token_may_differ_where_rounding_decides(self) -> None:
        for margin, agree in ((1.9, 3), (2.1, None)):
            steps = torch.eye(8, 50) * 5
            spread = float(make_reference(prompt_ids(50), self._found(steps), "x")["logits"].std())
            steps[3, 7] = 5 - margin * TOLERANCE * spread  # the fourth token is a near tie
            reference = make_reference(prompt_ids(50), self._found(steps), "x")
            other = steps.clone()
            other[3, 3] = 0
            other[4:] = other[4:].roll(1, dims=-1)  # what follows is another text
            if agree is not None:
                assert compare(reference, self._found(other), "x")[1] == agree
            else:
                with pytest.raises(ModelError, match="generated token 3"):
                    compare(reference, self._found(other), "x")
