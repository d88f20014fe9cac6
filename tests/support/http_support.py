"""Shared by the HTTP tests: a small real tokenizer file, a controlled generator, a server on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.http.sleep_handlers import SleepControl
from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.sessions.generation import GenerationRequest, Slot, TokenEvent
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.coordinator.sessions.tenants import ANYONE, Tenant
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML, EOS
from relayline.wire.common.errors import NotReadyError
from relayline.wire.common.phase import Phase

MODEL = "org/tiny"
CREATED = 1_790_000_000
WAIT_S = 60  # a test that waits longer for an event has failed


class Gate:
    """A named point inside a stream: signals when it is reached and holds the stream there until it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def pass_through(self) -> None:
        self.reached.set()
        await self.opened.wait()


Step = TokenEvent | Exception | Gate
Script = Callable[[GenerationRequest], Iterable[Step]]


class FakeStream:
    """Plays one script. Counts taken events, knows whether it was closed; `closing` delays the close."""

    def __init__(self, steps: Iterable[Step], closing: Gate | None = None) -> None:
        self._steps = iter(steps)
        self._closing = closing
        self.closed = asyncio.Event()
        self.n_taken = 0

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        for step in self._steps:
            if isinstance(step, Gate):
                await step.pass_through()
            elif isinstance(step, Exception):
                raise step
            else:
                self.n_taken += 1
                return step
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._closing is not None:
            await self._closing.pass_through()
        self.closed.set()


def tokens(
    request: GenerationRequest, text: bytes, *, ends: bool = True, top: tuple[tuple[int, float], ...] = ()
) -> Iterator[TokenEvent]:
    """One event per byte, as many as the request allows; then, with room left and `ends`, the end token."""
    scored = request.sampling.n_logprobs >= 0
    for n_sent, token in enumerate(text, start=1):
        finish = "length" if n_sent == request.max_tokens else None
        yield TokenEvent(token, -0.5 if scored else None, top if scored else (), finish)
        if finish:
            return
    if ends:
        yield TokenEvent(EOS, -0.1 if scored else None, (), "stop", is_end_token=True)


def says(text: bytes) -> Script:
    return lambda request: tokens(request, text)


class FakeGenerator:
    """A generator whose every answer is the test's script; `refusals` are raised by the next openings, in order."""

    def __init__(self, script: Script | None = None, ctx_tokens: int = 512) -> None:
        self.script = script or says(b"hello")
        self.ctx_tokens = ctx_tokens
        self.ready, self.otherwise = True, Phase.LOADING
        self.refusals: list[Exception | None] = []
        self.full: Exception | None = None  # refuses long bodies unread
        self.closing: Gate | None = None
        self.requests: list[GenerationRequest] = []
        self.records: list[RequestRecord | None] = []  # of each of them
        self.streams: list[FakeStream] = []
        self.streams_opened = asyncio.Event()

    @property
    def phase(self) -> Phase:
        return Phase.READY if self.ready else self.otherwise

    def is_ready(self) -> bool:
        return self.ready

    def check_ready(self) -> None:
        if not self.ready:
            raise NotReadyError("the pipeline is not ready")

    def check_room(self, tenant: Tenant = ANYONE) -> None:
        if self.full is not None:
            raise self.full

    def slots(self) -> list[Slot]:
        return [Slot(0, "prefill", True, task=7, n_prompt=9, n_read=4, n_left=5), Slot(1, "idle")]

    def tenants(self) -> dict[str, tuple[int, int]]:
        return {"alice": (1, 2)}

    async def describe(self, since_ns: int | None = None, *, with_recent: bool = True) -> dict[str, object]:
        return {"stages": [{"index": 0, "rows_per_step": {"1": 3}}], "asked_since_ns": since_ns}

    def open(self, request: GenerationRequest, record: RequestRecord | None = None) -> FakeStream:
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        self.check_ready()
        self.requests.append(request)
        self.records.append(record)
        self.streams.append(FakeStream(self.script(request), self.closing))
        self.streams_opened.set()
        return self.streams[-1]


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    port: int
    generator: FakeGenerator


@contextlib.asynccontextmanager
async def serving(
    tokenizer: Tokenizer,
    generator: FakeGenerator | None = None,
    *,
    template: str | None = CHATML,
    control: TelemetryControl | None = None,
    encoder: Encoder | None = None,
    sleep: SleepControl | None = None,
    **limits: object,
) -> AsyncIterator[Served]:
    """Serve a fake generator on a free loopback port; every stream it opened must be closed in the end."""
    generator = generator or FakeGenerator()
    chat = ChatTemplate(template, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    model = ServedModel(MODEL, CREATED, tokenizer, chat, encoder)
    app = make_app(generator, model, HttpLimits(**limits), control, sleep=sleep)
    runner, port = await start_http(app, "127.0.0.1", 0)
    try:
        yield Served(f"http://127.0.0.1:{port}", port, generator)
    finally:
        await runner.cleanup()
    for stream in generator.streams:
        async with asyncio.timeout(WAIT_S):
            await stream.closed.wait()
