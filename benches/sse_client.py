"""A cheap client of streamed chats: `python -m benches.sse_client URL MODEL STREAMS TOKENS WAVES NAME`.

It opens all connections, sends all requests at once, and only looks at when bytes come. So it takes little of the
processor that it shares with the measured server. Each stream asks WAVES times, on a new connection each time. A
request's id is NAME, its wave and its stream. It prints one JSON object: for each answer the milliseconds from the
first request of its wave to its first and last bytes, and the number of pieces that it came in.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 64 * 1024
SILENT_S = 120.0  # without a byte of any stream: the run has failed
END = b"data: [DONE]"


def request_of(host: str, model: str, stream: int, n_tokens: int, request_id: str) -> bytes:
    """Return one streamed greedy chat as it goes over the connection."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Stream {stream}: tell me more."}],
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"x-request-id: {request_id}\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


class Answer:
    """One answer as it comes."""

    def __init__(self) -> None:
        self.first_ns = self.last_ns = self.n_pieces = 0
        self.tail = self.head = b""

    def take(self, data: bytes, now_ns: int) -> None:
        """Note bytes."""
        if not self.n_pieces:
            self.first_ns, self.head = now_ns, data[:64]
        self.n_pieces, self.last_ns, self.tail = self.n_pieces + 1, now_ns, (self.tail + data)[-64:]

    def described(self, began_ns: int) -> dict[str, Any]:
        """Return its figures. Raises RuntimeError if it is incomplete."""
        if b" 200 " not in self.head or END not in self.tail:
            raise RuntimeError(f"an answer is incomplete: {self.head!r} ... {self.tail!r}")
        first_ms, last_ms = (self.first_ns - began_ns) / 1e6, (self.last_ns - began_ns) / 1e6
        return {"first_ms": first_ms, "last_ms": last_ms, "pieces": self.n_pieces}


def wave(address: tuple[str, int], requests: list[bytes]) -> list[dict[str, Any]]:
    """Send all requests at once and read all answers to their ends."""
    links = [socket.create_connection(address) for _ in requests]
    answers = [Answer() for _ in requests]
    with selectors.DefaultSelector() as selector:
        for index, link in enumerate(links):
            selector.register(link, selectors.EVENT_READ, index)
        began_ns = time.monotonic_ns()
        for link, request in zip(links, requests, strict=True):
            link.sendall(request)
        n_open = len(links)
        while n_open:
            ready = selector.select(SILENT_S)
            if not ready:
                raise RuntimeError(f"{n_open} answers have stopped")
            for key, _ in ready:
                data = links[key.data].recv(READ_BYTES)
                if data:
                    answers[key.data].take(data, time.monotonic_ns())
                    continue
                selector.unregister(key.fileobj)
                links[key.data].close()
                n_open -= 1
    return [answer.described(began_ns) for answer in answers]


def main(url: str, model: str, counts: list[int], name: str) -> None:
    """Ask, and print the figures of each wave's answers. `counts`: of streams, of tokens and of waves."""
    n_streams, n_tokens, n_waves = counts
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 80)
    found = []
    for at in range(n_waves):
        ids = [f"{name}-{at}-{stream}" for stream in range(n_streams)]
        found.append(
            wave(
                address, [request_of(parts.netloc, model, stream, n_tokens, ids[stream]) for stream in range(n_streams)]
            )
        )
    print(json.dumps(found))


if __name__ == "__main__":
    given_url, given_model, *given_counts, given_name = sys.argv[1:]
    main(given_url, given_model, [*map(int, given_counts)], given_name)
