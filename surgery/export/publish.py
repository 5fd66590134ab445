"""Publishes an exported folder on the Hub and checks what arrived. Owns: that conversation, its errors' wording.

Must never know: what a model is (`verify` does), recipes, how a card is written. The client is huggingface_hub's own;
docs/PUBLISH.md says what it sends. The token is read where huggingface_hub reads it, and is in nothing that this module
says.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from surgery import __version__
from surgery.errors import ModelError, SurgeryError
from surgery.export.files import LOADABLE, check_entries, sha256_of, visible_files
from surgery.export.verify import verify_folder
from surgery.files.secret_scan import search, secrets_of_environment

TRIES = 4
LONGEST_WAIT = 300.0  # seconds; a Hub that asks for more is left alone
_LISTED = 8  # findings that an error names

T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """What was done, and where it is.

    Attributes:
        commit: the commit that holds the folder, on the Hub before or made now.
        url: of that commit, or of the pull request.
        sent: the files that were new or other than on the Hub; empty if nothing was to be done.
        removed: weights, code and settings of another export, removed in the same commit.
        kept: other files of the repository that are not in the folder, left as they are.
        checked: how many files were downloaded again and found the same.
    """

    repo_id: str
    private: bool
    commit: str
    url: str
    sent: tuple[str, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    checked: int


def publish(
    folder: Path | str,
    repo_id: str,
    public: bool = False,
    revision: str | None = None,
    pull_request: bool = False,
    message: str | None = None,
    trust_remote_code: bool = False,
    endpoint: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    sleep: Callable[[float], None] = time.sleep,
    plugins: Sequence[str] = (),
) -> Published:
    """Puts an export on the Hub in one commit, downloads it and compares every file.

    Interrupted anywhere, the same call goes on: large files that the Hub has are not sent again, and if it has all of
    them nothing is committed.

    Args:
        folder: an export; hidden files in it stay here.
        repo_id: ORG/NAME; made if it is not there.
        public: who may read a repository that is made. One that everyone can read already needs it as well.
        revision: a branch, made from `main` if it is not there, or `refs/pr/N`.
        pull_request: propose the commit to `main`; one that is open with the same title and files is taken as it is.
        trust_remote_code: verify a folder whose modelling files are not this version's, by running them.
        endpoint: of another Hub; HF_ENDPOINT if not said.
        say: is told what is done, line by line.
        sleep: waits that many seconds between tries.

    Raises:
        ModelError: the folder does not verify, or the Hub gives back another file.
        SurgeryError: no token, a bad name, a path of this machine or a token in a file, or whatever the Hub answers.
    """
    folder = Path(folder)
    _check_request(repo_id, revision, pull_request)
    token = get_token()
    if token is None:
        raise SurgeryError(
            "token", "none", "Log in with `hf auth login`, or set HF_TOKEN to a token with write access."
        )
    # Before the checks: a file that changes after them is not what the Hub is to give back.
    sums = {name: sha256_of(path) for name, path in published_files(folder).items()}
    for sentence in verify_folder(folder, trust_remote_code, plugins)["not_checked"]:
        say(f"not checked: {sentence}")
    files = published_files(folder)
    check_private(files, folder, token)
    if sorted(files) != sorted(sums):
        raise ModelError("FOLDER", str(folder), "Its files changed while they were checked. Publish it again.")
    say(f"verified {folder}: {len(files)} files, {sum(p.stat().st_size for p in files.values()):,} bytes")
    hub = _Hub(HfApi(endpoint=endpoint, token=token), repo_id, revision or "main", token, say, sleep)
    private = hub.prepare(public)
    title = message or f"Hybrid exported by ssm-surgery {__version__}"
    done = hub.patiently("send the files", lambda: hub.send(files, sums, title, pull_request))
    what = f"sent {len(done.sent)} files" if done.sent or done.removed else "the Hub has all of it; nothing was sent"
    say(f"{what}: commit {done.commit}")
    hub.check(sums, done.commit)
    say(f"downloaded {len(sums)} files and compared their sha256: all the same")
    return Published(repo_id, private, done.commit, done.url, done.sent, done.removed, done.kept, len(sums))


def _check_request(repo_id: str, revision: str | None, pull_request: bool) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise SurgeryError("ORG/NAME", repo_id, str(error).splitlines()[0]) from None
    if "/" not in repo_id:
        raise SurgeryError(
            "ORG/NAME", repo_id, "Say whose it is: your name on the Hub or an organization, then a slash."
        )
    if pull_request and revision is not None:
        raise SurgeryError("--pr", f"with --revision {revision}", "A pull request is made against main. Leave one out.")


def published_files(folder: Path) -> dict[str, Path]:
    """Every file by its path in the repository, in order; hidden ones and compiled Python are left out.

    Raises:
        ModelError: the folder holds a symbolic link, or another thing that is no plain file.
    """
    check_entries(folder)
    return {path.relative_to(folder).as_posix(): path for path in visible_files(folder)}


def check_private(files: Mapping[str, Path], folder: Path, token: str | None = None) -> None:
    """Search every file but the numbers of weights for tokens and for paths of this or another machine.

    Besides anybody's home directory, the paths are the own home, the current folder and the export's own.

    Raises:
        SurgeryError: names file and line of the first, and where more are. A token is not repeated.
    """
    places = {str(p) for p in (Path.home(), Path.cwd(), folder.absolute(), folder.resolve())} - {"/"}
    known = secrets_of_environment() | ({"the token of the Hub": token} if token else {})
    found = list(islice(search(files, places, known), _LISTED))
    if found:
        more = sorted({finding.where for finding in found} - {found[0].where})
        hint = f"{found[0].hint} There is more in {', '.join(more)}." if more else found[0].hint
        raise SurgeryError(found[0].where, found[0].value, hint)


@dataclass(frozen=True)
class _Sent:
    commit: str
    url: str
    sent: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Hub:
    """One repository, spoken to until it answers or the tries are used up."""

    api: HfApi
    repo_id: str
    revision: str
    token: str
    say: Callable[[str], None]
    sleep: Callable[[float], None]

    def patiently(self, doing: str, step: Callable[[], T]) -> T:
        """Tries a step again where that may help: rate limits, faults of the Hub, lost connections.

        A step has to be one that may be repeated. Raises SurgeryError where trying again would not help.
        """
        for attempt in range(TRIES):
            try:
                return step()
            except SurgeryError:
                raise
            except (HTTPError, ConnectionError, RuntimeError, ValueError) as error:
                cause = _cause(error)
                wait = _wait(cause, attempt)
                if wait is None or wait > LONGEST_WAIT or attempt == TRIES - 1:
                    raise self._explained(cause, doing) from None
                self.say(f"could not {doing} ({self._short(cause)}); trying again in {wait:g} s")
                self.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def prepare(self, public: bool) -> bool:
        """Makes the repository and the branch where they are not there. Returns whether it is private."""
        asking = "find or make the repository"
        self.patiently(asking, lambda: self.api.create_repo(self.repo_id, private=not public, exist_ok=True))
        private = bool(self.patiently(asking, lambda: self.api.model_info(self.repo_id)).private)
        if not private and not public:
            hint = "Give --public to publish there, or name another repository."
            raise SurgeryError(self.repo_id, "everyone can read it", hint)
        self.say(f"{self.repo_id} is {'private' if private else 'public'}")
        if public and private:
            self.say("it was there before and stays private: its settings on the Hub change that")
        if self.revision != "main" and not self.revision.startswith("refs/"):
            making = f"make the branch {self.revision}"
            self.patiently(making, lambda: self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True))
        return private

    def send(self, files: Mapping[str, Path], sums: Mapping[str, str], title: str, pull_request: bool) -> _Sent:
        """One commit that makes the revision hold the files, or none if it does already.

        Whatever is left of an earlier try is found by looking: the step may be repeated.
        """
        new, removed, kept = self._changes(files, sums, self.revision)
        if not new and not removed:
            return self._head(self.revision, kept)
        if pull_request and (found := self._open_request(files, sums, title)) is not None:
            return found
        total = sum(files[name].stat().st_size for name in new)
        self.say(f"sending {len(new)} files, {total:,} bytes; what the Hub has of them is not sent again")
        adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=files[name]) for name in new]
        deletes = [CommitOperationDelete(path_in_repo=name) for name in removed]
        changes = [*adds, *deletes]
        try:
            done = self.api.create_commit(
                self.repo_id, changes, commit_message=title, revision=self.revision, create_pr=pull_request
            )
        except ValueError as error:
            if "README.md" not in str(error):
                raise
            said = " ".join(str(error).split()).replace(self.token, "<token>")
            raise ModelError("README.md", said, "Correct its front matter.") from None
        return _Sent(done.oid, done.pr_url or done.commit_url, tuple(new), tuple(removed), tuple(kept))

    def _changes(
        self, files: Mapping[str, Path], sums: Mapping[str, str], revision: str
    ) -> tuple[list[str], list[str], list[str]]:
        """Files to send, those of another export to remove, and others of the repository to leave."""
        listed = self.api.list_repo_tree(self.repo_id, recursive=True, revision=revision)
        there = {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}
        new = [name for name in files if name not in there or not _is_same(there[name], files[name], sums[name])]
        others = [name for name in sorted(there) if name not in files and name != ".gitattributes"]
        removed = [name for name in others if name.endswith(LOADABLE)]
        return new, removed, [name for name in others if name not in removed]

    def _head(self, revision: str, kept: list[str], url: str | None = None) -> _Sent:
        commit = self.api.model_info(self.repo_id, revision=revision).sha
        return _Sent(commit, url or f"{self.api.endpoint}/{self.repo_id}/commit/{commit}", kept=tuple(kept))

    def _open_request(self, files: Mapping[str, Path], sums: Mapping[str, str], title: str) -> _Sent | None:
        """An open pull request that holds just these files, such as one whose answer was lost."""
        found = self.api.get_repo_discussions(self.repo_id, discussion_type="pull_request", discussion_status="open")
        for request in found:
            if request.title == title and request.git_reference is not None:
                new, removed, kept = self._changes(files, sums, request.git_reference)
                if not new and not removed:
                    return self._head(request.git_reference, kept, request.url)
        return None

    def check(self, sums: Mapping[str, str], commit: str) -> None:
        """Downloads every file of a commit, one at a time, into a cache of its own, and compares its sha256.

        Raises:
            ModelError: names the first file that is missing or another one.
        """
        for name, expected in sums.items():
            with TemporaryDirectory() as cache:
                found = self.patiently(f"read back {name}", lambda: self._download(name, commit, cache))  # noqa: B023
            if found != expected:
                value = f"the Hub gives back other bytes (sha256 {found}, not {expected})"
                raise ModelError(name, value, "Publish again; if that does not help, delete it on the Hub first.")

    def _download(self, name: str, commit: str, cache: str) -> str:
        """The sha256 of a file of the commit."""
        try:
            return sha256_of(Path(self.api.hf_hub_download(self.repo_id, name, revision=commit, cache_dir=cache)))
        except RemoteEntryNotFoundError:
            hint = "If the repository's .gitignore names it, change that on the Hub and publish again."
            raise ModelError(name, "the Hub left it out", hint) from None

    def _short(self, error: Exception) -> str:
        """One line of what went wrong, without the token."""
        if isinstance(error, HfHubHTTPError):
            said = error.server_message or error.response.reason_phrase
            text = f"{error.response.status_code}, {said}"
        else:
            text = str(error) or type(error).__name__
        line = next((line for line in text.splitlines() if line.strip()), "no message")
        return line.replace(self.token, "<token>")[:200].rstrip(".")

    def _explained(self, error: Exception, doing: str) -> SurgeryError:
        """What the user can do about it."""
        value = f"could not {doing} ({self._short(error)})"
        if isinstance(error, OfflineModeIsEnabled):
            return SurgeryError("HF_HUB_OFFLINE", "1", "Publishing needs the Hub. Unset it.")
        if isinstance(error, HfHubHTTPError):
            status, wait = error.response.status_code, _retry_after(error)
            again = f"Run it again {f'in {wait:g} s' if wait else 'later'}: it goes on where it stopped."
            hint = again if status == 429 or status >= 500 else _HINTS.get(status, "The Hub's answer says why.")
            return SurgeryError("token" if status == 401 else self.repo_id, value, hint)
        if "xet" in value:
            return SurgeryError(self.repo_id, value, "A Hub without Xet needs HF_HUB_DISABLE_XET=1.")
        if isinstance(error, HTTPError | ConnectionError):
            hint = "The connection was lost. Run it again: it goes on where it stopped."
            return SurgeryError(str(self.api.endpoint), value, hint)
        return SurgeryError(self.repo_id, value, "The client's message says why.")


_HINTS = {
    401: "The Hub does not know this token. Log in with `hf auth login`, or set HF_TOKEN to a valid one.",
    403: "The token may not write there. Make one with write access to it under Settings, Access Tokens, on the Hub.",
    404: "It is not there, or this token may not see it. Check the name, the revision and the token's access.",
    409: "Something else changes the repository at this moment. Run it again.",
    412: "Something else was committed there meanwhile. Run it again.",
}


def _cause(error: Exception) -> Exception:
    """The answer or the lost connection that an error of the client stands for; the error itself if there is none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, HTTPError | OfflineModeIsEnabled):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error


def _retry_after(error: HfHubHTTPError) -> float | None:
    given = error.response.headers.get("Retry-After", "")
    return float(given) if given.isdigit() else None


def _wait(error: Exception, attempt: int) -> float | None:
    """Seconds until a try that may help; None where none would."""
    usual = 2.0**attempt
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return (_retry_after(error) or usual) if status in (408, 409, 412, 429) or status >= 500 else None
    # What is no JSON comes from a proxy in between, or from a Hub that is down.
    return usual if isinstance(error, HTTPError | json.JSONDecodeError) else None


def _is_same(there: Any, path: Path, sha256: str) -> bool:
    """Whether the Hub's file has the bytes of this one."""
    if there.size != path.stat().st_size:
        return False
    return there.lfs.sha256 == sha256 if there.lfs is not None else there.blob_id == _git_name(path)


def _git_name(path: Path) -> str:
    """What git names a file's content by."""
    total = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()
