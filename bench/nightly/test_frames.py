"""Few frames lie between a command and the model's forward call. bench/house_frames.py counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import house_frames

ROOT = Path(__file__).parents[2]

# Upper bounds. Lower them whenever a chain becomes shorter; never raise them.
#   below_cli: the deepest call, without the frames of cli.py. Goal: 11 for locate, 9 for train.
#   deepest: the deepest call, with the command's own frames.
BOUNDS = {
    "locate": {"below_cli": 11, "deepest": 12},
    # Two more than before a stage checked itself: the stage's `run`, and the trainer's pass.
    "train": {"below_cli": 11, "deepest": 13},
}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict]:
    """Both commands of this checkout, run once."""
    return house_frames.measure(ROOT)


@pytest.mark.parametrize("command", BOUNDS)
def test_frames_above_the_model_call_stay_few(measured: dict[str, dict], command: str) -> None:
    frames, bounds = measured[command], BOUNDS[command]
    depths = {name: frames[name] for name in bounds}
    chain = "\n  ".join(frames["deepest_chain"])
    assert all(depths[name] <= bounds[name] for name in bounds), f"{depths} > {bounds}\n  {chain}"


@pytest.mark.parametrize("command", BOUNDS)
def test_chains_begin_at_the_command_and_pass_through_its_package(measured: dict[str, dict], command: str) -> None:
    for chain in (measured[command]["usual_chain"], measured[command]["deepest_chain"]):
        assert chain[0].startswith(("cli.py ", "cli/"))
        assert any(frame.startswith(f"{command}/") for frame in chain)
    assert measured[command]["calls"] > 5
