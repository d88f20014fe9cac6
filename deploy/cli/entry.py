"""Starts the `relayline` command. Ctrl-C ends it without a traceback from its first line on: this module imports next
to nothing, and all else only once SIGINT has its handler.
"""

from __future__ import annotations

import atexit
import os
import sys

from relayline.deploy.cli.interrupts import SUPERVISED, EndAtOnce, ignore_hangups, ignore_the_last
from relayline.deploy.cli.streams import open_closed_streams

# Before numpy is imported. Its OpenBLAS ends its threads when the process forks, and waits for them for ever where
# another thread of ours has them compute: uvloop forks to start a process. Nothing here needs more than one thread,
# whatever the environment says for other programs.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
_quietly = EndAtOnce()
atexit.register(ignore_the_last)  # the first one here, so the last one that is called
_quietly.__enter__()  # here, since the console script still has a few lines to go


def main() -> None:
    """Entry point of the console script."""
    _quietly.__enter__()
    open_closed_streams()
    if SUPERVISED in sys.argv:
        ignore_hangups()
    from relayline.deploy.cli import main as command

    _quietly.__exit__()
    try:
        command.main()
    finally:
        _quietly.__enter__()  # for the interpreter's own end
