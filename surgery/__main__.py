"""`surgery`, `python -m surgery`, and so `accelerate launch -m surgery`."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Entry point. What is imported here is light, so that an interrupt is handled from the first moment."""
    signal.signal(signal.SIGINT, _interrupt)
    from surgery.cli import main as run

    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the process with code 130: at once during an import, which could swallow an exception, else by one."""
    at = frame
    while at is not None:
        if at.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        at = at.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
