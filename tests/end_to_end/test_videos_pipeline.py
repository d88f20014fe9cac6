"""Chats with videos over real stages give the answers of the whole model, with libmtmd's own way of videos, also after
losses.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import numpy as np
import pytest

from tests.end_to_end.test_going_on import cut
from tests.end_to_end.test_images_pipeline import (
    KINDS,
    NEAR_TIE,
    Model,
    _until_running,
    assert_as_whole,
    chats,
    content,
    made,
)
from tests.end_to_end.test_prefix_lanes import rows_of, until_kept
from tests.support.tiny_projectors import picture
from tests.support.tiny_videos import needs_video, video
from tests.support.whole_with_images import MARKER, needs_library

pytestmark = [needs_library, needs_video]
CTX = 640
# Rows of the second see each other. Frames of the others go in twos; the last takes features of them in its layers.
each_way = pytest.mark.parametrize(
    "model", ["mlp", "gemma3", "qwen2vl_merger", "qwen3vl_merger:deepstack"], indirect=True
)
one_kind = pytest.mark.parametrize("model", ["mlp"], indirect=True)


@pytest.fixture(scope="module", name="model")
def model_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with made(request.param, tmp_path_factory.mktemp("model"), CTX) as model:
        assert model.encoder.takes.video
        yield model


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", KINDS, indirect=True)
async def test_answers_are_those_of_the_whole_model_alone_and_together(model: Model) -> None:
    asked = [
        ("what moves in", video(1), "this?"),
        (video(2, 3, container="matroska"), picture(3), "compare these"),
        ("two", video(3, 2, container="avi"), video(4, 1, size=(64, 20))),
    ]
    async with chats(model) as client:
        alone = [await client.answer(*parts) for parts in asked]
        together = await asyncio.gather(*(client.answer(*parts) for parts in asked))
    for parts, one, other in zip(asked, alone, together, strict=True):
        assert_as_whole(model, one, *parts)
        assert_as_whole(model, other, *parts)
    seen = [model.whole.logits_along(f"<|user|>x{MARKER.decode()}?", [video(1, n)], [0])[1] for n in (5, 6)]
    assert np.abs(seen[0] - seen[1]).max() > 10 * NEAR_TIE, "the model does not look at its last frame"


@each_way
async def test_the_next_turn_reads_only_new_rows_and_videos_are_not_confused(model: Model) -> None:
    question = "look at this with care, and tell all that you see: "
    async with chats(model, prefix_lanes=4, kv_layout="per-lane") as client:
        first = await client.answer(question, video(5))
        n_prompt = first["usage"]["prompt_tokens"]
        await until_kept(client.running, 1)
        before = await rows_of(client.running)
        again = await client.answer(question, video(5))
        n_again = (await rows_of(client.running))[0] - before[0]
        other = await client.answer(question, video(6))
        cached = other["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert n_again < n_prompt, "the same video was read again"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == n_prompt - 1
    assert cached <= other["prompt_token_ids"].index(-1), "another video was copied"
    for answer, seed in ((first, 5), (again, 5), (other, 6)):
        assert_as_whole(model, answer, question, video(seed))


@pytest.mark.sampled(2)
@each_way
async def test_a_lost_stage_and_a_lost_link_are_pauses(model: Model) -> None:
    parts = ("what moves in", video(7), "this?")
    async with chats(model, proxied=True) as client:
        asking = asyncio.create_task(client.answer(*parts, n_tokens=60))
        await _until_running(client)
        await cut(client.running, 0)
        await client.running.lose(0)
        await client.running.start(0)
        answer = await asking
    assert len(answer["choices"][0]["token_ids"]) == 60
    assert_as_whole(model, answer, *parts)


@pytest.mark.parametrize("model", ["qwen2vl_merger"], indirect=True)
async def test_a_longer_video_has_its_times_and_its_frames_in_twos(model: Model) -> None:
    parts = ("when does it stop?", video(8, 24))
    async with chats(model) as client:
        answer = await client.answer(*parts)
        short = await client.answer("when does it stop?", video(8, 1))
    assert_as_whole(model, answer, *parts)
    n_rows, n_of_one = (each["prompt_token_ids"].count(-1) for each in (answer, short))
    assert n_rows == n_of_one * (1 + 10 + 2), "the first, which a time follows, 20 in twos, and three behind a time"


@one_kind
async def test_both_forms_and_a_gif_are_one_video_and_a_gif_may_be_an_image(model: Model) -> None:
    file = video(9)
    sent = base64.b64encode(file).decode()
    parts = ({"type": "input_video", "input_video": {"data": sent}},
             {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{sent}"}})  # fmt: skip
    async with chats(model) as client:
        bodies = [{"messages": [{"role": "user", "content": [part]}], "max_tokens": 4, "temperature": 0}
                  for part in parts]  # fmt: skip
        answers = [await client.post("/v1/chat/completions", body) for body in bodies]
        gif = base64.b64encode(video(9, container="gif")).decode()
        url = {"url": f"data:image/gif;base64,{gif}"}
        gifs = ({"type": kind, kind: url} for kind in ("image_url", "video_url"))
        asked = [{"messages": [{"role": "user", "content": [part]}]} for part in gifs]
        counts = [await client.post("/v1/chat/completions", body) for body in asked]
        body = {"messages": [{"role": "user", "content": content(video(10, 24), video(11, 24))}]}
        refused = await client.post("/v1/chat/completions", body, 400)
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]
    n_image, n_video = (each["usage"]["prompt_tokens"] for each in counts)
    assert n_video > n_image + 5 * 16
    assert refused["error"]["code"] == "context_length_exceeded"
