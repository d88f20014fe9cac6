"""A coordinator's API with files and batches, over a fake generator."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import openai

from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.batches.keeper import Keeper
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.opening import opened
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.settings.table import ServingSettings
from tests.support.http_support import CREATED, MODEL, WAIT_S, FakeGenerator, Gate, Step, tokens
from tests.support.polling import pause

ENDED = ("completed", "failed", "expired", "cancelled")


@contextlib.asynccontextmanager
async def serving_batches(
    tokenizer: Tokenizer,
    directory: Path,
    generator: FakeGenerator | None = None,
    *,
    keys: Path | None = None,
    observer: Observer | None = None,
    limits: HttpLimits | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[str, Keeper]]:
    """Serve on a free loopback port; yields its URL and the keeper."""
    generator = generator or FakeGenerator()
    chat = ChatTemplate(CHATML, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    control = TelemetryControl(observer or Observer(), list)
    app = make_app(generator, ServedModel(MODEL, CREATED, tokenizer, chat), limits or HttpLimits(), control)
    stopping = asyncio.Event()
    listener, kept = HttpListener(port=0, api_keys_file=keys), ServingSettings(batch_dir=str(directory), **settings)
    async with opened(app, listener, kept, generator, stopping=stopping) as (port, keeper):
        assert keeper is not None
        yield f"http://127.0.0.1:{port}", keeper


def request_lines(*names: str, url: str = "/v1/completions", **body: Any) -> bytes:
    """A file of requests with these custom_ids, whose prompts are these, too."""
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"prompt": name, "max_tokens": 8} | body}
        for name in names
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class Held(FakeGenerator):
    """Its answers stop at a gate until it is opened, all of them or those after the first few."""

    def __init__(self, n_free: int = 0) -> None:
        super().__init__(self.play)
        self.n_free, self.gate = n_free, Gate()

    def play(self, request: GenerationRequest) -> Iterable[Step]:
        gates = [self.gate] if len(self.requests) > self.n_free else []
        return itertools.chain(gates, tokens(request, b"hello"))


async def begun(client: openai.AsyncOpenAI, text: bytes, **more: Any) -> Any:
    """Make a batch of completions."""
    file = await client.files.create(file=("in.jsonl", text), purpose="batch")
    wanted = {"endpoint": "/v1/completions", "completion_window": "24h"} | more
    return await client.batches.create(input_file_id=file.id, **wanted)


async def running(client: openai.AsyncOpenAI, batch_id: str, n_done: int = 0) -> Any:
    """Wait until a batch runs and has so many answers."""
    async with asyncio.timeout(3 * WAIT_S):
        while True:
            batch = await client.batches.retrieve(batch_id)
            assert batch.status not in ENDED
            if batch.status == "in_progress" and batch.request_counts.completed >= n_done:
                return batch
            await pause()


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """Wait for the end of a batch."""
    async with asyncio.timeout(3 * WAIT_S):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:
            await pause()
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by their custom_id; every id once."""
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


@contextlib.asynccontextmanager
async def unread(url: str, path: str) -> AsyncIterator[None]:
    """Ask for an answer and read nothing of it, with little room for it, until the block ends."""
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.setblocking(False)
        await loop.sock_connect(reader, (host, int(port)))
        await loop.sock_sendall(reader, f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        yield
