"""The coordinator's end of the fork server: one for the whole process, started when it is first needed."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import subprocess
import threading
from pathlib import Path

from relayline.coordinator.http.workers.fork_orders import order_frame
from relayline.wire.common.child_command import module_command

END_S = 2.0  # for the server to end its workers and itself; then it is killed


class ForkServer:
    """Makes worker processes that have a vocabulary, and ends them. Any thread, the event loop's too: a server that
    hangs is not waited for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, tokenizer: Path) -> tuple[int, socket.socket]:
        """Return a new worker's number and the socket to talk to it. It may still take a while to begin.

        Raises OSError if no server can be started.
        """
        ours, its = socket.socketpair()
        number = next(self._numbers)
        order = order_frame({"number": number, "path": str(tokenizer.absolute())})
        with self._lock, its:
            try:
                self._say(self._started(), order, its.fileno())
            except ConnectionError:  # killed, by the kernel perhaps
                self._kill()
                self._say(self._started(), order, its.fileno())
        return number, ours

    def end(self, number: int) -> None:
        """End a worker at once, whatever its activity."""
        with self._lock, contextlib.suppress(OSError):
            if self._control is not None:
                self._say(self._control, order_frame({"number": number}))

    def close(self) -> None:
        """End the server and all workers. Waits for up to END_S."""
        with self._lock:
            if self._process is not None and self._control is not None:
                self._control.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_S)
            self._kill()

    def _say(self, control: socket.socket, order: bytes, *given: int) -> None:
        """Send an order, which the socket has room for unless the server hangs: then it is killed. Raises OSError."""
        try:
            n_sent = socket.send_fds(control, [order], given)
        except BlockingIOError:
            n_sent = 0
        if n_sent < len(order):
            self._kill()
            raise BlockingIOError("the fork server does not read its orders")

    def _started(self) -> socket.socket:
        if self._control is None:
            ours, its = socket.socketpair()  # of a stream: macOS has no other that says its end
            command = module_command("relayline.coordinator.http.workers.fork_server", str(its.fileno()))
            with its:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[its.fileno()],
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            ours.setblocking(False)
            self._control = ours
        return self._control

    def _kill(self) -> None:
        """End the server at once, and so its workers. The next one that is wanted has another server."""
        control, process = self._control, self._process
        self._control = self._process = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


fork_server = ForkServer()  # of this process
atexit.register(fork_server.close)
