"""What the HTTP tests share: a small real tokenizer file, a generator that tests steer, a server on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import gguf

from coordinator.chat import ChatTemplate
from coordinator.generation import GenerationRequest, TokenEvent
from coordinator.http.app import make_app
from coordinator.http.limits import HttpLimits
from coordinator.http.server import start_http
from coordinator.telemetry_control import TelemetryControl
from coordinator.tokenizer import Tokenizer
from wire.errors import NotReadyError

MODEL = "org/tiny"
CREATED = 1_790_000_000
WAIT_S = 20  # a test that waits longer for an event has failed
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, IM_START, IM_END = range(256, 260)
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
_FIRST_MERGE = 260
N_VOCAB = _FIRST_MERGE + len(MERGES)


def byte_letters() -> list[str]:
    """The printable stand-ins of byte-level BPE, by byte: printable Latin-1 stands for itself, the rest moves up."""
    keep = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(moved)) for byte in range(256)]


def write_tokenizer(
    path: Path,
    *,
    template: str | None = CHATML,
    tool_template: str | None = None,
    add_bos: bool = False,
    controls: Sequence[str] = (),
) -> Path:
    """Write a byte-level BPE vocabulary of 256 bytes, four specials and a few merges: a GGUF without tensors.

    `controls` are further control tokens, from N_VOCAB on.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    add_vocabulary(writer, controls)
    writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    if tool_template is not None:
        writer.add_string("tokenizer.chat_template.tool_use", tool_template)
    _write(writer)
    return path


def add_vocabulary(writer: gguf.GGUFWriter, controls: Sequence[str] = ()) -> None:
    """Add N_VOCAB tokens, bytes, specials and merges, and then `controls`."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_letters(), *SPECIALS, *(merge.replace(" ", "") for merge in MERGES), *controls])
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * len(MERGES)
    writer.add_token_types([*kinds, *[gguf.TokenType.CONTROL] * len(controls)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(IM_END)


def write_sentencepiece(path: Path, *, adds_blank: bool) -> Path:
    """Write a vocabulary of bytes and a few pieces, as sentencepiece makes them."""
    pieces = ["▁", "▁hello", "hello", "h", "e", "l", "o", "{", "}", "a", "b", "he", "ll", "x", "y", "z"]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    writer.add_token_scores([0.0] * 259 + [float(len(piece)) for piece in pieces])
    writer.add_token_types([*kinds, *[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * len(pieces)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(adds_blank)
    _write(writer)
    return path


def write_no_tokenizer(path: Path, n_vocab: int = 32) -> Path:
    """Write the file of a model whose tokenizer is "none"."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(n_vocab)
    _write(writer)
    return path


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


class Gate:
    """A named point inside a stream: says when it was reached and holds the stream there until opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def pass_through(self) -> None:
        self.reached.set()
        await self.opened.wait()


Step = TokenEvent | Exception | Gate
Script = Callable[[GenerationRequest], Iterable[Step]]


class FakeStream:
    """Plays one script. Counts what was taken, knows whether it was closed; `closing` holds the server up in that."""

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
        self.ready = True
        self.refusals: list[Exception | None] = []
        self.closing: Gate | None = None
        self.requests: list[GenerationRequest] = []
        self.streams: list[FakeStream] = []
        self.streams_opened = asyncio.Event()

    def is_ready(self) -> bool:
        return self.ready

    def check_ready(self) -> None:
        if not self.ready:
            raise NotReadyError("the pipeline is not ready")

    async def describe(self, since_ns: int | None = None) -> dict[str, object]:
        return {"stages": [{"index": 0, "rows_per_step": {"1": 3}}], "asked_since_ns": since_ns}

    def open(self, request: GenerationRequest) -> FakeStream:
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        self.check_ready()
        self.requests.append(request)
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
    **limits: object,
) -> AsyncIterator[Served]:
    """Serve a fake generator on a free loopback port; every stream it opened must be closed in the end."""
    generator = generator or FakeGenerator()
    chat = ChatTemplate(template, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    app = make_app(generator, tokenizer, chat, MODEL, CREATED, HttpLimits(**limits), control)
    runner, port = await start_http(app, "127.0.0.1", 0)
    try:
        yield Served(f"http://127.0.0.1:{port}", port, generator)
    finally:
        await runner.cleanup()
    for stream in generator.streams:
        async with asyncio.timeout(WAIT_S):
            await stream.closed.wait()
