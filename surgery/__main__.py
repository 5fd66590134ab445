"""Entry point of `surgery`, `python -m surgery` and `accelerate launch -m surgery`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line. Sets the handler of interrupts before any slow import."""
    signal.signal(signal.SIGINT, _interrupt)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: else the next file would get its number, and what is printed
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    from surgery.cli import main as run

    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. During an import, which could swallow it, exit with code 130 instead."""
    at = frame
    while at is not None:
        if at.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        at = at.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
