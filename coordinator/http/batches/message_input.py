"""The process that reads the body of a new message batch: it checks all requests, and writes them as lines.

Its order is one JSON line on stdin, what it found one on stdout. The body is a file, and the lines take its place. So a
body of 200 MiB costs the coordinator no time and no memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from relayline.coordinator.batches.lines import LINE_BYTES_MAX, LineError, read_request
from relayline.coordinator.batches.message_lines import URL
from relayline.coordinator.http.batches.bodies import MessageBatchBody, MessageRequest
from relayline.coordinator.http.requests.bodies import decode_body
from relayline.wire.common.errors import InvalidRequestError

NICENESS = 10  # what answers other requests goes first
PARAMS_BYTES_MAX = LINE_BYTES_MAX - (1 << 20)  # the rest of a line is the name, which may be long if it is escaped


class Order(msgspec.Struct, frozen=True):
    """What to read."""

    path: str
    n_requests_max: int
    n_bytes_max: int


class Read(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was found: the lines, a problem of the client's, or one of the disk's."""

    n_requests: int = 0
    n_bytes: int = 0
    window: str | None = None
    problem: str = ""
    param: str | None = None
    disk_problem: str = ""


class _Params(msgspec.Struct):
    stream: object = None


def main() -> None:
    """Read what stands on stdin."""
    os.nice(NICENESS)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(_read(order)) + b"\n")
    sys.stdout.flush()


def _read(order: Order) -> Read:
    path = Path(order.path)
    try:
        body = decode_body(path.read_bytes(), MessageBatchBody)
        n_bytes = 0
        # Not to be made anew: a coordinator that took the place of one that was killed may have removed it.
        with path.open("r+b") as file:
            file.truncate()
            for line in lines_of(body, order.n_requests_max):
                n_bytes += len(line)
                if n_bytes > order.n_bytes_max:
                    text = f"have more than {order.n_bytes_max} bytes together"
                    return Read(problem=f"requests: {text}", param="requests")
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except InvalidRequestError as error:
        return Read(problem=error.message, param=error.param)
    except OSError as error:
        return Read(disk_problem=error.strerror or str(error))
    return Read(len(body.requests), n_bytes, body.completion_window)


def lines_of(body: MessageBatchBody, n_max: int) -> Iterator[bytes]:
    """Yield the line of each request. Raises InvalidRequestError, which names the first request with a mistake."""
    if not 0 < len(body.requests) <= n_max:
        raise InvalidRequestError.of_field("requests", f"must be 1 to {n_max:,}, and are {len(body.requests):,}")
    places: dict[str, int] = {}
    for at, request in enumerate(body.requests):
        where, first = f"requests[{at}]", places.setdefault(request.custom_id, at)
        if first != at:
            raise InvalidRequestError.of_field(f"{where}.custom_id", f"is that of requests[{first}] too")
        yield _line(request, where)


def _line(request: MessageRequest, where: str) -> bytes:
    if len(bytes(request.params)) > PARAMS_BYTES_MAX:
        raise InvalidRequestError.of_field(f"{where}.params", f"has more than {PARAMS_BYTES_MAX >> 20} MiB")
    try:
        is_streamed = bool(msgspec.json.decode(request.params, type=_Params).stream)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidRequestError.of_field(f"{where}.params", "must be an object") from None
    if is_streamed:
        raise InvalidRequestError.of_field(f"{where}.params.stream", "must be false: the answers of a batch come whole")
    body = msgspec.json.format(request.params, indent=-1)
    line = msgspec.json.encode(
        {"custom_id": request.custom_id, "method": "POST", "url": URL, "body": msgspec.Raw(body)}
    )
    try:
        read_request(line)  # as the process will that asks it
    except LineError as error:
        raise InvalidRequestError.of_field(where, str(error)) from None
    return line + b"\n"


if __name__ == "__main__":
    main()
