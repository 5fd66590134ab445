"""What models weigh: counted on real modules, and at true size without memory. Caches are counted in the battery."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Mamba2Config, MambaConfig

from surgery.models.sizes import kv_bytes_per_token, meta_model, sizes_of, state_bytes
from surgery.train.optimizer import spliced_parameters
from tests.support.battery import base, spliced
from tests.support.cases import each
from tests.support.pico import FAMILY_NAMES, SPLICED_FAMILIES, pico_site, random_site

every_family = each("name", FAMILY_NAMES)
every_spliced = each("name", SPLICED_FAMILIES)
every_init = each("init", ["ssm", "random", "teacher"])


@every_family
def test_tied_weights_count_once(name: str) -> None:
    model, size = base(name), sizes_of(base(name))
    names = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    counts = {v.data_ptr(): v.numel() for key, v in model.state_dict().items() if key in names}
    assert size.parameters == sum(counts.values())
    assert size.new_parameters == 0


@every_spliced
@every_init
def test_new_parameters_are_what_the_base_does_not_have(name: str, init: str) -> None:
    hybrid = spliced(base(name), "add", init)
    size, before = sizes_of(hybrid), sizes_of(base(name))
    assert size.new_parameters == size.parameters - before.parameters > 0
    assert size.new_parameters == sum(p.numel() for p in spliced_parameters(hybrid))
    assert size.kv_bytes_per_token > before.kv_bytes_per_token and size.state_bytes >= before.state_bytes


def test_keys_and_values_of_a_splice_by_hand() -> None:
    """Two heads with keys of 8 and values of 16, one with keys of 24."""
    assert kv_bytes_per_token([pico_site(0, [1, 3]), random_site(2, [0])], 2) == 2 * (2 * (8 + 16) + (24 + 16))
    assert kv_bytes_per_token([]) == 0


PUBLISHED: dict[str, tuple[Any, int, int]] = {
    # parameters: 50288 x 768 tied, and 24 layers; state: 24 layers x ((1536 + 2 * 128) x 4 + 24 x 64 x 128) numbers
    "mamba2-130m": (
        Mamba2Config(
            hidden_size=768, num_heads=24, num_hidden_layers=24, state_size=128, n_groups=1, vocab_size=50288,
            tie_word_embeddings=True,
        ),
        128_989_632,
        24 * (1792 * 4 + 1536 * 128) * 4,
    ),
    "mamba-130m": (
        MambaConfig(hidden_size=768, num_hidden_layers=24, vocab_size=50280, tie_word_embeddings=True),
        129_135_360,
        24 * (1536 * 4 + 1536 * 16) * 4,
    ),
}  # fmt: skip


@each(("config", "parameters", "state"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_sizes(config: Any, parameters: int, state: int) -> None:
    size = sizes_of(meta_model(config))
    assert size.parameters == parameters and size.state_bytes == state == state_bytes(config)
    assert size.kv_bytes_per_token == 0 and size.kv_bytes(32768) == 0
    assert torch.get_default_device().type == "cpu"
