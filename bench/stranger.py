"""Install the wheel in a new environment, and convert models in an empty folder as a new user would.

    python -m bench.stranger runs/stranger                                            (make stranger)
    python -m bench.stranger runs/stranger --only quickstart mamba2
    python -m bench.stranger runs/stranger-3.13 --python python3.13 --only mamba2

Builds the wheel, installs it with its dependencies, and runs `surgery run quickstart`. Then, for a tiny random model
of every family that takes a splice and for a trained base in mamba_ssm's format: `surgery init MODEL > MODEL.yaml`,
`surgery run MODEL.yaml` without an edit, and `surgery verify` of the export. Prints a table of exit codes and times,
and writes it to `results.json`. Repeat the command to resume: finished cases are not run again. Exit code 1 if a
command failed or a file is missing.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench.common import ROOT, SHIPPED, finished, markdown_table, parser, save
from surgery.models.loading import load_model
from surgery.recipe import Base
from tests.support.pico import SPLICED_FAMILIES, pico_family, pico_tokenizer

QUICKSTART, MAMBA_SSM = "quickstart", "mamba-ssm"
CASES = (QUICKSTART, *SPLICED_FAMILIES, MAMBA_SSM)
# What a finished run must hold.
FILES = ("report.html", "results.json", "export/README.md", "export/model.safetensors")


def install(folder: Path, python: str) -> Path:
    """Build a wheel from the source distribution, as a release does, and install it with an interpreter.

    Returns:
        The command `surgery`.
    """
    environment = folder / "environment"
    command = environment / "bin" / "surgery"
    if command.is_file():
        return command
    shutil.rmtree(environment, ignore_errors=True)
    built = folder.absolute() / "built"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir(parents=True)
    steps = ("-q", "egg_info", "--egg-base", str(built), "sdist", "--dist-dir", str(built))
    subprocess.run([sys.executable, "setup.py", *steps], cwd=ROOT, check=True)
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(built, filter="data")
    (source,) = (path for path in built.iterdir() if (path / "setup.py").is_file())
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(source)], check=True)
    return command


def versions(command: Path) -> dict[str, str]:
    """Return the versions of Python and of the main packages beside an installed `surgery`."""
    packages = ("ssm-surgery", "torch", "transformers", "accelerate", "peft")
    program = "import importlib.metadata as m, json, platform\nprint(json.dumps({'python': platform.python_version(), "
    program += f"**{{name: m.version(name) for name in {packages}}}}}))"
    done = subprocess.run([str(command.parent / "python"), "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def write_model(name: str, folder: Path) -> None:
    """Write the model of a case and its tokenizer, as its owner would have them."""
    if name != MAMBA_SSM:
        pico_family(name, vocab_size=1024).save_pretrained(folder)
        copy.deepcopy(pico_tokenizer()).save_pretrained(folder)
        return
    base = load_model(Base(model=str(SHIPPED)))
    config = base.config
    theirs = {
        "d_model": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "ssm_cfg": {"layer": "Mamba2", "d_state": config.state_size, "headdim": config.head_dim, "chunk_size": 32},
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": True,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(theirs))
    weights = {name.replace("embeddings", "embedding"): tensor for name, tensor in base.state_dict().items()}
    torch.save(weights, folder / "pytorch_model.bin")
    for file in SHIPPED.glob("tokenizer*"):
        shutil.copy(file, folder)


class Stranger:
    """A user with an installed package in a folder that holds only the user's models.

    Args:
        command: the installed `surgery`.
        home: the folder. Every command starts there.
    """

    def __init__(self, command: Path, home: Path) -> None:
        self.command, self.home = command.absolute(), home
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
        self.environment = {key: value for key, value in os.environ.items() if key not in hidden}

    def run(self, log: str, *words: str, output: Path | None = None) -> dict[str, Any]:
        """Run a command. Its standard output goes to `output`, the rest to `log`."""
        began = time.perf_counter()
        command = [str(self.command), *words]
        with ExitStack() as files:
            errors = files.enter_context(open(self.home / log, "a", encoding="utf-8"))
            target = files.enter_context(open(output, "w", encoding="utf-8")) if output else errors
            done = subprocess.run(command, cwd=self.home, env=self.environment, stdout=target, stderr=errors)
        return {"command": " ".join(("surgery", *words)), "rc": done.returncode, "s": time.perf_counter() - began}

    def convert(self, name: str) -> dict[str, Any]:
        """Run all commands of a case, up to the first that fails."""
        run_folder, log = self.home / "runs" / name, f"{name}.log"
        shutil.rmtree(run_folder, ignore_errors=True)
        commands = []
        recipe = QUICKSTART
        if name != QUICKSTART:
            shutil.rmtree(self.home / name, ignore_errors=True)
            write_model(name, self.home / name)
            recipe = f"{name}.yaml"
            commands.append(self.run(log, "init", name, output=self.home / recipe))
        if not any(done["rc"] for done in commands):
            commands.append(self.run(log, "run", recipe))
        if not any(done["rc"] for done in commands):
            commands.append(self.run(log, "verify", f"runs/{name}/export"))
        missing = [file for file in FILES if not (run_folder / file).is_file()]
        result: dict[str, Any] = {"name": name, "commands": commands, "missing": missing}
        if not missing:
            found = json.loads((run_folder / "results.json").read_text(encoding="utf-8"))
            result["heads"] = found["heads"]
        return result


def succeeded(result: dict[str, Any]) -> bool:
    """Whether every command of a case exited with 0 and wrote its files."""
    return not result["missing"] and not any(done["rc"] for done in result["commands"])


def table(results: Sequence[dict[str, Any]]) -> str:
    """Table of the cases in Markdown: exit codes and seconds of `init`, `run` and `verify`, and the spliced heads."""
    rows = []
    for result in results:
        cells = {done["command"].split()[1]: f"{done['rc']}, {done['s']:.0f} s" for done in result["commands"]}
        report = f"no {', '.join(result['missing'])}" if result["missing"] else "yes"
        columns = [cells.get(command, "") for command in ("init", "run", "verify")]
        rows.append([result["name"], *columns, report, ", ".join(result.get("heads", []))])
    return markdown_table(["model", "init", "run", "verify", "report and export", "heads"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that are not finished, print the table, and write `results.json`."""
    options = parser(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases to run")
    options.add_argument("--python", default=sys.executable, help="interpreter of the new environment")
    options.add_argument("--surgery", type=Path, help="an installed command to use instead of a new environment")
    chosen = options.parse_args(arguments)
    folder: Path = chosen.folder
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    command = chosen.surgery or install(folder, chosen.python)
    installed = {} if chosen.surgery else {"installed": versions(command)}
    stranger = Stranger(command, home)
    results = []
    for name in chosen.only:
        path = folder / "cases" / f"{name}.json"
        result = finished(path, name)
        if result is None or not succeeded(result):
            path.parent.mkdir(exist_ok=True)
            result = {"key": name, **stranger.convert(name)}
            save(path, result)
        print(f"{name}: {'finished' if succeeded(result) else 'FAILED'}", flush=True)
        results.append(result)
    save(folder / "results.json", {**installed, "cases": results})
    print(table(results))
    return 0 if all(map(succeeded, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
