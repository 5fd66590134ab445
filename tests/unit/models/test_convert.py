"""Rewriting a checkpoint: the same model in transformers' format, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from surgery.errors import ModelError, RunError
from surgery.files.ownership import MARK
from surgery.models.convert import class_on_hub, convert
from surgery.models.loading import load_model
from surgery.recipe import Base
from tests.support.cases import each
from tests.support.errors import refused
from tests.support.mamba_ssm_files import PADDED, Kind, assert_same_logits, state_of, tiny, write
from tests.support.pico import pico_family, pico_hybrid, pico_site


def base_of(folder: Path) -> Base:
    return Base(model=str(folder))


@each("kind", ["bin", "safetensors"])  # test_loading has every kind
@each("layer", ["Mamba1", "Mamba2"])
def test_transformers_alone_loads_what_is_written(tmp_path: Path, layer: str, kind: Kind) -> None:
    model = tiny(layer, tied=kind != "bin")
    done = convert(base_of(write(tmp_path / "own", model, kind)), tmp_path / "new")
    assert done.shards == 1
    assert done.tensors == len(model.state_dict()) - model.config.tie_word_embeddings
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto").eval()
    assert type(loaded) is type(model)
    assert_same_logits(loaded, model)
    assert_same_logits(load_model(base_of(tmp_path / "new")), model)


def test_transformers_checkpoints_pass_through(tmp_path: Path) -> None:
    hybrid = pico_hybrid([pico_site(1)], vocab_size=PADDED)
    hybrid.save_pretrained(tmp_path / "own")
    config = tmp_path / "own" / "config.json"  # as transformers 4 wrote it
    config.write_text(config.read_text().replace('{\n      "__float__": "Infinity"\n    }', "Infinity"))
    assert "__float__" not in config.read_text()
    (tmp_path / "own" / "modeling_of_its_own.py").write_text("# code")
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    (tmp_path / "own" / "spiece.model").write_bytes(b"a tokenizer")
    convert(base_of(tmp_path / "own"), tmp_path / "new")
    assert_same_logits(load_model(base_of(tmp_path / "new")), hybrid)
    own, new = ({p.name for p in (tmp_path / name).iterdir()} for name in ("own", "new"))
    assert new == own | {MARK}


def test_what_a_class_keeps_in_fp32_stays(tmp_path: Path) -> None:
    """The router of a mixture of experts, which the names of an SSM do not include."""
    base = pico_family("nemotron_h").float()
    base.save_pretrained(tmp_path / "own")
    convert(base_of(tmp_path / "own"), tmp_path / "new", dtype="bfloat16")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.bfloat16)
    wide = {name for name, tensor in loaded.named_parameters() if tensor.dtype == torch.float32}
    assert any(name.endswith("gate.weight") for name in wide)
    assert {name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}.isdisjoint(wide)


def test_a_model_that_was_converted_is_replaced_with_overwrite_alone(tmp_path: Path) -> None:
    base = base_of(write(tmp_path / "own", tiny("Mamba2")))
    convert(base, tmp_path / "new", dtype="bfloat16")
    with refused(RunError, "--overwrite"):
        convert(base, tmp_path / "new")
    convert(base, tmp_path / "new", overwrite=True)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "float32"


def test_nothing_is_left_of_a_refusal(tmp_path: Path) -> None:
    model = tiny("Mamba2")
    state = state_of(model)
    state["backbone.layers.0.mixer.D"] = torch.ones(7)
    del state["backbone.norm_f.weight"]
    base = base_of(write(tmp_path / "own", model, state=state))
    words = ("missing backbone.norm_f.weight (32,)", "backbone.layers.0.mixer.D (7,), expected (4,)")
    with refused(ModelError, *words):
        convert(base, tmp_path / "new")
    with refused(RunError, "float8", "bfloat16"):
        convert(base, tmp_path / "new", dtype="float8")
    model.config.quantization_config = {"quant_method": "fp8"}
    state = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "own", state_dict=state)
    words = ("--dtype: bfloat16", "quantized (fp8)", "Remove it")
    with refused(RunError, *words):
        convert(base, tmp_path / "new", dtype="bfloat16")
    assert [p.name for p in tmp_path.iterdir()] == ["own"]


def test_modelling_code_of_the_hub_stays_where_it_is() -> None:
    for given, expected in (("m.C", "a/b--m.C"), ("c/d--m.C", "c/d--m.C"), (["m.T", None], ["a/b--m.T", None])):
        assert class_on_hub(given, "a/b") == expected
