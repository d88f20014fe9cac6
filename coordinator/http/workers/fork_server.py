"""The process whose children read bodies, as `forks.py` starts it with the number of its socket.

It loads the code and the vocabulary once; children share that memory and start within milliseconds. It has one thread,
so that it can fork; a coordinator, which has many, could not.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from pathlib import Path

from relayline.coordinator.http.workers.body_worker import end_with_parent, serve
from relayline.coordinator.http.workers.fork_orders import read_order
from relayline.coordinator.text.tokenizer import Tokenizer

_TOKENIZERS_MAX = 8  # a coordinator has one; tests have several


def main() -> None:
    """Fork, and end, until the other end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the coordinator says when it is over
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    tokenizers: dict[str, Tokenizer] = {}
    server = os.getpid()
    children: dict[int, int] = {}  # number -> process id
    while True:
        asked = read_order(control)
        _reap(children)
        if asked is None:
            break
        order, given = asked
        number = order["number"]
        if "path" not in order:
            _end(children, number)
            continue
        pipe = socket.socket(fileno=given[0])
        with contextlib.suppress(Exception):  # the one that waits at the other end sees it closed
            tokenizer = _loaded(tokenizers, order["path"])
            child = os.fork()
            if child == 0:
                end_with_parent(server)
                control.close()
                _be_child(pipe, tokenizer)
            children[number] = child
        pipe.close()
    for number in [*children]:
        _end(children, number)


def _be_child(pipe: socket.socket, tokenizer: Tokenizer) -> None:
    status = 1
    try:
        serve(pipe, tokenizer)
        status = 0
    finally:
        os._exit(status)


def _loaded(tokenizers: dict[str, Tokenizer], path: str) -> Tokenizer:
    found = tokenizers.get(path)
    if found is None:
        while len(tokenizers) >= _TOKENIZERS_MAX:
            tokenizers.pop(next(iter(tokenizers)))
        found = tokenizers[path] = Tokenizer.load(Path(path))
        found.warm()
        gc.collect()
        gc.freeze()  # a collection in a child would copy all of it
    return found


def _end(children: dict[int, int], number: int) -> None:
    child = children.pop(number, None)
    if child is not None:  # not reaped yet, so that the number of the process is still its own
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _reap(children: dict[int, int]) -> None:
    for number, child in [*children.items()]:
        if os.waitpid(child, os.WNOHANG)[0]:
            del children[number]


if __name__ == "__main__":
    main()
