"""What models weigh, counted on real modules. Caches are counted in the battery."""

from __future__ import annotations

from surgery.models.sizes import sizes_of
from surgery.train.optimizer import spliced_parameters
from tests.support.battery import base, spliced
from tests.support.cases import each
from tests.support.pico import FAMILY_NAMES, SPLICED_FAMILIES


@each("name", FAMILY_NAMES)
def test_tied_weights_count_once(name: str) -> None:
    model, size = base(name), sizes_of(base(name))
    names = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    counts = {v.data_ptr(): v.numel() for key, v in model.state_dict().items() if key in names}
    assert size.parameters == sum(counts.values())
    assert size.new_parameters == 0


@each("name", SPLICED_FAMILIES)
@each("init", ["ssm", "random", "teacher"])
def test_new_parameters_are_what_the_base_does_not_have(name: str, init: str) -> None:
    hybrid = spliced(base(name), "add", init)
    size, before = sizes_of(hybrid), sizes_of(base(name))
    assert size.new_parameters == size.parameters - before.parameters > 0
    assert size.new_parameters == sum(p.numel() for p in spliced_parameters(hybrid))
    assert size.kv_bytes_per_token > before.kv_bytes_per_token and size.state_bytes >= before.state_bytes
