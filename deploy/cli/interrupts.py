"""Ctrl-C where Python's KeyboardInterrupt is of no use: while modules are imported its traceback would be
printed, and in a callback that llama.cpp calls it would be lost.

SIGHUP makes a coordinator or a gateway read its API keys again. One that comes before there are any must not end it.

It imports only what Python itself has loaded when it starts, or nearly.
"""

from __future__ import annotations

import os
import signal
import types

INTERRUPTED = 130  # the exit code that shells give for SIGINT


SUPERVISED = "--exit-with-stdin"  # the flag of a process that ends with the one that started it


def ignore_hangups() -> None:
    """SIGHUP does nothing, until something wants to hear of it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _end(_number: int, _frame: types.FrameType | None) -> None:
    os._exit(INTERRUPTED)


class EndAtOnce:
    """A context manager. Inside, SIGINT ends the process with exit code 130 and without a word.

    The caller has nothing to tidy up then. A SIGINT that is ignored, or that has another handler, stays so.
    """

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_the_last() -> None:
    """A SIGINT from here on does nothing.

    It is called when all is done. Python then gives up its handlers, before it has ended: the system would kill the
    process, whose exit code says by now what it did.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
