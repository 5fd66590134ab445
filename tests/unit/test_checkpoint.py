"""Loading: mamba_ssm's format gives transformers' logits; every fault has a name; pickles hold tensors alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from surgery.checkpoint import check_finite, load_config, load_model, load_tokenizer, revision_of, source_of
from surgery.errors import ModelError
from surgery.families import family_of
from surgery.recipe import Base
from surgery.rundir import digest
from tests.integration.conftest import BASE
from tests.mamba_ssm_files import KINDS, PADDED, Kind, config_of, state_of, tiny, write
from tests.pico import pico_family
from tests.unit.hybrid.test_modeling_mamba2attn import CASES, attn_model

LAYERS = ("Mamba1", "Mamba2")
MIXER = "backbone.layers.1.mixer"


def base_of(folder: Path, **fields: Any) -> Base:
    return Base(model=str(folder), **fields)


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(PADDED, (2, 11), generator=torch.Generator().manual_seed(0))
    return model(ids, use_cache=False).logits


def assert_same_logits(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    assert torch.equal(logits_of(found), logits_of(expected))


def assert_refused(folder: Path, *words: str, load: Any = load_model, **fields: Any) -> None:
    with pytest.raises(ModelError) as caught:
        load(base_of(folder, **fields))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_mamba_ssm_files_give_transformers_logits(tmp_path: Path, layer: str, kind: Kind) -> None:
    model = tiny(layer)
    loaded = load_model(base_of(write(tmp_path, model, kind)))
    assert type(loaded) is type(model)
    assert not loaded.training
    assert_same_logits(loaded, model)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("tied", "head"), [(True, True), (True, False), (False, True)])
def test_the_head_may_be_tied_and_present_or_absent(tmp_path: Path, layer: str, tied: bool, head: bool) -> None:
    model = tiny(layer, tied=tied, use_bias=True, use_conv_bias=False)
    state = {name: tensor for name, tensor in state_of(model).items() if head or name != "lm_head.weight"}
    loaded = load_model(base_of(write(tmp_path, model, state=state)))
    assert (loaded.lm_head.weight is loaded.backbone.embeddings.weight) == tied
    assert_same_logits(loaded, model)


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    model = tiny("Mamba2")
    state = {**state_of(model), "lm_head.weight": model.lm_head.weight + 1}
    assert_refused(write(tmp_path, model, state=state), "lm_head.weight", "tie_embeddings")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_attention_layers_and_mlps_load(tmp_path: Path, case: str, kind: Kind) -> None:
    model = attn_model(case, vocab_size=PADDED, tie_word_embeddings=True)
    loaded = load_model(base_of(write(tmp_path, model, kind)))
    assert type(loaded) is type(model)
    assert_same_logits(loaded, model)


def test_a_saved_model_with_attention_loads_again(tmp_path: Path) -> None:
    model = load_model(base_of(write(tmp_path / "own", attn_model("mlp", vocab_size=PADDED))))
    model.save_pretrained(tmp_path / "saved")
    assert_same_logits(load_model(base_of(tmp_path / "saved")), model)


def test_saving_writes_transformers_names(tmp_path: Path) -> None:
    model = load_model(base_of(write(tmp_path / "own", tiny("Mamba2"))))
    model.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == model.state_dict().keys() - {"lm_head.weight"}
    assert_same_logits(load_model(base_of(tmp_path / "saved")), model)


def test_rotary_frequencies_of_older_files_are_passed_by(tmp_path: Path) -> None:
    model = attn_model("rotary", vocab_size=PADDED)
    state = {**state_of(model), "backbone.layers.0.mixer.rotary_emb.inv_freq": torch.ones(4)}
    assert_same_logits(load_model(base_of(write(tmp_path, model, state=state))), model)


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_training_does_not_write_into_the_mapped_file(tmp_path: Path, kind: Kind) -> None:
    folder = write(tmp_path, tiny("Mamba2"), kind)
    before = digest(folder)
    model = load_model(base_of(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert digest(folder) == before


def test_the_dtype_is_the_bases(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny("Mamba2").bfloat16())
    found = {dtype: load_model(base_of(folder, dtype=dtype)).dtype for dtype in ("float32", "bfloat16", "auto")}
    assert found == {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.bfloat16}


def test_the_config_alone_needs_no_weights(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny("Mamba2"))
    (folder / "pytorch_model.bin").unlink()
    assert load_config(base_of(folder)).vocab_size == PADDED
    assert_refused(folder, "no weights", "pytorch_model.bin")


def own_format(folder: Path, state: dict[str, Tensor]) -> Path:
    return write(folder, tiny("Mamba2"), state=state)


def transformers_format(folder: Path, state: dict[str, Tensor]) -> Path:
    tiny("Mamba2").config.save_pretrained(folder)
    names = {"backbone.embedding.weight": "backbone.embeddings.weight"}
    tensors = {names.get(name, name): tensor.clone() for name, tensor in state.items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("make", [own_format, transformers_format])
def test_faulty_tensors_are_named_with_the_expected_shape(tmp_path: Path, make: Any) -> None:
    state = state_of(tiny("Mamba2"))
    state[f"{MIXER}.gate"] = state.pop(f"{MIXER}.D")
    state[f"{MIXER}.A_log"] = torch.zeros(3)
    words = (f"missing {MIXER}.D (4,)", f"unexpected {MIXER}.gate", f"misshapen {MIXER}.A_log (3,), expected (4,)")
    assert_refused(make(tmp_path, state), *words)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("load", [load_model, check_finite])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, value: float, dtype: torch.dtype, load: Any) -> None:
    """Whichever format, and for `check_finite` without building the model."""
    tensors = {name: tensor.to(dtype) for name, tensor in state_of(tiny("Mamba2")).items()}
    load(base_of(own_format(tmp_path / "fine", tensors), dtype="auto"))
    name = f"{MIXER}.in_proj.weight"
    tensors[name][3, 2] = value
    for make in (own_format, transformers_format):
        folder = make(tmp_path / make.__name__, {k: v.clone() for k, v in tensors.items()})
        assert_refused(folder, str(folder), f"{name} holds NaN or infinity", "diverged", load=load, dtype="auto")


def test_many_faults_are_counted(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in state_of(tiny("Mamba2")).items() if "layers.1" not in name}
    assert_refused(own_format(tmp_path, state), "missing", "and 5 more")


class Malice:
    """What a pickle may bring along: a call."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("layout", ["mamba_ssm", "transformers"])
@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"call": Malice("pwned")}, "mkdir"),
        ({"epoch": 3}, "'epoch' is of type int"),
        ({"optimizer": {"step": torch.ones(1)}}, "'optimizer' is of type dict"),
    ],
)
def test_pickles_hold_tensors_alone(
    tmp_path: Path, layout: str, extra: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny("Mamba2")
    folder = write(tmp_path / "own", model, state={**state_of(model), **extra})
    if layout == "transformers":
        model.config.save_pretrained(folder)
    assert_refused(folder, "pytorch_model.bin", word)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("kind", ["bin", "legacy bin", "safetensors"])
def test_truncated_weights(tmp_path: Path, kind: Kind) -> None:
    folder = write(tmp_path, tiny("Mamba2"), kind)
    (file,) = (f for f in folder.iterdir() if f.name != "config.json")
    file.write_bytes(file.read_bytes()[:-500])
    assert_refused(folder, file.name, "Download it again")


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny("Mamba2"), "sharded bin")
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    assert_refused(folder, "pytorch_model-00002-of-00002.bin", "not there")


def test_a_pointer_instead_of_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny("Mamba2"))
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert_refused(folder, "git lfs pull")


def test_a_config_that_cannot_be_expressed(tmp_path: Path) -> None:
    model = tiny("Mamba2")
    config = config_of(model)
    folder = write(tmp_path, model, config={**config, "ssm_cfg": {**config["ssm_cfg"], "rmsnorm": False}})
    assert_refused(folder, "ssm_cfg.rmsnorm", "False", load=load_config)


def test_a_config_that_is_neither(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert_refused(tmp_path, str(tmp_path), load=load_config)


def test_a_tokenizer_beside_the_model_and_none(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny("Mamba2"))
    assert_refused(folder, "base.tokenizer", "no tokenizer there", load=load_tokenizer)
    for file in BASE.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    assert load_tokenizer(base_of(folder))("a 7")["input_ids"] == load_tokenizer(base_of(BASE))("a 7")["input_ids"]


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("org/name", None, ("org/name", None)),
        ("org/name", "v1", ("org/name", "v1")),
        ("org/name@v1", None, ("org/name", "v1")),
        ("org/name@v1", "v1", ("org/name", "v1")),
        ("org/name@refs/pr/7", None, ("org/name", "refs/pr/7")),
        ("./folder@v1", None, ("./folder@v1", None)),
    ],
)
def test_a_revision_may_follow_the_id(model: str, revision: str | None, expected: tuple[str, str | None]) -> None:
    assert source_of(model, revision) == expected


@pytest.mark.parametrize(
    ("model", "revision", "field"), [("org/name@v1", "v2", "base.revision"), ("org/name@", None, "base.model")]
)
def test_two_revisions_and_none(model: str, revision: str | None, field: str) -> None:
    with pytest.raises(ModelError) as caught:
        source_of(model, revision)
    assert caught.value.field == field


def test_a_folder_may_have_an_at_in_its_name(tmp_path: Path) -> None:
    model = tiny("Mamba2")
    folder = write(tmp_path / "a@b", model)
    assert_same_logits(load_model(base_of(folder)), model)
    assert revision_of(base_of(folder)) == revision_of(base_of(folder))


class TestChannels:
    """What makes a head of a Mamba-1 is the user's choice."""

    @pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
    def test_the_recipe_says_how_many_channels_make_a_head(self, name: str, tmp_path: Path) -> None:
        pico_family(name).save_pretrained(tmp_path)
        config = load_config(Base(model=str(tmp_path), channels_per_head=8))
        specs = family_of(config).mixers(config)
        assert {(s.num_heads, s.head_dim, s.native_heads) for s in specs} == {(8, 8, False)}
        single = load_config(Base(model=str(tmp_path), channels_per_head=1))
        assert family_of(single).mixers(single)[0].num_heads == config.intermediate_size

    @pytest.mark.parametrize(("name", "channels", "says"), [("mamba", 7, "divisor of the 64"), ("mamba2", 8, "Only")])
    def test_groups_that_cannot_be_are_refused(self, name: str, channels: int, says: str, tmp_path: Path) -> None:
        pico_family(name).save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=says):
            load_config(Base(model=str(tmp_path), channels_per_head=channels))
