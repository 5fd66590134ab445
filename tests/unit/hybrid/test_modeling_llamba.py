"""The plain Llamba: it equals a loop over tokens in fp64 however it is fed, and the published files load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from surgery.hybrid import LlambaConfig, LlambaForCausalLM
from surgery.hybrid.modeling_llamba import LlambaMixer, chunked_scan, scan_step
from tests.support.cases import each
from tests.support.llamba_loop import full, llamba, llamba_config, loop_logits, loop_mixer
from tests.support.pico import HIDDEN, tokens

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
every_variant = each("config", VARIANTS)
CLOSE = {"atol": 2e-5, "rtol": 1e-5}


def assert_close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact.double(), **CLOSE)


@every_variant
def test_equals_the_loop(config: dict) -> None:
    model, ids = llamba(**config), tokens()
    logits = full(model, ids)
    assert_close(logits, loop_logits(model, ids))
    assert logits.dtype == torch.float32 and logits.abs().max() > 1


@each("autocast", [False, True])
@each("at_once", [False, True])
def test_slow_decay_is_not_rounded_away(at_once: bool, autocast: bool) -> None:
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


def test_a_weak_decay_after_a_strong_one_keeps_its_digits() -> None:
    """In chunks in fp32 as in steps in fp64."""
    rng, shapes = (
        torch.Generator().manual_seed(0),
        ((2, 32, 4, 5), (2, 32, 2, 3), (2, 32, 2, 3), (2, 32, 4), (2, 4, 5, 3)),
    )
    *given, decay, start = (torch.randn(shape, generator=rng, dtype=torch.double) for shape in shapes)
    decay = -0.01 * decay.abs()
    decay[:, 3] = -3000.0
    state, exact = start, []
    for t in range(32):
        y, state = scan_step(*(x[:, t] for x in (*given, decay)), state)
        exact.append(y)
    found, _ = chunked_scan(*(x.float() for x in (*given, decay, start)), 32)
    torch.testing.assert_close(found.double(), torch.stack(exact, 1), **CLOSE)


def test_gradients_equal_the_loops() -> None:
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


IN_A_LAYER = [
    "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight", "mixer.in_proj.weight", "mixer.z_bias", "mixer.conv1d.weight", "mixer.conv1d.bias",
    "mixer.D", "mixer.out_proj.weight",
]  # fmt: skip


def published_tensors(config: LlambaConfig) -> dict[str, Tensor]:
    """Random tensors under the published names."""
    shapes = {name: tensor.shape for name, tensor in LlambaForCausalLM(config).state_dict().items()}
    names = [f"backbone.layers.{layer}.{name}" for layer in range(config.n_layer) for name in IN_A_LAYER]
    names += ["backbone.embedding.weight", "backbone.final_layernorm.weight"]
    names += [] if config.tie_embeddings else ["lm_head.weight"]
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn(shapes[name], generator=rng) * 0.3 for name in names}


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

    @each("tied", [False, True])
    @each("pickled", [False, True])
    @each("kind", [LlambaForCausalLM, AutoModelForCausalLM])
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
        assert held["lm_head.weight"].shape == (64, HIDDEN), "the vocabulary is padded"
        assert torch.equal(model.lm_head.weight, tensors["backbone.embedding.weight" if tied else "lm_head.weight"])
        assert_close(full(model.eval(), tokens()), loop_logits(model, tokens()))

    @each("field", ["d_state", "n_v_heads", "n_qk_heads", "d_conv", "expand", "chunk_size"])
    @each("value", [None, 0, -4, 2.5, "8", [8], True])
    def test_sizes_are_whole_numbers(self, field: str, value: Any) -> None:
        with pytest.raises(ValueError, match=rf"^ssm_cfg\.{field}: .*\. It needs a whole number of at least 1\.$"):
            llamba_config(ssm={field: value})
