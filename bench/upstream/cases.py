"""Test cases with transformers' common model tests, for the plain class and the hybrid of every family.

`python -m bench.upstream` runs them. The mixins come from transformers' source distribution. The testers here provide
configs and inputs. Every hybrid has three sites: one adds a head, one replaces a head, and one has a Transformer's head
or, in Llamba, its whole attention layer.
"""

from __future__ import annotations

import copy
import inspect
import os
import signal
import unittest
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from transformers import AutoModel, AutoModelForCausalLM, Mamba2Config, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from upstream_tests.generation.test_utils import GenerationTesterMixin
from upstream_tests.test_configuration_common import ConfigTester
from upstream_tests.test_modeling_common import ModelTesterMixin
from upstream_tests.test_training_mixin import TrainingTesterMixin

from surgery.hybrid import CLASSES
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Splice
from surgery.splice.graft import splice_model
from surgery.types import Graft, Plan
from tests.support.pico import HEADS, HIDDEN, PAD, SPLICED_FAMILIES, VOCAB, pico_family, pico_family_config, tokens

SECONDS = int(os.environ.get("UPSTREAM_TIMEOUT", "120"))  # of one test
# Layer settings of families whose pico model has fewer than three sites.
LAYERS: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4},
    "granite": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    },
    "zamba2": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"],
    },
    "nemotron_h": {
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "linear_attention",
            "mlp",
            "linear_attention",
        ],
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
}
# Their plain classes return no attention weights, so they skip tests of attention. Their hybrids do not skip them.
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "llamba")
WHOLE_LAYERS = ("llamba",)

# The common tests look up a class's name here to decide if it takes labels.
for _config, _model, _causal in CLASSES:
    MODEL_MAPPING_NAMES[_config.model_type] = _model.__name__
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_config.model_type] = _causal.__name__


@cache
def plain_config(name: str) -> PreTrainedConfig:
    """The config of a family's small model."""
    return pico_family_config(name, **LAYERS.get(name, {}))


@cache
def hybrid_config(name: str) -> PreTrainedConfig:
    """The config of the same model after a splice."""
    model, teacher = AutoModelForCausalLM.from_config(copy.deepcopy(plain_config(name))), pico_family("qwen2")
    first, second, *more = family_of(model.config).sites(model.config)
    grafts = [
        Graft(first, (3, 1), "add", "ssm", ("segment_end", "answer_token")),
        Graft(second, (2,), "replace", "ssm", ("answer_token",)),
    ]
    if more and name in WHOLE_LAYERS:
        grafts.append(
            Graft(more[0], (0, 1, 2, 3), "replace", "teacher", ("segment_end",) * 4, unit="layer", donors=("L1",))
        )
    elif more:
        grafts.append(Graft(more[0], (1,), "replace", "teacher", ("segment_end",), donors=("L1H3",)))
    plan = Plan("pico", geometry_of(model.config), tuple(grafts), seed=3)
    config = splice_model(model, plan, Splice(min_width=None), teacher).config
    return type(config).from_dict(config.to_dict())  # no attention implementation is chosen yet


@dataclass
class Tester:
    """Tester of a family, with the attributes that the common tests read."""

    config: PreTrainedConfig
    batch_size = 3
    seq_length = 7
    is_training = True
    hidden_size = HIDDEN
    vocab_size = VOCAB

    @property
    def expected_num_hidden_layers(self) -> int:
        """Number of hidden states that a model returns."""
        return self.config.num_hidden_layers + 1

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers that return attention weights: the common tests use it for these."""
        own = sum(kind in ("full_attention", "hybrid") for kind in getattr(self.config, "layers_block_type", ()))
        return own + len(getattr(self.config, "attn_layer_idx", None) or ()) + len(self.splice)

    @property
    def num_attention_heads(self) -> int:
        """Heads of the first layer that returns attention weights."""
        return len(self.splice[0]["heads"]) if self.splice else HEADS

    @property
    def splice(self) -> list[dict[str, Any]]:
        """The sites of the config."""
        return getattr(self.config, "splice", None) or []

    @property
    def base_model_class(self) -> type:
        """The class without a head."""
        return AutoModel._model_mapping[type(self.config)]

    @property
    def causal_lm_class(self) -> type:
        """The class with a head."""
        return AutoModelForCausalLM._model_mapping[type(self.config)]

    def get_config(self) -> PreTrainedConfig:
        """A copy of the config, since tests change it."""
        return copy.deepcopy(self.config)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        """Config and inputs. The first row begins with padding."""
        ids = tokens(self.batch_size, self.seq_length)
        mask = torch.ones_like(ids)
        ids[0, 0], mask[0, 0] = PAD, 0
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Case(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    """The common tests, with a time limit for each."""

    config: PreTrainedConfig
    plain_class: type
    model_tester: Any = None
    test_num_layers_is_small = unittest.skip("about the size of upstream's own testers")(lambda self: None)

    def setUp(self) -> None:
        self.model_tester = Tester(self.config)
        self.config_tester = ConfigTester(
            self, config_class=type(self.config), common_properties=["hidden_size", "num_hidden_layers"]
        )

        def stop(*_: Any) -> None:
            raise TimeoutError(f"over {SECONDS} s")

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(SECONDS)
        self.addCleanup(signal.alarm, 0)

    def test_reverse_loading_mapping(self) -> None:
        """Skip the base model of Nemotron-H, which renames weights of the language model only."""
        base_has_none = self.config.model_type.startswith("nemotron_h")
        super().test_reverse_loading_mapping(skip_base_model=base_has_none)

    def test_moe_models_record_router_logits(self) -> None:
        """Let the test find a hybrid's experts in the source of the class that it extends."""
        with mock.patch("inspect.getmodule", return_value=inspect.getmodule(self.plain_class)):
            super().test_moe_models_record_router_logits()

    def test_can_init_all_missing_weights(self) -> None:
        """Show the test a source with a copyright year: it skips models before 2023, and this library's have none."""
        source, config_class = inspect.getfile, type(self.config)
        with mock.patch("inspect.getfile", lambda item: source(Mamba2Config if item is config_class else item)):
            super().test_can_init_all_missing_weights()

    def test_config(self) -> None:
        """The common tests of the config."""
        self.config_tester.run_common_tests()


def case(name: str, kind: str) -> type:
    """The test class of a family, `plain` or `hybrid`."""
    config = plain_config(name) if kind == "plain" else hybrid_config(name)
    classes = (AutoModel._model_mapping[type(config)], AutoModelForCausalLM._model_mapping[type(config)])
    attributes = {
        "config": config,
        "plain_class": AutoModel._model_mapping[type(plain_config(name))],
        "all_model_classes": classes,
        "has_attentions": name not in WITHOUT_ATTENTION or kind == "hybrid",
        "__module__": __name__,
    }
    return type(f"{name}_{kind}_ModelTest", (Case, unittest.TestCase), attributes)


for _name in os.environ.get("UPSTREAM_FAMILIES", ",".join(SPLICED_FAMILIES)).split(","):
    for _kind in ("plain", "hybrid"):
        globals()[f"Test_{_name}_{_kind}"] = case(_name, _kind)
