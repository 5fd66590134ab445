"""Run commands in processes of their own without importing torch for each.

A server imports what its commands need, and forks a child for each of them. It computes nothing itself, so that a child
starts in the state of a fresh process. Variables that a library reads while it is imported have no effect in a child:
start a command that needs them with `subprocess`.

- `library()` has imported this library: `library().run(["surgery", "inspect", FOLDER], cwd)`.
- `stock()` has imported transformers and not this library. It stands in for `subprocess` in `surgery.export.reload`
  and `surgery.export.gguf_converter`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.support.forked import redirect, run_and_exit

ROOT = Path(__file__).parents[2]
TIMEOUT = 300.0
FAMILIES = ("mamba", "mamba2", "bamba", "falcon_mamba", "zamba2", "nemotron_h", "granitemoehybrid")


@dataclass
class Started:
    """A command that runs.

    Attributes:
        pid: its process id.
        line: connection over which the server sends the exit code.
        folder: holds its output, until `wait`.
    """

    arguments: Sequence[str]
    pid: int
    line: socket.socket
    folder: Path

    def wait(self, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
        """Wait for its end. Kill it after `timeout` seconds.

        Raises:
            TimeoutExpired: it took longer.
        """
        self.line.settimeout(timeout)
        try:
            code = json.loads(_line_of(self.line))
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(list(self.arguments), timeout) from None
        finally:
            self.line.close()
        texts = [(self.folder / name).read_text("utf-8", "replace") for name in ("out", "err")]
        shutil.rmtree(self.folder)
        return subprocess.CompletedProcess(list(self.arguments), code, *texts)

    def kill(self, number: int) -> None:
        """Send a signal, if it still runs: its process id may belong to another process later."""
        if self.running:
            os.kill(self.pid, number)

    @property
    def running(self) -> bool:
        """Whether the server has not sent the exit code yet."""
        return self.line.fileno() >= 0 and not select.select([self.line], [], [], 0)[0]


class Server:
    """A server, started at once and waited for when it is needed.

    Args:
        kind: `library` or `stock`.
        stock: address of the server in which commands of a `library` server reload exports.
    """

    def __init__(self, kind: str, stock: Server | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="surgery-test-"))
        self.address = str(self.folder / "socket")
        command = [sys.executable, "-m", __name__, kind, self.address, *([stock.address] if stock else [])]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
        atexit.register(self.stop)

    def start(
        self,
        arguments: Sequence[str],
        cwd: Path | str,
        environment: Mapping[str, str] | None = None,
        script: str | None = None,
    ) -> Started:
        """Start a command.

        Args:
            arguments: its `sys.argv`.
            environment: of the command; that of the server if not set. Folders of its PYTHONPATH are importable.
            script: Python code to run; `surgery` if not set.
        """
        while not Path(self.address).exists():
            assert self.process.poll() is None, "the server has ended"
            time.sleep(0.02)
        return _start(self.address, arguments, cwd, environment, script)

    def run(self, *given: Any, **named: Any) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Arguments are those of `start`."""
        return self.start(*given, **named).wait()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Reloads:
    """Stands in for the module `subprocess`: `python -c SCRIPT` runs in a child of the server at an address.

    Args:
        seconds: after these the child is ended, also if nobody waits for it any more.
    """

    def __init__(self, address: str, seconds: int = int(TIMEOUT)) -> None:
        self.address, self.seconds = address, seconds

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != sys.executable or "-c" not in command:
            return subprocess.run(command, **options)
        at = command.index("-c")
        script, arguments = command[at + 1], ["-c", *command[at + 2 :]]
        done = _start(self.address, arguments, options["cwd"], options["env"], script, self.seconds).wait()
        if options.get("check") and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done


def _start(
    address: str,
    arguments: Sequence[str],
    cwd: Path | str | None,
    environment: Mapping[str, str] | None,
    script: str | None,
    seconds: int = 0,
) -> Started:
    while not Path(address).exists():  # the server may still be importing
        assert Path(address).parent.is_dir(), "the server has ended"
        time.sleep(0.02)
    folder = Path(tempfile.mkdtemp(prefix="surgery-test-"))
    request = {
        "argv": list(arguments),
        "cwd": str(cwd or "."),
        "folder": str(folder),
        "script": script,
        "seconds": seconds,
    }
    request["env"] = None if environment is None else dict(environment)
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    line.sendall(json.dumps(request).encode() + b"\n")
    return Started(arguments, int(_line_of(line)), line, folder)


def _line_of(line: socket.socket) -> str:
    """The next line, byte by byte: the one after it may already be there."""
    text = b""
    while not text.endswith(b"\n"):
        byte = line.recv(1)
        assert byte, "the server has ended"
        text += byte
    return text.decode()


@cache
def stock() -> Server:
    """The server without this library, one for each test process."""
    return Server("stock")


@cache
def library() -> Server:
    """The server with this library, one for each test process."""
    return Server("library", stock())


def module_script(name: str) -> str:
    """A script that runs a module of this checkout, as `python -m` does."""
    return f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_module({name!r}, run_name='__main__')"


def servers() -> list[int]:
    """Process ids of the servers that this process has started."""
    return [make().process.pid for make in (stock, library) if make.cache_info().currsize]


def import_library(reloads: Reloads | None = None) -> Any:
    """Import what a command may need. Returns `surgery.cli.main`."""
    from surgery import cli
    from surgery.console.progress import silence_libraries

    silence_libraries()
    import surgery.export.gguf_converter
    import surgery.export.reload
    import surgery.models.convert
    import surgery.reproduce.analysis
    import surgery.run.dry_run
    import surgery.run.pipeline
    import surgery.run.pretrain

    if reloads is not None:
        for module in (surgery.export.reload, surgery.export.gguf_converter):
            module.subprocess = reloads  # type: ignore[attr-defined]
    return cli.main


def import_stock() -> None:
    """Import what loading a model takes in stock transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils  # noqa: F401
    from transformers.models.auto import modeling_auto  # noqa: F401

    torch.set_num_threads(1)
    for name in FAMILIES:
        __import__(f"transformers.models.{name}.modeling_{name}")
    assert "surgery" not in sys.modules


def serve(kind: str, address: str, stock_address: str | None = None) -> None:
    """Answer requests until the process that started the server ends."""
    gc.disable()  # until all is imported
    main = import_stock() if kind == "stock" else import_library(Reloads(stock_address) if stock_address else None)
    gc.collect()
    gc.enable()
    gc.freeze()  # children do not visit, and so do not copy, what the imports have made
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin, selectors.EVENT_READ, "end")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)
        waiting.register(listener, selectors.EVENT_READ, "request")
        while True:
            for key, _ in waiting.select():
                if key.data == "end":
                    return
                if key.data == "request":
                    line, _ = listener.accept()
                    request = json.loads(_line_of(line))
                    child = os.fork()
                    if child == 0:
                        _become(request, main)
                    line.sendall(f"{child}\n".encode())
                    waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, line))
                else:
                    child, line = key.data
                    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    with line, suppress(OSError):  # nobody may wait for it any more
                        line.sendall(f"{code}\n".encode())


def _become(request: dict[str, Any], main: Any) -> NoReturn:
    """Run the command, in the child."""

    def command() -> None:
        folder = Path(request["folder"])
        redirect(folder / "out", folder / "err")
        signal.alarm(request["seconds"])
        signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and background jobs start with it ignored
        if request["env"] is not None:
            os.environ.clear()
            os.environ.update(request["env"])
            _use_modules_cache(request["env"].get("HF_MODULES_CACHE"))
        os.chdir(request["cwd"])
        sys.argv = request["argv"]
        sys.path[1:1] = filter(None, (request["env"] or {}).get("PYTHONPATH", "").split(os.pathsep))
        if request["script"] is None:
            sys.path[0] = request["cwd"]
            main()
        else:
            sys.path[0] = ""
            exec(compile(request["script"], "<string>", "exec"), {"__name__": "__main__"})

    run_and_exit(command)


def _use_modules_cache(folder: str | None) -> None:
    """Set the folder of the code that comes with models, which transformers reads while it is imported."""
    if folder:
        from transformers import dynamic_module_utils
        from transformers.utils import hub

        for module in (dynamic_module_utils, hub):
            if hasattr(module, "HF_MODULES_CACHE"):
                module.HF_MODULES_CACHE = folder


if __name__ == "__main__":
    serve(*sys.argv[1:])


def leftover(target: Path) -> Path:
    """What a process that was killed while it wrote `target` leaves: a temporary folder with a mark."""
    folder = target.with_name(f".{target.name}.surgery-5.tmp")
    folder.mkdir(parents=True)
    (folder / ".surgery.json").write_text(json.dumps({"kind": "temporary", "of": target.name}))
    (folder / "new").write_text("half")
    return folder
