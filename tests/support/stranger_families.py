"""Use a saved hybrid of every family in a process without this library.

    python -m tests.support.stranger_families FOLDER OUT.json

FOLDER holds one saved model for each family. Results go to OUT.json, by family; nothing is printed.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging


def load(folder: Path, auto: Any = AutoModelForCausalLM) -> Any:
    return auto.from_pretrained(folder, trust_remote_code=True).eval()


@torch.no_grad()
def output(model: Any, head: bool = True) -> Tensor:
    result = model(torch.arange(3, 24).reshape(1, 21), use_cache=False)
    return result.logits if head else result.last_hidden_state


def look(folder: Path) -> dict[str, Any]:
    """Each entry is True where the model that came back computes the same, bit for bit."""
    model, scratch = load(folder), Path(tempfile.mkdtemp())
    body, expected = load(folder, AutoModel), output(model)
    torch.save(model, scratch / "model.pt")
    model.save_pretrained(scratch / "again")
    body.save_pretrained(scratch / "body")
    copies = {
        "pickle": pickle.loads(pickle.dumps(model)),  # noqa: S301  (its own)
        "torch.save": torch.load(scratch / "model.pt", weights_only=False),
        "saved_again": load(scratch / "again"),
    }
    found: dict[str, Any] = {name: torch.equal(output(copy), expected) for name, copy in copies.items()}
    hidden = output(body, head=False)
    found["body"] = torch.equal(output(model.base_model, head=False), hidden)
    found["body_saved_again"] = torch.equal(output(load(scratch / "body", AutoModel), head=False), hidden)
    found["body_of_saved_again"] = torch.equal(output(load(scratch / "again", AutoModel), head=False), hidden)
    found["class"] = type(model).__module__.startswith("transformers_modules.")
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    sys.modules["surgery"] = None  # type: ignore[assignment]
    folder, out = map(Path, sys.argv[1:])
    found: dict[str, Any] = {}
    for place in sorted(folder.iterdir()):
        try:
            found[place.name] = look(place)
        except Exception as error:
            found[place.name] = f"{type(error).__name__}: {error}"
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
