"""Search files for access tokens, private keys and home directories.

Rules of detect-secrets and of this module are applied to texts in all common encodings and containers.
"""

from __future__ import annotations

import base64
import binascii
import html
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from surgery.errors import RecipeError

# Detectors of secrets with a known form. Those based on entropy or on a nearby word are not used, since they match
# hashes, embedded images and vocabularies.
_DETECTORS = {
    "aws": "AWSKeyDetector",
    "azure_storage_key": "AzureStorageKeyDetector",
    "basic_auth": "BasicAuthDetector",
    "discord": "DiscordBotTokenDetector",
    "github_token": "GitHubTokenDetector",
    "gitlab_token": "GitLabTokenDetector",
    "jwt": "JwtTokenDetector",
    "mailchimp": "MailchimpDetector",
    "openai": "OpenAIDetector",
    "private_key": "PrivateKeyDetector",
    "pypi_token": "PypiTokenDetector",
    "sendgrid": "SendGridDetector",
    "slack": "SlackDetector",
    "square_oauth": "SquareOAuthDetector",
    "stripe": "StripeDetector",
    "telegram_token": "TelegramBotTokenDetector",
    "twilio": "TwilioKeyDetector",
}
_TOKENS = {
    "Hugging Face Token": r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}",
    "GitHub Token": r"\bgithub_pat_[A-Za-z0-9_]{22,}",
    "OpenAI Token": r"\bsk-(?:proj|svcacct|admin)-[\w-]{20,}|\bsk-[A-Za-z0-9]{48}\b",
    "Anthropic API Key": r"\bsk-ant-[\w-]{20,}",
    "Google API Key": r"\bAIza[\w-]{35}",
    "AWS Secret Key": r"(?i)\baws_?(?:secret|session)[\w-]{0,30}[\"']?\s{0,3}[:=]\s{0,3}[\"']?[A-Za-z0-9/+]{40}",
    "NPM Token": r"\bnpm_[A-Za-z0-9]{36}|_authToken\s?=\s?[\w-]{20,}",
    "Weights & Biases Key": r"(?i)\bwandb[\w.-]{0,30}\W{1,5}[0-9a-f]{40}\b",
    "Authorization Header": r"(?i)\bauthorization\W{1,4}(?:bearer|basic|token)\s[\w.~+/=-]{16,}",
    "Private Key": r"BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY|AGE-SECRET-KEY-1[0-9A-Z]{50,}",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _TOKENS.items()}
SECRET_NAME = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY)$|(?:^|_)(?:KEY|PAT|PASS)$", re.IGNORECASE
)
_BEFORE = r"(?<![\w.~-])"  # not part of a URL or of a relative path
_HOMES = (
    rf"{_BEFORE}(?:/mnt)?(?:/[A-Za-z]|/var|/export|/usr)?/+(?:home|Users)/+(?!Shared\b|Public\b|linuxbrew\b)\w[\w.-]*",
    rf"{_BEFORE}[A-Za-z]:[\\/]+(?i:Users|Documents and Settings)[\\/]+(?!Public\b|Default\b)\w[^\\/:*?\"<>|\r\n]*",
)
_ROOT = rf"{_BEFORE}/root/+\w[\w.-]*"
# Vocabularies have entries such as `/home/user`: there a home directory counts only if a path follows it.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_PACKED = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf\x27\x1c")
_PNG = b"\x89PNG\r\n\x1a\n"
_IMAGE = re.compile(rb"data:image/png;base64,([A-Za-z0-9+/=\s]+)")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([/\\\"]))")
_LONGEST = 1 << 24  # bytes of a decompressed text
_PIECE, _OVERLAP = 1 << 16, 1 << 12  # characters searched at once: some rules are quadratic in the length of a line

_REVOKE = "Remove it and revoke the token: it has been stored in a file."
_LOCAL = "Local paths are not published. Remove it, or export again."
_COMPRESSED = "Compressed files cannot be searched. Unpack it, or remove it."


@dataclass(frozen=True)
class Finding:
    """A token or local path in a file.

    Attributes:
        where: the file with its line or part.
        value: the path, or the token shortened to its first four characters.
        hint: what to do.
    """

    where: str
    value: str
    hint: str


def search(files: Mapping[str, Path], places: Iterable[str], known: Mapping[str, str]) -> Iterator[Finding]:
    """Search files for secrets and local paths. The values of weights are not searched.

    Args:
        files: paths by the names to report.
        places: folders of this machine. A folder of a single part, such as /data, matches only with a name after it.
        known: secrets of this machine by description.
    """
    for name, path in files.items():
        paths = _path_patterns(places, name.rpartition("/")[2] in _VOCABULARIES)
        for part, content in _parts(path):
            if content is None:
                yield Finding(f"{name}{part}", "compressed", _COMPRESSED)
                continue
            # Without NULs, ASCII in UTF-16 and UTF-32 reads as ASCII. Elsewhere NULs separate words.
            texts = dict.fromkeys(content.replace(b"\0", other).decode("utf-8", "replace") for other in (b"", b" "))
            findings = (finding for text in texts for finding in _findings(text, paths, known))
            yield from (Finding(f"{name}{part}:{line}", *what) for line, *what in dict.fromkeys(findings))


def secrets_of_environment() -> dict[str, str]:
    """Collect the values of environment variables whose names suggest secrets, such as HF_TOKEN and WANDB_API_KEY."""
    secrets = {f"the value of {name}": value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    return {name: value for name, value in secrets.items() if len(value) >= 12 and not re.search(r"^[/~]|\s", value)}


def tokens_in(text: str, known: Mapping[str, str]) -> Iterator[tuple[int, str, str]]:
    """Yield position, kind and value of every string that looks like a token."""
    for kind, value in known.items():
        if value in text:
            yield text.index(value), kind, value
    for kind, pattern in _PATTERNS.items():
        yield from ((match.start(), kind, match[0]) for match in pattern.finditer(text))
    for detector in _detectors():
        for pattern in detector.denylist:
            for match in pattern.finditer(text):
                if any(detector.analyze_string(match[0])):  # a detector may check more than its pattern
                    yield match.start(), detector.secret_type, match[0]


def refuse_tokens(data: Any, key: str = "") -> None:
    """Refuse a recipe that has an access token in a value, since files of a run repeat the recipe.

    Args:
        data: plain data of the recipe.
        key: dotted key of `data` in the recipe.

    Raises:
        RecipeError: a value has a token. Names the key.
    """
    if isinstance(data, Mapping):
        for name, value in data.items():
            refuse_tokens(value, f"{key}.{name}" if key else str(name))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            refuse_tokens(value, f"{key}.{index}")
    elif isinstance(data, str):
        for _, kind, value in tokens_in(data, secrets_of_environment()):
            hint = "Reports and exports repeat the recipe. Remove the token, and use `hf auth login` or HF_TOKEN."
            raise RecipeError(key, _shortened(kind, value), hint)


@cache
def _detectors() -> list[Any]:
    """Plugins of detect-secrets. Their `verify`, which contacts the services, is not called."""
    modules = ((import_module(f"detect_secrets.plugins.{module}"), name) for module, name in _DETECTORS.items())
    return [getattr(module, name)() for module, name in modules]


def _findings(text: str, paths: list[re.Pattern[str]], known: Mapping[str, str]) -> Iterator[tuple[int, str, str]]:
    """Yield line, value and hint of each finding, in the text as it is and with escapes resolved."""
    for start in range(0, max(1, len(text)), _PIECE):
        piece = text[start : start + _PIECE + _OVERLAP]
        before = 1 + text.count("\n", 0, start)
        for view in dict.fromkeys((piece, _unescaped(piece))):
            for place, kind, value in tokens_in(view, known):
                yield before + view.count("\n", 0, place), _shortened(kind, value), _REVOKE
            for pattern in paths:
                for match in pattern.finditer(view):
                    yield before + view.count("\n", 0, match.start()), match[0].strip(), _LOCAL


def _shortened(kind: str, value: str) -> str:
    """Describe a token with at most its first four characters."""
    start = f", {value[:4]}..." if len(value) >= 20 and not kind.startswith("the ") else ""
    return f"a token ({kind}{start}, {len(value)} characters)"


def _unescaped(text: str) -> str:
    """Resolve escapes of JSON (twice, for JSON in a string), HTML and URLs. Line numbers do not change."""
    for _ in range(2):
        text = _ESCAPE.sub(lambda m: chr(int(m[1] or m[2], 16)) if m[1] or m[2] else m[3], text)
    return unquote(html.unescape(text))


def _path_patterns(places: Iterable[str], is_vocabulary: bool) -> list[re.Pattern[str]]:
    """Patterns of these folders and of home directories."""
    below = r"[\\/]+\w" if is_vocabulary else ""
    local = [
        re.escape(place) + (r"(?![\w-])" if place.count("/") + place.count("\\") > 1 else r"/\w")
        for place in sorted(places)
    ]
    return [re.compile(pattern) for pattern in (*local, *(home + below for home in _HOMES), _ROOT)]


def _parts(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """Yield the texts of a file with their labels; None for a text that cannot be searched."""
    if path.suffix == ".safetensors":
        yield " (header)", _header(path)
        return
    content = path.read_bytes()
    yield "", None if content.startswith(_PACKED) else content
    if content.startswith(_PNG):
        yield from _png_texts(content)
    for image in _IMAGE.findall(content):
        try:
            yield from _png_texts(base64.b64decode(image))
        except binascii.Error:
            continue


def _header(path: Path) -> bytes:
    """Names and metadata of a safetensors file, without the values."""
    with open(path, "rb") as file:
        start = file.read(8)
        return start + file.read(min(int.from_bytes(start, "little"), path.stat().st_size))


def _png_texts(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Yield text, profile and EXIF chunks of a PNG file."""
    place = len(_PNG)
    while place + 8 <= len(content):
        length, kind = struct.unpack(">I4s", content[place : place + 8])
        data = content[place + 8 : place + 8 + length]
        place += length + 12
        keyword, _, rest = data.partition(b"\0")
        label = f" ({kind.decode('latin-1')} {keyword[:79].decode('latin-1')!r})"
        if kind in (b"zTXt", b"iCCP"):
            yield label, _inflated(rest[1:])
        elif kind == b"iTXt" and rest[:1] == b"\1":
            yield label, _inflated(rest[2:].split(b"\0", 2)[-1])
        elif kind in (b"tEXt", b"iTXt", b"eXIf"):
            yield label, data


def _inflated(data: bytes) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(data, _LONGEST)
    except zlib.error:
        return data
    return None if inflater.unconsumed_tail else text
