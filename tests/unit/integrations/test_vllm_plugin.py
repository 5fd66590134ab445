"""The vLLM plugin's config, weight names, branch and refusals, without vLLM. `make serve-test` runs it inside vLLM."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from surgery.hybrid.modeling_hybrid import SplicePass
from tests.support.battery import trained
from tests.support.cases import each
from tests.support.pico import HEAD_DIM, HIDDEN, pico_hybrid, pico_site, random_site

PLUGIN = Path(__file__).resolve().parents[3] / "integrations/vllm"
EXPORT = PLUGIN.parents[1] / "checkpoints/quickstart/export"
sys.path.insert(0, str(PLUGIN))

from ssm_surgery_vllm.branch import AttentionBranch, branch_of
from ssm_surgery_vllm.config import CONFIGS, REFUSED_TYPES, Mamba2HybridConfig, refusing
from ssm_surgery_vllm.engine import EngineChecks, reasons
from ssm_surgery_vllm.scan import selective_scan, selective_state_update
from ssm_surgery_vllm.splice import CHECKS, STREAM_FIELDS, Layers, Site, attention_shape, conv_state_shape, read_sites

WIDER = {**pico_site(0, [0, 3], qk_width=12), "copied_width": 8}
BIASED = {**pico_site(1, [1], "replace"), "bias": True, "conv_bias": False}


def sites_of(*splice: dict[str, Any], version: int = 1) -> dict[int, Site]:
    """Sites of the tiny model."""
    return read_sites(list(splice), version, Layers([0, 1, 2], num_heads=4, head_dim=HEAD_DIM))


def test_shapes_cover_all_layers() -> None:
    sites = sites_of(WIDER, random_site(2, [1]))
    assert attention_shape(sites) == (2, 32)
    assert conv_state_shape(sites) == (2 * (12 + 12 + HEAD_DIM), 3)
    assert attention_shape(sites_of(random_site(0) | {"qk_width": 65})) == (1, 80)


@pytest.mark.parametrize(
    ("heads", "width", "own", "expected"),
    [
        ([0], 32, (2, 128), (2, 128)),  # as the base's attention, where the heads fit
        ([0, 1, 2], 64, (2, 128), (4, 64)),  # else a cache of the same size for each token,
        ([0], 256, (8, 128), (1, 256)),  # or a divisor of it,
        ([0, 1, 2], 160, (1, 64), (3, 192)),  # or a multiple
    ],
)
def test_shapes_beside_attention_of_the_base(
    heads: list[int], width: int, own: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert attention_shape(sites_of(random_site(0, heads) | {"qk_width": width}), own) == expected


def test_replaced_channels_are_those_of_the_heads() -> None:
    assert sites_of(pico_site(0, [1]))[0].replaced_channels == []
    replaced = sites_of(pico_site(0, [3, 1], "replace"))[0].replaced_channels
    assert sorted(replaced) == [*range(HEAD_DIM, 2 * HEAD_DIM), *range(3 * HEAD_DIM, 4 * HEAD_DIM)]


def convolve(x_NC: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    padded = F.pad(x_NC.T, (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]).T


def attend(width: int) -> Any:
    """Causal attention of one text, with vLLM's shapes."""

    def run(*parts: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(1, (-1, width)).transpose(0, 1) for part in parts)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0).transpose(0, 1).flatten(1)

    return run


@pytest.mark.parametrize("entry", [WIDER, BIASED, pico_site(0, [0, 1, 2]), random_site(1, [2])])
@torch.no_grad()
def test_the_branch_is_that_of_the_hybrid(entry: dict[str, Any]) -> None:
    hybrid = pico_hybrid([entry])
    attention = hybrid.backbone.layers[entry["layer"]].mixer.attention
    width = 32
    branch = AttentionBranch(HIDDEN, sites_of(entry)[entry["layer"]], 4, width)
    branch.load_state_dict(attention.state_dict())
    u = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected, _ = attention(u[None], None, SplicePass(causal=torch.full((11, 11), -torch.inf).triu(1)))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(branch(u, convolve, attend(width)), expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "mix"}, r"splice\[0\]\.mode: 'mix'\. The plugin needs add or replace \(splice version 1\)"),
        ({"init": "teacher"}, r"splice\[0\]\.init: 'teacher'\. The plugin needs ssm or random"),
        ({"unit": "layer"}, r"splice\[0\]\.unit: 'layer'\. The plugin needs 'head'"),
        ({"window": 4}, r"splice\[0\]\.window: unknown in splice version 1\. Install a newer plugin"),
        ({"layer": 3}, r"splice\[0\]\.layer: 3\. The plugin needs one of the layers \[0, 1, 2\]"),
        ({"heads": [4]}, r"splice\[0\]\.heads: \[4\]\. The plugin needs heads from 0 to 3"),
        (
            {"heads": [1, 1]},
            r"splice\[0\]\.heads: \[1, 1\]\. The plugin needs a list of heads, at least one and none twice",
        ),
        ({"head_dim": 8}, r"splice\[0\]\.head_dim: 8\. The plugin needs 16"),
        ({"conv_kernel": 5}, r"splice\[0\]\.conv_kernel: 5\. The plugin needs one of 2, 3, 4"),
        ({"activation": "gelu"}, r"splice\[0\]\.activation: 'gelu'\. The plugin needs 'silu' or null"),
        ({"copied_width": 99}, r"splice\[0\]\.copied_width: 99\. The plugin needs 1 to 8"),
        ({"v_width": 0}, r"splice\[0\]\.v_width: 0\. The plugin needs a whole number of at least 1"),
    ],
)
def test_a_splice_that_is_not_served_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        sites_of(pico_site(0) | fields)
    assert "\n" not in str(error.value)


FIELDS = sorted({*CHECKS, "heads", "mode", "init", "unit", "conv_kernel"} - STREAM_FIELDS)


@each("value", ["a", ["a"], [[1]], [1.5], {}, -1, -1.5, float("nan")])
@each("field", FIELDS)
def test_a_value_of_another_type_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"splice\[0\]\.{field}: .*The plugin needs"):
        sites_of(pico_site(0) | {field: value})


def test_missing_field_and_plain_base_are_refused() -> None:
    entry = {name: value for name, value in pico_site(0).items() if name != "gate"}
    with pytest.raises(ValueError, match=r"splice\[0\]\.gate is missing"):
        sites_of(entry)
    with pytest.raises(ValueError, match=r"splice: \[\]\. The plugin needs a list"):
        sites_of()
    with pytest.raises(ValueError, match=r"splice\[1\]\.layer: 0\. .*none twice"):
        sites_of(pico_site(0), pico_site(0))
    with pytest.raises(ValueError, match=r"heads of width 600\. vLLM's attention takes at most 512"):
        attention_shape(sites_of(random_site(0) | {"qk_width": 600}))
    for version in (True, 1.0, "1", [1], None, 2):
        with pytest.raises(ValueError, match=r"splice_version: .*serves version 1\."):
            sites_of(pico_site(0), version=version)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'. The plugin needs 'silu'"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit: \[0.001, 0.1\]. The plugin needs \[0, inf\]"),
        ({"splice_version": 7}, "splice_version: 7"),
    ],
)
def test_a_config_that_is_not_served_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    config = json.loads((EXPORT / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Mamba2HybridConfig.from_pretrained(tmp_path)


def test_families_are_served_or_refused() -> None:
    import surgery.hybrid

    types = {config.model_type for config, _, _ in surgery.hybrid.CLASSES}
    assert types == {*REFUSED_TYPES, *(config.model_type for config in CONFIGS)}
    with pytest.raises(ValueError, match=r"model_type: 'bamba_hybrid'\. The plugin needs .*: vLLM has no Bamba"):
        refusing("bamba_hybrid").from_dict({})


@pytest.mark.parametrize(("mode", "init"), [("add", "ssm"), ("replace", "ssm"), ("add", "random")])
@pytest.mark.parametrize("name", ["falcon_mamba", "granite", "mamba", "mamba2", "nemotron_h", "zamba2"])
def test_exports_of_the_families_are_read(name: str, mode: str, init: str, tmp_path: Path) -> None:
    hybrid = trained(name, mode, init)
    hybrid.save_pretrained(tmp_path)
    config = {c.model_type: c for c in CONFIGS}[hybrid.config.model_type].from_pretrained(tmp_path)
    entries = {entry["layer"]: entry for entry in hybrid.config.splice}
    assert list(config.sites) == sorted(entries)
    assert config.ssm_heads() == hybrid.config.ssm_heads()
    assert config.architectures == [config.architecture] == [type(hybrid).__name__]
    for layer, site in config.sites.items():
        assert (list(site.heads), site.mode) == (entries[layer]["heads"], mode)
        prefix = next(n for n, _ in hybrid.named_modules() if f".{layer}." in n and n.endswith(".attention"))
        weights = hybrid.get_submodule(prefix).state_dict()
        branch_of(config.hidden_size, site, *config.attention_shape()).load_state_dict(weights)
    first = min(entries)
    with pytest.raises(ValueError, match=r"splice\[1\]\.heads: \[99\]"):
        config.splice = [entries[first], entries[max(entries)] | {"heads": [99]}]
        config.check()


def test_a_layer_without_an_ssm_mixer_is_refused(tmp_path: Path) -> None:
    hybrid = trained("granite", "add")
    hybrid.save_pretrained(tmp_path)
    config = {c.model_type: c for c in CONFIGS}["granitemoehybrid_hybrid"].from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"splice\[0\]\.layer: 1\. The plugin needs one of the layers \[0, 2\]"):
        config.splice = [config.splice[0] | {"layer": 1}]
        config.check()


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
@torch.no_grad()
def test_the_branch_of_mamba1_is_that_of_the_hybrid(name: str, tmp_path: Path) -> None:
    hybrid = trained(name, "add")
    hybrid.save_pretrained(tmp_path)
    config = {c.model_type: c for c in CONFIGS}[hybrid.config.model_type].from_pretrained(tmp_path)
    assert config.conv_state_shape() == (1, 1)  # vLLM wants a state in any case
    branch = branch_of(HIDDEN, config.sites[0], 4, 32)
    attention = hybrid.backbone.layers[0].mixer.attention
    branch.load_state_dict(attention.state_dict())
    rng = torch.Generator().manual_seed(0)
    widths = (HIDDEN, hybrid.config.intermediate_size, 3 + 2 * hybrid.config.state_size)
    u, *streams = (torch.randn(11, width, generator=rng) for width in widths)
    mask = torch.full((11, 11), -torch.inf).triu(1)
    expected, _ = attention(u[None], None, SplicePass(causal=mask), tuple(x[None] for x in streams))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(branch(u, convolve, attend(32), tuple(streams)), expected[0], atol=1e-5, rtol=1e-5)


def test_the_scan_of_mamba1_continues_each_request() -> None:
    """Two requests in one batch, one of which has a state: as one token after the other."""
    rng = torch.Generator().manual_seed(0)
    inner, state, lengths = 6, 4, (3, 5)
    u, dt, z = (torch.randn(inner, sum(lengths), generator=rng) for _ in range(3))
    B, C = (torch.randn(state, sum(lengths), generator=rng) for _ in range(2))
    A, D, bias = -torch.rand(inner, state, generator=rng), torch.rand(inner), torch.rand(inner)
    states = torch.randn(4, inner, state, generator=rng)
    blocks, begun = torch.tensor([2, 1]), torch.tensor([False, True])
    expected_states, steps = states.clone(), []
    expected_states[2] = 0
    for token, block in enumerate([2] * 3 + [1] * 5):
        out, at = torch.empty(1, inner), torch.tensor([block])
        parts = (x.T[token : token + 1] for x in (u, dt))
        groups = (x.T[token : token + 1] for x in (B, C))
        selective_state_update(
            expected_states, *parts, A, *groups, D, bias, z.T[token : token + 1], True, at, at, out=out
        )
        steps.append(out[0])
    start = torch.tensor([0, 3, 8])
    y = selective_scan(u, states, dt, A, B, C, D, z, bias, True, start, blocks, begun)
    torch.testing.assert_close(y, torch.stack(steps, dim=1))
    torch.testing.assert_close(states, expected_states)


HF = SimpleNamespace(
    streams=False, model_type="mamba2_hybrid", own_attention=lambda: None, attention_shape=lambda: (3, 64)
)


def engine(**changes: Any) -> SimpleNamespace:
    """The parts of vLLM's config that are checked, for an engine that is served; names are PART__FIELD or a field."""
    parts = {
        "model_config": {"enforce_eager": True, "quantization": None, "dtype": "torch.float32", "hf_config": HF},
        "cache_config": {"use_replayssm": False, "mamba_cache_mode": "align", "cache_dtype": "auto"},
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1},
        "device_config": {"device_type": "cuda"},
    }
    others = {"speculative_config": None, "lora_config": None, "kv_transfer_config": None}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[f"{part}_config"][field] = value
        else:
            others[name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()}, **others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"parallel__tensor_parallel_size": 2, "model__hf_config": SimpleNamespace(streams=True, model_type="m")},
            "tensor_parallel_size 2 is not supported for m",
        ),
        ({"parallel__pipeline_parallel_size": 4}, "pipeline_parallel_size 4 is not supported"),
        ({"parallel__decode_context_parallel_size": 2}, "decode_context_parallel_size 2 is not supported"),
        ({"speculative_config": object()}, "speculative decoding is not supported"),
        ({"model__enforce_eager": False}, "CUDA graphs were not tested. Set --enforce-eager."),
        ({"model__quantization": "fp8"}, "quantization fp8 is not supported"),
        ({"lora_config": object()}, "LoRA adapters are not supported"),
        ({"kv_transfer_config": object()}, "KV transfer between engines is not supported"),
        ({"cache__use_replayssm": True}, "ReplaySSM is not supported"),
        ({"cache__kv_offloading_size": 1.0}, "KV transfer between engines is not supported"),
        ({"cache__cache_dtype": "fp8"}, "kv_cache_dtype fp8 is not supported"),
    ],
)
def test_an_engine_that_was_not_tested_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"ssm-surgery-vllm: {message}"):
        EngineChecks.verify_and_update_config(engine(**change))


def test_a_tested_engine_is_accepted() -> None:
    assert reasons(engine()) == []
    assert reasons(engine(model__enforce_eager=False, device__device_type="cpu")) == []
    assert reasons(engine(cache__cache_dtype="float32", cache__mamba_cache_mode="none")) == []


def test_every_process_has_all_heads_of_the_branch() -> None:
    """vLLM divides the heads that it knows of by the processes."""
    known = SimpleNamespace(total_num_attention_heads=3, total_num_kv_heads=3)
    config = engine(parallel__tensor_parallel_size=2, model__model_arch_config=known)
    EngineChecks.verify_and_update_config(config)
    assert (known.total_num_attention_heads, known.total_num_kv_heads) == (6, 6)


def test_the_plugin_imports_nothing_of_the_toolkit() -> None:
    allowed = {"torch", "transformers", "vllm", *sys.stdlib_module_names}
    for path in (PLUGIN / "ssm_surgery_vllm").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, path.name
