"""Every kind of secret in a text, and what looks like one and is none."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import string
from pathlib import Path

import pytest

from surgery.errors import RecipeError
from surgery.files.secret_scan import _OVERLAP, _PIECE, findings, redacted, refuse_tokens, secrets_of_environment
from surgery.recipe import check_recipe

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


def found(text: str, known: dict[str, str] | None = None) -> list[tuple[int, str, str]]:
    return list(findings(text, [], known or {}))


def test_every_kind_is_found_with_its_line_and_no_token_is_repeated() -> None:
    for kind, secret in {**TOKENS, **KEYS, **PATHS}.items():
        for text in (
            f"first\nx = {secret}\n",
            f"first\n{json.dumps({'a': [secret]}, ensure_ascii=False)}",
            f"\n<p>{secret}</p>",
        ):
            text = text.replace("\\\\", "\\")
            told = found(text)
            assert told and {line for line, *_ in told} == {2}, kind
            if kind in TOKENS:
                assert all(secret not in what and secret[-8:] not in what for _, what, _ in told), kind
                assert redacted(f"GET {secret} failed") != f"GET {secret} failed", kind


def test_long_texts_are_searched_in_pieces_that_overlap() -> None:
    for place in (_PIECE - 20, _PIECE, _PIECE + _OVERLAP - 20, 3 * _PIECE - 5):
        text = "x\n" * (place // 2) + TOKENS["GitHub"]
        assert {line for line, *_ in found(text)} == {place // 2 + 1}


def test_secrets_of_this_machine_need_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "nothing-like-a-token"
    for name in ("SOME_API_KEY", "HF_TOKEN", "PGPASSWORD", "GH_PAT", "DB_PASS", "AWS_CREDENTIALS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, secret)
            ((_, what, _),) = found(f"a {secret}", secrets_of_environment())
            assert name in what and secret not in what and redacted(f"a {secret}: b") == "a <token>: b"
    assert found(secret) == [] and redacted(secret) == secret


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


def test_what_is_no_secret_passes() -> None:
    for kind, text in HARMLESS.items():
        assert found(text) == [], kind


def test_places_of_this_machine(tmp_path: Path) -> None:
    """One of a single part, which may be a word of a text, counts only with a name after it."""
    for text, told in (("/data/x", "/data/x"), ("/data", None), ("/srv/me/a", "/srv/me"), ("/srv/me-too", None)):
        assert [what[:7] for _, what, _ in findings(text, ["/data", "/srv/me"], {})] == ([told[:7]] if told else [])


def test_a_recipe_with_a_token_is_refused_before_anything_repeats_it() -> None:
    for secret in (*TOKENS.values(), *KEYS.values()):
        with pytest.raises(RecipeError, match=r"^base.model: a token \(") as caught:
            check_recipe({"name": "a", "base": {"model": f"x {secret}"}, "unknown": 1})
        assert secret not in str(caught.value) and len(str(caught.value).splitlines()) == 1
        with pytest.raises(RecipeError, match=r"^train.sources.1.file: "):
            refuse_tokens({"train": {"sources": [{}, {"file": secret}]}})
    for path in PATHS.values():
        refuse_tokens({"base": {"model": path}})
