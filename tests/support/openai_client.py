"""The official `openai` client of a server on this machine."""

from __future__ import annotations

import ssl

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
