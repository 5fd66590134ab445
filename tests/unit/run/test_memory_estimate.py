"""The estimate agrees with a real run: saved tensors within 10%, and counts by their formulas."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from surgery.data.encoding import encode
from surgery.data.user import open_source
from surgery.models.lookup import family_of, geometry_of
from surgery.models.meters import saved_bytes
from surgery.recipe import Source, Splice, Train, Weights
from surgery.run.memory_estimate import StepCost, sample_sources, step_cost
from surgery.splice.graft import splice_model
from surgery.splice.plan import make_plan
from surgery.train.optimizer import spliced_parameters
from surgery.train.teacher import Teacher
from surgery.train.training import train_model
from surgery.types import HeadSet, Plan, ScoredHead
from tests.support.pico import pico_family, pico_tokenizer

CLOSE = 0.1
OBJECTIVES: dict[str, dict[str, float]] = {
    "answer": {"answer": 1.0},
    "supervised": {"answer": 1.0, "attention": 1.0},
    "base_kl": {"base_kl": 1.0},
    "lm and base_kl": {"lm": 0.5, "base_kl": 1.0},
}


def section(weights: dict[str, float], trainable: str = "all", rows: int = 3, pairs: tuple[int, int] = (4, 4)) -> Train:
    source = Source(task="kv_retrieval", pairs=pairs, questions=2, rows=rows, weights=Weights(**weights))
    return Train(steps=1, trainable=trainable, sources=(source,))


@cache
def spliced(name: str, **splice_fields: Any) -> tuple[PreTrainedModel, PreTrainedModel, Plan]:
    """A base, a hybrid of it with the first head of its second site, and the plan. Copy before training."""
    base = pico_family(name, vocab_size=1024)
    head = family_of(base.config).sites(base.config)[1].heads[0]
    chosen = (ScoredHead(head, "neither", "answer_token", {}),)
    recipe = Splice(**splice_fields)
    plan = make_plan(HeadSet("x", "", geometry_of(base.config), (), chosen, "listed", 0), base.config, recipe)
    return base, splice_model(base, plan, recipe), plan


def estimated(name: str, asked: Train, **splice_fields: Any) -> StepCost:
    base, hybrid, plan = spliced(name, **splice_fields)
    on_meta = [copy.deepcopy(model).to("meta") for model in (hybrid, base)]
    return step_cost(*on_meta, plan.grafts, asked, sample_sources(asked, 0, pico_tokenizer()))


def really_saved(name: str, asked: Train, **splice_fields: Any) -> int:
    """What autograd keeps in one real step of training."""
    base, hybrid, plan = spliced(name, **splice_fields)
    hybrid = copy.deepcopy(hybrid)
    with saved_bytes(hybrid) as saved:
        train_model(hybrid, pico_tokenizer(), asked, plan, base)
    return saved.total


def test_saved_bytes_agree_with_training() -> None:
    """Families whose scan differs, or whose attention is shared; every objective; training less; and saving less."""
    bf16, checkpointed = {"precision": "bf16"}, {"gradient_checkpointing": True}
    for name, objective, trainable, more in (
        ("mamba2", "supervised", "all", {}),
        ("mamba2", "lm and base_kl", "new_heads", {}),
        ("mamba2", "answer", "lora", {}),
        ("mamba", "answer", "all", {}),
        ("zamba2", "answer", "all", {}),
        ("mamba2", "supervised", "all", bf16),
        ("zamba2", "answer", "all", checkpointed),
        ("mamba2", "lm and base_kl", "new_heads", {**bf16, **checkpointed}),
    ):
        asked = section(OBJECTIVES[objective], trainable).model_copy(update=more)
        cost, real = estimated(name, asked), really_saved(name, asked)
        assert cost.memory["activations"] == pytest.approx(real, rel=CLOSE), (name, objective, trainable, more)
        assert cost.memory["optimizer"] == 8 * cost.trained, "two moments of 4 bytes"


def test_saved_bytes_agree_with_a_teacher(tmp_path: Path) -> None:
    llama = pico_family("llama", vocab_size=1024, hidden_size=32)
    llama.save_pretrained(tmp_path)
    pico_tokenizer().save_pretrained(tmp_path)
    base, hybrid, plan = spliced("mamba2")
    align = {"heads": {f"{graft.site.name}{head}": "L0H1" for graft in plan.grafts for head in graft.heads}}
    plain = section({"answer": 1.0}).sources[0]
    for objective in ("distil", "attention_kl", "hidden_mse"):
        source = plain.model_copy(update={"weights": Weights(**{"answer": 1.0, objective: 1.0})})
        data = {"steps": 1, "sources": [source], "teacher": {"model": str(tmp_path)}, "align": align}
        train = Train.model_validate(data)
        on_meta = [copy.deepcopy(model).to("meta") for model in (hybrid, llama)]
        teacher = Teacher(on_meta[1], pico_tokenizer(), base.config, plan.grafts, train.align, train.needs)
        samples = sample_sources(train, 0, pico_tokenizer())
        cost = step_cost(on_meta[0], None, plan.grafts, train, samples, teacher=teacher)
        assert cost.memory["activations"] == pytest.approx(really_saved("mamba2", train), rel=CLOSE), objective
        assert cost.memory["teacher"] == sum(t.nbytes for t in (*llama.parameters(), *llama.buffers()))


def test_weights_gradients_and_moments() -> None:
    _, hybrid, plan = spliced("mamba2")
    for dtype, trainable in ((torch.float32, "all"), (torch.bfloat16, "all"), (torch.bfloat16, "new_heads")):
        model = copy.deepcopy(hybrid).to(dtype).to("meta")
        asked = section({"answer": 1.0}, trainable)
        cost = step_cost(model, None, plan.grafts, asked, sample_sources(asked, 0, pico_tokenizer()))
        memory = cost.memory
        trained = spliced_parameters(model) if trainable == "new_heads" else list(model.parameters())
        numbers, size = sum(p.numel() for p in trained), torch.empty(0, dtype=dtype).element_size()
        assert memory["weights"] == sum(p.numel() for p in model.parameters()) * size
        assert (memory["gradients"], memory["optimizer"]) == (numbers * size, numbers * 8)
        assert memory["master_copies"] == (numbers * 4 if size < 4 else 0)
        assert memory["frozen_base"] == 0 and cost.total == sum(memory.values())


def test_training_less_keeps_less() -> None:
    weights = OBJECTIVES["base_kl"]
    whole, new = (estimated("mamba2", section(weights, trainable)) for trainable in ("all", "new_heads"))
    assert new.memory["activations"] < whole.memory["activations"] and new.flops < whole.flops
    assert new.memory["frozen_base"] == whole.memory["frozen_base"] > 0


def test_the_longest_row_of_own_data_counts_wherever_it_is(tmp_path: Path) -> None:
    for place, size in ((0, {"rows": 2}), (19, {"rows": 2}), (19, {"tokens": 400})):
        rows = [{"prompt": "The number of Balo is", "answer": " 42"} for _ in range(20)]
        rows[place] = {"prompt": "The number of Balo is 42.\n" * 20 + "The number of Balo is", "answer": " 42"}
        path = tmp_path / f"{place}{size}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"data": {"path": str(path)}, **size, "weights": {"answer": 1.0}}
        stage = Train.model_validate({"steps": 2, "sources": [source]}).sequence[0]
        (sample,) = sample_sources(stage, 0, pico_tokenizer())
        assert sample.batch.input_ids.shape[1] > len(pico_tokenizer()(rows[place]["prompt"])["input_ids"])
        drawn = [open_source(stage.sources[0], pico_tokenizer(), 0, 0).step(step) for step in range(10)]
        shapes = [encode(documents, pico_tokenizer()).input_ids.shape for documents in drawn]
        assert sample.batch.input_ids.numel() == max(rows * columns for rows, columns in shapes), (place, size)


def test_processes_share_the_rows() -> None:
    asked = section({"answer": 1.0}, rows=4)
    (alone,), (shared,) = (sample_sources(asked, 0, pico_tokenizer(), n) for n in (1, 2))
    assert (len(alone.batch), len(shared.batch)) == (4, 2)
    assert shared.tokens == pytest.approx(alone.tokens / 2, rel=0.05)


def test_sources_of_one_pass_add_up() -> None:
    small, large = section({"answer": 1.0}, rows=1), section({"answer": 1.0}, rows=6)
    both = small.model_copy(update={"sources": (*small.sources, *large.sources)})
    found, *alone = (estimated("mamba2", asked) for asked in (both, small, large))
    assert found.largest == 1
    assert found.memory["activations"] == sum(cost.memory["activations"] for cost in alone)
    apart = estimated("mamba2", both.model_copy(update={"micro_batch": 8}))
    assert apart.memory["activations"] == max(cost.memory["activations"] for cost in alone)
    assert found.flops == apart.flops > alone[1].flops
