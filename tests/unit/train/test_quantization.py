"""QLoRA: which layers are quantized, what trains, what is merged, resuming, and what stock libraries load.

Tests run with bitsandbytes if it is installed, otherwise with a stand-in (tests/support/four_bits.py).
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from surgery.errors import ModelError, RecipeError
from surgery.models.config_checks import check_unquantized
from surgery.recipe import Train
from surgery.run.memory_estimate import weight_bytes
from surgery.splice.plan import check_splices
from surgery.train import lora
from surgery.train.quantization import BITS_PER_WEIGHT, quantizable, quantization_of, quantized
from tests.support import four_bits
from tests.support.pico import SPLICED_FAMILIES, pico_base, pico_family, pico_hybrid, pico_site
from tests.unit.train import common
from tests.unit.train.common import FAST, KV, logits, moved, weights

WIDE: dict[str, Any] = {"hidden_size": 64, "expand": 1}
SHAPE: dict[str, Any] = {"vocab_size": 1024, "layers": 2, **WIDE}
TEXT = {"task": "sentence", "rows": 2, "weights": {"base_kl": 1.0}}
NF4 = {"trainable": "lora", "lora": {"rank": 2, "quantization": "nf4"}}
real = pytest.mark.skipif(not four_bits.HAS_BITSANDBYTES, reason="bitsandbytes is not installed")


@pytest.fixture(autouse=True)
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    four_bits.install(monkeypatch)


def section(**given: Any) -> Train:
    return Train.model_validate({"optimizer": FAST, "sources": [KV], "steps": 3, **NF4, **given})


def settings(**given: Any) -> BitsAndBytesConfig:
    made = section(**given)
    config = quantization_of(made, made)
    assert config is not None
    return config


def hybrid() -> PreTrainedModel:
    return pico_hybrid([pico_site(1)], **SHAPE)


def two_stages(first: str = "all", **more: Any) -> Train:
    before = {"name": "first", "steps": 1, "sources": [KV, TEXT], "optimizer": FAST, "trainable": first}
    after = {"name": "second", "steps": 3, "sources": [KV], "optimizer": FAST, **NF4}
    return Train.model_validate({"stages": [before, after], **more})


def fit(model: PreTrainedModel, made: Train, **more: Any) -> list[dict[str, float]]:
    return common.fit(model, made, common.plan(**WIDE), **more)


CPU = torch.device("cpu")


class TestLayers:
    def test_only_layers_that_are_called_as_modules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("surgery.train.quantization.BLOCK", 1)
        for family in SPLICED_FAMILIES:
            model = pico_family(family)
            layers = quantizable(model)
            names = {name.rpartition(".")[2] for name in layers}
            assert {"in_proj", "out_proj"} <= names and not {"x_proj", "dt_proj", "lm_head", "conv1d"} & names, family
            assert model.get_output_embeddings() not in layers.values()
            with quantized([model], settings(), CPU):  # a weight that is read directly would have half its columns
                assert logits(model).isfinite().all(), family

    def test_neither_spliced_heads_nor_parts_of_blocks(self) -> None:
        names = set(quantizable(hybrid()))
        assert names == {f"backbone.layers.{n}.mixer.{name}" for n in (0, 1) for name in ("in_proj", "out_proj")}
        layers = quantizable(pico_hybrid([pico_site(1)], layers=2))  # 32 inputs of in_proj, 64 of out_proj
        assert {name.rpartition(".")[2] for name in layers} == {"out_proj"}

    def test_the_model_computes_with_rounded_weights_and_is_restored(self) -> None:
        model, rounded, before = hybrid(), hybrid(), weights(hybrid())
        with quantized([model], settings(), CPU) as unquantized:
            for name in unquantized:
                layer = model.get_submodule(name)
                assert (
                    layer.weight.dtype == torch.uint8 and layer.weight.numel() * 2 == unquantized[name].weight.numel()
                )
                rounded.get_submodule(name).weight.data = four_bits.weight_of(layer)
                error = (rounded.get_submodule(name).weight - unquantized[name].weight).norm()
                assert 0 < error < 0.15 * unquantized[name].weight.norm()
            torch.testing.assert_close(logits(model), logits(rounded), atol=1e-4, rtol=1e-4)
        assert moved(before, model) == set() and before.keys() == weights(model).keys()

    def test_a_frozen_base_shares_equal_layers_and_is_restored_after_an_error(self) -> None:
        model, base = hybrid(), pico_base(**SHAPE)
        other = "backbone.layers.0.mixer.out_proj"
        model.get_submodule(other).weight.data.mul_(2)
        before = weights(base)
        with pytest.raises(KeyError), quantized([model, base], settings(), CPU) as unquantized:
            shared = {name for name in unquantized if model.get_submodule(name) is base.get_submodule(name)}
            assert shared == set(unquantized) - {other}
            raise KeyError
        assert moved(before, base) == set()


class TestTraining:
    def test_heads_and_adapters_train_and_are_merged_into_the_unquantized_weights(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, base, before, deltas = hybrid(), pico_base(**SHAPE), weights(hybrid()), dict[str, Tensor]()
        merge = lora.Adapters.merge

        def recorded(self: lora.Adapters, *args: Any) -> None:
            for name, module in self.model.named_modules():
                if isinstance(module, LoraLayer):
                    deltas[f"{name}.weight"] = module.get_delta_weight("default").detach()
            merge(self, *args)

        monkeypatch.setattr(lora.Adapters, "merge", recorded)
        base_before = weights(base)
        history = fit(model, section(sources=[KV, TEXT]), base=base)
        assert len(history) == 3 and all(entry["base_kl"] >= 0 for entry in history)
        assert len(deltas) == 4 and all(delta.abs().max() > 0 for delta in deltas.values())
        for name, p in model.named_parameters():
            if name in deltas:
                torch.testing.assert_close(p, before[name] + deltas[name])
            else:
                assert torch.equal(p, before[name]) != (".attention." in name)
        assert moved(base_before, base) == set()
        assert not hasattr(model, "is_loaded_in_4bit") and all(
            type(m) is not four_bits.Linear4bit for m in model.modules()
        )

    def test_fused_kernels_get_no_weight_of_4_bits(self) -> None:
        """Also where `out_proj` has no adapter."""
        model, seen = hybrid(), list[bool]()
        model.backbone.layers[0].mixer.norm.register_forward_hook(
            lambda *_: seen.append(model.backbone.layers[0].mixer.training)
        )
        fit(model, section(steps=1, lora={"rank": 2, "targets": ["in_proj"], "quantization": "nf4"}))
        assert seen and not any(seen)

    @pytest.mark.parametrize("first", ["", "new_heads", "all"])
    def test_a_resumed_training_ends_with_the_same_weights(self, tmp_path: Path, first: str) -> None:
        """Biases are trained too."""
        made = two_stages(first, save_every=1) if first else section(save_every=1)
        shape = SHAPE | {"use_bias": True}
        whole, resumed, stopped = (pico_hybrid([pico_site(1)], **shape) for _ in range(3))
        bases = [pico_base(**shape) for _ in range(3)]
        fit(whole, made, base=bases[0])
        common.fit_until(made.num_all_steps - 1, stopped, made, common.plan(**WIDE), base=bases[1], folder=tmp_path)
        assert list(tmp_path.rglob("step_*/model.safetensors"))
        assert bool(list(tmp_path.rglob("unquantized"))) == (first == "all")
        history = fit(resumed, made, base=bases[2], folder=tmp_path)
        assert [entry["step"] for entry in history] == list(range(1, made.num_all_steps + 1))
        assert moved(weights(whole), resumed) == set()
        for base in bases:  # also after a stage that shared its weights
            assert moved(weights(pico_base(**shape)), base) == set()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match=r"lora.quantization: nf4` needs `trainable: lora`"):
        section(trainable="all")
    with pytest.raises(ValidationError, match="'nf4'"):
        section(lora={"quantization": "int8"})
    monkeypatch.undo()
    monkeypatch.setattr("surgery.train.quantization.version", lambda _: version("no-such-package"))
    with pytest.raises(RecipeError, match=r"train.lora.quantization: nf4.*pip install bitsandbytes"):
        settings()
    config = pico_base().config
    check_unquantized(config)
    for packed in ({"quant_method": "gptq"}, BitsAndBytesConfig(load_in_4bit=True)):
        config.quantization_config = packed
        with pytest.raises(ModelError, match=r"quantization_config: (gptq|bitsandbytes).*quantization: nf4"):
            check_splices(config)


def test_the_estimate_counts_quantized_layers_as_such() -> None:
    model = hybrid()
    linear = sum(layer.weight.nbytes for layer in quantizable(model).values())
    saved = weight_bytes(model) - weight_bytes(model, is_quantized=True)
    assert saved == pytest.approx(linear * (1 - BITS_PER_WEIGHT / 32), abs=8)
    assert pytest.approx(4.127, abs=5e-4) == BITS_PER_WEIGHT  # arXiv 2305.14314, section 3


@real
class TestBitsandbytes:
    def test_transformers_and_peft_load_the_same_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`spliced/` in 4 bits by BitsAndBytesConfig, with the saved adapters, equals the model that was trained."""
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
        model, trained = hybrid(), dict[str, Tensor]()
        model.save_pretrained(tmp_path / "spliced")

        def record(step: int, _: Any) -> None:
            trained["logits"] = logits(model)

        fit(model, section(), outputs=tmp_path, on_step=record)
        config = settings()
        config.llm_int8_skip_modules = ["lm_head", "backbone.layers.1.mixer.attention"]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "spliced", quantization_config=config)
        loaded = PeftModel.from_pretrained(loaded, str(tmp_path / "adapters")).train()
        torch.testing.assert_close(logits(loaded), trained["logits"], atol=1e-5, rtol=1e-5)
