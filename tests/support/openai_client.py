"""The official `openai` client of a server on this machine."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import openai

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from tests.support.http_support import FakeGenerator, Served, serving

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


@contextlib.asynccontextmanager
async def client_of(
    tokenizer: Tokenizer, generator: FakeGenerator | None = None, template: str = CHATML, **options: object
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    """A client of a coordinator's API over a fake generator."""
    async with (
        serving(tokenizer, generator, template=template, **options) as served,
        openai_client(served.url) as client,
    ):
        yield client, served


def prompt_of(tokenizer: Tokenizer, served: Served, at: int = -1) -> str:
    """Return the text of a prompt that the generator was asked for: of the latest one, or of that number."""
    return tokenizer.decode(served.generator.requests[at].prompt_tokens)


async def leave(stream: openai.AsyncStream[Any]) -> None:
    """End a stream before its last event, with the generators that read it.

    The client's own `close` ends the connection alone. Its generators are a circle of references then, which the
    garbage collector ends in any thread, while the loop's thread may be ending them too.
    """
    await stream._iterator.aclose()  # type: ignore[attr-defined]
    await stream.close()
