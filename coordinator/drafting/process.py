"""The process that drafts, as `link.py` starts it: a crash of llama.cpp there costs guesses, and no request."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path

from relayline.coordinator.drafting.draft_model import DraftModel, DraftSettings
from relayline.coordinator.drafting.messages import SIZE, TO_DRAFTER, FromDrafter, Ready, Refused, ToDrafter, framed
from relayline.coordinator.drafting.streams import Streams
from relayline.wire.common.bounds import DRAFT_FRAME_BYTES_MAX
from relayline.wire.common.child_command import is_passing
from relayline.wire.common.errors import RelaylineError

_READ_BYTES = 256 * 1024


def main() -> None:
    """Load the model, say so, and draft until the other end closes. Arguments: socket, draft model, the served model's
    vocabulary, cells, threads, layers on a GPU.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the coordinator says when it is over
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=int(sys.argv[1])) as pipe, contextlib.suppress(BrokenPipeError, ConnectionError):
        path, vocabulary = Path(sys.argv[2]), Path(sys.argv[3])
        n_cells = int(sys.argv[4])
        try:
            model = DraftModel(path, vocabulary, DraftSettings(n_cells, int(sys.argv[5]), int(sys.argv[6])))
        except (RelaylineError, OSError) as error:
            _say(pipe, [Refused(str(error), may_pass=is_passing(error))])
            return
        _say(pipe, [Ready()])
        try:
            draft(Inbox(pipe), model, Streams(n_cells, model.n_vocab, model.ends))
        except RelaylineError as error:
            _say(pipe, [Refused(str(error))])
    os._exit(0)  # not through llama.cpp's destructors


class Inbox:
    """The messages that arrive at a blocking socket."""

    def __init__(self, pipe: socket.socket) -> None:
        self.pipe = pipe
        self._buffer = bytearray()

    def messages(self, *, waits: bool) -> list[ToDrafter] | None:
        """Return what has arrived; with `waits` at least one message. None: the other end has closed."""
        while True:
            found = self._whole()
            if found or not (waits or self._is_readable()):
                return found
            data = self.pipe.recv(_READ_BYTES)
            if not data:
                return None
            self._buffer += data

    def _whole_ends(self) -> int:
        """Return where the whole frames of the buffer end."""
        end = 0
        while len(self._buffer) - end >= SIZE.size:
            (size,) = SIZE.unpack_from(self._buffer, end)
            if size > DRAFT_FRAME_BYTES_MAX:
                raise ConnectionError("a frame that is too large")
            if len(self._buffer) - end < SIZE.size + size:
                break
            end += SIZE.size + size
        return end

    def _whole(self) -> list[ToDrafter]:
        found: list[ToDrafter] = []
        at, end = 0, self._whole_ends()
        while at < end:
            (size,) = SIZE.unpack_from(self._buffer, at)
            found += TO_DRAFTER.decode(bytes(self._buffer[at + SIZE.size : at + SIZE.size + size]))
            at += SIZE.size + size
        del self._buffer[:end]
        return found

    def _is_readable(self) -> bool:
        return bool(select.select([self.pipe], [], [], 0)[0])


def draft(inbox: Inbox, model: DraftModel, streams: Streams) -> None:
    """Draft until the other end closes."""
    is_idle = True
    while (messages := inbox.messages(waits=is_idle)) is not None:
        heard: list[FromDrafter] = []
        for message in messages:
            heard += streams.hear(message)
        step = streams.next_step()
        for sequence, position in step.trims:
            model.drop(sequence, position)
        is_idle = not step.rows
        if step.rows:
            results = model.decode(step.rows)
            heard += streams.full() if results is None else streams.computed(step.rows, results)
        if heard:
            _say(inbox.pipe, heard)


def _say(pipe: socket.socket, messages: list[FromDrafter]) -> None:
    pipe.sendall(framed(messages))


if __name__ == "__main__":
    main()
