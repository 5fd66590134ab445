"""The config field `splice` is checked where a config is built: by class, in every family."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from tests.support.battery import trained
from tests.support.cases import each
from tests.support.pico import SPLICED_FAMILIES

MISSING = object()
# What no family takes, by field; an entry of two heads in the first layer is changed.
VALUES: dict[str, list[Any]] = {
    "layer": [MISSING, "0", True, -1, 99, 1.0],
    "heads": [MISSING, [], [1, 1], [0, 4], [-1, 2], ["1", 2], 3, None],
    "head_dim": [MISSING, 7, 0],
    "mode": [MISSING, "swap", ["add"]],
    "init": [MISSING, "copy"],
    "unit": ["block", None],
    "reads": [MISSING, ["answer_token"], "answer_token"],
    "qk_width": [MISSING, 0, "8"],
    "v_width": [MISSING, 2.5],
    "conv_kernel": [MISSING, -1],
    "activation": [MISSING, "relu"],
    "gate": [MISSING, 1],
    "bias": [MISSING, "yes"],
    "norm_eps": [MISSING, 0, float("nan")],
}
WRONG = [(field, value) for field, values in VALUES.items() for value in values]
BY_INIT: dict[str, list[tuple[str, Any]]] = {
    "ssm": [],
    "random": [("conv_kernel", 0), ("conv_bias", MISSING)],
    "teacher": [
        ("kv_heads", MISSING),
        ("kv_heads", 3),
        ("out_bias", None),
        ("rope", MISSING),
        ("rope", {"dim": 3, "parameters": {}, "max_position_embeddings": 8}),
        ("rope", {"dim": 4}),
    ],
}
STREAMS = [("rank", MISSING), ("rank", 0), ("stream_eps", MISSING), ("stream_eps", "1"), ("v_width", 8)]


def rebuilt(config: PreTrainedConfig, splice: Any) -> PreTrainedConfig:
    return type(config).from_dict({**config.to_dict(), "splice": splice})


def changed(site: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    return {k: v for k, v in site.items() if k != field} | ({} if value is MISSING else {field: value})


@each("name", SPLICED_FAMILIES)
@each("init", ["ssm", "random", "teacher"])
class TestEntries:
    def test_what_is_right_is_taken(self, name: str, init: Any) -> None:
        """As a list of mappings; an entry of an older release names no unit."""
        config = trained(name, init=init).config
        older = [changed(site, "unit", MISSING) for site in config.splice]
        for splice in (config.splice, older, None, []):
            assert rebuilt(config, copy.deepcopy(splice)).splice == splice

    def test_what_is_wrong_is_refused(self, name: str, init: Any) -> None:
        """With the field, its value and what would do, before anything is built."""
        config = trained(name, init=init).config
        streams = STREAMS if init == "ssm" and name in ("mamba", "falcon_mamba") else []
        for field, value in (*WRONG, *BY_INIT[init], *streams):
            first, last = copy.deepcopy(config.splice)
            with pytest.raises(ValueError) as error:
                rebuilt(config, [changed(first, field, value), last])
            text = str(error.value)
            beginning = f"splice[0].{field}" + (" is missing" if value is MISSING else f": {value!r}"[:40])
            assert text.startswith(beginning) and ". It needs " in text and "\n" not in text, (field, value, text)

    def test_the_field_as_a_whole(self, name: str, init: Any) -> None:
        config = trained(name, init=init).config
        first, last = config.splice
        with pytest.raises(ValueError, match=r"^splice\[2\]\.layer: 0\. It needs another layer \(splice\[0\] has this"):
            rebuilt(config, [first, last, first])
        for wrong in ({"0": first}, "L0H1", 3):
            with pytest.raises(ValueError, match=r"^splice: .*It needs a list of one entry"):
                rebuilt(config, wrong)
        with pytest.raises(ValueError, match=r"^splice\[1\]: 'L0H1'\. It needs a mapping"):
            rebuilt(config, [first, "L0H1"])


@each("name", SPLICED_FAMILIES)
class TestPlaces:
    def test_a_layer_that_takes_no_splice(self, name: str) -> None:
        """Attention, MLPs, and Zamba2's layers with a shared block; the error names the others."""
        config = trained(name).config
        kinds = rebuilt(config, None)
        kinds = getattr(kinds, "layers_block_type", None) or kinds.layer_types
        for layer, kind in enumerate(kinds):
            moved = [{**config.splice[0], "layer": layer}]
            if kind == "linear_attention":
                assert rebuilt(config, moved).splice == moved
                continue
            with pytest.raises(ValueError, match=rf"^splice\[0\]\.layer: {layer}\. .*can be spliced, \[0, "):
                rebuilt(config, moved)

    def test_whole_layers(self, name: str) -> None:
        config = trained(name, init="teacher").config
        site = {**config.splice[0], "unit": "layer", "mode": "replace"}
        if name == "llamba":
            assert rebuilt(config, [site]).layer_types[0] == "full_attention"
            with pytest.raises(ValueError, match=r"^splice\[0\]\.mode: 'add'\. It needs 'replace' with unit"):
                rebuilt(config, [{**site, "mode": "add"}])
            return
        with pytest.raises(ValueError, match=r"^splice\[0\]\.unit: 'layer'\. It needs 'head'"):
            rebuilt(config, [site])

    def test_a_file(self, name: str, tmp_path: Path) -> None:
        """Read by its type, and not written either."""
        config = copy.deepcopy(trained(name).config)
        config.save_pretrained(tmp_path)
        data = json.loads((tmp_path / "config.json").read_text())
        data["splice"][1]["mode"] = "swap"
        (tmp_path / "config.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"^splice\[1\]\.mode: 'swap'\. It needs 'add' or 'replace'\.$"):
            AutoConfig.from_pretrained(tmp_path)
        config.splice[1]["heads"] = [7]
        with pytest.raises(ValueError, match=r"^splice\[1\]\.heads: \[7\]\. It needs heads from 0 to 3\.$"):
            config.save_pretrained(tmp_path)
