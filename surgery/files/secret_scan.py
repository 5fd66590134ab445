"""Find access tokens, private keys and home directories in texts, with rules of detect-secrets and of this module."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

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
_PIECE, _OVERLAP = 1 << 16, 1 << 12  # characters searched at once: some rules are quadratic in the length of a line

_REVOKE = "Remove it and revoke the token: it has been stored in a file."
_LOCAL = "Local paths are not published. Remove it, or export again."


def findings(text: str, places: Iterable[str], known: Mapping[str, str]) -> Iterator[tuple[int, str, str]]:
    """Yield every token and local path in a text: its line, a description without the token, and what to do.

    Args:
        places: folders of this machine. A folder of a single part, such as /data, matches only with a name after it.
        known: secrets of this machine by description.
    """
    local = [re.escape(place) + (r"(?![\w-])" if place.count("/") > 1 else r"/\w") for place in sorted(places)]
    paths = [re.compile(pattern) for pattern in (*local, *_HOMES, _ROOT)]
    for start in range(0, max(1, len(text)), _PIECE):
        piece = text[start : start + _PIECE + _OVERLAP]
        before = 1 + text.count("\n", 0, start)
        for place, kind, value in tokens_in(piece, known):
            yield before + piece.count("\n", 0, place), _shortened(kind, value), _REVOKE
        for pattern in paths:
            for match in pattern.finditer(piece):
                yield before + piece.count("\n", 0, match.start()), match[0].strip(), _LOCAL


def redacted(text: str) -> str:
    """Replace every token in a line of a log or a message."""
    for _, _, token in list(tokens_in(text, secrets_of_environment())):
        text = text.replace(token, "<token>")
    return text


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


def _shortened(kind: str, value: str) -> str:
    """Describe a token with at most its first four characters."""
    start = f", {value[:4]}..." if len(value) >= 20 and not kind.startswith("the ") else ""
    return f"a token ({kind}{start}, {len(value)} characters)"
