"""Starts the `relayline` command. Ctrl-C ends it without a traceback from its first line on: this module imports next
to nothing, and all else only once SIGINT has its handler.
"""

from __future__ import annotations

from relayline.deploy.cli.interrupts import EndAtOnce

_quietly = EndAtOnce()
_quietly.__enter__()  # here, since the console script still has a few lines to go


def main() -> None:
    """Entry point of the console script."""
    _quietly.__enter__()
    from relayline.deploy.cli import main as command

    _quietly.__exit__()
    try:
        command.main()
    finally:
        _quietly.__enter__()  # for the interpreter's own end
