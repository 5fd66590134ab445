"""What adapters, quantisers, trainers and savers do: they replace a hybrid's modules, and save it with its code."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA_DEFAULTS
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import surgery.hybrid
from surgery.hybrid.modeling_hybrid import HybridMixerMixin
from surgery.models.lookup import family_of, mixer_of
from tests.support.battery import base, logits, trained
from tests.support.cases import each
from tests.support.kernels import with_kernels
from tests.support.pico import SPLICED_FAMILIES, tokens

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}
READ_DIRECTLY = ("dt_proj",)  # plain Mamba-1 multiplies with its weight, past the module
SHIPPED = Path(surgery.hybrid.__file__).parent


def projections(name: str, mode: str) -> list[str]:
    """The linear maps of the mixers that take a splice, and of their branches, as PEFT finds them."""
    found = {
        f"{site.path.rsplit('.', 1)[-1]}.{key}"
        for site in family_of(base(name).config).sites(base(name).config)
        for key, module in mixer_of(trained(name, mode), site).named_modules()
        if isinstance(module, nn.Linear) and key not in READ_DIRECTLY
    }
    return sorted(found)


class Wrapped(nn.Module):
    """As a quantiser's: another module, in whose weights the projection is rounded to eight bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight_int8 = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.bias = linear.bias

    def dequantized(self) -> Tensor:
        return self.weight_int8 * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantized(), self.bias)


def replace_projections(model: nn.Module, make: Any) -> None:
    for key, module in list(model.named_modules()):
        parent, _, last = key.rpartition(".")
        if isinstance(module, nn.Linear) and last not in ("lm_head", *READ_DIRECTLY):
            setattr(model.get_submodule(parent), last, make(module))


@each("name", SPLICED_FAMILIES)
def test_default_adapters_train_and_others_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT finds targets by itself, and no fused kernel bypasses one. An adapter that the scan bypasses raises."""
    monkeypatch.delitem(LORA_DEFAULTS, trained(name).config.model_type, raising=False)
    with_kernels(monkeypatch)
    adapted = get_peft_model(copy.deepcopy(trained(name)), LoraConfig(task_type="CAUSAL_LM", r=2)).train()
    adapted(tokens(), labels=tokens()).loss.backward()
    gradients = {key: parameter.grad for key, parameter in adapted.named_parameters() if "lora_B" in key}
    mixers = [m for m in trained(name).modules() if isinstance(m, HybridMixerMixin)]
    assert len(gradients) >= 2 * len(mixers) and all(g is not None and g.any() for g in gradients.values())
    if name != "llamba":  # which calls its convolution
        path = family_of(trained(name).config).sites(trained(name).config)[0].path
        channels = trained(name).get_submodule(path).conv1d.groups
        adapted = get_peft_model(
            copy.deepcopy(trained(name)), LoraConfig(r=channels, target_modules=[f"{path}.conv1d"])
        )
        with pytest.raises(ValueError, match=r"^target_modules: conv1d has an adapter"):
            adapted.train()(tokens())


@each("name", SPLICED_FAMILIES)
@each("mode", ["add", "replace"])
class TestReplacedModules:
    def test_adapters_are_the_same_when_merged(self, name: str, mode: str) -> None:
        """LoRA on each projection of a spliced mixer: what it computes beside the weight and as part of it."""
        for target in projections(name, mode):
            adapted = get_peft_model(copy.deepcopy(trained(name, mode)), LoraConfig(r=4, target_modules=[target]))
            for number, (key, parameter) in enumerate(adapted.named_parameters()):
                if "lora_B" in key:
                    parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.3
            beside = logits(adapted.eval(), tokens())
            merged = logits(adapted.merge_and_unload(), tokens())
            torch.testing.assert_close(merged, beside, **CLOSE, msg=lambda text, t=target: f"{t}: {text}")
            assert (beside - logits(trained(name, mode), tokens())).abs().max() > 0.1, target

    def test_other_modules_may_stand_in_the_place_of_projections(self, name: str, mode: str) -> None:
        """With a quantiser's modules as with their rounded weights; also copied, and with a cache."""
        rounded, wrapped = copy.deepcopy(trained(name, mode)), copy.deepcopy(trained(name, mode))
        replace_projections(wrapped, Wrapped)
        for key, module in wrapped.named_modules():
            if isinstance(module, Wrapped):
                rounded.get_submodule(key).weight.data = module.dequantized()
        expected = logits(rounded, tokens())
        for model in (wrapped, copy.deepcopy(wrapped)):
            torch.testing.assert_close(logits(model, tokens()), expected, **CLOSE)
        torch.testing.assert_close(logits(wrapped, tokens(), use_cache=True), expected, **CLOSE)

    def test_a_copy_of_a_projection_is_a_projection(self, name: str, mode: str) -> None:
        """Its hooks do not bring the mixer along."""
        model = trained(name, mode)
        for site in family_of(model.config).sites(model.config):
            mixer = mixer_of(model, site)
            for part in (getattr(mixer, key) for key in ("out_proj", "x_proj") if hasattr(mixer, key)):
                hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
                assert not any(isinstance(value, HybridMixerMixin) for hook in hooks for value in vars(hook).values())

    def test_nothing_reaches_a_replaced_head(self, name: str, mode: str) -> None:
        """Whatever stands at `out_proj`: it takes zeros from the silenced channels, and from those alone."""
        model, seen = copy.deepcopy(trained(name, mode)), dict[str, Tensor]()

        class Looking(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                seen[self.key] = x
                return super().forward(x)

        sites = {site["layer"]: site for site in model.config.splice}
        specs = [s for s in family_of(model.config).mixers(model.config) if s.is_ssm and s.layer in sites]
        for spec in specs:
            mixer = mixer_of(model, spec)
            other = Looking(mixer.out_proj.in_features, mixer.out_proj.out_features, mixer.out_proj.bias is not None)
            other.key, mixer.out_proj = spec.name, other
        logits(model, tokens())
        for spec in specs:
            heads = seen[spec.name].unflatten(-1, (-1, sites[spec.layer]["head_dim"])).abs().amax((0, 1, 3))
            silent = sites[spec.layer]["heads"] if mode == "replace" else []
            assert [h for h, most in enumerate(heads) if most == 0] == sorted(silent)


@each("name", SPLICED_FAMILIES)
def test_gradient_checkpointing_of_the_config(name: str) -> None:
    """As in the plain class: on in every block, and no longer in the config."""
    found = []
    for model in (base(name), trained(name)):
        config = copy.deepcopy(model.config)
        config.gradient_checkpointing = True
        again = type(model)(config)
        blocks = [m.gradient_checkpointing for m in again.modules() if hasattr(m, "gradient_checkpointing")]
        found.append((again.is_gradient_checkpointing, all(blocks), hasattr(config, "gradient_checkpointing")))
    assert found == [(True, True, False)] * 2


@each("name", SPLICED_FAMILIES)
class TestMasksOfACache:
    @each("new", [1, 3])
    def test_a_mask_of_the_new_tokens_alone(self, name: str, new: int) -> None:
        """Means what the whole mask means; so does one that is longer, for a cache of fixed size."""
        model, ids = trained(name), tokens(2, 9 + new)
        whole = logits(model, ids)[:, 9:]
        for width in (None, new, 9 + new, 14 + new):
            with torch.no_grad():
                before = model(ids[:, :9], use_cache=True)
                mask = None if width is None else torch.ones(2, width, dtype=torch.long)
                given = {"cache": before.cache, "use_cache": True}
                found = model(ids[:, 9:], attention_mask=mask, **given).logits
            torch.testing.assert_close(found, whole, **CLOSE, msg=lambda text, w=width: f"{w}: {text}")

    def test_any_other_width_is_refused(self, name: str) -> None:
        model, ids = trained(name), tokens(2, 12)
        before = model(ids[:, :9], use_cache=True)
        given = {"cache": before.cache}
        for width in (1, 2, 4, 11):
            with pytest.raises(ValueError, match=rf"^attention_mask: {width} columns\. It needs 12, .* or 3, "):
                model(ids[:, 9:], attention_mask=torch.ones(2, width), **given)
        with pytest.raises(ValueError, match=r"^attention_mask: 5 columns\. It needs 12, one for each token"):
            model(ids, attention_mask=torch.ones(2, 5), use_cache=False)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_masks_of_a_cache_in_a_compiled_model(kind: Any) -> None:
    """The same mask as without compiling; with a cache of fixed size an error for another width than the text's."""
    model = trained("mamba2")
    cache = kind(config=model.config) if kind is DynamicCache else kind(config=model.config, max_cache_len=24)
    given: dict[str, Any] = {"cache": cache, "use_cache": True}
    with torch.no_grad():
        model(tokens(2, 9), **given)

    def whole_mask(mask: Tensor) -> Tensor:
        return model.backbone._whole_mask(mask, 3, cache)

    for width in (3, 12, 20):
        mask = torch.ones(2, width, dtype=torch.long)
        torch._dynamo.reset()
        compiled = torch.compile(whole_mask, backend="eager", fullgraph=True)
        if kind is StaticCache and width != 12:
            with pytest.raises(RuntimeError, match="attention_mask: it needs one column for each token"):
                compiled(mask)
        else:
            assert torch.equal(compiled(mask), whole_mask(mask)) and whole_mask(mask).shape == (2, 12)


@each("name", SPLICED_FAMILIES)
class TestSavingWithCode:
    def test_the_code_travels(self, name: str, tmp_path: Path) -> None:
        """Of the whole model, of the one without its head, and of the config: byte for byte, and named in full."""
        model = trained(name)
        for part in (model, model.base_model, model.config):
            copy.deepcopy(part).save_pretrained(tmp_path / type(part).__name__)
            found = {file.name: file.read_bytes() for file in (tmp_path / type(part).__name__).glob("*.py")}
            assert found and all((SHIPPED / file).read_bytes() == code for file, code in found.items())
            config = json.loads((tmp_path / type(part).__name__ / "config.json").read_text())
            classes = (type(model.config), type(model.base_model), type(model))
            module = classes[0].__module__.rsplit(".", 1)[-1]
            assert f"{module}.py" in found
            autos = dict(zip(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), classes, strict=True))
            autos["AutoModelForDecision"] = classes[-1]  # which `transformers serve` loads
            assert config["auto_map"] == {auto: f"{module}.{cls.__name__}" for auto, cls in autos.items()}
