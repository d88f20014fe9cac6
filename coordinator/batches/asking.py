"""Asks a server the requests of a batch, several at a time, and writes each outcome as it comes.

A shell around `patience`: an HTTP client, a clock and files. The server may be any that speaks OpenAI's API.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

import aiohttp
from yarl import URL

from relayline.coordinator.batches.lines import ANSWER_BYTES_MAX, Asked, Outcome
from relayline.coordinator.batches.patience import Attempts, Terms, Trouble, trouble_of
from relayline.wire.common.errors import StartError
from relayline.wire.common.texts import printable, system_reason, whole_number

STREAMS_ELSEWHERE = 16  # in flight at a server that does not tell how many it runs at once
STREAMS_MAX = 4_096
CONNECT_S = 30.0
OVERHANG = 4  # one request in line for so many lanes, so that none is empty between two requests
_PIECE_BYTES = 1 << 16
_LANES_UNKNOWN = ("unknown", "starting", "loading", "dead")  # phases of a pipeline, and of one behind a gateway
_JSON = {"Content-Type": "application/json"}
_SURROGATE = re.compile("[\ud800-\udfff]")  # has no UTF-8, so it is escaped; all other text takes fewer bytes as it is

Sleep = Callable[[float], Awaitable[object]]


class Sink(Protocol):
    """Where outcomes go."""

    def add(self, line: bytes) -> None:
        """Write one line."""

    def is_unsynced(self) -> bool:
        """Return whether `sync` should be called."""

    def sync(self) -> None:
        """Wait for the disk."""


@dataclasses.dataclass(slots=True)
class Progress:
    """How far a batch has come; the counts are of this run alone."""

    began_s: float
    n_answered: int = 0
    n_failed: int = 0
    n_tokens: int = 0
    n_in_flight: int = 0
    trouble: str = ""
    """Why the latest attempt gave no answer, empty after one that did."""
    answered_s: float = 0.0
    """When the server last had an outcome for a request; first: when the run began. Monotonic."""


class NotAnsweredError(Exception):
    """One attempt that gave no outcome to keep."""

    def __init__(self, trouble: Trouble, outcome: Outcome, retry_after_s: float | None) -> None:
        super().__init__(outcome.error_message)
        self.trouble, self.outcome, self.retry_after_s = trouble, outcome, retry_after_s


class Asking:
    """One run over the requests of a batch."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        terms: Terms,
        *,
        answers: Sink,
        errors: Sink,
        model: str = "",
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._session, self._url, self._terms = session, url, terms
        self._answers, self._errors, self._model, self._sleep = answers, errors, model, sleep
        now_s = time.monotonic()
        self.progress = Progress(now_s, answered_s=now_s)

    async def run(self, requests: Iterator[Asked], n_streams: int) -> None:
        """Ask all, `n_streams` at a time.

        Raises StartError where the server refuses the key, or has answered nobody for as long as the terms allow, and
        what the files raise. All lines that were written are on the disk then.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(n_streams):
                    group.create_task(self._stream(requests))
        except* Exception as errors:
            raise _first(errors) from None
        finally:
            for sink in {self._answers, self._errors}:
                sink.sync()

    async def _stream(self, requests: Iterator[Asked]) -> None:
        for asked in requests:  # shared by all streams
            self.progress.n_in_flight += 1
            try:
                outcome = await self._outcome(asked)
            finally:
                self.progress.n_in_flight -= 1
            sink = self._errors if outcome.is_failed else self._answers
            sink.add(outcome.line())
            self._count(outcome)
            if sink.is_unsynced():
                await asyncio.to_thread(sink.sync)

    def _count(self, outcome: Outcome) -> None:
        self.progress.n_failed += outcome.is_failed
        self.progress.n_answered += not outcome.is_failed
        self.progress.n_tokens += outcome.n_tokens()

    async def _outcome(self, asked: Asked) -> Outcome:
        attempts = Attempts(time.monotonic())
        while True:
            try:
                outcome = await self._attempt(asked)
            except NotAnsweredError as error:
                now_s, text = time.monotonic(), error.outcome.error_message or f"status {error.outcome.status}"
                self.progress.trouble = text
                wait_s = attempts.next_wait_s(error.trouble, error.retry_after_s, now_s, self._terms)
                if wait_s is None:
                    if now_s - self.progress.answered_s >= self._terms.wait_s and error.trouble is Trouble.BUSY:
                        raise StartError(f"{self._url} has answered nothing for too long: {text}") from None
                    return error.outcome
                await self._sleep(wait_s)
            else:
                self.progress.answered_s, self.progress.trouble = time.monotonic(), ""
                return outcome

    async def _attempt(self, asked: Asked) -> Outcome:
        """Return an outcome to keep. Raises NotAnsweredError, and StartError for a key that is refused."""
        url = f"{self._url}{asked.url}"
        body = asked.body | {"model": self._model} if self._model else asked.body
        data = _SURROGATE.sub(_escaped, json.dumps(body, ensure_ascii=False, separators=(",", ":"))).encode()
        timeout = aiohttp.ClientTimeout(total=self._terms.timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._session.post(url, data=data, headers=_JSON, timeout=timeout) as response:
                raw = await _read(response)
        except aiohttp.ClientConnectorError as error:
            reason = system_reason(error) or type(error).__name__
            raise _unanswered(asked, Trouble.BUSY, "unreachable", f"the server cannot be reached ({reason})") from error
        except TimeoutError as error:
            text = f"no answer within {self._terms.timeout_s:g} s"
            raise _unanswered(asked, Trouble.BROKEN, "timeout", text) from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"the connection broke ({printable(system_reason(error) or str(error) or type(error).__name__)})"
            raise _unanswered(asked, Trouble.BROKEN, "connection_broken", text) from error
        if raw is None:
            text = f"the answer has more than {ANSWER_BYTES_MAX >> 20} MiB"
            return Outcome(asked.custom_id, error_code="answer_too_long", error_message=text)
        return self._judged(asked, response, raw)

    def _judged(self, asked: Asked, response: aiohttp.ClientResponse, raw: bytes) -> Outcome:
        status, headers = response.status, response.headers
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        message = _message_of(found)
        trouble = trouble_of(status, may_retry=headers.get("x-should-retry") != "false")
        if trouble is Trouble.REFUSED:
            raise StartError(
                f"{self._url} answered {status}{f' ({message})' if message else ''}; give it the right API key with "
                "--api-key, --api-key-file or in RELAYLINE_API_KEY"
            )
        if found is None:  # of a proxy, most often
            text = f"the server answered {status}, and no JSON"
            outcome = Outcome(asked.custom_id, error_code="no_json", error_message=text)
            trouble = trouble or (Trouble.BROKEN if status < 400 else None)
        else:
            outcome = Outcome(asked.custom_id, status, headers.get("x-request-id", ""), found)
        if trouble is not None:
            retry_after_s = _seconds(headers.get("retry-after"))
            shown = dataclasses.replace(outcome, error_message=f"the server answers {status}: {message}")
            raise NotAnsweredError(trouble, shown if outcome.status else outcome, retry_after_s)
        return outcome


def client(headers: Mapping[str, str], tls: ssl.SSLContext | bool) -> aiohttp.ClientSession:
    """Return an HTTP session for `Asking`; `tls` as aiohttp's `ssl`.

    An answer may take hours without a byte. So the system itself looks whether the other host is still there, and each
    request has its own connection: one that the server closes when it is idle would break the next request.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls, socket_factory=_watched_socket)
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=CONNECT_S))


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 8)):
        if hasattr(socket, name):  # not every system has them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


async def lanes_of(session: aiohttp.ClientSession, url: str) -> int | None:
    """Return how many requests a server runs at once: of a relayline gateway the sum, 0 for one that does not tell.

    None where stages still load for the first time, and nobody knows yet. Raises aiohttp.ClientError and OSError where
    nothing answers.
    """
    async with session.get(f"{url}/v1/pipeline") as response:
        try:
            found = json.loads(await _read(response) or b"")
        except (ValueError, RecursionError):
            return 0
    if response.status != 200 or not isinstance(found, dict):
        return 0
    every = found.get("pipelines") if found.get("kind") == "gateway" else [found]
    described = [each for each in every or () if isinstance(each, dict)]
    known = [each.get("lanes") for each in described if each.get("phase") not in _LANES_UNKNOWN]
    return sum(count for count in known if isinstance(count, int)) if known or not described else None


async def streams_at(
    session: aiohttp.ClientSession,
    url: str,
    terms: Terms,
    on_wait: Callable[[Exception | None], None],
    sleep: Sleep = asyncio.sleep,
) -> int:
    """Return how many requests to have in flight at a server, once it answers and has loaded.

    `on_wait` is called with the first failure, and with None for a server that loads. One that still loads after the
    terms' `wait_s` is left to whoever asks it. Raises aiohttp.ClientError and OSError where nothing answers within the
    terms' `first_answer_s`. Raises at once for a certificate or a URL that is no good, and, at the first attempt, for a
    host that has no address; StartError there for http:// to a port that speaks TLS.
    """
    attempts, at_first = Attempts(time.monotonic()), dataclasses.replace(terms, wait_s=terms.first_answer_s)
    loading = Attempts(time.monotonic())
    while True:
        try:
            n_lanes = await lanes_of(session, url)
        except (aiohttp.ClientSSLError, aiohttp.InvalidURL):
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if attempts.n_busy == 0:
                await _refuse_mistyped(url, error)
            wait_s = attempts.next_wait_s(Trouble.BUSY, None, time.monotonic(), at_first)
            if wait_s is None:
                raise
            if attempts.n_busy == 1:
                on_wait(error)
        else:
            wait_s = loading.next_wait_s(Trouble.BUSY, None, time.monotonic(), terms) if n_lanes is None else None
            if wait_s is None:
                return streams_for(n_lanes or 0)
            if loading.n_busy == 1:
                on_wait(None)
        await sleep(wait_s)


async def _refuse_mistyped(url: str, error: Exception) -> None:
    """Raise what waiting cannot mend: `error` itself, or StartError."""
    if isinstance(error, aiohttp.ClientConnectorDNSError) and error.errno == socket.EAI_NONAME:
        raise error
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientResponseError) and await _speaks_tls(url):
        secure = URL(url).with_scheme("https")  # which keeps the port
        raise StartError(f"{url} is no URL of a server: its port speaks TLS; give {secure}") from error


async def _speaks_tls(url: str) -> bool:
    """Return whether the port of an http:// URL takes a TLS handshake. Nothing else is sent."""
    place = URL(url)
    if place.scheme != "http":
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nobody is trusted: it is only looked at
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(place.host, place.port, ssl=context)
    except OSError:  # also ssl.SSLError and TimeoutError
        return False
    writer.transport.abort()
    return True


def streams_for(n_lanes: int) -> int:
    """Return how many requests to have in flight at a server of so many lanes; 0 lanes: it does not tell."""
    if n_lanes < 1:
        return STREAMS_ELSEWHERE
    return min(STREAMS_MAX, n_lanes + max(1, n_lanes // OVERHANG))


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    """Return a whole body, None for one that is too long."""
    found = bytearray()
    async for piece in response.content.iter_chunked(_PIECE_BYTES):
        found += piece
        if len(found) > ANSWER_BYTES_MAX:
            return None
    return bytes(found)


def _unanswered(asked: Asked, trouble: Trouble, code: str, text: str) -> NotAnsweredError:
    return NotAnsweredError(trouble, Outcome(asked.custom_id, error_code=code, error_message=text), None)


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _message_of(found: Any) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return printable(text) if isinstance(text, str) else ""


def _seconds(text: str | None) -> float | None:
    """Return a Retry-After in seconds; None for none, and for a date."""
    return whole_number(text or "", 9)


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group that is none."""
    error: Any = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
