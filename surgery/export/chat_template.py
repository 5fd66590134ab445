"""The chat template of an exported tokenizer: the base's, a named one, or that of a Jinja file."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from surgery.errors import RecipeError, reading, summary
from surgery.files.atomic import digest, fingerprint

FIELD = "export.chat_template"
# For models without training on chats, which continue text. A message of the assistant follows the text before it
# directly, so the conversation is what the model read and wrote. The prompt for an answer is empty: after a line break
# or a role's name, such a model retrieves no more (docs/serve.md).
PLAIN = (
    "{% for message in messages %}"
    "{% if not loop.first and message['role'] != 'assistant' %}{{ '\\n' }}{% endif %}"
    "{{ message['content'] }}"
    "{% endfor %}"
)
NAMED = {"plain": PLAIN}
_SAMPLE = [{"role": "user", "content": "The value of the key 'miku' is"}]


def with_chat_template(tokenizer: PreTrainedTokenizerBase, name: str | None) -> PreTrainedTokenizerBase:
    """Copy a tokenizer with the chat template that `export.chat_template` names; the tokenizer itself if it is None.

    Named templates start with the token that the tokenizer puts before a text, if it does: chat endpoints add no
    special tokens.

    Args:
        name: key of `NAMED`, or path of a Jinja file.

    Raises:
        RecipeError: there is no such template, the file cannot be read, or Jinja cannot parse or render it.
    """
    if name is None:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    if name in NAMED:
        starts_text = tokenizer.bos_token is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if starts_text else "") + NAMED[name]
    else:
        with reading(FIELD, name, "The file cannot be read. Use a Jinja file in UTF-8.", RecipeError):
            file = Path(os.path.expanduser(name))
            if not file.exists():
                hint = f"No such template. Use {', '.join(NAMED)}, or the path of a Jinja file."
                raise RecipeError(FIELD, name, hint)
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        if not tokenizer.chat_template.strip():
            raise RecipeError(FIELD, name, "The file is empty. Write a Jinja template into it, or remove the key.")
    try:
        text = str(tokenizer.apply_chat_template(_SAMPLE, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # of Jinja, or of a method that the template calls
        line = getattr(error, "lineno", None)
        value = f"{name}{f', line {line}' if line else ''} ({summary(error)})"
        hint = "Jinja cannot render one message of a user. Correct the template."
        raise RecipeError(FIELD, value, hint) from error
    if not text.strip():
        raise RecipeError(FIELD, name, "It renders no text for one message of a user. Correct the template.")
    return tokenizer


def template_revision(name: str) -> str:
    """Hash of the template that `export.chat_template` names. A missing file has the hash of nothing."""
    return fingerprint(NAMED[name]) if name in NAMED else digest(Path(os.path.expanduser(name)))
