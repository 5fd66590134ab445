"""The plain Llamba: it equals a loop over tokens in fp64 however it is fed, and the published files load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from surgery.hybrid import LlambaConfig, LlambaForCausalLM
from surgery.hybrid.modeling_llamba import LlambaMixer
from tests.support.llamba_loop import HEAD_DIM, full, generate, llamba, llamba_config, loop_logits, loop_mixer, part
from tests.support.pico import HEADS, HIDDEN, STATE, pad, prompts, tokens

VARIANTS: dict[str, dict[str, Any]] = {
    "one key head": {"n_qk_heads": 1},
    "shared keys": {"n_qk_heads": 2},
    "own keys": {"n_qk_heads": 4},
    "tied": {"tie_embeddings": True, "lm_head_bias": True},
    "head bias": {"lm_head_bias": True},
    "biases, no z_bias": {"ssm": {"bias": True}, "mlp_cfg": {"intermediate_size": 40, "bias": True}},
    "wide, silu, three taps": {"ssm": {"expand": 2, "activation": "silu", "d_conv": 3, "conv_bias": False}},
    "final norm": {"norm_epsilon": 0.1},
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
CLOSE = {"atol": 2e-5, "rtol": 1e-5}


def assert_close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact.double(), **CLOSE)


class TestForward:
    @every_variant
    def test_equals_the_loop(self, config: dict) -> None:
        model, ids = llamba(**config), tokens()
        logits = full(model, ids)
        assert_close(logits, loop_logits(model, ids))
        assert logits.dtype == torch.float32 and logits.abs().max() > 1

    @every_variant
    def test_mixer_equals_the_loop_in_fp64(self, config: dict) -> None:
        model = llamba(**config).double()
        mixer, u = model.backbone.layers[1].mixer, torch.randn(1, 21, HIDDEN, dtype=torch.double)
        with torch.no_grad():
            found = mixer(u)[0]
        expected = loop_mixer(part(dict(model.state_dict()), "backbone.layers.1.mixer."), model.config.ssm_cfg, u[0])
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)

    def test_config_decides_the_parameters(self) -> None:
        named = {name: dict(llamba(**config).named_parameters()) for name, config in VARIANTS.items()}
        z_bias, head = "backbone.layers.0.mixer.z_bias", "lm_head.weight"
        for name, parameters in named.items():
            assert (z_bias in parameters) == ("no z_bias" not in name)
            assert (head in parameters) == (name != "tied")
            assert ("lm_head.bias" in parameters) == (name == "head bias")

    def test_causality(self) -> None:
        model, ids = llamba(), tokens()
        changed = ids.clone()
        changed[:, 11] = (ids[:, 11] + 1) % 50 + 3
        before, after = full(model, ids), full(model, changed)
        torch.testing.assert_close(before[:, :11], after[:, :11], atol=1e-6, rtol=0)
        assert ((before - after).abs().amax((0, 2))[11:] > 1e-4).all()

    def test_embeddings_instead_of_tokens(self) -> None:
        model, ids = llamba(), tokens()
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embedded, use_cache=False).logits, full(model, ids))
        with pytest.raises(ValueError, match="exactly one"):
            model(ids, inputs_embeds=embedded)

    def test_what_is_asked_for_comes_back(self) -> None:
        model, ids = llamba(), tokens()
        output = model(ids, use_cache=False, logits_to_keep=2, output_hidden_states=True)
        torch.testing.assert_close(output.logits, full(model, ids)[:, -2:])
        assert output.cache is None and len(output.hidden_states) == 4
        assert torch.equal(output.hidden_states[0], model.get_input_embeddings()(ids))
        assert torch.equal(model.lm_head(output.hidden_states[-1]), full(model, ids))
        assert torch.equal(model(ids, use_cache=False, return_dict=False)[0], full(model, ids))


class TestDecoding:
    @every_variant
    def test_token_by_token(self, config: dict) -> None:
        model, ids = llamba(**config), tokens()
        cache, steps = None, []
        for t in range(ids.shape[1]):
            output = model(ids[:, t : t + 1], cache=cache, use_cache=True)
            cache = output.cache
            steps.append(output.logits)
        assert_close(torch.cat(steps, 1), loop_logits(model, ids))

    @every_variant
    @pytest.mark.parametrize("border", [1, 2, 9, 20])
    def test_several_tokens_after_a_prefix(self, config: dict, border: int) -> None:
        model, ids = llamba(**config), tokens()
        first = model(ids[:, :border], use_cache=True)
        second = model(ids[:, border:], cache=first.cache, use_cache=True)
        assert_close(torch.cat([first.logits, second.logits], 1), loop_logits(model, ids))

    @every_variant
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded_batch_equals_single_prompts(self, side: Any, config: dict) -> None:
        model, rows = llamba(**config), [tokens(1, n, seed=n)[0] for n in (9, 14, 2)]
        ids, mask = pad(rows, side)
        logits = full(model, ids, mask)
        assert logits.isfinite().all()
        for b, row in enumerate(rows):
            assert_close(logits[b][mask[b].bool()], loop_logits(model, row[None])[0])

    def test_left_padded_prefix_then_decode(self) -> None:
        """By hand, the mask growing with the tokens, one and then three at a time."""
        model, rows = llamba(), [tokens(1, n, seed=n)[0] for n in (13, 18)]
        ids, mask = pad(rows, "left")
        output, steps = model(ids[:, :12], attention_mask=mask[:, :12], use_cache=True), []
        for start, end in ((12, 13), (13, 14), (14, 17), (17, 18)):
            cache = output.cache
            output = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
            steps.append(output.logits)
        for b, row in enumerate(rows):
            assert_close(torch.cat(steps, 1)[b], loop_logits(model, row[None])[0, -6:])

    def test_padding_of_the_second_part_is_seen(self) -> None:
        model, row = llamba(), tokens(1, 12)[0]
        ids, mask = pad([row, tokens(1, 16)[0]], "left")
        first = model(ids[:, :2], attention_mask=mask[:, :2], use_cache=True)
        second = model(ids[:, 2:], attention_mask=mask, cache=first.cache, use_cache=True)
        assert_close(second.logits[0, -12:], loop_logits(model, row[None])[0])

    def test_state_does_not_grow(self) -> None:
        model = llamba()
        cache = DynamicCache(config=model.config)
        for length in (9, 5, 1):
            model(tokens(2, length), cache=cache, use_cache=True)
            states = [(slot.conv_states[0].shape, slot.recurrent_states[0].shape) for slot in cache.layers]
            assert states == [((2, HIDDEN + 2 * 2 * STATE, 4), (2, HEADS, HEAD_DIM, STATE))] * 3


class TestGenerate:
    def test_greedy_is_the_argmax_of_a_forward(self) -> None:
        model, ids = llamba(), tokens(length=9)
        greedy = generate(model, ids)
        assert torch.equal(greedy, generate(model, ids, use_cache=False))
        for t in range(8):
            longer = torch.cat([ids, greedy[:, :t]], 1)
            assert torch.equal(full(model, longer)[:, -1].argmax(-1), greedy[:, t])

    def test_beams(self) -> None:
        model, ids = llamba(), tokens(length=9)
        beams = generate(model, ids, num_beams=3)
        assert torch.equal(beams, generate(model, ids, num_beams=3, use_cache=False))
        assert not torch.equal(beams, generate(model, ids)), "these beams never left the greedy path: nothing tested"

    @pytest.mark.parametrize("beams", [1, 3])
    def test_left_padded(self, beams: int) -> None:
        model, rows = llamba(), [tokens(1, n, seed=n)[0] for n in (5, 11)]
        together = generate(model, *pad(rows, "left"), num_beams=beams)
        for b, row in enumerate(rows):
            assert torch.equal(together[b], generate(model, row[None], num_beams=beams)[0])

    def test_sampling(self) -> None:
        model, ids, drawn = llamba(), tokens(length=9), []
        for cached in (True, False):
            torch.manual_seed(0)
            drawn.append(generate(model, ids, do_sample=True, top_k=0, use_cache=cached))
        assert torch.equal(*drawn) and not torch.equal(drawn[0], generate(model, ids))


class TestPrecision:
    def test_state_and_decay_stay_in_fp32(self, tmp_path: Path) -> None:
        model, ids = llamba(), tokens(2, 60)
        model.save_pretrained(tmp_path)
        half = LlambaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert half.backbone.layers[0].mixer.in_proj.weight.dtype == torch.bfloat16
        cache = half(ids, use_cache=True).cache
        assert {slot.recurrent_states[0].dtype for slot in cache.layers} == {torch.float32}
        logits = full(half, ids)
        assert logits.dtype == torch.float32
        assert (logits - full(model, ids)).abs().max() < 0.5

    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("at_once", [False, True])
    def test_slow_decay_is_not_rounded_away(self, at_once: bool, autocast: bool) -> None:
        """A bf16 state that holds 256 forgets what adds 1 to it; a bf16 decay of 0.999 is 1."""
        config = llamba_config(n_qk_heads=1, n_layer=1, ssm={"d_state": 1, "bias": True})
        mixer, cache = LlambaMixer(config, 0).bfloat16(), DynamicCache(config=config)
        for p in mixer.parameters():
            p.data.zero_()
        x, key, decay = 0, HIDDEN, 2 * HIDDEN + 2  # channels of x and B, and the first row of a
        mixer.conv1d.bias.data[[x, key]] = 1
        mixer.in_proj.bias.data[decay] = -7
        kept = 1 / (1 + torch.tensor(-7.0, dtype=torch.double).exp())  # exp(-softplus(-7))
        u = torch.zeros(1, 250, HIDDEN, dtype=torch.bfloat16)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for part_of_u in [u] if at_once else u.split(1, dim=1):
                mixer(part_of_u, cache=cache)
        state = cache.layers[0].recurrent_states[0]
        assert state.dtype == torch.float32
        assert abs(state[0, 0, 0, 0] / ((1 - kept**250) / (1 - kept)) - 1) < 1e-4


class TestTraining:
    def test_gradients_equal_the_loops(self) -> None:
        model = llamba().double()
        mixer, ssm = model.backbone.layers[1].mixer, model.config.ssm_cfg
        u, want = torch.randn(1, 21, HIDDEN, dtype=torch.double), torch.randn(21, HIDDEN, dtype=torch.double)
        names, leaves = zip(*mixer.named_parameters(), strict=True)
        found = torch.autograd.grad((mixer(u)[0] * want).sum(), leaves)
        looped = loop_mixer(dict(zip(names, leaves, strict=True)), ssm, u[0])
        expected = torch.autograd.grad((looped * want).sum(), leaves)
        for name, one, other in zip(names, found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
            assert one.abs().max() > 1e-3, name

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_keeps_gradients(self, reentrant: bool) -> None:
        model, batch = llamba().train(), prompts((9, 14, 12))
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        found: list[dict[str, Tensor]] = []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            model.zero_grad()
            model(batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, gradient in found[0].items():
            torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5)
            assert gradient.abs().max() > 1e-7, name

    def test_loss_is_of_the_next_token(self) -> None:
        model, ids = llamba(pad_vocab_size_multiple=8), tokens()
        labels = ids.clone()
        labels[:, :5] = -100
        output = model(ids, labels=labels)
        expected = F.cross_entropy(output.logits[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten())
        torch.testing.assert_close(output.loss, expected)


def published_tensors(config: LlambaConfig) -> dict[str, Tensor]:
    """Random tensors under the published names, of the published shapes."""
    d, ssm = config.d_model, config.ssm_cfg
    inner, channels = d, d + 2 * ssm["n_qk_heads"] * ssm["d_state"]
    mlp, vocab = config.mlp_cfg["intermediate_size"], 64
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embedding.weight": (vocab, d),
        "backbone.final_layernorm.weight": (d,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (vocab, d)
    for layer in range(config.n_layer):
        own = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "mlp.gate_proj.weight": (mlp, d),
            "mlp.up_proj.weight": (mlp, d),
            "mlp.down_proj.weight": (d, mlp),
            "mixer.in_proj.weight": (channels + inner + ssm["n_v_heads"], d),
            "mixer.z_bias": (inner,),
            "mixer.conv1d.weight": (channels, 1, 4),
            "mixer.conv1d.bias": (channels,),
            "mixer.D": (ssm["n_v_heads"],),
            "mixer.out_proj.weight": (d, inner),
        }
        shapes |= {f"backbone.layers.{layer}.{name}": shape for name, shape in own.items()}
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=rng) * 0.3 for name, shape in shapes.items()}


class TestCheckpoint:
    PUBLISHED = {
        "model_type": "llamba",
        "vocab_size": 61,
        "pad_vocab_size_multiple": 8,
        "lm_head_bias": False,
        "d_model": HIDDEN,
        "n_layer": 2,
        "resid_dropout": 0.0,
        "norm_epsilon": 1e-5,
        "mlp_cfg": {"intermediate_size": 40, "bias": False, "act_fn": "silu"},
        "ssm_cfg": {
            "d_state": 6,
            "n_v_heads": 4,
            "n_qk_heads": 4,
            "expand": 1,
            "chunk_size": 8,
            "activation": "identity",
            "bias": False,
        },
    }

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("pickled", [False, True])
    @pytest.mark.parametrize("kind", [LlambaForCausalLM, AutoModelForCausalLM])
    def test_published_files_load(self, tied: bool, pickled: bool, kind: Any, tmp_path: Path) -> None:
        fields = {**self.PUBLISHED, "tie_embeddings": tied}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        tensors = published_tensors(LlambaConfig(**{k: v for k, v in fields.items() if k != "model_type"}))
        if pickled:
            torch.save(tensors, tmp_path / "pytorch_model.bin")
        else:
            save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model, info = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        held = model.state_dict()
        assert all(torch.equal(held[name], value) for name, value in tensors.items())
        assert set(held) == set(tensors) | ({"lm_head.weight"} if tied else set())
        assert torch.equal(model.lm_head.weight, tensors["backbone.embedding.weight" if tied else "lm_head.weight"])
        assert_close(full(model.eval(), tokens()), loop_logits(model, tokens()))

    @pytest.mark.parametrize("size", [(2048, 16, 8192, 8224), (4096, 32, 14336, 12320)], ids=["1B", "8B"])
    def test_published_shapes(self, size: tuple[int, ...]) -> None:
        width, layers, mlp, rows = size
        config = LlambaConfig(d_model=width, n_layer=layers, mlp_cfg={"intermediate_size": mlp})
        with torch.device("meta"):
            model = LlambaForCausalLM(config)
        assert model.backbone.layers[-1].mixer.in_proj.weight.shape == (rows, width)
        assert model.backbone.embedding.weight.shape == (128256, width) and len(model.backbone.layers) == layers

    @every_variant
    def test_round_trip(self, config: dict, tmp_path: Path) -> None:
        model = llamba(**config, pad_vocab_size_multiple=8, resid_dropout=0.0)
        model.save_pretrained(tmp_path)
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is LlambaForCausalLM
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(full(loaded.eval(), tokens()), full(model, tokens()))
        ours, theirs = model.config.to_dict(), AutoConfig.from_pretrained(tmp_path).to_dict()
        assert all(ours[name] == theirs[name] for name in set(ours) - {"_name_or_path"})
        assert theirs["resid_dropout"] == 0.0 and theirs["vocab_size"] == 64

    def test_config_has_the_usual_names(self) -> None:
        config = llamba_config(tie_embeddings=True)
        assert (config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings) == (HIDDEN, 3, True)
        assert (config.num_heads, config.head_dim, config.n_groups, config.state_size) == (HEADS, HEAD_DIM, 2, STATE)
        assert config.layer_types == ["linear_attention"] * 3 and config.number_of_conv_states == 2
        assert LlambaConfig(hidden_size=64, num_hidden_layers=1).d_model == 64

    @pytest.mark.parametrize(
        ("ssm", "field"),
        [({"n_v_heads": 5}, "n_v_heads"), ({"n_qk_heads": 3}, "n_qk_heads"), ({"activation": "relu"}, "activation")],
    )
    def test_impossible_shapes_are_named(self, ssm: dict, field: str) -> None:
        with pytest.raises(ValueError, match=field):
            llamba_config(**({"n_qk_heads": 1} | {"ssm": ssm}))

    @pytest.mark.parametrize("field", ["d_state", "n_v_heads", "n_qk_heads", "d_conv", "expand", "chunk_size"])
    @pytest.mark.parametrize("value", [None, 0, -4, 2.5, "8", [8], True])
    def test_sizes_are_whole_numbers(self, field: str, value: Any) -> None:
        with pytest.raises(ValueError, match=rf"^ssm_cfg\.{field}: .*\. It needs a whole number of at least 1\.$"):
            llamba_config(ssm={field: value})

    def test_resized_embeddings_load_again(self, tmp_path: Path) -> None:
        model = llamba(pad_vocab_size_multiple=8)
        model.resize_token_embeddings(70)
        assert full(model, tokens()).shape[-1] == 72 == model.config.vocab_size
        model.save_pretrained(tmp_path)
        assert torch.equal(full(LlambaForCausalLM.from_pretrained(tmp_path).eval(), tokens()), full(model, tokens()))

    def test_resizing_to_a_multiple_that_is_no_whole_number_is_refused(self) -> None:
        with pytest.raises(ValueError, match="multiple of"):
            llamba().resize_token_embeddings(70, pad_to_multiple_of=1.5)
