"""The chat template of an export: the base's is kept, `plain` continues text, and a faulty file is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from surgery.errors import RecipeError
from surgery.export.chat_template import template_revision, with_chat_template
from surgery.export.folder import export_model
from surgery.export.verify import verify_folder
from surgery.models.loading import load_tokenizer
from surgery.recipe import Base, Export
from tests.support.pico import pico_hybrid, pico_site, pico_tokenizer

BASES_OWN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}\n"
)
CHAT = [
    {"role": "system", "content": "Answer with a word."},
    {"role": "user", "content": "The colour of the sky is"},
    {"role": "assistant", "content": " blue."},
    {"role": "user", "content": "The colour of grass is"},
]


def exported(folder: Path, tokenizer: Any, template: str | None = None) -> Any:
    model = pico_hybrid([pico_site(0, [1, 3])], vocab_size=1024, seed=1)
    export_model(model, tokenizer, folder, Export(chat_template=template))
    return AutoTokenizer.from_pretrained(folder)


def test_the_bases_template_is_kept(tmp_path: Path) -> None:
    """Wherever the base has it. It is written and listed as a file of its own. Without one there is none."""
    for place in ("chat_template.jinja", "tokenizer_config.json", "nowhere"):
        base, folder = tmp_path / place / "base", tmp_path / place / "export"
        pico_tokenizer().save_pretrained(base)
        if place == "chat_template.jinja":
            (base / place).write_text(BASES_OWN)
        elif place == "tokenizer_config.json":
            config = json.loads((base / place).read_text())
            (base / place).write_text(json.dumps({**config, "chat_template": BASES_OWN}))
        tokenizer = load_tokenizer(Base(model=str(base)))
        loaded = exported(folder, tokenizer)
        verify_folder(folder)
        listed = json.loads((folder / "export.json").read_text())["files"]
        if place == "nowhere":
            assert loaded.chat_template is None and "chat_template.jinja" not in listed
            continue
        assert loaded.chat_template == tokenizer.chat_template == BASES_OWN
        assert (folder / "chat_template.jinja").read_text() == BASES_OWN and "chat_template.jinja" in listed
        text = loaded.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
        assert text == "<system>Answer with a word.\n<user>The colour of the sky is\n>"


def test_plain_is_the_text_of_the_conversation() -> None:
    """It starts as the tokenizer starts a text."""
    begins = copy.deepcopy(pico_tokenizer())
    begins.bos_token = begins.eos_token
    start = (begins.bos_token, begins.bos_token_id)
    begins.backend_tokenizer.post_processor = TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    text = "Answer with a word.\nThe colour of the sky is blue.\nThe colour of grass is"
    for plain, before in ((pico_tokenizer(), ""), (begins, start[0])):
        tokenizer = with_chat_template(plain, "plain")
        for prompt in (True, False):
            assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt) == before + text
        ids = tokenizer.apply_chat_template(CHAT[1:2], add_generation_prompt=True)["input_ids"]
        assert ids == plain(CHAT[1]["content"])["input_ids"], "one message: the tokens of a completion"


def test_a_file_in_the_home_folder_has_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    missing, file = template_revision("~/chat.jinja"), tmp_path / "chat.jinja"
    file.write_text(BASES_OWN)
    assert missing != template_revision("~/chat.jinja") == template_revision(str(file))


def test_what_is_no_template_is_refused(tmp_path: Path) -> None:
    refused: tuple[tuple[bytes | None, str], ...] = (
        (None, r"No such template\. Use plain, or the path of a Jinja file\."),
        (b"\xff\xfe{{ messages }}", r"The file cannot be read\. Use a Jinja file in UTF-8\."),
        (b" \n", r"The file is empty\."),
        (b"a\n{% for m in messages %}\nb", r"line [23] \(TemplateSyntaxError: .*\)\. Jinja cannot render one message"),
        (b"{{ raise_exception('Roles must alternate') }}", r"\(TemplateError: Roles must alternate\)\. Jinja cannot"),
        (b"{{ messages[0].content.nothing.at.all }}", r"\(UndefinedError: .*\)\. Jinja cannot render"),
        (b"{{ messages[0].content.index('!') }}", r"\(substring not found\)\. Jinja cannot render"),
        (b"{{ ''.__class__.__mro__ }}", r"\(SecurityError: .*\)\. Jinja cannot render"),
        (b"{% if false %}x{% endif %}", r"It renders no text for one message of a user\. Correct the template\."),
    )
    file = tmp_path / "chat.jinja"
    for content, message in refused:
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(RecipeError, match=rf"^export\.chat_template: \S*chat\.jinja.*{message}"):
            with_chat_template(pico_tokenizer(), str(file))
    with pytest.raises(RecipeError, match="The file cannot be read"):
        exported(tmp_path / "export", pico_tokenizer(), str(tmp_path))
    assert not (tmp_path / "export").exists(), "it is refused before anything is written"
