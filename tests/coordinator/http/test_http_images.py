"""Images in requests: encoded once, placed in prompts, counted, or refused in one line. The encoder is a fake."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections import Counter
from typing import Any

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.media.encoder import Encoder, Segment
from relayline.coordinator.media.parts import Takes
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.generation import ROW_TOKEN_MIN
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InternalError, InvalidRequestError
from relayline.wire.telemetry import names
from tests.support.http_support import WAIT_S, FakeGenerator, Served, serving

PNG = b"\x89PNG\r\n\x1a\n"
BEFORE, N_ROWS, BEHIND = 60, 6, 62  # "<", rows, ">"
IMAGES = Takes(images=True)


class FakeEncoder(Encoder):
    """An encoder that a test can hold: six rows of each image, of the image's last byte."""

    def __init__(self, takes: Takes = IMAGES) -> None:
        self.n_embd, self.identity, self.are_mutual = 4, b"fake", False
        self.takes = takes
        self.asked: Counter[tuple[bytes, int]] = Counter()
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_busy = threading.Event()

    def encode(self, data: bytes, rows_max: int, *, is_video: bool = False) -> tuple[list[Segment], np.ndarray]:
        self.asked[data, rows_max] += 1
        self.is_busy.set()
        assert self.may_go.wait(WAIT_S)
        if data.endswith(b"broken"):
            raise InvalidRequestError("it is no image that can be read")
        if data.endswith(b"fatal") and rows_max:
            raise InternalError("the process that encodes images and audio ended")
        rows = np.full((N_ROWS if rows_max >= N_ROWS else 0, 4), data[-1], np.float32)
        return [[BEFORE], N_ROWS, [BEHIND]], rows

    def close(self) -> None:
        self.may_go.set()


def url_of(name: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(PNG + name).decode()}"


def chat(*names: bytes, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(name)}} for name in names]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}], **more}


async def post(served: Served, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(served.url + path, json=body) as response:
        found: dict[str, Any] = await response.json()
        assert response.status == status, found
        return found


async def test_rows_stand_in_the_prompt_and_each_image_is_encoded_once(tokenizer: Tokenizer) -> None:
    generator, encoder = FakeGenerator(), FakeEncoder()
    async with serving(tokenizer, generator, encoder=encoder) as served:
        answer = await post(served, "/v1/chat/completions", chat(b"1", b"2", b"1", return_token_ids=True))
        await post(served, "/v1/chat/completions", chat(b"2"))
        models = await _get(served, "/v1/models")
        props = await _get(served, "/props")
    first, second = generator.requests
    tokens = first.prompt_tokens
    assert [each.end - each.start for each in first.images] == [N_ROWS] * 3
    assert [float(each.rows[0, 0]) for each in first.images] == [49.0, 50.0, 49.0]
    for each in first.images:
        assert tokens[each.start - 1] == BEFORE
        assert min(tokens[each.start : each.end]) >= ROW_TOKEN_MIN
        assert tokens[each.end] == BEHIND
    spans = [tokens[each.start : each.end] for each in (*first.images, *second.images)]
    assert spans[0] == spans[2] != spans[1]
    assert second.prompt_tokens[second.images[0].start : second.images[0].end] == spans[1]
    assert set(encoder.asked.values()) == {1}
    assert len(encoder.asked) == 4, "two images, each counted and encoded"
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert answer["prompt_token_ids"].count(-1) == 3 * N_ROWS
    assert models["data"][0]["architecture"]["input_modalities"] == ["text", "image"]
    assert props["modalities"]["vision"] is True


async def test_a_trace_and_the_metrics_say_what_each_file_took(tokenizer: Tokenizer) -> None:
    encoder, observer = FakeEncoder(), Observer()
    control = TelemetryControl(observer, lambda: ())
    async with serving(tokenizer, FakeGenerator(), encoder=encoder, control=control) as served:
        await post(served, "/v1/chat/completions", chat(b"1"))
        await post(served, "/v1/chat/completions", chat(b"1", b"2"))
        found = await _get(served, "/v1/traces/last")
        await post(served, "/v1/chat/completions", chat(b"broken"), 400)
        refused = await _get(served, "/v1/traces/last")
    families = {each.name: each for each in text_string_to_metric_families(observer.metrics.render().decode())}
    kept, read = found["media"]
    assert (kept["kept"], kept["rows"], kept["steps"]) == (True, N_ROWS, [])
    assert (read["kept"], read["rows"], read["bytes"]) == (False, N_ROWS, len(PNG) + 1)
    assert [step["step"] for step in read["steps"]] == [names.SPAN_COUNT, names.SPAN_ENCODE]
    assert sum(step["took_ms"] for step in read["steps"]) <= found["media_ms"]
    assert [step["step"] for step in refused["media"][0]["steps"]] == [names.SPAN_COUNT]
    assert (refused["media"][0]["rows"], refused["media_ms"] is not None) == (0, True)
    assert families[names.METRIC_MEDIA_QUERIES].samples[0].value == 4
    assert families[names.METRIC_MEDIA_HITS].samples[0].value == 1
    counts = {
        (sample.labels[names.LABEL_STEP], sample.labels[names.LABEL_KIND]): sample.value
        for sample in families[names.METRIC_MEDIA_SECONDS].samples
        if sample.name.endswith("_count")
    }
    assert counts == {(names.SPAN_COUNT, "image"): 3, (names.SPAN_ENCODE, "image"): 2}


async def test_equal_images_that_come_together_are_encoded_once_and_a_client_may_go(tokenizer: Tokenizer) -> None:
    generator, encoder = FakeGenerator(), FakeEncoder()
    encoder.may_go.clear()
    async with serving(tokenizer, generator, encoder=encoder) as served:
        gone = asyncio.create_task(post(served, "/v1/chat/completions", chat(b"1")))
        assert await asyncio.to_thread(encoder.is_busy.wait, WAIT_S)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        both = [asyncio.create_task(post(served, "/v1/chat/completions", chat(b"1"))) for _ in range(2)]
        encoder.may_go.set()
        answers = await asyncio.gather(*both)
    assert all(answer["choices"] for answer in answers)
    assert set(encoder.asked.values()) == {1}


async def test_an_error_names_the_field_that_was_sent_in_one_line(tokenizer: Tokenizer) -> None:
    generator, encoder = FakeGenerator(ctx_tokens=40), FakeEncoder()
    async with serving(tokenizer, generator, encoder=encoder) as served:
        broken = await post(served, "/v1/chat/completions", chat(b"1", b"broken"), 400)
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": url_of(b"broken")}]}]
        dialect = await post(served, "/v1/responses", {"input": items}, 400)
        long = await post(served, "/v1/chat/completions", chat(*[b"3"] * 8), 400)
        scored = await post(served, "/v1/chat/completions", chat(b"4", prompt_logprobs=0), 400)
        fatal = await post(served, "/v1/chat/completions", chat(b"fatal"), 500)
        address = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": [address]}]}
        elsewhere = await post(served, "/v1/messages", body, 400)
    assert broken["error"]["message"].startswith("messages[0].content[2].image_url: it is no image")
    assert broken["error"]["param"] == "messages[0].content[2].image_url"
    assert dialect["error"]["param"].startswith("input[0].content[0]")
    assert long["error"]["code"] == "context_length_exceeded"
    assert (PNG + b"3", N_ROWS) not in encoder.asked, "it was encoded for nothing"
    assert "prompt_logprobs" in scored["error"]["message"]
    assert "the process that encodes images and audio ended" in fatal["error"]["message"]
    assert "fetches none from elsewhere" in elsewhere["error"]["message"]
    assert not generator.requests


async def test_an_image_of_another_dialect_is_named_where_its_client_had_it(tokenizer: Tokenizer) -> None:
    """System turns, results of tools and turns before it move it in the chat that such a body becomes."""
    data = base64.b64encode(PNG + b"broken").decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    shown = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "see"}, block]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    message = {"max_tokens": 1, "system": "s", "messages": [call, {"role": "user", "content": [shown]}]}
    item = {"role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": "input_image"}]}
    item["content"][1]["image_url"] = f"data:image/png;base64,{data}"  # type: ignore[index]
    response = {"instructions": "s", "input": [{"role": "assistant", "content": "hm"}, item]}
    places = {
        "/v1/messages": "messages[1].content[0].content[1].source",
        "/v1/responses": "input[1].content[1].image_url",
    }
    for encoder, fault in ((FakeEncoder(), "it is no image"), (None, "served without a projector")):
        async with serving(tokenizer, FakeGenerator(), encoder=encoder) as served:
            for path, body in (("/v1/messages", message), ("/v1/responses", response)):
                refusal = (await post(served, path, body, 400))["error"]["message"]
                assert refusal.startswith(f"{places[path]}: "), refusal
                assert fault in refusal


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_instructions_may_show_an_image(role: str, tokenizer: Tokenizer) -> None:
    image = {"type": "input_image", "image_url": url_of(b"1")}
    turn = {"role": role, "content": [{"type": "input_text", "text": "like"}, image]}
    body = {"instructions": "Draw", "input": [turn, {"role": "user", "content": "a cat"}], "store": False}
    generator = FakeGenerator()
    async with serving(tokenizer, generator, encoder=FakeEncoder()) as served:
        await post(served, "/v1/responses", body)
    (asked,) = generator.requests
    assert [each.end - each.start for each in asked.images] == [N_ROWS]


async def test_counts_encode_nothing(tokenizer: Tokenizer) -> None:
    encoder = FakeEncoder()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": base64.b64encode(PNG + b"1").decode()}}  # fmt: skip
    async with serving(tokenizer, encoder=encoder) as served:
        bare = await post(served, "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "see"}]})
        parts = [{"type": "text", "text": "see"}, image]
        body = {"messages": [{"role": "user", "content": parts}]}
        counted = await post(served, "/v1/messages/count_tokens", body)
        shown = await post(served, "/apply-template", chat(b"1"))
    assert counted["input_tokens"] == bare["input_tokens"] + N_ROWS + 2
    assert list(encoder.asked) == [(PNG + b"1", 0)]
    assert "see<__media__>" in shown["prompt"]


async def test_a_tool_may_return_an_image(tokenizer: Tokenizer) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG + b"1").decode()}
    blocks = [{"type": "text", "text": "seen:"}, {"type": "image", "source": source}]
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": blocks}]},
    ]
    output = [{"type": "input_text", "text": "seen:"}, {"type": "input_image", "image_url": url_of(b"1")}]
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t1", "output": output},
    ]
    generator = FakeGenerator()
    async with serving(tokenizer, generator, encoder=FakeEncoder()) as served:
        await post(served, "/v1/messages", {"messages": turns, "max_tokens": 1})
        await post(served, "/v1/responses", {"input": items})
        blocks[1] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}}
        broken = await post(served, "/v1/messages", {"messages": turns, "max_tokens": 1}, 400)
        blocks[1] = {"type": "document"}
        other = await post(served, "/v1/messages", {"messages": turns, "max_tokens": 1}, 400)
    message, response = generator.requests
    assert [each.end - each.start for each in message.images] == [N_ROWS]
    start = message.images[0].start
    assert tokenizer.decode(message.prompt_tokens[: start - 1]).endswith("seen:")
    assert message.prompt_tokens == response.prompt_tokens
    assert "it is not base64" in broken["error"]["message"]
    assert "'document' are not served here" in other["error"]["message"]


async def test_without_a_projector_chats_are_text_alone(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served:
        refusal = await post(served, "/v1/chat/completions", chat(b"1"), 400)
        models = await _get(served, "/v1/models")
    assert "only text parts are supported: this model is served without a projector" in refusal["error"]["message"]
    assert "architecture" not in models["data"][0]


async def _get(served: Served, path: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(served.url + path) as response:
        found: dict[str, Any] = await response.json()
        return found


async def test_one_gif_as_an_image_and_as_a_video_is_two_files(tokenizer: Tokenizer) -> None:
    generator, encoder = FakeGenerator(), FakeEncoder(Takes(images=True, video=True))
    gif = f"data:image/gif;base64,{base64.b64encode(b'GIF89a and more').decode()}"
    async with serving(tokenizer, generator, encoder=encoder) as served:
        for kind in ("image_url", "video_url", "video_url"):
            body = {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": gif}}]}]}
            await post(served, "/v1/chat/completions", body)
        models = await _get(served, "/v1/models")
        props = await _get(served, "/props")
    assert sorted(encoder.asked.values()) == [2, 2], "each counted and encoded once"
    (image,), (video,), (again,) = (request.images for request in generator.requests)
    numbers = [request.prompt_tokens[image.start : image.end] for request in generator.requests]
    assert (video.start, again.start) == (image.start, image.start)
    assert numbers[0] != numbers[1] == numbers[2]
    assert models["data"][0]["architecture"]["input_modalities"] == ["text", "image", "video"]
    assert props["modalities"] == {"vision": True, "audio": False, "video": True}


async def test_without_a_projector_a_video_is_refused_in_one_line(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, FakeGenerator()) as served:
        part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
        refused = await post(served, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}, 400)
    assert "this model is served without a projector" in refused["error"]["message"]
