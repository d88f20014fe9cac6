"""stdin, stdout and stderr, where whoever started the command has closed some of them.

It imports only what Python itself has loaded when it starts.
"""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Let each of the three that is closed lead to the null device.

    Otherwise the next file or socket would have its number, and get what native code prints.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False, encoding="utf-8"))  # noqa: SIM115
