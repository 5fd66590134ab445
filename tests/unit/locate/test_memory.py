"""The estimated memory of locating is what a clean run holds, and one batch is held at a time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from surgery.locate import batches as batches_module
from surgery.locate.batches import PromptBatches
from surgery.locate.clean_run import CleanRun, run_clean
from surgery.locate.locating import locate_heads
from surgery.locate.memory import LocateMemory, locate_memory
from surgery.models.meters import Meter, belongings
from surgery.recipe import Locate
from tests.support.cases import each
from tests.support.pico import pico_base, pico_family, pico_tokenizer, prompts

STEP = Locate(methods=("query", "patching", "sharpen"))
WHOLE = Locate(methods=("ablation", "query"))


def estimated(model: Any, section: Locate, *batches: Any) -> LocateMemory:
    return locate_memory(PromptBatches(model, pico_tokenizer(), section, 0, batches))


@each("name", ("mamba2", "mamba", "zamba2", "llama"))
def test_the_estimate_is_what_a_clean_run_holds(name: str) -> None:
    """Within 5%; with a decode step within 30%: the streams of the query are held twice, and prompts are short here."""
    model, batch = pico_family(name), prompts((40, 38, 40, 40))
    for section, tolerance in ((WHOLE, 0.05), (STEP, 0.3)):
        with Meter(belongings(model)) as meter:
            run = run_clean(model, batch, section is STEP)
            held = meter.now
        memory = estimated(model, section, batch)
        assert memory.activations + memory.states == pytest.approx(held, rel=tolerance)
        assert memory.weights == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert memory.total == memory.weights + memory.activations + memory.states
        del run


@each("methods", [("patching", "sharpen"), ("ablation", "patching", "context")])
def test_one_batch_is_held_at_a_time(methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[weakref.ref[CleanRun]] = []

    def counted(*args: Any, **more: Any) -> CleanRun:
        assert all(reference() is None for reference in runs), "an earlier run is still held"
        run = run_clean(*args, **more)
        runs.append(weakref.ref(run))
        return run

    monkeypatch.setattr(batches_module, "run_clean", counted)
    section = Locate(methods=methods, examples=6, batch_size=2, pairs=4)
    notes: list[str] = []
    model = pico_base(vocab_size=1024)
    locate_heads(model, pico_tokenizer(), section, any_accuracy=True, note=notes.append)
    assert len(runs) >= 3
    assert notes == [str(locate_memory(PromptBatches(model, pico_tokenizer(), section, 0)))]
