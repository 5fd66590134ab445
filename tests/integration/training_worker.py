"""A small training as a process of its own, for tests that need several of them or kill one.

`python -m torch.distributed.run --standalone --nproc_per_node=2 -m tests.integration.training_worker FOLDER CASE`
writes FOLDER/out.safetensors from rank 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from surgery.families import family_of
from surgery.heads import Graft
from surgery.recipe import Train
from surgery.train import make_accelerator
from surgery.train.loop import Trainer
from tests.pico import pico_base, pico_hybrid, pico_site, pico_tokenizer

SHAPE: dict[str, Any] = {"vocab_size": 1024, "layers": 2}
KV = {"task": "kv_retrieval", "rows": 5, "pairs": (2, 9), "questions": 3, "weights": {"answer": 1, "attention": 0.5}}
TEXT = {"task": "sentence", "rows": 3, "weights": {"keep": 1.0, "text": 0.5}}


def lines(folder: Path) -> dict[str, Any]:
    """A source of the user's own: answers of very different lengths, so that halves of a batch differ in tokens."""
    path = folder / "rows.jsonl"
    if not path.exists():
        rows = [{"prompt": f"Say {n} times a:", "answer": " a" * n} for n in range(1, 12)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data": {"path": str(path)}, "rows": 3, "weights": {"answer": 1.0}}


def section(folder: Path, steps: int, **more: Any) -> Train:
    optimizer = {"warmup": 1, "lr": 1e-3, "new_heads_lr": 1e-2, "weight_decay": 0.1}
    sources = [KV, TEXT, lines(folder)]
    return Train.model_validate({"steps": steps, "sources": sources, "save_every": 2, "optimizer": optimizer, **more})


def trainer(folder: Path, train: Train, double: bool = False, **more: Any) -> Trainer:
    """A hybrid of two layers with one spliced head, on what `section` says; steps go to FOLDER/steps."""
    model, base = pico_hybrid([pico_site(1)], **SHAPE), pico_base(**SHAPE)
    if double:
        model, base = model.double(), base.double()
    site = family_of(base.config).mixers(base.config)[1]
    graft = Graft(site, (2,), "add", "ssm", ("segment_end",))
    given = {"base": base, "grafts": (graft,), **more}
    return Trainer(model, pico_tokenizer(), train, 0, folder / "steps", make_accelerator(), **given)


def gradients(folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Of the first step, before clipping."""
    made = trainer(folder, section(folder, 1, **more))
    found: dict[str, torch.Tensor] = {}

    def keep(parameters: Any, norm: float) -> torch.Tensor:
        found.update({name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None})
        return torch.tensor(1.0)

    made.accelerator.clip_grad_norm_ = keep  # type: ignore[method-assign]
    made.run()
    return found


def weights(folder: Path, steps: int, stop: int | None = None, double: bool = True, **more: Any) -> dict[str, Any]:
    """After so many steps. `stop`: after that one the process ends as if killed."""

    def on_step(step: int, _: dict[str, float]) -> None:
        if step == stop:
            raise SystemExit(9)

    made = trainer(folder, section(folder, steps, **more), double, on_step=on_step)
    made.run()
    return {name: p.detach().clone() for name, p in made.model.named_parameters()}


def losses(folder: Path) -> list[dict[str, float]]:
    """Of three steps."""
    return trainer(folder, section(folder, 3)).run()


def main(folder: Path, case: str) -> None:
    accelerator = make_accelerator()
    world = torch.tensor(accelerator.num_processes)
    found: dict[str, Any] = {}
    if case == "gradients":
        found = gradients(folder)
    elif case == "losses":
        found = {
            name: torch.tensor([h[name] for h in losses(folder)])
            for name in ("answer", "attention", "keep", "text", "tokens")
        }
    elif case.startswith("stop"):
        weights(folder, 5, stop=3)
    else:
        found = weights(folder, 5)
    if accelerator.is_main_process:
        save_file({"world": world, **found}, folder / "out.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
