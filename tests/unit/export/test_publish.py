"""Publishing, with the real client against a small server that speaks the Hub's protocol."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

import surgery.export.verify
from surgery.errors import ModelError, SurgeryError
from surgery.export.files import RECORD, visible_files
from surgery.export.publish import LONGEST_WAIT, TRIES, Published, publish
from tests.support.exports import list_again
from tests.support.hub_server import TOKEN, Blob, HubServer, serve

NAME = "someone/hybrid"
AGAIN = "Run the same command again"
CARD = "---\nlicense: mit\n---\n\n# hybrid\n"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client would have slept."""
    slept: list[float] = []
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=slept.append))
    return slept


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Iterator[HubServer]:
    """A Hub, and a user who is logged in there; every folder verifies."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    report = {"format": "transformers", "not_checked": ["a thing"]}
    monkeypatch.setattr(surgery.export.verify, "verify_folder", lambda folder, trust, plugins: report)
    with serve() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Looks like an export: two files for LFS, two for git and the list, one below."""
    path = tmp_path / "export"
    (path / "figures").mkdir(parents=True)
    (path / "README.md").write_text(CARD)
    (path / "config.json").write_text('{"a": 1}\n')
    (path / "figures" / "curve.png").write_bytes(b"\x89PNG" + bytes(range(200)) * 3)
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (path / RECORD).write_text("{}")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in visible_files(folder)}


class Caller:
    """Calls `publish` as the command does, and keeps what it said and how long it would have waited."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        self.said: list[str] = []
        self.slept: list[float] = []

    def __call__(self, **given: object) -> Published:
        list_again(self.folder)
        options = {"repo_id": NAME, **given}
        return publish(self.folder, endpoint=self.hub.url, say=self.said.append, sleep=self.slept.append, **options)

    def refused(self, **given: object) -> str:
        with pytest.raises(SurgeryError) as caught:
            self(**given)
        return str(caught.value)


@pytest.fixture
def call(hub: HubServer, folder: Path) -> Caller:
    return Caller(hub, folder)


def test_a_new_repository_is_private_and_holds_the_folder(call: Caller) -> None:
    """Later only what has changed is sent, and nothing is committed if nothing has."""
    done = call()
    repository = call.hub.repositories[NAME]
    assert repository.private and done.private
    assert call.hub.files(NAME) == contents(call.folder) and "not checked: a thing" in call.said
    assert set(done.sent) == set(contents(call.folder)) and done.checked == 5
    assert done.commit == repository.refs["main"].oid and done.url == f"{call.hub.url}/{NAME}/commit/{done.commit}"
    assert len(repository.commits) == 2, "the folder arrives in one commit"
    received, second = call.hub.received, call()
    assert second.sent == () and second.commit == done.commit and second.checked == 5
    assert call.hub.received == received and len(repository.commits) == 2
    (call.folder / "config.json").write_text('{"a": 2}\n')
    assert call().sent == ("config.json", RECORD)
    assert call.hub.received == received and call.hub.files(NAME) == contents(call.folder)


def test_nothing_goes_by_accident_where_everyone_can_read(call: Caller) -> None:
    call.hub.create(NAME, private=False)
    assert "this repository is public" in call.refused()
    assert call.hub.files(NAME) == {} and call(public=True).sent
    call.hub.create("someone/other", private=True)
    assert call(repo_id="someone/other", public=True).private and any("stays private" in line for line in call.said)
    assert not call(repo_id="someone/new", public=True).private and not call.hub.repositories["someone/new"].private


def test_what_another_export_left_goes_and_other_files_stay(call: Caller) -> None:
    """transformers would load an old model.safetensors before the shards of a new index."""
    call()
    (call.folder / "model.safetensors").rename(call.folder / "model-00001-of-00001.safetensors")
    repository = call.hub.repositories[NAME]
    more = {"notes.txt": Blob(b"mine", False), "modeling_old.py": Blob(b"pass", False)}
    repository.add("main", "by hand", {**repository.refs["main"].files, **more})
    done = call()
    assert (done.removed, done.kept) == (("model.safetensors", "modeling_old.py"), ("notes.txt",))
    assert call.hub.files(NAME) == {**contents(call.folder), "notes.txt": b"mine"}


def test_weights_of_what_is_no_export_stay(call: Caller) -> None:
    """A slip of the name: another model lies there."""
    call.hub.create(NAME, private=True)
    call.hub.repositories[NAME].add("main", "theirs", {"pytorch_model.bin": Blob(b"theirs", False)})
    assert "pytorch_model.bin" in call.refused() and call.hub.files(NAME) == {"pytorch_model.bin": b"theirs"}


def test_a_pull_request_leaves_main_alone_and_is_not_made_twice(call: Caller) -> None:
    done = call(pull_request=True, message="A better one")
    repository = call.hub.repositories[NAME]
    assert repository.requests == ["A better one"] and done.url.endswith(f"/{NAME}/discussions/1")
    assert call.hub.files(NAME) == {} and call.hub.files(NAME, "refs/pr/1") == contents(call.folder)
    again = call(pull_request=True, message="A better one")
    assert again.commit == done.commit and again.sent == () and len(repository.requests) == 1
    (call.folder / "config.json").write_text("{}\n")
    assert call(revision="refs/pr/1").sent == ("config.json", RECORD), "an open one is gone on with by its name"


def test_an_interrupted_upload_goes_on(call: Caller, waits: list[float]) -> None:
    """The connection breaks in the middle of the weights, for good; what had arrived is not sent again."""
    figure = Blob((call.folder / "figures" / "curve.png").read_bytes(), True)
    call.hub.cuts, call.hub.cut_after, call.hub.spares = 999, 2000, {figure.sha256}
    message = call.refused()
    assert AGAIN in message and "could not upload the files" in message
    assert f"{NAME} {figure.sha256}" in call.hub.stored and call.hub.files(NAME) == {}
    whole = sum((call.folder / name).stat().st_size for name in ("figures/curve.png", "model.safetensors"))
    call.hub.cuts, before = 0, call.hub.received
    assert call().checked == 5
    assert call.hub.received - before == whole - len(figure.data)
    assert len(waits) == TRIES * 5, "the client itself tries again as well"


def test_rate_limits_and_faults_of_the_hub_are_waited_for(call: Caller) -> None:
    for branch, (path, doing) in enumerate((
        ("/repos/create", "find or create the repository"),
        ("/branch/", "create the branch 1"),
        ("/validate-yaml", "upload the files"),
        ("/commit/", "upload the files"),
    )):  # fmt: skip
        call.hub.fail("POST", path, 429, times=2, headers={"Retry-After": "7"})
        call.said.clear(), call.slept.clear()
        assert call(revision=str(branch)).checked == 5 and call.slept == [7.0, 7.0], path
        assert call.said.count(f"could not {doing} (429, no); retrying in 7 s") == 2
    call.hub.fail("POST", "/commit/", 503, times=2)
    call.slept.clear()
    assert call(repo_id="someone/other").checked == 5 and call.slept == [1.0, 2.0]
    assert len(call.hub.repositories["someone/other"].commits) == 2


def test_waiting_has_a_bound(call: Caller) -> None:
    """What is no number, or none that can be waited for, is as nothing."""
    call.hub.fail("POST", "/commit/", 429, headers={"Retry-After": "2"})
    message = call.refused()
    assert call.slept == [2.0] * (TRIES - 1) and "429" in message and f"{AGAIN} in 2 s" in message
    for text, slept, said in (
        (str(int(LONGEST_WAIT) + 1), [], "in 301 s"),
        ("9" * 12, [], "later"),
        *((text, [1.0, 2.0, 4.0], "later") for text in ("soon", "-5", "inf", "nan", "9" * 400)),
    ):
        call.hub.failures[0].headers = {"Retry-After": text}
        call.slept.clear()
        assert f"{AGAIN} {said}" in call.refused() and call.slept == slept, text


def test_a_rejected_upload_of_many_files_leaves_nothing(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hf_xet, `HfApi.upload_folder` answers repeated errors by committing the files in parts."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    (call.folder / "figures" / "curve.png").unlink()  # large files need a Hub with Xet
    (call.folder / "model.safetensors").unlink()
    for number in range(45):
        (call.folder / f"{number}.json").write_text(f"{number}\n")
    call.hub.fail("POST", "/commit/", 413, times=6)
    call.refused()
    assert call.hub.files(NAME) == {}
    call.hub.failures.clear()
    assert call().checked == 48 and len(call.hub.repositories[NAME].commits) == 2


@pytest.mark.parametrize("pull_request", [False, True])
def test_a_commit_whose_answer_is_lost_is_found_and_not_made_twice(call: Caller, pull_request: bool) -> None:
    call.hub.lost = 1
    done = call(pull_request=pull_request)
    repository = call.hub.repositories[NAME]
    assert done.commit == repository.refs["refs/pr/1" if pull_request else "main"].oid and call.slept == [1.0]
    assert len(repository.commits) == 2 and len(repository.requests) == pull_request


def test_an_answer_becomes_one_line(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, path, field, hint in (
        (401, "/repos/create", "token", "hf auth login"),
        (403, "/repos/create", NAME, "write access"),
        (404, "/commit/", NAME, "Check the name"),
        (409, "/commit/", NAME, AGAIN),
        (413, "/commit/", NAME, "See the answer of the Hub"),
        (503, "/repos/create", NAME, AGAIN),
    ):
        call.hub.failures.clear()
        call.hub.fail("POST", path, status, text="a reason")
        message = call.refused()
        assert message.startswith(f"{field}: could not ") and f"({status}, a reason)" in message and hint in message
        assert "\n" not in message
    call.hub.failures.clear()
    call.hub.writable = False
    assert "write access" in call.refused()
    call.hub.url = "http://127.0.0.1:9"
    message = call.refused()
    assert message.startswith("http://127.0.0.1:9: could not ") and AGAIN in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    call.slept.clear()
    assert "HF_HUB_OFFLINE" in call.refused() and call.slept == []


def test_a_changed_byte_on_the_way_back_is_found(call: Caller) -> None:
    call.hub.flipped = {"model.safetensors"}
    with pytest.raises(ModelError, match=r"^model.safetensors: the Hub returned other bytes"):
        call()


def test_what_cannot_be_meant_is_refused_before_any_request(call: Caller) -> None:
    for given, said in (
        ({"repo_id": "hybrid"}, "Use OWNER/NAME"),
        ({"repo_id": "a/b/c"}, "ORG/NAME"),
        ({"repo_id": "someone/two words"}, "ORG/NAME"),
        ({"pull_request": True, "revision": "other"}, "--pr"),
    ):
        assert said in call.refused(**given)
    for option in ("message", "revision"):
        for text, said in (
            (f"see {TOKEN}", "a token"),
            ("of /home/bob/base", "/home/bob"),
            ("a\x1b[2J", "the control character U+001B"),
            ("a\u202eb", "the control character U+202E"),
            ("a\rb", "the control character U+000D"),
        ):
            told = call.refused(**{option: text})
            assert told.startswith(f"--{option}: ") and said in told and TOKEN not in told
    assert call.hub.log == []
    titles = ("A title\n\nand\ta text", "32\u00a0tokens", "a family: \U0001f469\u200d\U0001f467")
    for number, title in enumerate(titles):
        assert call(repo_id=f"someone/{number}", message=title).sent, "what a terminal only shows is no fault"


def test_a_bad_front_matter_is_refused_before_anything_is_uploaded(call: Caller) -> None:
    (call.folder / "README.md").write_text("---\n- a list\n---\n")
    assert "Invalid metadata in README.md" in call.refused()
    assert call.hub.received == 0


@pytest.mark.parametrize("at_fault", ["", "flip", "401", "503", "cut", "echo"])
def test_the_token_is_in_nothing_that_is_said_sent_or_logged(
    call: Caller, at_fault: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    call.hub.flipped = {"model.safetensors"} if at_fault == "flip" else set()
    call.hub.cuts = 999 if at_fault == "cut" else 0
    if at_fault in ("401", "503"):
        call.hub.fail("POST", "/commit/", int(at_fault))
    if at_fault == "echo":
        call.hub.fail("POST", "/commit/", 400, text=f"{'what is ' * 22}{TOKEN}?")
    text = repr(call()) if not at_fault else call.refused()
    text += "".join(call.said) + caplog.text + "".join(capfd.readouterr())
    assert len(caplog.text) > 500 and TOKEN[:12] not in text
    assert not any(TOKEN.encode() in data for data in call.hub.files(NAME).values())
    assert not call.hub.told_storage, "signed addresses are somebody else's"


def test_names_and_texts_are_searched_before_any_request_and_every_place_is_named(call: Caller) -> None:
    """Tokens with and without a known form, and paths of this machine and of others; no token is repeated."""
    secret = "ghp_" + "a" * 36
    for text in (secret, TOKEN, "hf_" + "b" * 34, str(Path.cwd()), str(call.folder), "/home/bob"):
        (call.folder / "README.md").write_text(f"{CARD}\n{text}\n")
        message = call.refused()
        assert message.startswith("README.md:7: ") and (text in message or text[0] != "/")
        assert text not in message or text[0] == "/"
    for name in ("config.json", "model.py", "notes.TXT"):  # code too
        (call.folder / name).write_text(f'{{"a": "{secret}"}}')
        message = call.refused()
        assert f"More findings: {name}:1." in message and len(message.splitlines()) == 1
        (call.folder / name).write_text("{}")
    (call.folder / "README.md").write_text("{}")
    (call.folder / f"{secret}.txt").touch()
    assert call.refused().startswith("name of ghp_") and call.hub.log == []


def test_a_file_that_changes_after_the_checks_is_not_sent(call: Caller) -> None:
    def late(_: str) -> None:
        (call.folder / "config.json").write_text('{"a": 2}\n')

    list_again(call.folder)
    with pytest.raises(ModelError, match=r"^config\.json: changed during the checks"):
        publish(call.folder, NAME, endpoint=call.hub.url, say=late)
    assert call.hub.files(NAME) == {}
