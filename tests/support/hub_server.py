"""A small server on this machine that speaks the Hub's protocol, for the real huggingface_hub client.

It keeps repositories with branches, pull requests and commits, stores large files by their sha256 as Git LFS does, and
fails when it is told to. What it is not: fast, complete, or Xet (set HF_HUB_DISABLE_XET=1).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_" + "Zq7" * 11
LARGE = (".safetensors", ".bin", ".png")  # what a new repository's .gitattributes hands to LFS
PAGE = 4  # entries of a tree that one answer holds


@dataclass(frozen=True)
class Blob:
    """One file of a commit."""

    data: bytes
    is_large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def git(self) -> str:
        """What git names it by: of a large file, its pointer's."""
        data = f"pointer to {self.sha256}".encode() if self.is_large else self.data
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def oid(self) -> str:
        return self.sha256 if self.is_large else self.git


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    files: Mapping[str, Blob]


@dataclass
class Repository:
    private: bool
    refs: dict[str, Commit]
    commits: dict[str, Commit]
    requests: list[str] = field(default_factory=list)  # titles of pull requests

    def at(self, revision: str) -> Commit | None:
        return self.refs.get(revision) or self.commits.get(revision)

    def add(self, ref: str, title: str, files: Mapping[str, Blob]) -> Commit:
        commit = Commit(hashlib.sha1(f"{ref} {len(self.commits)}".encode()).hexdigest(), title, dict(files))
        self.refs[ref] = self.commits[commit.oid] = commit
        return commit


@dataclass
class Failure:
    """Requests that match are answered with this status, as often as said."""

    method: str
    path: str
    status: int
    times: int
    headers: Mapping[str, str]
    text: str


class HubServer:
    """The state of the Hub. `url` is its endpoint; requests are logged as `METHOD /path`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}  # of LFS, by `repository sha256`
        self.received = 0  # bytes of PUTs, the broken ones too
        self.log: list[str] = []
        self.told_storage = False  # whether the token was sent where signed addresses point
        self.failures: list[Failure] = []
        self.cuts = 0  # PUTs that lose their connection ...
        self.cut_after = 0  # ... after this many bytes
        self.spares: set[str] = set()  # sha256 of files that are not cut
        self.lost = 0  # commits that are made, and whose answer never comes
        self.flipped: set[str] = set()  # files whose first byte is another one when they are read
        self.writable = True
        self.lock = threading.Lock()
        self.url = ""

    def fail(
        self, method: str, path: str, status: int, times: int = 99, text: str = "no", headers: Mapping[str, str] = {}
    ) -> None:
        """From now on, answers `times` requests whose path matches the pattern with `status`."""
        self.failures.append(Failure(method, path, status, times, headers, text))

    def create(self, name: str, private: bool) -> Repository:
        first = {".gitattributes": Blob(b"".join(b"*%s filter=lfs\n" % s.encode() for s in LARGE), False)}
        repository = self.repositories[name] = Repository(private, {}, {})
        repository.add("main", "initial commit", first)
        return repository

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """What a repository holds, without what it was made with."""
        commit = self.repositories[name].at(revision)
        assert commit is not None
        return {path: blob.data for path, blob in commit.files.items() if path != ".gitattributes"}


@contextmanager
def serve() -> Iterator[HubServer]:
    """A running server on a free port of this machine."""
    hub = HubServer()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Cut(Exception):
    """The connection is gone."""


class _Answered(Exception):
    """The request has its answer: what was asked for is not there, hidden, or not to be written."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = -1, True  # else each answer waits for an acknowledgement of its headers
    hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.dispatch()

    do_HEAD = do_POST = do_PUT = do_GET

    def dispatch(self) -> None:
        split = urlsplit(self.path)
        self.route, self.query = unquote(split.path), parse_qs(split.query)
        try:
            body = self.body()
        except (_Cut, ConnectionError):
            self.close_connection = True
            return
        with self.hub.lock, suppress(_Answered):
            self.hub.log.append(f"{self.command} {self.route}")
            for failure in self.hub.failures:
                if failure.times and self.command == failure.method and re.search(failure.path, self.route):
                    failure.times -= 1
                    return self.send({"error": failure.text}, failure.status, failure.headers)
            for method, pattern, name in _ROUTES:
                match = re.fullmatch(pattern, self.route)
                if match and self.command in method.split():
                    return getattr(self, name)(body, *match.groups())
            self.missing("no such address")

    def body(self) -> bytes:
        """What was sent; raises where the connection is to break in the middle."""
        is_put = self.command == "PUT"
        limit = None
        if is_put and self.hub.cuts and not any(self.route.endswith(name) for name in self.hub.spares):
            self.hub.cuts -= 1
            limit = self.hub.cut_after
        data = b""
        for block in self.blocks():
            if is_put:
                self.hub.received += len(block)
            data += block
            if limit is not None and len(data) >= limit:
                raise _Cut
        return data

    def blocks(self) -> Iterator[bytes]:
        left = int(self.headers.get("Content-Length", 0))
        while left:
            block = self.rfile.read(min(left, 1024))
            left -= len(block)
            yield block

    def send(self, data: Any, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(data, bytes) else "application/json"
        sent = {"Content-Type": kind, "Content-Length": str(len(content)), **headers}
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def missing(self, text: str, code: str = "RepoNotFound") -> None:
        self.send({"error": text}, 404, {"X-Error-Code": code, "X-Error-Message": text})

    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def check_write(self) -> None:
        if not self.is_known():
            self.send({"error": "Invalid username or password."}, 401)
            raise _Answered
        if not self.hub.writable:
            self.send({"error": "You don't have the rights to do this"}, 403)
            raise _Answered

    def repository(self, name: str) -> Repository:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self.is_known()):
            self.missing(f"{name} is not there")
            raise _Answered
        return found

    def at(self, name: str, revision: str) -> tuple[Repository, Commit]:
        repository = self.repository(name)
        commit = repository.at(revision)
        if commit is None:
            self.missing(f"Invalid rev id: {revision}", "RevisionNotFound")
            raise _Answered
        return repository, commit

    def create_repo(self, body: bytes) -> None:
        self.check_write()
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repositories:
            return self.send({**url, "error": "You already created this model repo"}, 409)
        self.hub.create(name, asked.get("visibility", "public") == "private" or asked.get("private", False))
        self.send(url)

    def validate_yaml(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.S)
        front = yaml.safe_load(match[1]) if match else None
        if not isinstance(front, dict):
            return self.send({"errors": [{"message": "front matter is no mapping"}], "warnings": []}, 400)
        self.send({"errors": [], "warnings": []})

    def branch(self, body: bytes, name: str, branch: str) -> None:
        self.check_write()
        repository = self.repository(name)
        if branch in repository.refs:
            return self.send({"error": "Reference already exists"}, 409)
        repository.refs[branch] = repository.refs["main"]
        self.send({})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        self.check_write()
        _, commit = self.at(name, revision)
        files = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            found = {"path": path, "uploadMode": "lfs" if path.endswith(LARGE) else "regular", "shouldIgnore": False}
            if path in commit.files:
                found["oid"] = commit.files[path].oid
            files.append(found)
        self.send({"files": files})

    def lfs_batch(self, body: bytes, name: str) -> None:
        self.repository(name)
        self.check_write()
        objects = []
        for asked in json.loads(body)["objects"]:
            found = dict(asked)
            if f"{name} {asked['oid']}" not in self.hub.stored:
                storage = self.hub.url.replace("127.0.0.1", "localhost")
                put = {"href": f"{storage}/storage/{name}/{asked['oid']}?signature=s", "header": {}}
                found["actions"] = {"upload": put, "verify": {"href": f"{self.hub.url}/api/verify/{name}"}}
            objects.append(found)
        self.send({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, name: str, oid: str) -> None:
        self.hub.told_storage |= "Authorization" in self.headers
        if hashlib.sha256(body).hexdigest() != oid:
            return self.send({"error": "the content has another sha256"}, 400)
        self.hub.stored[f"{name} {oid}"] = body
        self.send(b"", 200, {"ETag": f'"{oid}"'})

    def lfs_verify(self, body: bytes, name: str) -> None:
        asked = json.loads(body)
        stored = self.hub.stored.get(f"{name} {asked['oid']}")
        right = stored is not None and len(stored) == asked["size"]
        self.send({}) if right else self.send({"error": "size or sha256 do not match"}, 422)

    def lfs_get(self, body: bytes, name: str, oid: str, path: str) -> None:
        self.hub.told_storage |= "Authorization" in self.headers
        self.send(self.flipped(path, self.hub.stored[f"{name} {oid}"]))

    def flipped(self, path: str, data: bytes) -> bytes:
        return bytes([data[0] ^ 1]) + data[1:] if path in self.hub.flipped else data

    def commit(self, body: bytes, name: str, revision: str) -> None:
        self.check_write()
        repository, base = self.at(name, revision)
        title, files = "", dict(base.files)
        for line in body.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "header":
                title = value["summary"]
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                stored = self.hub.stored.get(f"{name} {value['oid']}")
                if stored is None or len(stored) != value["size"]:
                    return self.send({"error": f"{value['path']} was not uploaded"}, 400)
                files[value["path"]] = Blob(stored, True)
            elif key == "deletedFile":
                del files[value["path"]]
        answer: dict[str, Any] = {"success": True, "hookOutput": ""}
        if self.query.get("create_pr"):
            repository.requests.append(title)
            number = len(repository.requests)
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.url}/{name}/discussions/{number}"
        made = repository.add(revision, title, files)
        if self.hub.lost:
            self.hub.lost -= 1
            self.close_connection = True
            return
        self.send({**answer, "commitOid": made.oid, "commitUrl": f"{self.hub.url}/{name}/commit/{made.oid}"})

    def info(self, body: bytes, name: str, revision: str | None) -> None:
        repository, commit = self.at(name, revision or "main")
        siblings = [{"rfilename": path} for path in commit.files]
        known = {"id": name, "sha": commit.oid, "private": repository.private, "siblings": siblings, "tags": []}
        self.send(known)

    def tree(self, body: bytes, name: str, revision: str, folder: str | None) -> None:
        """All files below a folder, a few at a time."""
        _, commit = self.at(name, revision)
        below = f"{folder}/" if folder else ""
        paths = sorted(path for path in commit.files if path.startswith(below))
        if folder and not paths:
            return self.missing(f"{folder} does not exist", "EntryNotFound")
        start = int(self.query.get("cursor", ["0"])[0])
        entries = []
        for path in paths[start : start + PAGE]:
            blob = commit.files[path]
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.git}
            if blob.is_large:
                entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 134}
            entries.append(entry)
        more = f'<{self.hub.url}{self.path.split("?")[0]}?recursive=True&cursor={start + PAGE}>; rel="next"'
        self.send(entries, headers={"Link": more} if start + PAGE < len(paths) else {})

    def discussions(self, body: bytes, name: str) -> None:
        repository = self.repository(name)
        found = [
            {"title": title, "num": number, "status": "open", "isPullRequest": True, "author": {"name": "someone"}}
            | {"createdAt": "2025-01-01T00:00:00.000Z", "repo": {"name": name, "type": "model"}}
            for number, title in enumerate(repository.requests, 1)
        ]
        self.send({"count": len(found), "start": 0, "discussions": found})

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        _, commit = self.at(name, revision)
        known = {"X-Repo-Commit": commit.oid}
        blob = commit.files.get(path)
        if blob is None:
            missing = {**known, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self.send({"error": "Entry not found"}, 404, missing)
        known |= {"ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"}
        if not blob.is_large:
            return self.send(self.flipped(path, blob.data), headers=known)
        storage = self.hub.url.replace("127.0.0.1", "localhost")
        known |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
        known["Location"] = f"{storage}/storage/{name}/{blob.sha256}/{path}?signature=s"
        self.send(b"", 302, known)


_NAME = r"([^/]+/[^/]+)"
_ROUTES = (
    ("POST", r"/api/repos/create", "create_repo"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", rf"/api/models/{_NAME}/branch/(.+)", "branch"),
    ("POST", rf"/api/models/{_NAME}/preupload/(.+)", "preupload"),
    ("POST", rf"/api/models/{_NAME}/commit/(.+)", "commit"),
    ("GET", rf"/api/models/{_NAME}/tree/(refs/pr/\d+|[^/]+)(?:/(.+))?", "tree"),
    ("GET", rf"/api/models/{_NAME}/discussions", "discussions"),
    ("GET", rf"/api/models/{_NAME}(?:/revision/(.+))?", "info"),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", rf"/storage/{_NAME}/(\w+)", "lfs_put"),
    ("POST", rf"/api/verify/{_NAME}", "lfs_verify"),
    ("GET HEAD", rf"/storage/{_NAME}/(\w+)/(.+)", "lfs_get"),
    ("GET HEAD", rf"/{_NAME}/resolve/(refs/pr/\d+|[^/]+)/(.+)", "resolve"),
)
