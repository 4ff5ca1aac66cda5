"""The entry point of the command `rlx`. Ctrl-C during imports ends the process without a traceback."""

from __future__ import annotations

import signal


def run() -> None:
    """Entry point of the script `rlx` and of `python -m rlx`."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if SIGINT is ignored
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rlx.cli.main import run as command

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


__all__ = ["run"]
