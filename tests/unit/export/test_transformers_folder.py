"""The generation settings of an exported folder."""

from __future__ import annotations

import copy
from pathlib import Path

from transformers import GenerationConfig

from surgery.export.transformers_folder import check_generation_config, write_folder
from surgery.recipe import Export
from tests.support.pico import pico_hybrid, pico_site, pico_tokenizer

END = pico_tokenizer().eos_token_id


def test_generation_ends_at_the_base_s_tokens(tmp_path: Path) -> None:
    for of_base, of_tokenizer, exported in (
        ([END, 7, 9], True, [END, 7, 9]),  # a chat model ends at several tokens
        (END + 5, True, END),  # the default of transformers' class
        (None, True, END),
        (END + 5, False, END + 5),
    ):
        model, tokenizer = pico_hybrid([pico_site(1)]), copy.deepcopy(pico_tokenizer())
        # Flags of sampling without `do_sample`, as some published models have them: transformers would not save them.
        model.generation_config = GenerationConfig(eos_token_id=of_base, temperature=0.6, top_p=0.9)
        if not of_tokenizer:
            tokenizer.eos_token = None
        write_folder(model, tokenizer, tmp_path, Export())
        check_generation_config(tmp_path)
        assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == exported
