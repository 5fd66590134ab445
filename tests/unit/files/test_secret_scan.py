"""Every kind of secret in every container that an export has, and what looks like one and is none."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import random
import string
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
import yaml
from safetensors.torch import save_file

from surgery.errors import RecipeError
from surgery.files.secret_scan import (
    _LONGEST,
    _OVERLAP,
    _PIECE,
    Finding,
    refuse_tokens,
    search,
    secrets_of_environment,
)
from surgery.recipe import check_recipe

ROOT = Path(__file__).parents[3]
LETTERS = string.ascii_letters + string.digits


def some(count: int, of: str = LETTERS) -> str:
    """Always the same characters; written out, other scanners would find them here."""
    return "".join(random.Random(count).choices(of, k=count))


def part_of_jwt(data: dict[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")


TOKENS = {
    "Hub": "hf_" + some(34),
    "Hub organization": "api_org_" + some(34),
    "OpenAI": "sk-" + some(20) + "T3Blbk" + "FJ" + some(20),
    "OpenAI of a project": "sk-proj-" + some(40) + "_" + some(40),
    "OpenAI, old": "sk-" + some(48),
    "Anthropic": "sk-ant-" + "api03-" + some(60),
    "GitHub": "ghp_" + some(36),
    "GitHub, fine-grained": "github_pat_" + some(22) + "_" + some(59),
    "GitLab": "glpat-" + some(20),
    "AWS": "AKIA" + some(16, string.ascii_uppercase + string.digits),
    "AWS, secret": "aws_secret_access_key=" + some(40),
    "Google": "AIza" + some(35),
    "Slack": "xoxb-" + "123456789012-123456789012-" + some(24),
    "npm": "npm_" + some(36),
    "PyPI": "pypi-" + "AgEIcHlwaS5vcmc" + some(80),
    "Stripe": "sk_live_" + some(24),
    "JSON web token": f"{part_of_jwt({'alg': 'HS256'})}.{part_of_jwt({'sub': 1})}.{some(43)}",
    "Weights & Biases": "WANDB_API_KEY=" + some(40, "0123456789abcdef"),
    "header": "Authorization: Bearer " + some(40),
    "password in an address": "https://" + "someone:" + some(20) + "@example.com/model",
}
KEYS = {
    "RSA": "-----BEGIN RSA PRIVATE KEY-----",
    "PKCS 8": "-----BEGIN PRIVATE KEY-----",
    "encrypted": "-----BEGIN ENCRYPTED PRIVATE KEY-----",
    "OpenSSH": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "PGP": "-----BEGIN PGP PRIVATE KEY BLOCK-----",
}
PATHS = {
    "Linux": "/home/bob/models/base",
    "Linux, the home itself": "/home/bob",
    "root": "/root/models/base",
    "macOS": "/Users/bob/models",
    "Windows": "C:\\Users\\Bob\\models\\base",
    "Windows, slashes": "d:/Users/bob/models",
    "Windows, old": "C:\\Documents and Settings\\Bob\\models",
    "Windows under Linux": "/mnt/c/Users/bob/models",
    "address": "file:///home/bob/base",
    "beyond ASCII": "/home/zoë/base",
}
SECRETS = TOKENS | KEYS | PATHS


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(*chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")
    )


def tensors(folder: Path, name: str, metadata: dict[str, str]) -> None:
    save_file({name: torch.zeros(3)}, folder / "a.safetensors", metadata=metadata)


def write(name: str, encode: Callable[[str], bytes]) -> Callable[[Path, str], None]:
    return lambda folder, secret: (folder / name).write_bytes(encode(secret)) and None


def escaped(text: str) -> str:
    """Every character as JSON may write it."""
    return "".join(f"\\u{ord(c):04x}" for c in text)


def embedded(secret: str) -> bytes:
    image = png(chunk(b"tEXt", b"Comment\0" + secret.encode()))
    return b'<img src="data:image/png;base64,' + base64.b64encode(image) + b'">'


CONTAINERS: dict[str, Callable[[Path, str], None]] = {
    "UTF-8": write("a.txt", lambda s: f"first\nx = {s}\n".encode()),
    "UTF-16, little": write("a.txt", lambda s: f"first\n{s}\n".encode("utf-16-le")),
    "UTF-16, big": write("a.txt", lambda s: f"first\n{s}\n".encode("utf-16-be")),
    "UTF-16, marked": write("a.txt", lambda s: f"first\n{s}\n".encode("utf-16")),
    "UTF-32": write("a.txt", lambda s: f"first\n{s}\n".encode("utf-32")),
    "JSON": write("a.json", lambda s: json.dumps({"a": [s]}).encode()),
    "JSON, slashes escaped": write("a.json", lambda s: json.dumps({"a": s}).replace("/", "\\/").encode()),
    "JSON, all escaped": write("a.json", lambda s: f'{{"a": "{escaped(s)}"}}'.encode()),
    "JSON in JSON": write("a.json", lambda s: json.dumps(json.dumps({"a": s}).replace("/", "\\u002f")).encode()),
    "YAML": write("recipe.yaml", lambda s: yaml.safe_dump({"base": {"model": s}}, width=999).encode()),
    "YAML, quoted": write("recipe.yaml", lambda s: f"a: {json.dumps(s)}\n".encode()),
    "HTML": write("report.html", lambda s: f"<p>first\n<p>{html.escape(s)}</p>".encode()),
    "HTML, slashes escaped": write("report.html", lambda s: html.escape(s).replace("/", "&#x2F;").encode()),
    "HTML, image": write("report.html", embedded),
    "address": write("a.md", lambda s: f"[a]({quote(s, safe='')})".encode()),
    "PNG": write("a.png", lambda s: png(chunk(b"tEXt", b"Comment\0" + s.encode()))),
    "PNG, compressed": write("a.png", lambda s: png(chunk(b"zTXt", b"Comment\0\0" + zlib.compress(s.encode())))),
    "PNG, international": write("a.png", lambda s: png(chunk(b"iTXt", b"C\0\0\0en\0C\0" + s.encode()))),
    "PNG, international, compressed": write(
        "a.png", lambda s: png(chunk(b"iTXt", b"C\0\1\0en\0C\0" + zlib.compress(s.encode())))
    ),
    "PNG, behind the end": write("a.png", lambda s: png() + s.encode()),
    "weights, metadata": lambda folder, secret: tensors(folder, "w", {"format": "pt", "note": secret}),
    "weights, a name": lambda folder, secret: tensors(folder, secret, {"format": "pt"}),
}


def found(folder: Path, known: dict[str, str] | None = None) -> list[Finding]:
    return list(search({p.name: p for p in sorted(folder.iterdir())}, [], known or {}))


@pytest.mark.parametrize("put", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_every_secret_is_found_in_every_container(
    secret: str, put: Callable[[Path, str], None], tmp_path: Path
) -> None:
    put(tmp_path, secret)
    findings = found(tmp_path)
    (name,) = (path.name for path in tmp_path.iterdir())
    assert findings and all(finding.where.startswith(name) for finding in findings)
    if secret in TOKENS.values():
        assert all(
            secret not in f.value and secret[-8:] not in f.value and f.value.startswith("a token (") for f in findings
        )


@pytest.mark.parametrize("container", ["UTF-8", "UTF-16, little", "UTF-16, big", "UTF-16, marked", "UTF-32", "HTML"])
@pytest.mark.parametrize("secret", [TOKENS["GitHub"], PATHS["Linux"]], ids=["token", "path"])
def test_the_line_is_named(container: str, secret: str, tmp_path: Path) -> None:
    CONTAINERS[container](tmp_path, secret)
    assert {finding.where.rpartition(":")[2] for finding in found(tmp_path)} == {"2"}


@pytest.mark.parametrize("place", [_PIECE - 20, _PIECE, _PIECE + _OVERLAP - 20, 3 * _PIECE - 5])
def test_long_texts_are_searched_in_pieces_that_overlap(place: int, tmp_path: Path) -> None:
    text = "x\n" * (place // 2) + TOKENS["GitHub"]
    (tmp_path / "a.txt").write_text(text)
    assert {finding.where for finding in found(tmp_path)} == {f"a.txt:{place // 2 + 1}"}


@pytest.mark.parametrize("put", CONTAINERS.values(), ids=CONTAINERS)
def test_secrets_of_this_machine_need_no_form(
    put: Callable[[Path, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "nothing-like-a-token"
    put(tmp_path, secret)
    assert found(tmp_path) == []
    monkeypatch.setenv("SOME_SERVICE_API_KEY", secret)
    findings = found(tmp_path, secrets_of_environment())
    assert findings and all("SOME_SERVICE_API_KEY" in f.value and secret not in f.value for f in findings)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "PGPASSWORD", "GH_PAT", "AZURE_STORAGE_KEY", "DB_PASS", "AWS_CREDENTIALS"]
)
def test_names_that_suggest_a_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "nothing-like-a-token")
    assert secrets_of_environment() == {f"the value of {name}": "nothing-like-a-token"}


def test_variables_that_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TOKENIZERS_PARALLELISM": "true-but-longer",
        "A_TOKEN": "short",
        "B_TOKEN": "/a/file/of/it",
    }.items():
        monkeypatch.setenv(name, value)
    assert not {"true-but-longer", "short", "/a/file/of/it"} & set(secrets_of_environment().values())


HASHES = "\n".join(hashlib.sha256(bytes([i])).hexdigest() for i in range(256))
HARMLESS = {
    "hashes": HASHES,
    "commits": "\n".join(f"https://huggingface.co/a/b/commit/{line[:40]}" for line in HASHES.splitlines()),
    "base64": base64.b64encode(random.Random(1).randbytes(500_000)).decode(),
    "base64 for addresses": base64.urlsafe_b64encode(random.Random(2).randbytes(300_000)).decode(),
    "numbers": "\n".join(str(random.Random(i).random()) for i in range(5000)),
    "addresses": "https://example.org/home/page http://a.b/Users/guide https://x.y/root/z www.a.org/home/b ../home/b",
    "words": "hf_hub_download sk-learn api_org_name ghp_ AKIA home/bob Users/bob BEGIN PUBLIC KEY C:\\Windows",
    "placeholders": "hf_... $HF_TOKEN ${{ secrets.TOKEN }} HF_TOKEN=<yours> /Users/Shared/x C:\\Users\\Public\\x",
    "time": "2026-01-02T03:04:05 12345678:90 1:2:3",
}


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_what_is_no_secret_passes(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert found(tmp_path) == []


def test_entries_of_a_vocabulary_pass(tmp_path: Path) -> None:
    """With something below it is a path there too."""
    vocabulary = json.dumps(
        {"/home/user": 1, "/Users/name": 2, "C:\\Users\\name": 3, "/root": 4, "/root/": 5}, indent=1
    )
    (tmp_path / "tokenizer.json").write_text(vocabulary)
    assert found(tmp_path) == []
    (tmp_path / "tokenizer.json").write_text(json.dumps({"path": "/home/user/base"}))
    assert found(tmp_path)


@pytest.mark.parametrize("folder", ["quickstart/export/figures/locate", "quickstart/export", "pico-mamba2"])
def test_what_is_shipped_can_be_published(folder: str) -> None:
    paths = (ROOT / "checkpoints" / folder).iterdir()
    assert list(search({p.name: p for p in paths if p.is_file() and p.name != "report.html"}, [str(ROOT)], {})) == []


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"])
def test_what_cannot_be_searched_is_named(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(start + b"\0" * 50)
    assert [(f.where, f.value) for f in found(tmp_path)] == [("a.bin", "compressed")]


def test_a_text_that_grows_without_bound_is_not_unpacked(tmp_path: Path) -> None:
    packed = zlib.compress(b"\0" * (_LONGEST + 1), 9)
    (tmp_path / "a.png").write_bytes(png(chunk(b"zTXt", b"Comment\0\0" + packed)))
    assert [f.value for f in found(tmp_path)] == ["compressed"]


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", png()[:40], png()[:-3] + b"\xff", b"\xff" * 99])
@pytest.mark.parametrize("name", ["a.png", "a.safetensors", "a.json", "a.html"])
def test_a_broken_file_is_searched_as_far_as_it_goes(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert found(tmp_path) == []
    (tmp_path / name).write_bytes(content + TOKENS["GitHub"].encode())
    assert found(tmp_path)


@pytest.mark.parametrize("secret", [*TOKENS.values(), *KEYS.values()], ids=[*TOKENS, *KEYS])
def test_a_recipe_with_a_token_is_refused_before_anything_repeats_it(secret: str) -> None:
    data = {"name": "a", "base": {"model": f"x {secret}"}, "unknown": 1}
    with pytest.raises(RecipeError, match=r"^base.model: a token \(") as caught:
        check_recipe(data)
    assert secret not in str(caught.value) and len(str(caught.value).splitlines()) == 1
    with pytest.raises(RecipeError, match=r"^train.sources.1.file: "):
        refuse_tokens({"train": {"sources": [{}, {"file": secret}]}})


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_recipe_may_name_paths(path: str) -> None:
    refuse_tokens({"base": {"model": path}})
