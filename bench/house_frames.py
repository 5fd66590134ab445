"""Count the frames of the package between a command and the model's forward call.

    python bench/house_frames.py [TREE]

Run `surgery locate` and `surgery run --to train` of a checkout on its small checkpoint, in one process, and record the
call stack wherever a model is called (not its inner modules). The rule:

- A frame counts if its file is in TREE/surgery. The command's own function is the first frame. The code that starts the
  command line comes before it and does not count. `surgery/hybrid` comes after the model call and does not count.
- Comprehensions, generator expressions and module bodies do not count: Python 3.12 has no frame for the first.
  A `with` block of ours leaves no frame on the stack; a decorator of ours does, and counts.
- Only calls from the package that does the work count (`surgery/locate`, `surgery/train`), not the checks of a loaded
  model.

`usual` is the depth of most calls, `deepest` the largest depth. `below_cli` is the largest depth without the frames of
the command line's own module (`cli.py`).
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

Chain = tuple[str, ...]  # "locate/sweep.py Sweep.at_query", the command first
COMMANDS = {"locate": ("locate",), "train": ("run", "--to", "train")}  # by the package that does the work
SMALL = (
    "locate.examples=4",
    "locate.pairs=4",
    "splice.select=list",
    "splice.heads=[L1H2]",  # with layers below it, which the hybrid and its base share in training
    "train.steps=2",
    *(f"train.sources.{source}.rows=2" for source in range(5)),
    *(f"train.sources.{source}.{key}" for source in range(2) for key in ("pairs=[4, 6]", "questions=2")),
)
_NO_FRAME = {"<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
_CLI = ("cli.py", "cli/")


def measure(tree: Path) -> dict[str, Any]:
    """Run both commands of a checkout and summarise the chains of each.

    Raises:
        RuntimeError: a command fails, or calls no model.
    """
    tree = tree.resolve()
    with TemporaryDirectory() as folder:
        out = Path(folder) / "chains.json"
        path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--record", str(tree), str(out)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode or not out.is_file():
            raise RuntimeError(f"no frames recorded: {done.stderr[-2000:]}")
        recorded = json.loads(out.read_text())
    return {name: summarise([(tuple(c), n) for c, n in chains], name) for name, chains in recorded.items()}


def summarise(chains: Sequence[tuple[Chain, int]], package: str) -> dict[str, Any]:
    """Depths of the chains that pass through a package.

    Args:
        chains: each with its number of calls.

    Returns:
        `usual`, `deepest` and `below_cli` depths, `calls`, and the names of the usual and of the deepest chain.
    """
    working = [(chain, calls) for chain, calls in chains if any(f.startswith(f"{package}/") for f in chain)]
    if not working:
        raise RuntimeError(f"surgery/{package} called no model")
    depths: Counter[int] = Counter()
    for chain, calls in working:
        depths[len(chain)] += calls
    usual = max(depths, key=lambda depth: (depths[depth], depth))
    deepest = max((chain for chain, _ in working), key=len)
    most = max((entry for entry in working if len(entry[0]) == usual), key=lambda entry: entry[1])[0]
    below = max(sum(not frame.startswith(_CLI) for frame in chain) for chain, _ in working)
    return {
        "usual": usual,
        "deepest": len(deepest),
        "below_cli": below,
        "calls": sum(depths.values()),
        "usual_chain": list(most),
        "deepest_chain": list(deepest),
    }


def chain_of(frame: FrameType | None, package: str) -> Chain | None:
    """List the package's frames from the command's function to `frame`; None inside another model's forward."""
    from transformers import PreTrainedModel

    chain = []
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] not in ("typer", "click"):
        code = frame.f_code
        if code.co_name == "forward" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            return None
        if code.co_filename.startswith(package + os.sep) and code.co_name not in _NO_FRAME:
            name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")  # from Python 3.11 on
            chain.append(f"{Path(code.co_filename).relative_to(package).as_posix()} {name}")
        frame = frame.f_back
    return tuple(reversed(chain))


def record(tree: str, out: str) -> None:
    """Run both commands in this process and write `{command: [[chain, calls], ...]}` to `out`."""
    sys.path[0] = tree  # not this folder, whose files are named like other modules
    from torch import nn
    from torch.nn.modules.module import register_module_forward_pre_hook
    from transformers import PreTrainedModel

    import surgery

    package = str(Path(tree) / "surgery")
    if Path(surgery.__file__).parent != Path(package):
        raise RuntimeError(f"surgery was imported from {surgery.__file__}, not from {package}")
    chains: Counter[Chain] = Counter()

    def note(module: nn.Module, arguments: Any) -> None:
        chain = chain_of(sys._getframe(1), package) if isinstance(module, PreTrainedModel) else None
        if chain is not None:
            chains[chain] += 1

    register_module_forward_pre_hook(note)
    known = surgery.Recipe.model_fields["train"].annotation.model_fields
    trainable = "trainable" if "trainable" in known else "trains"  # the key's name in older trees
    overrides = [f"base.model={tree}/checkpoints/pico-mamba2", *SMALL, f"train.{trainable}=new_heads"]
    recorded = {}
    for name, (command, *options) in COMMANDS.items():
        chains.clear()
        sys.argv = ["surgery", command, f"{tree}/recipes/quickstart.yaml", *overrides, *options]
        try:
            runpy.run_module("surgery", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise
        recorded[name] = [[list(chain), calls] for chain, calls in chains.items()]
    Path(out).write_text(json.dumps(recorded))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(*sys.argv[2:])
    else:
        print(json.dumps(measure(Path(sys.argv[1] if sys.argv[1:] else ".")), indent=1))
