"""Images and audio that chats name by an address: fetched from the hosts that `--media-hosts` allows, and no others.

An address that a client chose must not reach what the client itself cannot: this host, its network, a cloud's metadata.
So every address of a chain of redirects is held against the list, and a host that * alone allows must have a public IP
address. It is connected to by the very address that was looked at: a second answer of its name server is not asked for.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from relayline.coordinator.media.addresses import host_of, url_of
from relayline.coordinator.media.parts import MediaFile, fetched_file
from relayline.wire.common.bounds import MEDIA_BYTES_MAX, MEDIA_FETCH_S, MEDIA_FETCHED_BYTES_MAX, MEDIA_REDIRECTS_MAX
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.texts import printable
from relayline.wire.settings.media_hosts import is_named, is_public, may_be_asked

_HEADERS = {"User-Agent": "relayline", "Accept": "image/*, audio/*", "Accept-Encoding": "identity"}
_REDIRECTS = (301, 302, 303, 307, 308)
_SHOWN_CHARS = 120  # of an address, in an error


class Fetcher:
    """Fetches files for one application. Event loop only."""

    def __init__(self, hosts: Sequence[str], fetch_s: float = MEDIA_FETCH_S) -> None:
        """`hosts`: the list of `--media-hosts`; `fetch_s`: for one file, all redirects together."""
        self._hosts, self._fetch_s = tuple(hosts), fetch_s
        self._session: aiohttp.ClientSession | None = None

    async def all_here(self, files: Sequence[MediaFile]) -> list[MediaFile]:
        """Return the files of a request, those that have an address fetched.

        Raises InvalidRequestError, of the file's place, where one cannot be had.
        """
        if not any(file.address for file in files):
            return list(files)
        budget = _Budget()
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._settled(file, budget)) for file in files]
        found = [task.result() for task in asked]
        for each in found:
            if isinstance(each, InvalidRequestError):
                raise each
        return [each for each in found if isinstance(each, MediaFile)]

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def _settled(self, file: MediaFile, budget: _Budget) -> MediaFile | InvalidRequestError:
        """Return a file, or its error: so one that fails does not end the others in the middle of a connection."""
        if not file.address:
            return file
        try:
            async with asyncio.timeout(self._fetch_s):
                data = await self._fetched(url_of(file.address), file.address, budget)
            return await asyncio.to_thread(fetched_file, file, data)
        except InvalidRequestError as error:
            return InvalidRequestError.of_field(file.param, error.message)
        except TimeoutError:
            problem = f"it did not come within {self._fetch_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            problem = f"it cannot be fetched: {printable(reason)[:200]}"
        return InvalidRequestError.of_field(file.param, f"{_shown(file.address)}: {problem}")

    async def _fetched(self, url: URL | None, address: str, budget: _Budget) -> bytes:
        """Return the bytes at an address, which is also given as it was said."""
        for _ in range(1 + MEDIA_REDIRECTS_MAX):
            if url is None or not may_be_asked(host_of(url), self._hosts):
                raise InvalidRequestError(f"{_shown(address)}: this server does not fetch from there")
            async with self._client().get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "Location" in response.headers:
                    address = str(url.join(URL(response.headers["Location"])))
                    url = url_of(address)
                    continue
                if response.status != 200:
                    raise InvalidRequestError(f"{_shown(address)}: its server answered {response.status}")
                return await _read(response, budget)
        raise InvalidRequestError(f"{_shown(address)}: more than {MEDIA_REDIRECTS_MAX} redirects")

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(resolver=_Resolver(self._hosts), use_dns_cache=False, limit_per_host=8)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=_HEADERS,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session


class _Budget:
    """The bytes that the files of one request may still have."""

    def __init__(self) -> None:
        self.left_bytes = MEDIA_FETCHED_BYTES_MAX

    def take(self, n_bytes: int) -> None:
        self.left_bytes -= n_bytes
        if self.left_bytes < 0:
            most = f"the fetched files of a request have at most {MEDIA_FETCHED_BYTES_MAX} bytes together"
            raise InvalidRequestError(most)


async def _read(response: aiohttp.ClientResponse, budget: _Budget) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_any():
        budget.take(len(chunk))
        data += chunk
        if len(data) > MEDIA_BYTES_MAX:
            raise InvalidRequestError(f"{_shown(str(response.url))}: a file has at most {MEDIA_BYTES_MAX} bytes")
    return bytes(data)


class _Resolver(AbstractResolver):
    """Looks names up, and leaves out addresses that are not public unless the list names the host."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if is_named(host.lower().rstrip("."), self._hosts):
            return found
        public = [each for each in found if is_public(each["host"])]
        if not public:
            raise OSError(errno.EHOSTUNREACH, "its host has no public address")
        return public

    async def close(self) -> None:
        await self._inner.close()


def _shown(address: str) -> str:
    text = printable(address)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
