"""An exported folder in stock transformers, and in what people run on top of it: the table in docs/CONFORMANCE.md.

`stranger.py` does it all in one process that cannot import this library; bench/nightly/test_serve.py has a server.
What every hybrid class has to do, whatever its family, is in tests/unit/hybrid/test_common_properties.py.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from surgery.export import transformers_folder
from surgery.export.folder import export_model
from surgery.recipe import Export
from tests.support.battery import trained
from tests.support.exports import in_this_process
from tests.support.pico import SPLICED_FAMILIES, pico_hybrid, pico_site, pico_tokenizer, random_site
from tests.support.processes import alone, module_script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with heads added in one layer and one replaced in another."""
    splice = [pico_site(0, [1, 3]), random_site(2, [0], "replace")]
    model, there = pico_hybrid(splice, vocab_size=1024, seed=1), tmp_path_factory.mktemp("conformance") / "export"
    with torch.no_grad():
        model.backbone.layers[2].mixer.out_proj.weight[:, :16] = 0
        model.get_input_embeddings().weight.mul_(0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_folder, "reload", in_this_process)
        export_model(model, pico_tokenizer(), there, Export(chat_template="plain"))
    return there


def seen_by_a_stranger(folder: str, *names: str, place: Path) -> dict[str, Any]:
    words = (folder, "found.json", *names)
    alone(module_script("tests.support.stranger"), *words, cwd=place, HF_MODULES_CACHE=str(place / "modules"))
    return json.loads((place / "found.json").read_text())


def test_a_stranger_gets_what_the_table_says(folder: Path) -> None:
    """Greedy and seeded sampling as token by token over whole passes; beams as without a cache, and other than greedy;
    a padded batch as row by row; a pipeline in batches as one by one; the same logits after every round trip."""
    found = seen_by_a_stranger(str(folder), place=folder.parent)
    for way in ("greedy", "sampling", "beams", "padded_batch", "pipeline", "saved_again", "without_head"):
        answers = found[way] if isinstance(found[way], list) else [found[way]]
        assert answers and all(answer is True for answer in answers), (way, found[way])
    assert found["static_cache"] == [True, "StaticCache"]
    assert found["compiled"] < 1e-5, "the forward is one graph"
    *dtypes, apart, new = found["bf16"]
    assert dtypes == ["torch.float32"] * 3 + ["torch.bfloat16"] and 0 < apart < 0.1 and new == 6
    assert found["device_maps"] == dict.fromkeys(("auto", "cpu", "disk", "mixed"), True), "the same bits"
    # LoRA learns, and is the same after saving, loading, merging, and loading the merged model.
    peft = found["peft"]
    assert peft["trained"] == ["lora_A", "lora_B"]
    assert peft["losses"] == sorted(peft["losses"], reverse=True) and peft["losses"][-1] < peft["losses"][0] - 0.1
    assert max(peft["apart"]) < 1e-4 < 0.1 < peft["moved"]
    # What does not work says so, as transformers does; none of it gives a wrong text instead.
    for way, error in {
        "contrastive": "Contrastive Search requires `trust_remote_code=True`",
        "quantized_cache": "only supported for models with only full attention",
        "continuous_batching": "Invalid layer type: hybrid",
    }.items():  # fmt: skip
        assert found[way].startswith("ValueError: ") and error in found[way], (way, found[way])


def test_what_is_saved_is_loaded_pickled_and_saved_again(tmp_path: Path) -> None:
    """By stock transformers, with the code in the folder: whole, and without its head; every family."""
    for name in SPLICED_FAMILIES:
        copy.deepcopy(trained(name)).save_pretrained(tmp_path / "models" / name)
    for name, found in seen_by_a_stranger("models", "families", place=tmp_path).items():
        assert isinstance(found, dict) and len(found) == 7 and all(found.values()), (name, found)
