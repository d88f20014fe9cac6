"""The official `openai` client of a server on this machine."""

from __future__ import annotations

import ssl
from typing import Any

import openai

# By itself it reads the certificates of a hundred authorities: 50 ms of processor time, and TLS is never used here.
_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def openai_client(url: str, api_key: str = "none", *, max_retries: int = 0) -> openai.AsyncOpenAI:
    """Return a client of the server at `url`."""
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=api_key,
        max_retries=max_retries,
        http_client=openai.DefaultAsyncHttpxClient(verify=_TLS),
    )


async def leave(stream: openai.AsyncStream[Any]) -> None:
    """End a stream before its last event, with the generators that read it.

    The client's own `close` ends the connection alone. Its generators are a circle of references then, which the
    garbage collector ends in any thread, while the loop's thread may be ending them too.
    """
    await stream._iterator.aclose()  # type: ignore[attr-defined]
    await stream.close()
