"""Run commands in processes of their own without importing torch for each.

- `run(["surgery", "inspect", FOLDER], cwd)` forks a child of this process, which becomes the command.
- `alone(SCRIPT, ...)` forks a child of a server that has imported transformers and not this library. All test processes
  of a session share it. `Reloads` lets it stand in for `subprocess` where an export is reloaded without this library.

Variables that a library reads while it is imported have no effect in a child: start a command that needs them with
`subprocess`.
"""

from __future__ import annotations

import gc
import json
import logging
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
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.support.forked import redirect, run_and_exit

ROOT = Path(__file__).parents[2]
TIMEOUT = 300.0
FAMILIES = ("mamba", "mamba2", "bamba", "falcon_mamba", "zamba2", "nemotron_h", "granitemoehybrid")


class Started:
    """A command that runs.

    Args:
        pid: its process id.
        folder: holds its output, until `wait`.
        line: connection over which a server sends the exit code; None for a child of this process.
    """

    def __init__(self, arguments: Sequence[str], pid: int, folder: Path, line: socket.socket | None = None) -> None:
        self.arguments, self.pid, self.folder, self.line = list(arguments), pid, folder, line
        self.end = os.pidfd_open(pid) if line is None else line.detach()

    def wait(self, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
        """Wait for its end. Kill it after `timeout` seconds.

        Raises:
            TimeoutExpired: it took longer.
        """
        late = not select.select([self.end], [], [], timeout)[0]
        if late:
            os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) if self.line is None else int(_line_of(self.end))
        os.close(self.end)
        self.end = -1
        texts = [(self.folder / name).read_text("utf-8", "replace") for name in ("out", "err")]
        shutil.rmtree(self.folder)
        if late:
            raise subprocess.TimeoutExpired(self.arguments, timeout, *texts)
        return subprocess.CompletedProcess(self.arguments, code, *texts)

    def kill(self, number: int) -> None:
        """Send a signal, if it still runs: its process id may belong to another process later."""
        if self.running:
            os.kill(self.pid, number)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.end >= 0 and not select.select([self.end], [], [], 0)[0]


def start(
    arguments: Sequence[str], cwd: Path | str, environment: Mapping[str, str] | None = None, script: str | None = None
) -> Started:
    """Start a command in a forked child of this process.

    Args:
        arguments: its `sys.argv`.
        environment: of the command; that of this process if not set. Folders of its PYTHONPATH are importable.
        script: Python code to run; `surgery` if not set.
    """
    request = _request(arguments, cwd, environment, script)
    child = os.fork()
    if child == 0:
        logging.getLogger().handlers.clear()  # pytest's own
        if "accelerate" in sys.modules:  # which remembers how many processes there are
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        _become(request)
    return Started(arguments, child, Path(request["folder"]))


def run(*given: Any, **named: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Arguments are those of `start`."""
    return start(*given, **named).wait()


class Server:
    """The server without this library. It ends with the pytest that the user started."""

    def __init__(self) -> None:
        first = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        folder = Path(tempfile.gettempdir()) / f"surgery-test-{os.getuid()}-{first}"
        self.address, self.pid = str(folder / "socket"), 0
        with suppress(FileExistsError):  # another test process has started it
            folder.mkdir(mode=0o700)
            command = [sys.executable, "-m", __name__, self.address, str(first)]
            self.pid = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True).pid

    def start(self, *given: Any, **named: Any) -> Started:
        """Start a command. Arguments are those of `start` in this module."""
        return _ask(self.address, _request(*given, **named))

    def stop(self) -> None:
        """End it, if this process has started it."""
        if self.pid:
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)
            shutil.rmtree(Path(self.address).parent, ignore_errors=True)


@cache
def stock() -> Server:
    """The server of this test session, started when it is first needed."""
    return Server()


def alone(script: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script, which has to succeed, where this library cannot be imported."""
    script = f"import sys\nsys.modules['surgery'] = None\n{script}"
    done = stock().start(["-c", *arguments], cwd, {**os.environ, **environment}, script).wait()
    assert done.returncode == 0, done.stderr[-3000:]
    return done


class Reloads:
    """Stands in for the module `subprocess`: `python -c SCRIPT` runs in a child of the server.

    Args:
        address: of the server; that of `stock` if not set.
        seconds: after these the child is ended, also if nobody waits for it any more.
    """

    def __init__(self, address: str | None = None, seconds: int = int(TIMEOUT)) -> None:
        self.address, self.seconds = address, seconds

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != sys.executable or "-c" not in command:
            return subprocess.run(command, **options)
        at = command.index("-c")
        script, arguments = command[at + 1], ["-c", *command[at + 2 :]]
        request = _request(arguments, options["cwd"], options["env"], script, self.seconds)
        done = _ask(self.address or stock().address, request).wait()
        if options.get("check") and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done


def _request(
    arguments: Sequence[str],
    cwd: Path | str | None,
    environment: Mapping[str, str] | None = None,
    script: str | None = None,
    seconds: int = 0,
) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="surgery-test-")
    env = None if environment is None else dict(environment)
    return {
        "argv": list(arguments), "cwd": str(cwd or "."), "folder": folder, "env": env, "script": script,
        "seconds": seconds,
    }  # fmt: skip


def _ask(address: str, request: dict[str, Any]) -> Started:
    """Send a request to a server, which may still be importing."""
    deadline = time.time() + TIMEOUT
    while not Path(address).exists():
        assert Path(address).parent.is_dir() and time.time() < deadline, "the server has ended"
        time.sleep(0.02)
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    line.sendall(json.dumps(request).encode() + b"\n")
    return Started(request["argv"], int(_line_of(line.fileno())), Path(request["folder"]), line)


def _line_of(descriptor: int) -> str:
    """The next line, byte by byte: the one after it may already be there."""
    text = b""
    while not text.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        assert byte, "the server has ended"
        text += byte
    return text.decode()


def module_script(name: str) -> str:
    """A script that runs a module of this checkout, as `python -m` does."""
    return f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_module({name!r}, run_name='__main__')"


def import_library() -> None:
    """Import what a command may need, so that children need not."""

    import surgery.cli
    import surgery.export.gguf_converter
    import surgery.export.reload
    import surgery.models.convert
    import surgery.report.figures.attention
    import surgery.report.figures.costs
    import surgery.report.figures.curves
    import surgery.report.figures.heatmaps
    import surgery.run.analysis
    import surgery.run.dry_run
    import surgery.run.pipeline
    import surgery.run.pretrain  # noqa: F401


def serve(address: str, first: int) -> None:
    """Import what loading a model takes in stock transformers, and answer requests until the process `first` ends."""
    gc.disable()  # until all is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.auto import modeling_auto  # noqa: F401

    torch.set_num_threads(1)
    for name in FAMILIES:
        __import__(f"transformers.models.{name}.modeling_{name}")
    assert "surgery" not in sys.modules
    gc.collect()
    gc.enable()
    gc.freeze()  # children do not visit, and so do not copy, what the imports have made
    waiting = selectors.DefaultSelector()
    waiting.register(os.pidfd_open(first), selectors.EVENT_READ, "end")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)
        waiting.register(listener, selectors.EVENT_READ, "request")
        while True:
            for key, _ in waiting.select():
                if key.data == "end":
                    return shutil.rmtree(Path(address).parent, ignore_errors=True)
                if key.data == "request":
                    line, _ = listener.accept()
                    request = json.loads(_line_of(line.fileno()))
                    child = os.fork()
                    if child == 0:
                        _become(request)
                    line.sendall(f"{child}\n".encode())
                    waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, line))
                else:
                    child, line = key.data
                    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    with line, suppress(OSError):  # nobody may wait for it any more
                        line.sendall(f"{code}\n".encode())


def _become(request: dict[str, Any]) -> NoReturn:
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
        more = filter(None, (request["env"] or {}).get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:0] = [request["cwd"] if request["script"] is None else "", *more]
        if request["script"] is None:
            from surgery import cli

            cli.main()
        else:
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


def leftover(target: Path) -> Path:
    """What a process that was killed while it wrote `target` leaves: a temporary folder with a mark."""
    folder = target.with_name(f".{target.name}.surgery-5.tmp")
    folder.mkdir(parents=True)
    (folder / ".surgery.json").write_text(json.dumps({"kind": "temporary", "of": target.name}))
    (folder / "new").write_text("half")
    return folder


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
