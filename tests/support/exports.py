"""Small exports, and ways to change them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.errors import ModelError
from surgery.export.documents import card_rows
from surgery.export.files import RECORD, fingerprints
from surgery.export.folder import export_model
from surgery.export.reload import SAMPLE
from surgery.export.verify import verify_folder
from surgery.types import HeadId, HeadSet, ScoredHead
from tests.support.battery import base, logits, plan_of, trained
from tests.support.pico import pico_tokenizer


def in_this_process(folder: Path, ids: Tensor, dtypes: Any, remote_code: bool = True) -> dict[str, Tensor]:
    """The twin of `reload` with this library's own classes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {"tokenizer": torch.tensor(tokenizer(SAMPLE)["input_ids"])}
    found["chat_template"] = torch.tensor(list(json.dumps(tokenizer.chat_template).encode()), dtype=torch.uint8)
    for dtype in dtypes:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True}
        text = model.generate(ids[:1], return_dict_in_generate=True, **options)
        found |= {f"{dtype}.logits": logits(model, ids), f"{dtype}.text": text.sequences}
        found[f"{dtype}.steps"] = torch.cat(text.logits).float()
    return found


def heads_of(plan: Any) -> HeadSet:
    """As locating would have chosen what the plan has."""
    chosen = tuple(
        ScoredHead(HeadId(graft.site.layer, head), "neither", reads, {})
        for graft in plan.grafts
        for head, reads in zip(graft.heads, graft.reads, strict=True)
    )
    return HeadSet("pico", "", plan.geometry, chosen, chosen, "sharpen", 0)


def card_of(plan: Any) -> str:
    rows = [f"| {' | '.join(row)} | unknown |" for row in card_rows(plan)]
    return "\n".join(
        ["# A card", "", "| spliced head | mode | init | reads | role |", "|---|---|---|---|---|", *rows, ""]
    )


def written(folder: Path, mode: str = "replace", name: str = "mamba2", section: Any = None) -> Path:
    """An export with all its documents."""
    plan = plan_of(base(name), mode)
    given = {"card": card_of(plan), "plan": plan, "heads": heads_of(plan), "recipe_yaml": "name: pico\n"}
    export_model(trained(name, mode), pico_tokenizer(), folder, section, results={"a": 1}, **given)
    return folder


def list_again(folder: Path) -> None:
    """As who changes a folder and covers it up would."""
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({**record, "files": fingerprints(folder)}))


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file, or the tensors of a file."""
    if name.endswith(".json"):
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))
    else:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})


def refusal(folder: Path, **more: Any) -> str:
    with pytest.raises(ModelError) as caught:
        verify_folder(folder, **more)
    return str(caught.value)
