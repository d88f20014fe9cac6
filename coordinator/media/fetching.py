"""Images, audio and videos that chats name by an address: fetched from hosts that `--media-hosts` allows alone.

An address that a client chose must not reach what the client itself cannot: a local network, a cloud's metadata.
So every address of a chain of redirects is held against the list, and a host that * alone allows must have a public IP
address. It is connected to by the very address that was looked at: a second answer of its name server is not asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import TypeAlias

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from relayline.coordinator.media.addresses import host_of, url_of
from relayline.coordinator.media.parts import VIDEO, MediaFile, fetched_file
from relayline.coordinator.sessions.media_record import FileRecord
from relayline.wire.common.bounds import (
    MEDIA_BYTES_MAX,
    MEDIA_FETCH_S,
    MEDIA_FETCHED_BYTES_MAX,
    MEDIA_REDIRECTS_MAX,
    VIDEO_FETCHED_BYTES_MAX,
)
from relayline.wire.common.errors import InternalError, InvalidRequestError, RelaylineError
from relayline.wire.common.texts import printable
from relayline.wire.settings.media_hosts import is_named, is_public, may_be_asked
from relayline.wire.telemetry import names

_HEADERS = {"User-Agent": "relayline", "Accept": "image/*, audio/*, video/*", "Accept-Encoding": "identity"}
_REDIRECTS = (301, 302, 303, 307, 308)
_SHOWN_CHARS = 120  # of an address, in an error
# The bytes of an answer are never repeated: one of no web server may be for its own callers alone.
_PROBLEMS: tuple[tuple[type[Exception], str], ...] = (
    (aiohttp.ClientConnectorCertificateError, "the certificate of its server is not valid here"),
    (aiohttp.ClientSSLError, "its server does not speak TLS as this one does"),
    (aiohttp.ServerDisconnectedError, "its server ended the connection"),
    (aiohttp.ClientPayloadError, "its server's answer is not complete"),
    (aiohttp.ClientResponseError, "its server's answer is no HTTP"),
)
LookUp: TypeAlias = "asyncio.Future[list[ResolveResult]]"


class Fetcher:
    """Fetches files for one application. Event loop only."""

    def __init__(self, hosts: Sequence[str], fetch_s: float = MEDIA_FETCH_S) -> None:
        """`hosts`: the list of `--media-hosts`; `fetch_s`: for one file, all redirects together."""
        self._hosts, self._fetch_s = tuple(hosts), fetch_s
        self._is_closed = False

    async def all_here(
        self, files: Sequence[MediaFile], look_ups: set[LookUp], seen: Sequence[FileRecord]
    ) -> list[MediaFile]:
        """Return the files of a request, those that have an address fetched. `seen`: the record of each.

        `look_ups` gets the look-ups of names that begin: some may end later than the request that began them.

        Raises InvalidRequestError, of the file's place, where one cannot be had; InternalError while this closes.
        """
        budget = _Budget(look_ups)
        found = await asyncio.gather(*(self._timed(*each, budget) for each in zip(files, seen, strict=True)))
        for each in found:
            if isinstance(each, RelaylineError):
                raise each
        return [each for each in found if isinstance(each, MediaFile)]

    def close(self) -> None:
        """Begin no further files."""
        self._is_closed = True

    async def _timed(self, file: MediaFile, seen: FileRecord, budget: _Budget) -> MediaFile | RelaylineError:
        if not file.address:
            return file
        start_ns = time.monotonic_ns()
        try:
            found = await self._settled(file, budget)
        finally:
            seen.steps[names.SPAN_FETCH] = start_ns, time.monotonic_ns()
        if isinstance(found, MediaFile):
            seen.n_bytes = len(found.data)
        return found

    async def _settled(self, file: MediaFile, budget: _Budget) -> MediaFile | RelaylineError:
        """Fetch a file. Returns its error: so one that fails does not end the others in the middle of a connection."""
        try:
            async with asyncio.timeout(self._fetch_s):
                data = await self._fetched(file, budget)
            return await asyncio.to_thread(fetched_file, file, data, _shown(file.address))
        except InvalidRequestError as error:
            return InvalidRequestError.of_field(file.param, error.message)
        except RelaylineError as error:
            return error
        except TimeoutError:
            problem = f"it did not come within {self._fetch_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = f"it cannot be fetched: {_problem(error)}"
        return InvalidRequestError.of_field(file.param, f"{_shown(file.address)}: {problem}")

    async def _fetched(self, file: MediaFile, budget: _Budget) -> bytes:
        """Return the bytes at the address of a file."""
        address = file.address
        url = url_of(address)
        bytes_max = VIDEO_FETCHED_BYTES_MAX if file.kind == VIDEO else MEDIA_BYTES_MAX
        for _ in range(1 + MEDIA_REDIRECTS_MAX):
            if self._is_closed:
                raise InternalError("the coordinator is closing")
            if url is None or not may_be_asked(host_of(url), self._hosts):
                raise InvalidRequestError(f"{_shown(address)}: this server does not fetch from there")
            async with self._client(budget) as client, client.get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "Location" in response.headers:
                    address, url = _led_to(url, response.headers["Location"], address)
                    continue
                if response.status != 200:
                    raise InvalidRequestError(f"{_shown(address)}: its server answered {response.status}")
                return await _read(response, budget, bytes_max)
        raise InvalidRequestError(f"{_shown(address)}: more than {MEDIA_REDIRECTS_MAX} redirects")

    def _client(self, budget: _Budget) -> aiohttp.ClientSession:
        """Return a client for one address: requests share no connections, nor lines for them."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=_Resolver(self._hosts, budget.look_ups), use_dns_cache=False),
            headers=_HEADERS,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )


def _led_to(url: URL, location: str, address: str) -> tuple[str, URL | None]:
    """Return where a redirect leads, as text and as an address. Raises InvalidRequestError where it leads nowhere."""
    try:
        led = str(url.join(URL(location)))
    except ValueError:
        raise InvalidRequestError(f"{_shown(address)}: it leads to no address") from None
    return led, url_of(led)


class _Budget:
    """The bytes that the files of one request may still have, and its look-ups of names."""

    def __init__(self, look_ups: set[LookUp]) -> None:
        self.left_bytes, self.look_ups = MEDIA_FETCHED_BYTES_MAX, look_ups

    def take(self, n_bytes: int) -> None:
        self.left_bytes -= n_bytes
        if self.left_bytes < 0:
            most = f"the fetched files of a request have at most {MEDIA_FETCHED_BYTES_MAX} bytes together"
            raise InvalidRequestError(most)


async def _read(response: aiohttp.ClientResponse, budget: _Budget, bytes_max: int) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_any():
        budget.take(len(chunk))
        data += chunk
        if len(data) > bytes_max:
            raise InvalidRequestError(f"{_shown(str(response.url))}: a file has at most {bytes_max} bytes")
    return bytes(data)


class _Resolver(AbstractResolver):
    """Looks names up, and leaves out addresses that are not public unless the list names the host."""

    def __init__(self, hosts: Sequence[str], look_ups: set[LookUp]) -> None:
        self._hosts, self._look_ups = hosts, look_ups

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await asyncio.shield(self._begin(host, port, family))
        if not is_named(host.lower().rstrip("."), self._hosts):
            found = [each for each in found if is_public(each["host"])]
        if not found:
            raise OSError(errno.EHOSTUNREACH, "its host has no public address")
        return found

    def _begin(self, host: str, port: int, family: socket.AddressFamily) -> LookUp:
        """Look a name up in a thread for this alone.

        A name server that does not answer may hold it for a minute, and nothing can end it. In a loop's own threads,
        which are few, it would keep other look-ups waiting, and the end of the process.
        """
        loop = asyncio.get_running_loop()
        look_up: LookUp = loop.create_future()
        self._look_ups.add(look_up)

        def settle(found: list[ResolveResult] | OSError) -> None:
            if isinstance(found, OSError):
                look_up.set_exception(found)
                look_up.exception()  # perhaps nobody waits for it any more
            else:
                look_up.set_result(found)

        def work() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, _looked_up(host, port, family))

        threading.Thread(target=work, name="look-up", daemon=True).start()
        return look_up

    async def close(self) -> None:
        """Nothing is kept."""


def _looked_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult] | OSError:
    """Return the addresses of a host, or the error. Blocks."""
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
    except OSError as error:
        return error
    except UnicodeError:
        return OSError(errno.EINVAL, "its host is no name")
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return [
        ResolveResult(hostname=host, host=str(place[0]), port=int(place[1]), family=kind, proto=proto, flags=flags)
        for kind, _, proto, _, place in found
    ]


def _shown(address: str) -> str:
    text = printable(address)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _problem(error: Exception) -> str:
    """Return in a few words why an answer cannot be had."""
    for kind, problem in _PROBLEMS:
        if isinstance(error, kind):
            return problem
    if isinstance(error, OSError) and not isinstance(error, aiohttp.ClientConnectorDNSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return printable(reason)[:200]
