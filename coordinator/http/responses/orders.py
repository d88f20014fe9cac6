"""Background responses that have not ended, as files: they are asked for again when the coordinator is back.

* `ID`: the request, written whole.
* `ID.tokens`: the tokens of the answer so far, a record for each write. The last record may be torn.
* `ID.starts`: a byte for each time that it was asked for again and the coordinator was then killed, or crashed.

Everything here blocks: call it in a thread, one call at a time. `add` and `read` may run beside the others: they are of
one response, and share only the sum of the answers' bytes.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from relayline.coordinator.http.responses.items import KeptItem
from relayline.coordinator.http.responses.kept_files import (
    FILE_BYTES_MAX,
    VERSION,
    append,
    in_pieces,
    read,
    read_all,
    remove_torn,
    write,
)
from relayline.coordinator.sessions.generation import FinishReason, TokenEvent
from relayline.wire.common.bounds import (
    STORED_RESPONSES_BYTES_MAX,
    UNFINISHED_ANSWERS_BYTES_MAX,
    UNFINISHED_RESPONSES_BYTES_MAX,
)
from relayline.wire.common.errors import OverloadedError

_TOKENS, _STARTS = ".tokens", ".starts"
_LENGTH_BYTES = 4  # before each record
SAID_BYTES_MAX = STORED_RESPONSES_BYTES_MAX  # of the tokens of one answer; a longer one could not be stored either


class Sent(msgspec.Struct):
    """The body of a request, with what must be known to read it again to the same end."""

    raw: bytes
    n_context: int  # its first bytes: the stored context that it refers to
    seed: int  # for a request that brings none


class Order(msgspec.Struct, kw_only=True):
    """The request of a background response, and its owner."""

    version: int = VERSION
    id: str
    owner: str
    payer: str
    """`ApiKey.lasting_name` of the key that was shown; empty where none was demanded."""
    behalf: str
    """For whom a gateway showed it, as the gateway said it."""
    created: int
    sent: Sent | None
    model_id: str
    n_vocab: int
    queued: bytes
    """The response as it began, JSON."""
    input_items: list[KeptItem]
    previous_id: str | None
    is_stream: bool
    conversation_id: str | None = None  # which files of 0.1.0 do not have


class _Sent(msgspec.Struct):
    """Of an `Order` what it is asked for again with."""

    sent: Sent


class Unfinished(msgspec.Struct):
    """A background response that the coordinator before has not ended."""

    order: Order  # without what was sent
    has_begun: bool
    n_starts: int
    """How often it was asked for again by a coordinator that was killed or crashed."""


class _Said(msgspec.Struct, array_like=True):
    """A TokenEvent, as far as answers show it."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None
    is_end_token: bool
    n_cached: int


class _Sizes:
    """Of files, by the response: several threads write them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, int] = {}

    def sum(self) -> int:
        with self._lock:
            return sum(self._of.values())

    def put(self, id: str, n_bytes: int) -> None:
        with self._lock:
            self._of[id] = n_bytes

    def pop(self, id: str) -> None:
        with self._lock:
            self._of.pop(id, None)


class OrderFiles:
    """Those of one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes_of: dict[str, tuple[str, int]] = {}  # owners and bytes of requests
        self._answers = _Sizes()

    def load(self) -> list[Unfinished]:
        """Return all, the one that came first at the front. Raises OSError."""
        remove_torn(self.path, (_TOKENS, _STARTS))
        found: list[Unfinished] = []
        for order in read_all(self.path, Order):
            self._bytes_of[order.id] = (order.owner, (self.path / order.id).stat().st_size)
            order.sent = None
            n_said = _size(self._tokens(order.id))
            self._answers.put(order.id, n_said)
            found.append(Unfinished(order, n_said > 0, _size(self._starts(order.id))))
        return sorted(found, key=lambda each: (each.order.created, each.order.id))

    def begin(self, order: Order) -> None:
        """Keep a request. Raises OSError, and OverloadedError where too much is kept already."""
        pieces = [*in_pieces(order)]
        own_bytes = sum(len(piece) for piece in pieces)
        self._check_room(order.owner, own_bytes)
        if self._answers.sum() + SAID_BYTES_MAX > UNFINISHED_ANSWERS_BYTES_MAX:
            text = f"the answers of background responses that run have {self._answers.sum()} bytes on the disk"
            raise OverloadedError(f"{text}, which leaves too little room for one more; try again later")
        write(self.path / order.id, pieces)
        self._bytes_of[order.id] = (order.owner, own_bytes)

    def read(self, id: str) -> tuple[Sent, list[TokenEvent]]:
        """Return a request, and the tokens of its answer so far. A torn record is cut off. Raises OSError, and others
        for a file that has become unreadable.
        """
        return read(self.path / id, _Sent).sent, self.said(id)

    def said(self, id: str) -> list[TokenEvent]:
        """Return the tokens of an answer so far. A torn record is cut off. Raises OSError."""
        path = self._tokens(id)
        if not path.exists():
            return []
        with path.open("rb") as file:
            events, at = _records(file, min(_size(path), SAID_BYTES_MAX))
        if at < _size(path):
            os.truncate(path, at)
        self._answers.put(id, at)
        return events

    def add(self, id: str, events: Sequence[TokenEvent]) -> None:
        """Note more tokens of an answer. It does not wait for the disk: a power cut may take it. Raises OSError, also
        where the answer is too long to be read again, or all answers together are.
        """
        said = [
            _Said(
                each.token, each.logprob, each.top_logprobs, each.finish_reason, each.is_end_token, each.n_cached
            )
            for each in events
        ]  # fmt: skip
        data = msgspec.msgpack.encode(said)
        record = len(data).to_bytes(_LENGTH_BYTES) + data
        if self._answers.sum() + len(record) > UNFINISHED_ANSWERS_BYTES_MAX:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        self._answers.put(id, append(self._tokens(id), record, bytes_max=SAID_BYTES_MAX))

    def started(self, id: str) -> None:
        """Note that it is asked for again now. Raises OSError."""
        append(self._starts(id), b".", waits=True)

    def left(self, ids: Iterable[str]) -> None:
        """The coordinator ends in order, and it was not for these. Raises OSError."""
        for id in ids:
            self._starts(id).unlink(missing_ok=True)

    def finished(self, id: str) -> None:
        """Forget one. Raises OSError."""
        for path in (self.path / id, self._tokens(id), self._starts(id)):  # the first one says that there is one
            path.unlink(missing_ok=True)
        self._bytes_of.pop(id, None)
        self._answers.pop(id)

    def _check_room(self, owner: str, own_bytes: int) -> None:
        """Raise OverloadedError where a request has no room. A key may have half of it, as it may of their number."""
        all_bytes = sum(n_bytes for _, n_bytes in self._bytes_of.values()) + own_bytes
        key_bytes = sum(n_bytes for name, n_bytes in self._bytes_of.values() if name == owner) + own_bytes
        rooms = [("", all_bytes, UNFINISHED_RESPONSES_BYTES_MAX)]
        if owner:
            rooms.append((" of this API key", key_bytes, UNFINISHED_RESPONSES_BYTES_MAX // 2))
        for whose, n_bytes, n_max in reversed(rooms):
            if n_bytes > n_max or own_bytes > FILE_BYTES_MAX:
                text = f"background responses{whose} that wait or run have {n_bytes} bytes with this one"
                advice = f"send at most {min(n_max, FILE_BYTES_MAX)} bytes, or try again later"
                raise OverloadedError(f"{text}, which is too many; {advice}")

    def _tokens(self, id: str) -> Path:
        return self.path / f"{id}{_TOKENS}"

    def _starts(self, id: str) -> Path:
        return self.path / f"{id}{_STARTS}"


def _records(file: BinaryIO, n_bytes: int) -> tuple[list[TokenEvent], int]:
    """Return what the whole records in the first bytes of a file hold, and where the last of them ends."""
    events: list[TokenEvent] = []
    at = 0
    while at + _LENGTH_BYTES <= n_bytes:
        end = at + _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES))
        if end > n_bytes:
            break
        try:
            said = msgspec.msgpack.decode(file.read(end - at - _LENGTH_BYTES), type=list[_Said])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            break
        for each in said:
            event = TokenEvent(each.token, each.logprob, each.top, each.finish_reason, each.is_end_token)
            events.append(msgspec.structs.replace(event, n_cached=each.n_cached) if each.n_cached else event)
        at = end
    return events, at


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
