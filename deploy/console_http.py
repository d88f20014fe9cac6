"""What the commands that look at a running coordinator share: its address, and one JSON answer."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import aiohttp
import click

from wire.errors import StartError, UsageError

TIMEOUT_S = 15.0

url_option = click.option(
    "--url", default="http://127.0.0.1:8080", show_default=True, envvar="RELAYLINE_URL", help="The coordinator."
)
key_option = click.option(
    "--api-key", default="", envvar="RELAYLINE_API_KEY", help="Key, where the coordinator demands one."
)


def base_url(url: str) -> str:
    """Return the coordinator's address without a path. Raises UsageError."""
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not a URL such as http://127.0.0.1:8080")
    return url


class Coordinator:
    """GETs from one coordinator. An async context manager."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = base_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Coordinator:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        """Return the JSON at `path`.

        Raises StartError with one line when nothing answers there, or answers with an error or with something else.
        """
        try:
            async with self._session.get(f"{self.url}{path}") as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # What the system says is clearer than aiohttp's sentence about it.
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
            reason = os.strerror(cause.errno) if cause and cause.errno else str(error) or type(error).__name__
            raise StartError(f"{self.url} does not answer ({reason}); give the coordinator's with --url") from error
        try:
            found = json.loads(body)
        except ValueError:
            raise StartError(f"{self.url}{path} is not a relayline coordinator's") from None
        if response.status >= 400:
            detail = found.get("error") if isinstance(found, dict) else None
            text = detail.get("message") if isinstance(detail, dict) else None
            raise StartError(str(text or f"{self.url}{path} answered {response.status}"))
        return found


def fetch(url: str, path: str, api_key: str = "") -> Any:
    """Return the JSON at one path of a coordinator. Raises like Coordinator.get."""

    async def once() -> Any:
        async with Coordinator(url, api_key) as coordinator:
            return await coordinator.get(path)

    return asyncio.run(once())


def width_of_terminal() -> int | None:
    """Return a width for output that goes to no terminal; None leaves it to rich."""
    return None if os.isatty(1) else int(os.environ.get("COLUMNS") or 120)
