"""Publish an export on the Hub in one commit, and verify the uploaded files.

The commit is made with `HfApi.create_commit`, which applies all changes or none. `HfApi.upload_folder` may split an
upload into several commits if hf_xet is installed. Messages and errors never contain the token.
"""

from __future__ import annotations

import json
import math
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash

from surgery import __version__
from surgery.errors import ModelError, SurgeryError
from surgery.export.files import LOADABLE, RECORD, sha256_of
from surgery.export.verify import check_publishable, known_secrets
from surgery.files.secret_scan import findings, redacted

TRIES = 4
LONGEST_WAIT = 300.0  # seconds; if the Hub asks for more, the command fails
_ONE_DAY = 86_400
# They reverse the text that a terminal shows around them.
_BIDI = {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}

T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """Result of a publication.

    Attributes:
        commit: the commit that holds the folder. It may have existed before.
        url: address of that commit, or of the pull request.
        sent: files that were new or different; empty if the Hub had all of them.
        removed: weights, code and configs of another export, removed in the same commit.
        kept: other files of the repository that are not in the folder.
        checked: number of files that were downloaded and compared.
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
    """Verify an export, upload it in one commit, download it and compare every file.

    After an interruption, call it again. Large files that the Hub already has are not uploaded again, and nothing is
    committed if it has all files.

    Args:
        folder: an export. Its `export.json`, the files that this lists, and README.md are uploaded.
        repo_id: ORG/NAME. Created if it does not exist.
        public: create a public repository. Also required to publish in one that is public already.
        revision: a branch, created from `main` if it does not exist, or `refs/pr/N`.
        pull_request: open a pull request against `main`. An open one with the same title and files is reused.
        trust_remote_code: verify modelling files that are not known by running them.
        endpoint: address of the Hub; HF_ENDPOINT if None.
        say: called with each line of progress.
        sleep: called with the seconds to wait before a retry.
        plugins: modules to import that register export formats or attention branches.

    Raises:
        ModelError: the folder does not verify, or the Hub returns other bytes.
        SurgeryError: no token, an invalid name, a local path or a token in a file, or an error of the Hub.
    """
    check_request(repo_id, revision, pull_request, message)
    token = get_token()
    if token is None:
        hint = "Log in with `hf auth login`, or set HF_TOKEN to a token with write access."
        raise SurgeryError("token", "none", hint)
    sums, export_format = check_publishable(Path(folder), trust_remote_code, plugins, say)
    loadable = (*LOADABLE, *export_format.loadable)
    api = HfApi(endpoint=endpoint, token=token)
    hub = _Hub(api, token, repo_id, revision or "main", Path(folder), sums, loadable, say, sleep)
    private = hub.prepare(public)
    title = message or f"Hybrid exported by ssm-surgery {__version__}"
    done = hub.retry("upload the files", lambda: hub.upload(title, pull_request, private))
    what = f"uploaded {len(done.sent)} files" if done.sent or done.removed else "the Hub has all files"
    say(f"{what}: commit {done.commit}")
    hub.check(done.commit)
    say(f"downloaded {len(sums)} files: every sha256 matches")
    return done


def check_request(repo_id: str, revision: str | None, pull_request: bool, message: str | None) -> None:
    """Raise SurgeryError for options that the Hub would refuse, or that would publish a token."""
    reason = "" if repo_id.count("/") == 1 else "Use OWNER/NAME, for example my-org/my-hybrid."
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        reason = reason or str(error).splitlines()[0]
    if reason:
        raise SurgeryError("ORG/NAME", repo_id, reason)
    if pull_request and revision is not None:
        hint = "A pull request is opened against main. Remove one of the options."
        raise SurgeryError("--pr", f"with --revision {revision}", hint)
    for option, text in (("--message", message or ""), ("--revision", revision or "")):
        for char in text:
            if (unicodedata.category(char) in ("Cc", "Cs") and char not in "\t\n") or char in _BIDI:
                hint = f"It has the control character U+{ord(char):04X}, which a terminal may obey. Remove it."
                raise SurgeryError(option, ascii(text), hint)
        for _, value, _ in findings(text, (), known_secrets()):
            raise SurgeryError(option, value, "It would be published. Remove it, and revoke a token.")


@dataclass(frozen=True)
class _Hub:
    """One repository on the Hub, accessed with retries, and the folder to publish there.

    Attributes:
        sums: SHA-256 of the files to publish, by name.
        loadable: other files with these suffixes are removed from the repository.
    """

    api: HfApi
    token: str
    repo_id: str
    revision: str
    folder: Path
    sums: Mapping[str, str]
    loadable: tuple[str, ...]
    say: Callable[[str], None]
    sleep: Callable[[float], None]

    def retry(self, doing: str, step: Callable[[], T]) -> T:
        """Run a repeatable step, and retry it after rate limits, server errors and lost connections.

        Raises:
            SurgeryError: another error, or the last try failed.
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
                self.say(f"could not {doing} ({self._short(cause)}); retrying in {wait:g} s")
                self.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def prepare(self, public: bool) -> bool:
        """Create the repository and the branch if they do not exist. Return True if the repository is private."""
        doing = "find or create the repository"
        self.retry(doing, lambda: self.api.create_repo(self.repo_id, private=not public, exist_ok=True))
        private = bool(self.retry(doing, lambda: self.api.model_info(self.repo_id)).private)
        if not private and not public:
            hint = "Pass --public to publish there, or use another repository."
            raise SurgeryError(self.repo_id, "this repository is public", hint)
        self.say(f"{self.repo_id} is {'private' if private else 'public'}")
        if public and private:
            self.say("the repository existed and stays private; change that in its settings on the Hub")
        if self.revision != "main" and not self.revision.startswith("refs/"):
            doing = f"create the branch {self.revision}"
            self.retry(doing, lambda: self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True))
        return private

    def upload(self, title: str, pull_request: bool, private: bool) -> Published:
        """Upload new and changed files in one commit. Commits nothing if the revision has all files already.

        The step can be repeated: it finds its own commit, or its pull request, if the Hub's response was lost.
        """
        new, removed, kept = self._changes(self.revision)
        if not new and not removed:
            return self._head(private, self.revision, kept)
        if pull_request:
            kinds = {"discussion_type": "pull_request", "discussion_status": "open"}
            for request in self.api.get_repo_discussions(self.repo_id, **kinds):
                if request.title == title and request.git_reference is not None:
                    missing, extra, others = self._changes(request.git_reference)
                    if not missing and not extra:
                        return self._head(private, request.git_reference, others, request.url)
        total = sum((self.folder / name).stat().st_size for name in new)
        self.say(f"uploading {len(new)} files, {total:,} bytes; content that the Hub has is not sent again")
        adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=self.folder / name) for name in new]
        for add in adds:
            if add.upload_info.sha256.hex() != self.sums[add.path_in_repo]:
                raise ModelError(add.path_in_repo, "changed during the checks", "Publish the folder again.")
        changes = [*adds, *(CommitOperationDelete(path_in_repo=name) for name in removed)]
        try:
            done = self.api.create_commit(
                self.repo_id, changes, commit_message=title, revision=self.revision, create_pr=pull_request
            )
        except ValueError as error:
            if "README.md" not in str(error):
                raise
            text = redacted(" ".join(str(error).split()).replace(self.token, "<token>"))
            raise ModelError("README.md", text, "Correct its front matter.") from None
        url, changed = done.pr_url or done.commit_url, (tuple(new), tuple(removed), tuple(kept))
        return Published(self.repo_id, private, done.oid, url, *changed, len(self.sums))

    def _changes(self, revision: str) -> tuple[list[str], list[str], list[str]]:
        """Names of the files to upload, of files of another export to remove, and of other files in the repository."""
        listed = self.api.list_repo_tree(self.repo_id, recursive=True, revision=revision)
        remote = {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}
        new = [name for name in self.sums if name not in remote or not self._is_same(name, remote[name])]
        others = [name for name in sorted(remote) if name not in self.sums and name != ".gitattributes"]
        removed = [name for name in others if name.endswith(self.loadable)]
        if removed and RECORD not in remote:
            hint = f"It would be removed, and the repository is no export: it has no {RECORD}. Use another name."
            raise ModelError("repository", f"{self.repo_id} has {removed[0]}", hint)
        return new, removed, [name for name in others if name not in removed]

    def _is_same(self, name: str, remote: RepoFile) -> bool:
        """Whether a file on the Hub has the content of the local one."""
        if remote.lfs is not None:
            return remote.lfs.sha256 == self.sums[name]
        return remote.blob_id == git_hash((self.folder / name).read_bytes())

    def _head(self, private: bool, revision: str, kept: list[str], url: str | None = None) -> Published:
        commit = self.api.model_info(self.repo_id, revision=revision).sha
        url = url or f"{self.api.endpoint}/{self.repo_id}/commit/{commit}"
        return Published(self.repo_id, private, commit, url, (), (), tuple(kept), len(self.sums))

    def check(self, commit: str) -> None:
        """Download every file of a commit, each into a temporary cache, and compare its sha256.

        Raises:
            ModelError: names the first file that is missing or different.
        """
        for name, expected in self.sums.items():
            digest = self.retry(f"download {name}", lambda: self._downloaded(name, commit))  # noqa: B023
            if digest != expected:
                value = f"the Hub returned other bytes (sha256 {digest}, expected {expected})"
                raise ModelError(name, value, "Publish again. If that fails too, delete the file on the Hub first.")

    def _downloaded(self, name: str, commit: str) -> str:
        """SHA-256 of a file of the commit."""
        try:
            with TemporaryDirectory() as cache:
                return sha256_of(Path(self.api.hf_hub_download(self.repo_id, name, revision=commit, cache_dir=cache)))
        except RemoteEntryNotFoundError:
            hint = "If the repository's .gitignore excludes it, change that on the Hub and publish again."
            raise ModelError(name, "missing on the Hub after the commit", hint) from None

    def _short(self, error: Exception) -> str:
        """First line of an error message, without the token."""
        if isinstance(error, HfHubHTTPError):
            text = f"{error.response.status_code}, {error.server_message or error.response.reason_phrase}"
        else:
            text = str(error) or type(error).__name__
        line = next((line for line in text.splitlines() if line.strip()), "no message")
        return line.replace(self.token, "<token>")[:200].rstrip(".")

    def _explained(self, error: Exception, doing: str) -> SurgeryError:
        """Convert an error of the Hub to one that tells the user what to do."""
        value = f"could not {doing} ({self._short(error)})"
        if isinstance(error, OfflineModeIsEnabled):
            return SurgeryError("HF_HUB_OFFLINE", "1", "Publishing needs the Hub. Unset HF_HUB_OFFLINE.")
        if isinstance(error, HfHubHTTPError):
            status, wait = error.response.status_code, _retry_after(error)
            when = f"in {math.ceil(wait)} s" if wait and wait <= _ONE_DAY else "later"
            again = f"Run the same command again {when}: it resumes."
            hint = again if status == 429 or status >= 500 else _HINTS.get(status, "See the answer of the Hub.")
            return SurgeryError("token" if status == 401 else self.repo_id, value, hint)
        if "xet" in value:
            return SurgeryError(self.repo_id, value, "If this Hub has no Xet storage, set HF_HUB_DISABLE_XET=1.")
        if isinstance(error, HTTPError | ConnectionError):
            hint = "The connection was lost. Run the same command again: it resumes."
            return SurgeryError(str(self.api.endpoint), value, hint)
        return SurgeryError(self.repo_id, value, "See the message of huggingface_hub.")


_HINTS = {
    401: "The Hub rejects this token. Log in with `hf auth login`, or set HF_TOKEN to a valid one.",
    403: "The token has no write access. Create one that does under Settings, Access Tokens, on the Hub.",
    404: "It does not exist, or the token has no access to it. Check the name, the revision and the token.",
    409: "The repository is being changed by another client. Run the same command again.",
    412: "Another client committed to the repository. Run the same command again.",
}


def _cause(error: Exception) -> Exception:
    """Find the HTTP error in the chain of causes. Returns the error itself if there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HTTPError | OfflineModeIsEnabled):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def _retry_after(error: HfHubHTTPError) -> float | None:
    """Seconds that the Hub asks to wait; None without a number. Like huggingface_hub, it reads no date."""
    try:
        seconds = float(error.response.headers.get("Retry-After", ""))
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _wait(error: Exception, attempt: int) -> float | None:
    """Seconds to wait before a retry; None if a retry cannot help."""
    usual = 2.0**attempt
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return (_retry_after(error) or usual) if status in (408, 409, 412, 429) or status >= 500 else None
    # A response that is not JSON comes from a proxy, or from a Hub that is down.
    return usual if isinstance(error, HTTPError | json.JSONDecodeError) else None
