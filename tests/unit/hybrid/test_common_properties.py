"""What transformers asks of its own models, asked of every hybrid class.

Its common tests are not installed with it; these are the same properties, on hybrids with three spliced heads in two
layers. Where the plain model of a family does not have a property, its hybrid need not: that is said where it is so.
"""

from __future__ import annotations

import copy
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from surgery.hybrid import CLASSES
from surgery.models.runtime import requires_grad, stays_in_fp32
from tests.support.battery import base, logits, shared, stays_fp32, trained
from tests.support.cases import each
from tests.support.pico import SPLICED_FAMILIES, VOCAB, tokens

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}  # logits of these models are up to 30
every_class = each("classes", {c[0].model_type: c for c in CLASSES})
every_spliced = each("name", SPLICED_FAMILIES)
# Models that transformers compiles whole; in the others a cache of fixed size is refused.
COMPILES = ("mamba2", "mamba2attn", "bamba", "granite", "nemotron_h")


def to_train(name: str, **more: Any) -> Any:
    """A copy with gradients."""
    return copy.deepcopy(trained(name, **more)).train().requires_grad_(True)


def saved(model: Any, folder: Path, **more: Any) -> dict[str, Tensor]:
    """Saves, and gives what the files hold."""
    model.save_pretrained(folder, **more)
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert not set(found) & set(opened.keys()), "stored twice"
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **more}
    return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **settings)


@every_class
def test_its_defaults_make_a_config(classes: Any, tmp_path: Path) -> None:
    """Without arguments, by its type, and back from a file the same."""
    config = classes[0]()
    assert config.splice is None and config.to_dict() == AutoConfig.for_model(config.model_type).to_dict()
    config.save_pretrained(tmp_path)
    assert classes[0].from_pretrained(tmp_path).to_dict() == config.to_dict()


@every_spliced
class TestSaving:
    def test_save_and_load(self, name: str, tmp_path: Path) -> None:
        """In several files; every tensor once."""
        model = trained(name)
        stored = saved(model, tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        unique = {v.data_ptr(): v.nbytes for v in model.state_dict(keep_vars=True).values()}
        assert sum(v.nbytes for v in stored.values()) == sum(unique.values())
        again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert torch.equal(logits(again, tokens()), logits(model, tokens())) and shared(again) == shared(model)

    def test_with_and_without_its_head(self, name: str, tmp_path: Path) -> None:
        """`base_model_prefix` is right: each class loads what the other one saved."""
        model = trained(name)
        saved(model, tmp_path / "whole")
        body, info = AutoModel.from_pretrained(tmp_path / "whole", output_loading_info=True)
        assert type(body) is type(model.base_model) and model.base_model is not model and not info["missing_keys"]
        with requires_grad(True, model):
            hidden = [m(tokens(), use_cache=False).last_hidden_state for m in (body, model.base_model)]
        assert torch.equal(*hidden)
        saved(body, tmp_path / "body")
        whole, info = AutoModelForCausalLM.from_pretrained(tmp_path / "body", output_loading_info=True)
        tied = model.config.tie_word_embeddings
        assert {k.split(".")[0] for k in info["missing_keys"]} == (set() if tied else {"lm_head"})
        assert torch.equal(whole.base_model(tokens(), use_cache=False).last_hidden_state, hidden[0])

    def test_missing_weights_are_initialised(self, name: str, tmp_path: Path) -> None:
        """As the class itself would: silent branches, finite numbers, and the stored tensors untouched."""
        model = copy.deepcopy(trained(name))
        state = {k: v for k, v in model.state_dict().items() if ".attention." not in k or "out_proj" in k}
        fewer = {k: v for i, (k, v) in enumerate(sorted(state.items())) if i % 3}
        again, info = type(model).from_pretrained(None, config=model.config, state_dict=fewer, output_loading_info=True)
        assert info["missing_keys"] and all(p.isfinite().all() for p in again.parameters())
        assert all(torch.equal(v, fewer[k]) for k, v in again.state_dict().items() if k in fewer)
        fresh = type(model)(model.config)
        fewer |= {key: Tensor() for group in shared(model) if group & set(fewer) for key in group}
        for (key, ours), (_, theirs) in zip(again.named_parameters(), fresh.named_parameters(), strict=True):
            if key.endswith(("attention.o_proj.weight", "attention.scale")):
                assert torch.equal(ours, theirs), key
            elif key not in fewer and theirs.numel() > 200 and theirs.std() > 0:
                assert 0.7 < ours.std() / theirs.std() < 1.4, key

    def test_weights_may_lie_on_disk(self, name: str, tmp_path: Path) -> None:
        """accelerate brings a module's weights when the module is called: none may be read past its call."""
        if name not in ("mamba2", "mamba", "llamba"):  # one of each kind of mixer
            return
        model, ids = trained(name), tokens(2, 9)
        saved(model, tmp_path / "model")
        away = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "offload"
        )
        assert {p.device.type for p in away.parameters()} == {"meta"}
        assert torch.equal(logits(away, ids), logits(model, ids))
        assert torch.equal(generate(away, ids), generate(model, ids))

    def test_a_new_model_keeps_its_recurrence_in_fp32(self, name: str) -> None:
        """As one that is loaded: a model made from a config in half precision."""
        model = AutoModelForCausalLM.from_config(trained(name).config, dtype=torch.bfloat16)
        kept = [stays_in_fp32(model, key) for key, _ in model.named_parameters()]
        assert [p.dtype == torch.float32 for p in model.parameters()] == kept and 3 <= sum(kept) < len(kept)

    def test_in_bf16(self, name: str, tmp_path: Path) -> None:
        """What decides over decay stays fp32, logits have the dtype that the plain model's have, and all is finite."""
        saved(trained(name), tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        kept = {k for k, p in model.named_parameters() if p.dtype == torch.float32}
        assert kept == {key for key, _ in model.named_parameters() if stays_fp32(key)}
        found = model(tokens(), use_cache=False).logits
        plain = copy.deepcopy(base(name)).to(torch.bfloat16)(tokens(), use_cache=False).logits
        assert found.dtype == plain.dtype and found.isfinite().all()
        exact = logits(trained(name), tokens())
        assert (found.float() - exact).std() < 0.1 * exact.std()

    @each("tied", [True, False])
    def test_tied_weights(self, name: str, tied: bool, tmp_path: Path) -> None:
        """Tied: one tensor, also after a load, stored once. Untied: two, with the numbers that they had."""
        config = copy.deepcopy(trained(name).config)
        config.tie_word_embeddings = tied
        model = type(trained(name))(config)
        if name == "nemotron_h" and tied:  # the plain class ties nothing, whatever its config says
            assert base(name)._tied_weights_keys == model._tied_weights_keys == {}
            return
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert (head is embedding) == tied
        stored = saved(model, tmp_path)
        assert ("lm_head.weight" in stored) != tied
        again = type(model).from_pretrained(tmp_path)
        assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied
        assert torch.equal(again.get_output_embeddings().weight, head)
        assert set(model._tied_weights_keys) <= set(model.state_dict())

    def test_resized_embeddings(self, name: str, tmp_path: Path) -> None:
        size = VOCAB + 11 if name in ("mamba2", "llamba", "zamba2") else VOCAB - 9
        model = copy.deepcopy(trained(name))
        before = logits(model, tokens() % (VOCAB - 9))
        model.resize_token_embeddings(size, mean_resizing=False)
        assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
        after = logits(model, tokens() % (VOCAB - 9))
        least = min(size, VOCAB)
        assert after.shape[-1] == size
        torch.testing.assert_close(after[..., :least], before[..., :least], **CLOSE)
        saved(model, tmp_path)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), tokens() % (VOCAB - 9)), after)


@every_spliced
class TestForward:
    def test_embeddings_instead_of_tokens(self, name: str) -> None:
        model, ids = trained(name), tokens(2, 9)
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(logits(model, None, inputs_embeds=embedded), logits(model, ids))
        if "inputs_embeds" not in signature(base(name).prepare_inputs_for_generation).parameters:
            assert name in ("zamba2", "bamba", "nemotron_h")  # the plain model refuses
            return
        new = model.generate(inputs_embeds=embedded, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(new, generate(model, ids, max_new_tokens=4)[:, 9:])

    def test_attentions_are_those_of_every_layer_that_attends(self, name: str) -> None:
        """From below, the family's own (as the plain model gives them) and the branches', whose rows are known."""
        model, ids = copy.deepcopy(trained(name)), tokens(2, 9)
        model.set_attn_implementation("eager")
        given = {"use_cache": False, "splice_queries": torch.arange(9).expand(2, 9)}
        found = model(ids, output_attentions=True, **given)
        spliced = [site["layer"] for site in model.config.splice]
        kinds = getattr(model.config, "layers_block_type", None) or ()
        own = [layer for layer, kind in enumerate(kinds) if kind in ("full_attention", "hybrid")]
        own += getattr(model.config, "attn_layer_idx", None) or []
        layers = sorted(spliced + own)
        assert len(found.attentions) == len(layers)
        weights = dict(zip(layers, found.attentions, strict=True))
        for layer, rows in zip(spliced, found.splice_attentions, strict=True):
            torch.testing.assert_close(weights[layer], rows.to(weights[layer].dtype), **CLOSE)
        assert all(w.shape == (2, 4, 9, 9) and (w.sum(-1) - 1).abs().max() < 1e-5 for w in map(weights.get, own))
        body = model.base_model(ids, output_attentions=True, use_cache=False)
        assert all(map(torch.equal, body.attentions, found.attentions)) and model(ids).attentions is None
        kept = model.requires_grad_(True)(ids, output_attentions=True, use_cache=False)
        for weight in kept.attentions:
            weight.retain_grad()
        kept.logits.flatten()[-1].backward()
        assert all(weight.grad is not None and weight.grad.any() for weight in kept.attentions)
        model.set_attn_implementation("sdpa")
        assert model(ids, output_attentions=True, use_cache=False).attentions == ()


@every_spliced
class TestTraining:
    def test_loss_is_the_mean_over_labels(self, name: str) -> None:
        """Shifted by one, without those of -100; over `num_items_in_batch` where a trainer says how many there are."""
        model, ids = trained(name), tokens(2, 9)
        labels = ids.clone()
        labels[0, :4] = -100
        output = model(ids, labels=labels, use_cache=False)
        flat, wanted = output.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        total = torch.nn.functional.cross_entropy(flat, wanted, reduction="sum")
        torch.testing.assert_close(output.loss, total / (wanted != -100).sum())
        scaled = model(ids, labels=labels, use_cache=False, num_items_in_batch=40).loss
        torch.testing.assert_close(scaled, total / 40)

    def test_every_weight_has_a_gradient(self, name: str) -> None:
        """Training for real: a backward pass reaches all parameters, and a step makes the loss smaller."""
        model, ids = to_train(name), tokens(2, 12)
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        before = model(ids, labels=ids).loss.item()
        with torch.no_grad():
            norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
            for p in model.parameters():
                p -= 0.02 * p.grad / norm
        assert model(ids, labels=ids).loss.item() < before

    def test_checkpointing_gives_the_same_gradients(self, name: str) -> None:
        found, ids = [], tokens(2, 9)
        for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
            model = to_train(name)
            if options:
                model.gradient_checkpointing_enable(options)
                assert model.is_gradient_checkpointing
            model(ids, labels=ids).loss.backward()
            found.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
        for gradients in found[1:]:
            assert gradients.keys() == found[0].keys()
            for key, gradient in found[0].items():
                torch.testing.assert_close(gradients[key], gradient, atol=1e-6, rtol=1e-4, msg=key)


@each("argument", ["cache_params", "past_key_values"])
def test_old_names_of_the_cache_are_deprecated(argument: str) -> None:
    for name in ("mamba2", "bamba"):
        model = trained(name)
        with torch.no_grad(), pytest.warns(FutureWarning, match=f"`{argument}` is deprecated"):
            model(tokens(), **{argument: DynamicCache(config=model.config)})


@every_spliced
class TestGenerate:
    def test_goes_on_from_a_cache_with_a_longer_text(self, name: str) -> None:
        """The text so far and three more tokens: what the cache holds is not read again."""
        model, ids = trained(name), tokens(2, 12)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        first = generate(model, ids[:, :9], mask[:, :9], max_new_tokens=1, return_dict_in_generate=True)
        second = generate(model, ids, mask, cache=first.cache)
        assert torch.equal(second, generate(model, ids, mask))

    def test_cache_of_fixed_size(self, name: str) -> None:
        """The same text; it can be compiled whole where transformers does that to the plain model."""
        model, ids = trained(name), tokens(2, 9)
        assert bool(model._can_compile_fullgraph) == bool(base(name)._can_compile_fullgraph) == (name in COMPILES)
        fixed = generate(model, ids, cache_implementation="static")
        assert torch.equal(fixed, generate(model, ids))

    def test_assisted_decoding_is_refused(self, name: str) -> None:
        """States cannot go back to an earlier token."""
        model = trained(name)
        assert model._is_stateful
        with pytest.raises(ValueError, match="stateful"):
            generate(model, tokens(1, 9), assistant_model=model)
        with pytest.raises(ValueError, match="stateful"):
            generate(model, tokens(1, 9), prompt_lookup_num_tokens=2)
