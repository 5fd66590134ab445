"""A process that has imported transformers and not this library, and forks a child for every reload of an export.

`surgery verify` and `surgery export` reload a folder where the library cannot be imported. That takes four seconds,
nearly all of them imports; forked from here the same script takes a few tenths.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from tests.fuzz.values import ROOT
from tests.support.forked import run_and_exit


class Outsider:
    """The process, started at once and waited for when it is needed; `run` stands in for `subprocess.run`."""

    def __init__(self, address: Path) -> None:
        self.address = str(address)
        self.process = subprocess.Popen([sys.executable, "-m", __name__, self.address], cwd=ROOT)

    def wait(self) -> None:
        """Returns when it listens."""
        while not Path(self.address).exists():
            assert self.process.poll() is None, "the process without the library is gone"
            time.sleep(0.05)

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """`python [flags] -c SCRIPT ARGUMENTS` in a forked child; anything else as it is."""
        if command[0] != sys.executable or "-c" not in command:
            return subprocess.run(command, **options)
        self.wait()
        at = command.index("-c")
        request = {
            "script": command[at + 1],
            "argv": ["-c", *command[at + 2 :]],
            "env": dict(options["env"]),
            "cwd": options["cwd"],
        }
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(self.address)
            line.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(line.makefile().readline())
        done = subprocess.CompletedProcess(command, answer["code"], answer["out"], answer["err"])
        if options.get("check") and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done

    def stop(self) -> None:
        """Ends the process."""
        self.process.terminate()
        self.process.wait()


def serve(address: str) -> None:
    """Answers until it is terminated."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
    from transformers.models.auto import modeling_auto

    torch.set_num_threads(1)
    for name in ("mamba", "mamba2", "bamba", "falcon_mamba", "zamba2", "nemotron_h", "granitemoehybrid"):
        __import__(f"transformers.models.{name}.modeling_{name}")
    assert (
        AutoModelForCausalLM
        and AutoTokenizer
        and dynamic_module_utils
        and modeling_auto
        and "surgery" not in sys.modules
    )
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(f"{address}.new")
        line.listen()
        os.rename(f"{address}.new", address)
        while True:
            peer, _ = line.accept()
            with peer:
                request = json.loads(peer.makefile().readline())
                peer.sendall(json.dumps(_answer(request)).encode() + b"\n")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the script in a child, for twenty seconds at most."""
    out, err = (os.memfd_create(name) for name in ("out", "err"))
    child = os.fork()
    if child == 0:
        _become(request, out, err)
    _, status = os.waitpid(child, 0)
    texts = [
        os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace") for descriptor in (out, err)
    ]
    for descriptor in (out, err):
        os.close(descriptor)
    return {"code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}


def _become(request: dict[str, Any], out: int, err: int) -> NoReturn:
    """Run the script, in the child."""
    import signal

    from transformers import dynamic_module_utils
    from transformers.utils import hub

    def command() -> None:
        signal.alarm(20)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.clear()
        os.environ.update(request["env"])
        modules = request["env"].get("HF_MODULES_CACHE")
        if modules:
            for module in (dynamic_module_utils, hub):
                if hasattr(module, "HF_MODULES_CACHE"):
                    module.HF_MODULES_CACHE = modules
        os.chdir(request["cwd"] or ".")
        sys.path[0] = ""
        sys.argv = request["argv"]
        exec(compile(request["script"], "<string>", "exec"), {"__name__": "__main__"})

    run_and_exit(command)


if __name__ == "__main__":
    serve(sys.argv[1])
