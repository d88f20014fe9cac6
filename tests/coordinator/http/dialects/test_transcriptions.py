"""/v1/audio/transcriptions: OpenAI's form as a chat with audio, its answers and events. The encoder is a fake."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import numpy as np
import pytest

from relayline.coordinator.gateway.peek import peek
from relayline.coordinator.http.requests.multipart import FIELDS_MAX, fields_of
from relayline.coordinator.http.transcriptions.asking import INSTRUCTION
from relayline.coordinator.media.encoder import Encoder, Segment
from relayline.coordinator.media.parts import Takes
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError
from tests.support.http_support import FakeGenerator, Served, serving
from tests.support.tiny_audio import sound

WAV = sound(1)
PATH = "/v1/audio/transcriptions"


class Hearing(Encoder):
    """Three rows of each sound; remembers the files."""

    def __init__(self) -> None:
        self.n_embd, self.identity, self.are_mutual, self.takes = 4, b"hearing", False, Takes(audio=True)
        self.files: list[bytes] = []

    def encode(
        self, data: bytes, rows_max: int, *, is_video: bool = False
    ) -> tuple[list[Segment], np.ndarray[Any, Any]]:
        self.files += [data] if rows_max else []
        return [3], np.zeros((3 if rows_max else 0, 4), np.float32)

    def close(self) -> None:
        """There is nothing to end."""


def form(file: bytes | None = WAV, **fields: str) -> aiohttp.FormData:
    found = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        found.add_field(name, value)
    if file is not None:
        found.add_field("file", file, filename="said.wav", content_type="audio/wav")
    return found


async def post(served: Served, data: Any, status: int = 200, path: str = PATH) -> tuple[str, str]:
    async with aiohttp.ClientSession() as session, session.post(served.url + path, data=data) as response:
        text = await response.text()
        assert response.status == status, text
        return response.content_type, text


async def test_a_file_becomes_a_chat_and_its_text_the_answer(tokenizer: Tokenizer) -> None:
    encoder, generator = Hearing(), FakeGenerator()
    async with serving(tokenizer, generator, encoder=encoder) as served:
        kind, text = await post(served, form(max_tokens="5", language="de"))
        plain_kind, plain = await post(
            served, form(max_tokens="5", response_format="text"), path="/audio/transcriptions"
        )
        _, streamed = await post(served, form(max_tokens="5", stream="true", prompt="Say it", temperature="0.5"))
    answer = json.loads(text)
    assert (kind, plain_kind) == ("application/json", "text/plain")
    assert plain == answer["text"] + "\n"
    assert answer["usage"]["type"] == "tokens"
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert {event["type"] for event in events[:-1]} == {"transcript.text.delta"}
    assert events[-1]["type"] == "transcript.text.done"
    assert events[-1]["text"] == "".join(event["delta"] for event in events[:-1]) == answer["text"]
    first, _, third = generator.requests
    assert [(each.end - each.start) for each in first.images] == [3]
    assert f"{INSTRUCTION} (language: de)" in tokenizer.decode(first.prompt_tokens[: first.images[0].start])
    assert "Say it" in tokenizer.decode(third.prompt_tokens[: third.images[0].start])
    assert first.sampling.temperature == 0
    assert third.sampling.temperature == 0.5
    assert encoder.files == [WAV], "it is not encoded again"


@pytest.mark.parametrize(
    ("given", "param", "problem"),
    [
        (form(None, language="de"), "file", "missing"),
        (form(b"OggS" + bytes(50)), "file", "no WAV, MP3 or FLAC"),
        (form(response_format="verbose_json"), "response_format", "times of words"),
        (form(response_format="xml"), "response_format", "must be one of json, text"),
        (form(**{"timestamp_granularities[]": "word"}), "response_format", "times of words"),
        (form(**{"include[]": "logprobs"}), "include", "not served"),
        (form(stream="maybe"), "stream", "true or false"),
        (form(temperature="warm"), "temperature", "must be a number"),
        (form(temperature="9"), "temperature", "temperature"),
        (b'{"model": "m"}', None, "multipart/form-data"),
    ],
)
async def test_a_wrong_form_gets_one_line(tokenizer: Tokenizer, given: Any, param: str | None, problem: str) -> None:
    generator = FakeGenerator()
    async with serving(tokenizer, generator, encoder=Hearing()) as served:
        error = json.loads((await post(served, given, 400))[1])["error"]
    assert error["param"] == param
    assert problem in error["message"]
    assert "\n" not in error["message"]
    assert not generator.requests


async def test_a_model_without_audio_says_what_is_missing(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served:
        error = json.loads((await post(served, form(), 501))[1])["error"]
    assert "takes no audio" in error["message"]


def multipart(*parts: bytes, end: bytes = b"--") -> bytes:
    return b"".join(b"--xyz\r\n" + part + b"\r\n" for part in parts) + b"--xyz" + end + b"\r\n"


def named(name: str, value: bytes) -> bytes:
    return (
        b'Content-Disposition: form-data; name="%s"; filename="name=a"\r\nContent-Type: x/y\r\n\r\n' % name.encode()
        + value
    )


def test_fields_are_what_was_between_their_borders() -> None:
    tricky = b"a--xyz\r\n\r\n--xy\r\n\r\n" + bytes(range(256))
    assert fields_of(multipart(named("a", b"1"), named("b", tricky), named("c", b""))) == {
        "a": b"1",
        "b": tricky,
        "c": b"",
    }
    curl = b"content-disposition: form-data; name=a\r\n\r\n1"
    assert fields_of(bytearray(multipart(curl))) == {"a": b"1"}


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", b"--xyz", b"--xyz\r\n", multipart(named("a", b"1"))[:-8], multipart(named("a", b"1"), end=b"!"),
        multipart(named("a", b"1"), named("a", b"2")), multipart(b"X: y\r\n\r\n1"),
        multipart(*(named(f"f{at}", b"") for at in range(FIELDS_MAX + 1))),
    ],
)  # fmt: skip
def test_other_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="must be multipart/form-data"):
        fields_of(raw)


def test_a_gateway_reads_the_model_that_the_pipeline_reads() -> None:
    assert peek(multipart(named("model", b"whisper-1"), named("file", WAV))).model == "whisper-1"
    hidden = named("file", b"--xy\r\n" + named("model", b"other"))
    assert peek(multipart(hidden, named("model", b"m"))).model == "m"
    assert peek(multipart(named("model", b"a"), named("model", b"b"))).model is None
