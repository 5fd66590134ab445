"""Publish an export on the Hub in one commit, and verify the uploaded files.

The commit is made with `HfApi.create_commit`, which applies all changes or none. `HfApi.upload_folder` may split an
upload into several commits if hf_xet is installed. Messages and errors never contain the token.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

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
from huggingface_hub.utils.sha import git_hash

from surgery import __version__
from surgery.errors import ModelError, SurgeryError
from surgery.export.files import LOADABLE, sha256_of
from surgery.export.verify import check_publishable, known_secrets
from surgery.files.secret_scan import findings, redacted

TRIES = 4
LONGEST_WAIT = 300.0  # seconds; if the Hub asks for more, the command fails
_ONE_DAY = 86_400

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
    folder = Path(folder)
    check_request(repo_id, revision, pull_request, message)
    token = get_token()
    if token is None:
        raise SurgeryError(
            "token", "none", "Log in with `hf auth login`, or set HF_TOKEN to a token with write access."
        )
    sums, export_format = check_publishable(folder, trust_remote_code, plugins, say)
    files = {name: folder / name for name in sums}
    hub = _Hub(HfApi(endpoint=endpoint, token=token), repo_id, revision or "main", token, say, sleep)
    private = hub.prepare(public)
    title = message or f"Hybrid exported by ssm-surgery {__version__}"
    loadable = (*LOADABLE, *export_format.loadable)
    done = hub.retry("upload the files", lambda: hub.upload(files, sums, title, pull_request, loadable))
    what = f"uploaded {len(done.sent)} files" if done.sent or done.removed else "the Hub has all files"
    say(f"{what}: commit {done.commit}")
    hub.check(sums, done.commit)
    say(f"downloaded {len(sums)} files: every sha256 matches")
    return Published(repo_id, private, done.commit, done.url, done.sent, done.removed, done.kept, len(sums))


def check_request(repo_id: str, revision: str | None, pull_request: bool, message: str | None) -> None:
    """Raise SurgeryError for options that the Hub would refuse, or that would publish a token."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        reason = str(error).splitlines()[0]
        hint = "Use OWNER/NAME, for example my-org/my-hybrid." if repo_id.count("/") > 1 else reason
        raise SurgeryError("ORG/NAME", repo_id, hint) from None
    if "/" not in repo_id:
        raise SurgeryError("ORG/NAME", repo_id, "Use OWNER/NAME, for example my-org/my-hybrid.")
    if pull_request and revision is not None:
        raise SurgeryError(
            "--pr", f"with --revision {revision}", "A pull request is opened against main. Remove one of the options."
        )
    for option, text in (("--message", message), ("--revision", revision)):
        if text is not None and not text.replace("\n", "").isprintable():
            raise SurgeryError(option, ascii(text), "It has control characters. Remove them.")
        for _, value, _ in findings(text or "", (), known_secrets()):
            raise SurgeryError(option, value, "It would be published. Remove it, and revoke a token.")


@dataclass(frozen=True)
class _Upload:
    commit: str
    url: str
    sent: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Hub:
    """One repository on the Hub, accessed with retries."""

    api: HfApi
    repo_id: str
    revision: str
    token: str
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

    def upload(
        self,
        files: Mapping[str, Path],
        sums: Mapping[str, str],
        title: str,
        pull_request: bool,
        loadable: tuple[str, ...],
    ) -> _Upload:
        """Upload new and changed files in one commit. Commits nothing if the revision has all files already.

        The step can be repeated: it finds its own commit if the Hub's response was lost.

        Args:
            loadable: other files with these suffixes are removed from the repository.
        """
        new, removed, kept = self._changes(files, sums, self.revision, loadable)
        if not new and not removed:
            return self._head(self.revision, kept)
        if pull_request and (opened := self._open_request(files, sums, title, loadable)) is not None:
            return opened
        total = sum(files[name].stat().st_size for name in new)
        self.say(f"uploading {len(new)} files, {total:,} bytes; content that the Hub has is not sent again")
        adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=files[name]) for name in new]
        deletes = [CommitOperationDelete(path_in_repo=name) for name in removed]
        for add in adds:
            if add.upload_info.sha256.hex() != sums[add.path_in_repo]:
                raise ModelError(add.path_in_repo, "changed during the checks", "Publish the folder again.")
        changes = [*adds, *deletes]
        try:
            done = self.api.create_commit(
                self.repo_id, changes, commit_message=title, revision=self.revision, create_pr=pull_request
            )
        except ValueError as error:
            if "README.md" not in str(error):
                raise
            text = redacted(" ".join(str(error).split()).replace(self.token, "<token>"))
            raise ModelError("README.md", text, "Correct its front matter.") from None
        return _Upload(done.oid, done.pr_url or done.commit_url, tuple(new), tuple(removed), tuple(kept))

    def _changes(
        self, files: Mapping[str, Path], sums: Mapping[str, str], revision: str, loadable: tuple[str, ...]
    ) -> tuple[list[str], list[str], list[str]]:
        """Names of the files to upload, of files of another export to remove, and of other files in the repository."""
        listed = self.api.list_repo_tree(self.repo_id, recursive=True, revision=revision)
        remote = {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}
        new = [name for name in files if name not in remote or not _is_same(remote[name], files[name], sums[name])]
        others = [name for name in sorted(remote) if name not in files and name != ".gitattributes"]
        removed = [name for name in others if name.endswith(loadable)]
        return new, removed, [name for name in others if name not in removed]

    def _head(self, revision: str, kept: list[str], url: str | None = None) -> _Upload:
        commit = self.api.model_info(self.repo_id, revision=revision).sha
        return _Upload(commit, url or f"{self.api.endpoint}/{self.repo_id}/commit/{commit}", kept=tuple(kept))

    def _open_request(
        self, files: Mapping[str, Path], sums: Mapping[str, str], title: str, loadable: tuple[str, ...]
    ) -> _Upload | None:
        """Find an open pull request with this title and these files, such as one from an interrupted call."""
        requests = self.api.get_repo_discussions(self.repo_id, discussion_type="pull_request", discussion_status="open")
        for request in requests:
            if request.title == title and request.git_reference is not None:
                new, removed, kept = self._changes(files, sums, request.git_reference, loadable)
                if not new and not removed:
                    return self._head(request.git_reference, kept, request.url)
        return None

    def check(self, sums: Mapping[str, str], commit: str) -> None:
        """Download every file of a commit, each into a temporary cache, and compare its sha256.

        Raises:
            ModelError: names the first file that is missing or different.
        """
        for name, expected in sums.items():
            with TemporaryDirectory() as cache:
                digest = self.retry(f"download {name}", lambda: self._download(name, commit, cache))  # noqa: B023
            if digest != expected:
                value = f"the Hub returned other bytes (sha256 {digest}, expected {expected})"
                raise ModelError(name, value, "Publish again. If that fails too, delete the file on the Hub first.")

    def _download(self, name: str, commit: str, cache: str) -> str:
        """SHA-256 of a file of the commit."""
        try:
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
            soon = wait is not None and 0 < wait <= _ONE_DAY
            again = f"Run the same command again {f'in {math.ceil(wait)} s' if wait and soon else 'later'}: it resumes."
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
    """Seconds that the Hub asks to wait, as a number or a date; None if it asks for nothing that can be read."""
    text = error.response.headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
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


def _is_same(remote: RepoFile, path: Path, sha256: str) -> bool:
    """True if a file on the Hub has the content of a local one."""
    if remote.size != path.stat().st_size:
        return False
    return remote.lfs.sha256 == sha256 if remote.lfs is not None else remote.blob_id == git_hash(path.read_bytes())
