"""Loading: mamba_ssm's format gives transformers' logits; every fault has a name; pickles hold tensors alone."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor

from surgery.data.offsets import encode_alike
from surgery.errors import ModelError, PlanError
from surgery.files.atomic import digest
from surgery.files.ownership import mark
from surgery.models import config_checks
from surgery.models.config_checks import STEP_MIN
from surgery.models.convert import convert
from surgery.models.loading import (
    check_finite,
    check_vocabulary,
    has_tokenizer,
    load_config,
    load_model,
    load_tokenizer,
    revision_of,
)
from surgery.models.lookup import family_of
from surgery.models.stored import FOREIGN
from surgery.recipe import Base, Recipe, to_yaml
from surgery.recipe.public import source_of
from surgery.splice.plan import check_splices
from tests.integration.conftest import BASE
from tests.support.cases import each
from tests.support.errors import refused
from tests.support.mamba2attn import CASES, attn_model
from tests.support.mamba_ssm_files import KINDS, PADDED, Kind, assert_same_logits, state_of, tiny, write
from tests.support.pico import pico_base, pico_family, pico_family_config, pico_tokenizer

LAYERS = ("Mamba1", "Mamba2")
MIXER = "backbone.layers.1.mixer"


def base_of(folder: Path, **fields: Any) -> Base:
    return Base(model=str(folder), **fields)


def assert_refused(folder: Path, *words: str, load: Any = load_model, **fields: Any) -> None:
    with refused(ModelError, *words):
        load(base_of(folder, **fields))


@each("kind", KINDS)
@each("layer", LAYERS)
def test_mamba_ssm_files_give_transformers_logits(tmp_path: Path, layer: str, kind: Kind) -> None:
    model = tiny(layer)
    loaded = load_model(base_of(write(tmp_path, model, kind)))
    assert type(loaded) is type(model)
    assert not loaded.training
    assert_same_logits(loaded, model)


@each("make", ["own_format", "transformers_format"])
def test_a_head_of_its_own_unties_the_config_and_what_is_converted(tmp_path: Path, make: str) -> None:
    model = tiny("Mamba2")
    folder = globals()[make](tmp_path / "own", {**state_of(model), "lm_head.weight": model.lm_head.weight + 1})
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    convert(base_of(folder), tmp_path / "new")
    for place in (folder, tmp_path / "new"):
        loaded = load_model(base_of(place))
        assert not loaded.config.tie_word_embeddings
        assert_same_logits(loaded, model)
    assert not json.loads((tmp_path / "new" / "config.json").read_text())["tie_word_embeddings"]


@each("case", list(CASES))
@each("kind", ["bin", "safetensors"])
def test_attention_layers_and_mlps_load(tmp_path: Path, case: str, kind: Kind) -> None:
    model = attn_model(case, vocab_size=PADDED, tie_word_embeddings=True)
    loaded = load_model(base_of(write(tmp_path, model, kind)))
    assert type(loaded) is type(model)
    assert_same_logits(loaded, model)


@each("kind", ["bin", "safetensors"])
def test_training_does_not_write_into_the_mapped_file(tmp_path: Path, kind: Kind) -> None:
    folder = write(tmp_path, tiny("Mamba2"), kind)
    before = digest(folder)
    model = load_model(base_of(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert digest(folder) == before


def own_format(folder: Path, state: dict[str, Tensor]) -> Path:
    return write(folder, tiny("Mamba2"), state=state)


def transformers_format(folder: Path, state: dict[str, Tensor]) -> Path:
    tiny("Mamba2").config.save_pretrained(folder)
    names = {"backbone.embedding.weight": "backbone.embeddings.weight"}
    tensors = {names.get(name, name): tensor.clone() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@each("make", [own_format, transformers_format])
def test_faulty_tensors_are_named_with_the_expected_shape(tmp_path: Path, make: Any) -> None:
    state = state_of(tiny("Mamba2"))
    state[f"{MIXER}.gate"] = state.pop(f"{MIXER}.D")
    state[f"{MIXER}.A_log"] = torch.zeros(3)
    words = (f"missing {MIXER}.D (4,)", f"unexpected {MIXER}.gate", f"misshapen {MIXER}.A_log (3,), expected (4,)")
    assert_refused(make(tmp_path, state), *words)


@each(("value", "dtype"), [(torch.nan, torch.float32), (torch.inf, torch.bfloat16), (-torch.inf, torch.float16)])
@each("load", [load_model, check_finite])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, value: float, dtype: torch.dtype, load: Any) -> None:
    """Whichever format, and for `check_finite` without building the model."""
    tensors = {name: tensor.to(dtype) for name, tensor in state_of(tiny("Mamba2")).items()}
    load(base_of(own_format(tmp_path / "fine", tensors), dtype="auto"))
    name = f"{MIXER}.in_proj.weight"
    tensors[name][3, 2] = value
    for make in (own_format, transformers_format):
        folder = make(tmp_path / make.__name__, {k: v.clone() for k, v in tensors.items()})
        assert_refused(folder, str(folder), f"{name} holds NaN or infinity", "diverged", load=load, dtype="auto")


class Malice:
    """What a pickle may bring along: a call."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (self.path,)


@each("layout", ["mamba_ssm", "transformers"])
@each(
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


@each("kind", ["bin", "legacy bin", "safetensors"])
def test_weights_that_are_cut_a_pointer_or_missing(tmp_path: Path, kind: Kind) -> None:
    folder = write(tmp_path, tiny("Mamba2"), kind)
    (file,) = (f for f in folder.iterdir() if f.name != "config.json")
    file.write_bytes(file.read_bytes()[:-500])
    assert_refused(folder, file.name, "Download it again")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert_refused(folder, "git lfs pull")
    file.unlink()
    assert load_config(base_of(folder)).vocab_size == PADDED, "the config alone needs no weights"
    assert_refused(folder, "no weights", "pytorch_model.bin")


def test_a_tokenizer_beside_the_model_and_none(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny("Mamba2"))
    assert_refused(folder, "base.tokenizer", "There is no tokenizer", load=load_tokenizer)
    for file in BASE.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    assert load_tokenizer(folder)("a 7")["input_ids"] == load_tokenizer(base_of(BASE))("a 7")["input_ids"]
    bare = json.loads((folder / "tokenizer_config.json").read_text())
    for names, padding in ((("unk_token",), bare["eos_token"]), ((), None)):
        chosen = dict.fromkeys(names, bare["eos_token"])
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **chosen})
        )
        assert load_tokenizer(folder).pad_token == padding
    parts = tmp_path / "parts"
    pico_base().save_pretrained(parts)
    pico_tokenizer().backend_tokenizer.model.save(str(parts))  # vocab.json and merges.txt alone
    assert load_tokenizer(parts)("a 7")["input_ids"] == pico_tokenizer()("a 7")["input_ids"]
    assert load_model(str(folder)).config.name_or_path == str(folder)
    with pytest.raises(ModelError, match=r"^base\.tokenizer: .*Use the id in it: a/b\."):
        load_tokenizer(Base(model=str(folder), tokenizer="https://huggingface.co/a/b"))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"\x1b[2J": "x"}}))
    assert_refused(folder, "special_tokens_map.json", "control character", load=load_tokenizer)


def test_a_revision_may_follow_the_id_and_an_address_is_no_id() -> None:
    for model, revision, expected in (
        ("org/name", "v1", ("org/name", "v1")),
        ("org/name@v1", "v1", ("org/name", "v1")),
        ("org/name@refs/pr/7", None, ("org/name", "refs/pr/7")),
        ("./folder@v1", None, ("./folder@v1", None)),
    ):
        assert source_of(model, revision) == expected
    for model, revision, says in (
        ("org/name@v1", "v2", "base.revision: v2"),
        ("org/name@", None, "base.model: org/name@"),
        ("hf.co/org/name", None, r"id in it: org/name\."),
        ("org/name/tree/main", None, r"id in it: org/name\."),
        ("https://huggingface.co/org/name/blob/v2/config.json?x", None, r"id in it: org/name@v2\."),
    ):
        with pytest.raises(ModelError, match=says):
            source_of(model, revision)
    assert_refused(Path("a/" + "b" * 5000), "base.model", load=load_config)
    assert_refused(BASE, "base.revision: v2", "which has none", load=load_config, revision="v2")


def test_the_chat_template_is_part_of_the_revision(tmp_path: Path) -> None:
    """The tokenizer writes the training text with it."""
    pico_family("mamba2").save_pretrained(tmp_path)
    own, apart = Base(model=str(tmp_path)), Base(model=str(BASE), tokenizer=str(tmp_path))
    before = revision_of(own), revision_of(apart)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert revision_of(own) != before[0] and revision_of(apart) != before[1]


class TestChannels:
    """What makes a head of a Mamba-1 is the user's choice."""

    @each("name", ["mamba", "falcon_mamba"])
    def test_the_recipe_says_how_many_channels_make_a_head(self, name: str, tmp_path: Path) -> None:
        pico_family(name).save_pretrained(tmp_path)
        config = load_config(Base(model=str(tmp_path), channels_per_head=8))
        specs = family_of(config).mixers(config)
        assert {(s.num_heads, s.head_dim, s.native_heads) for s in specs} == {(8, 8, False)}
        single = load_config(Base(model=str(tmp_path), channels_per_head=1))
        assert family_of(single).mixers(single)[0].num_heads == config.intermediate_size

    def test_groups_that_cannot_be_are_refused(self, tmp_path: Path) -> None:
        """The heads of a hybrid are those of its splice."""
        hybrid = family_of(pico_family_config("mamba")).hybrid_config(pico_family_config("mamba"), [])
        for config, channels, says in (
            (pico_family_config("mamba"), 7, "divisor of the 64"),
            (pico_family_config("mamba2"), 8, "a Mamba-1 without a splice"),
            (hybrid, 8, "a Mamba-1 without a splice"),
        ):
            config.save_pretrained(tmp_path)
            assert_refused(tmp_path, says, load=load_config, channels_per_head=channels)


class TestMalformedConfigs:
    """Whatever config.json holds: one line, at once, or a model that computes."""

    @each(
        "text",
        ["", "[]", "null", "{", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, "{}", "\ud800", '{"model_type": []}',
         '{"model_type": "mamba2", "architectures": 3, "auto_map": 3}', '{"d_model": 8, "n_layer": 2, "ssm_cfg": []}',
         '{"d_model": 8, "n_layer": 2, "vocab_size": 1e999}',
         '{"d_model": 8, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2", "dt_limit": [1, "x"]}}',
         '{"d_model": 8, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [[]], "attn_cfg": {}}'],
    )  # fmt: skip
    def test_of_another_form(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert_refused(tmp_path, load=load_config)

    @each("key", ["attn_implementation", "_attn_implementation", "_experts_implementation"])
    @each("value", ["org/kernel", {"": "org/kernel:name"}])
    def test_a_kernel_of_the_hub_is_not_fetched(self, key: str, value: Any, tmp_path: Path) -> None:
        """At the top and in a nested config; with trust transformers decides."""
        pico_family("mamba2").save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        good = json.loads(file.read_text())
        for changed in ({key: value}, {"text_config": {key: value}}):
            file.write_text(json.dumps({**good, **changed}))
            assert_refused(tmp_path, f"{key}: ", "org/kernel", "base.trust_remote_code", load=load_config)

    @each("name", ["mamba2", "llamba", "zamba2", "nemotron_h"])
    def test_sizes_that_no_model_has(self, name: str, tmp_path: Path) -> None:
        pico_family(name).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        good = json.loads(file.read_text())
        fields = {key for key in good if key in config_checks.SIZES} | set(good.get("ssm_cfg", ()))
        assert len(fields & config_checks.SIZES) > 4
        for field in fields & config_checks.SIZES:
            for value in (0, 2.5, True, 2**40):
                changed = {**good, field: value}
                if field not in good:
                    changed = {**good, "ssm_cfg": {**good["ssm_cfg"], field: value}}
                file.write_text(json.dumps(changed))
                assert_refused(tmp_path, field, str(value), load=load_config)

    @each("name", ["mamba2", "llamba", "nemotron_h", "llama"])
    def test_millions_of_layers_and_words_are_refused_at_once(self, name: str, tmp_path: Path) -> None:
        model = pico_family(name)
        model.save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        good = json.loads(file.read_text())
        layers = next(key for key in ("layers_block_type", "num_hidden_layers", "n_layer") if key in good)
        many = good[layers] * 10**5 if isinstance(good[layers], list) else 10**7
        file.write_text(json.dumps({**good, layers: many}))
        assert_refused(tmp_path, layers, "layers", load=load_config)
        file.write_text(json.dumps({**good, "vocab_size": 2**31 - 1}))
        assert_refused(tmp_path, "parameters")

    @each(
        ("field", "value"),
        [("quantization_config", {"quant_method": "nope"}), ("dtype", "float99"), ("time_step_limit", []),
         ("quantization_config", {"quant_method": "gptq", "bits": 4}), ("n_groups", 3), ("is_encoder_decoder", True)],
    )  # fmt: skip
    def test_a_model_that_cannot_be_built_or_run(self, field: str, value: object, tmp_path: Path) -> None:
        pico_family("mamba2").save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
        assert_refused(tmp_path)


class TestFolders:
    """What a folder of weights is: the model that it holds, or one line that says what to do."""

    def test_other_formats_are_named(self, tmp_path: Path) -> None:
        for patterns, what, _ in FOREIGN:
            for pattern in patterns:
                folder = tmp_path / f"folder{len(list(tmp_path.iterdir()))}"
                file = folder / pattern.replace("*", "1")
                file.parent.mkdir(parents=True)
                file.write_text('{"base_model_name_or_path": "lab/base"}')
                assert_refused(folder, f"It is {what}. ", *["lab/base"] * ("PEFT" in what), load=load_config)
                (folder / "config.json").write_bytes((BASE / "config.json").read_bytes())
                if "PEFT" in what:  # transformers would apply it
                    assert_refused(folder, "adapter_config.json", "merge_and_unload", load=load_config)
                else:
                    assert_refused(folder, f"It is {what}. ")

    def test_a_model_inside_is_named(self, tmp_path: Path) -> None:
        for name in ("checkpoint-90", "checkpoint-750", "notes"):
            (tmp_path / "out" / name).mkdir(parents=True)
            (tmp_path / "out" / name / ("config.json" if "-" in name else "a.txt")).write_text("{}")
        assert_refused(tmp_path / "out", "2 checkpoints", "out/checkpoint-750. Use it.", load=load_config)
        (tmp_path / "hub" / "snapshots" / "f00d").mkdir(parents=True)
        (tmp_path / "hub" / "snapshots" / "f00d" / "config.json").write_text("{}")
        assert_refused(tmp_path / "hub", "hub/snapshots/f00d. Use it.", load=load_config)

    @each(
        ("name", "prefix"),
        [("mamba2", ""), ("nemotron_h", "module."), ("bamba", "_orig_mod.module."), ("mamba2", "student.")],
    )
    def test_prefixes_and_other_file_names(self, name: str, prefix: str, tmp_path: Path) -> None:
        """Shards without an index under any name, and a prefix of all tensors: the same model, converted too."""
        model = pico_family(name)
        model.save_pretrained(tmp_path / "own")
        state = load_file(tmp_path / "own" / "model.safetensors")
        (tmp_path / "own" / "model.safetensors").unlink()
        names = sorted(state)
        for number, part in enumerate((names[::2], names[1::2]), 1):
            save_file({prefix + n: state[n] for n in part}, tmp_path / "own" / f"x-{number}-of-2.safetensors")
        convert(base_of(tmp_path / "own"), tmp_path / "new")
        assert load_file(tmp_path / "new" / "model.safetensors").keys() == set(names)
        for place in ("own", "new"):
            loaded = load_model(base_of(tmp_path / place)).state_dict()
            assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())
        (tmp_path / "own" / "x-1-of-2.safetensors").unlink()
        (tmp_path / "own" / "y-1-of-2.safetensors").write_bytes(b"")
        assert_refused(tmp_path / "own", "several weight files and no index")
        (tmp_path / "own" / "y-1-of-2.safetensors").rename(tmp_path / "own" / "x-3-of-3.safetensors")
        (tmp_path / "own" / "x-2-of-2.safetensors").rename(tmp_path / "own" / "x-2-of-3.safetensors")
        assert_refused(tmp_path / "own", "2 of 3 shards", "no x.safetensors.index.json")

    @each("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
    def test_weights_and_config_agree_on_quantization(self, dtype: torch.dtype, tmp_path: Path) -> None:
        for says, packed in ((False, True), (True, False)):
            folder = transformers_format(tmp_path / str(says), state_of(tiny("Mamba2")))
            file, tensors = folder / "config.json", load_file(folder / "model.safetensors")
            name = f"{MIXER}.in_proj.weight"
            if packed:
                tensors[name.replace("weight", "qweight") if dtype == torch.int32 else name] = tensors[name].to(dtype)
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            else:
                packed_by = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
                file.write_text(json.dumps({**json.loads(file.read_text()), **packed_by}))
            words = ("not quantized (float32)", "Remove the key") if says else ("quantized", "no quantization_config")
            assert_refused(folder, *words)
            with pytest.raises(ModelError, match=words[-1]):
                convert(base_of(folder), tmp_path / "new")


class TestConfigs:
    """A config.json states one model: that which its class computes and which was published."""

    @each("name", ["mamba2", "llamba", "bamba", "zamba2", "nemotron_h"])
    def test_dt_is_limited_as_published(self, name: str, tmp_path: Path) -> None:
        pico_family(name).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        good = json.loads(file.read_text())
        for low, high in ((0.0, math.inf), (0.25, math.inf), (0.0, 0.5)):
            file.write_text(json.dumps({**good, "time_step_limit": [low, high]}))
            try:
                model = load_model(base_of(tmp_path))
            except ModelError as error:
                assert high == 0.5 and "no upper limit of dt" in str(error)
                continue
            limits = [tuple(m.time_step_limit) for m in model.modules() if hasattr(m, "time_step_limit")]
            assert all(limit in ((low, high), (max(low, STEP_MIN), high)) for limit in limits)

    @each(
        ("name", "change", "key"),
        [
            ("nemotron_h", {"hybrid_override_pattern": "M|M*"}, "hybrid_override_pattern: M|M*"),
            ("nemotron_h", {"hybrid_override_pattern": "MM*"}, "hybrid_override_pattern: MM*"),
            ("nemotron_h", {"num_hidden_layers": 9}, "num_hidden_layers: 9"),
            ("granite", {"layers_block_type": ["mamba"] * 3}, "layer_types"),
            ("granite", {"attn_layer_indices": [0]}, "attn_layer_indices: [0]"),
            ("bamba", {"layers_block_type": ["mamba"] * 3}, "layers_block_type"),
            ("zamba2", {"hybrid_layer_ids": [0]}, "hybrid_layer_ids: [0]"),
        ],
    )
    def test_layers_are_stated_once(self, name: str, change: dict[str, Any], key: str, tmp_path: Path) -> None:
        pico_family(name).save_pretrained(tmp_path)
        load_config(base_of(tmp_path))
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        assert_refused(tmp_path, "config.json", key, load=load_config)

    @each("name", ["granite", "bamba", "nemotron_h"])
    def test_a_model_without_an_ssm_is_not_spliced(self, name: str) -> None:
        kinds = ["full_attention"] * 3
        layers = {"granite": {"layer_types": kinds}, "bamba": {"attn_layer_indices": [0, 1, 2]}}
        config = pico_family_config(name, **layers.get(name, {"layers_block_type": kinds}))
        with refused(PlanError, "no layer with an SSM"):
            check_splices(config)

    def test_files_that_are_read_whole_are_bounded(self, tmp_path: Path) -> None:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            folder = transformers_format(tmp_path / name, state_of(tiny("Mamba2")))
            with open(folder / name, "ab") as file:
                file.truncate(10**12)
            load = load_config if name == "config.json" else load_tokenizer
            assert_refused(folder, name, "1,000,000,000,000 bytes", load=load)
            with pytest.raises(ModelError, match=r"1,000,000,000,000 bytes"):
                convert(base_of(folder), tmp_path / "new")


class TestTokenizers:
    """A tokenizer's files are a stranger's too, and the library raises bare exceptions, or panics."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for file in (*BASE.glob("tokenizer*"), BASE / "config.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    @each("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
    def test_a_file_of_another_form(self, folder: Path, name: str) -> None:
        """It loads and works, or is refused in one line."""
        for content in (b"", b"[]", b"null", b"\xff\xfe\0", b"[" * 100_000, b"{}", b'{"a":' * 900):
            (folder / name).write_bytes(content)
            try:
                tokenizer = load_tokenizer(base_of(folder))
                check_vocabulary(tokenizer, load_config(base_of(folder)))
                tokenizer.decode(tokenizer(["one 7", "b"], padding=True)["input_ids"][0])
            except ModelError as error:
                assert "\n" not in str(error) and len(str(error)) < 800
        (folder / name).write_bytes((BASE / "tokenizer.json").read_bytes()[:2000])
        assert_refused(folder, "base.tokenizer", load=load_tokenizer)


@each("name", ["./bsae", "runs/bsae"])
def test_a_folder_of_a_similar_name_is_proposed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a path, and for a name that could be a model's on the Hub. Folders that hold no model are not proposed."""
    monkeypatch.chdir(tmp_path)
    for folder in ("base", "runs/base", "runs/bsae2"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("base/config.json", "runs/base/config.json"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError, match=f"Did you mean {name.removeprefix('./').replace('bsae', 'base')}\\?"):
        load_config(Base(model=name))
    with pytest.raises(ModelError) as caught:
        load_config(Base(model="./nothing-like-it"))
    assert "Did you mean" not in str(caught.value)


@each("load", [load_config, load_model, load_tokenizer, revision_of, check_finite])
@each("field", ["control.model", "CHECKPOINT"])
def test_errors_name_the_key_or_the_argument_of_the_model(load: Any, field: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder") as error:
        load(Base(model=str(tmp_path / "nothing")).named(field))
    assert error.value.field == field
    with pytest.raises(ModelError) as error:
        load(Base(model=str(tmp_path / "nothing")))
    assert error.value.field == "base.model"


def test_a_model_of_a_run_has_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    """That of the base before the export is written, and that of the export then, which may be all that is left."""
    trained = tmp_path / "run" / "trained"
    pico_base().save_pretrained(trained)
    pico_tokenizer().save_pretrained(tmp_path / "base")
    mark(tmp_path / "run", "run")
    (tmp_path / "run" / "recipe.yaml").write_text(to_yaml(Recipe(name="run", base={"model": str(tmp_path / "base")})))
    for name in ("base", "run/export"):
        assert Path(load_tokenizer(Base(model=str(trained))).name_or_path) == tmp_path / name
        (tmp_path / "base").rename(tmp_path / "run" / "export") if name == "base" else None
    assert not has_tokenizer(Base(model=str(trained)))


def test_tokenizers_with_equal_tokens_that_split_differently_do_not_encode_alike() -> None:
    one, other = pico_tokenizer(), copy.deepcopy(pico_tokenizer())
    assert encode_alike(one, other)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert one.get_vocab() == other.get_vocab() and not encode_alike(one, other)
