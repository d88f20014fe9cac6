"""Chats with images over real stages give the answers of llama.cpp's own encoder and the whole model, also after
losses.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.media.parts import is_audio_file
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.projectors import check_projector
from relayline.coordinator.model.split import split_model
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from tests.end_to_end.test_going_on import cut
from tests.end_to_end.test_prefix_lanes import rows_of, until_kept
from tests.support.fleet import CTX, Fleet, fleet
from tests.support.tiny_gemma_media import WIDE
from tests.support.tiny_models import CHAT_TEMPLATE, TOKENS, make_tiny
from tests.support.tiny_projectors import MEDIA_TOKENS, make_projector, picture
from tests.support.tiny_videos import is_video
from tests.support.whole_with_images import MARKER, WholeWithImages, needs_library

pytestmark = needs_library
KINDS = {"mlp": ("llama", (2,)), "pixtral": ("mistral3", ()), "internvl": ("qwen2", (1, 2)),
         "gemma3": ("gemma3", (3,)), "gemma4v": ("gemma4", (4,)), "gemma4v:e2b": ("gemma4:e2b", (2, 4, 6)),
         "gemma4v:wide": ("gemma4:wide", (3, 5)), "gemma4uv": ("gemma4", (4,)), "qwen2vl_merger": ("qwen2vl", (1,)),
         "nemotron_v2_vl": ("nemotron_h", (5,)),
         "qwen2.5vl_merger": ("qwen2vl", ()), "qwen3vl_merger": ("qwen35", (4,)),
         "qwen3vl_merger:deepstack": ("qwen3vl", (3, 4)), "qwen3vl_merger:moe": ("qwen3vlmoe", (3,)),
         "glm4v": ("glm4moe", (2,)), "glm4v:glm4": ("glm4:axes", (2,)), "glm5v": ("glm5-next", (4,)),
         "ling3vl": ("bailingmoe3", (4,)), "minimax_m3": ("minimax-m3", (4,)), "mimovl": ("mimo2", (4,)),
         "paddleocr": ("paddleocr", (2,)),
         "dots_ocr": ("qwen2", (1,)), "muse-glimmer": ("muse-glimmer", (4,)),
         "youtuvl": ("deepseek2", (2,)),
         "kimik25": ("deepseek2", (1, 3)), "kimik25:glm": ("glm-dsa", (2,)), "kimivl": ("deepseek2", (2,)),
         "llama4": ("llama4", (4, 8)), "lightonocr": ("qwen3", (2,)), "phi4": ("phi3", (2,)),
         "janus_pro": ("llama", (1,)), "step3vl": ("qwen3", (1,)), "step3vl:flash": ("step35", (2,)),
         "lfm2": ("lfm2", (4,)), "lfm2:moe": ("lfm2moe", (3,)), "minicpmv4_6": ("qwen35", (4,)),
         "resampler": ("qwen3:wide", (2,)), "idefics3": ("smollm3", (4,))}  # fmt: skip
AXES = {"rope.dimension_sections": [3, 3, 2, 0]}
VALUES = {"glm4v": AXES, "ling3vl": AXES}  # of models


MAX_TOKENS = {"gemma4v": 24, "gemma4uv": 24, "lfm2": 16}  # of an image; without it, small ones have 64 and more
MUTUAL = ("gemma3", "gemma4v", "gemma4uv")  # whose rows see each other
NEAR_TIE = 1e-3  # of logits, over few tokens; another image moves some logit by 0.25 and more
one_kind = pytest.mark.parametrize("model", ["mlp"], indirect=True)
N_DEEPSTACK = 2  # layers of some models that take features of images
# Rows of gemma3 see each other, and so do those of gemma4v. Those of E2B, the wide one, do not, and its layers take
# inputs besides rows. Those of the next three have positions in a grid. qwen35 has a recurrent state too, and qwen3vl
# layers that take features of images. glm5v's model hands on several streams of each row.
each_way = pytest.mark.parametrize(
    "model",
    [
        "mlp",
        "gemma3",
        "gemma4v",
        "gemma4v:wide",
        "qwen2vl_merger",
        "qwen3vl_merger",
        "qwen3vl_merger:deepstack",
        "glm5v",
    ],
    indirect=True,
)
# Of the last, the model's file alone says that positions have several axes.
in_grids = pytest.mark.parametrize(
    "model", ["qwen2vl_merger", "qwen3vl_merger", "qwen3vl_merger:deepstack", "glm4v"], indirect=True
)
in_tiles = pytest.mark.parametrize(
    ("model", "n_tiles"),
    [("step3vl", 4), ("lfm2", 4), ("minicpmv4_6", 9), ("resampler", 9), ("idefics3", 1)],
    indirect=["model"],
)


@dataclasses.dataclass
class Model:
    """One model in stages, and in one piece."""

    file: PipelineFile
    paths: list[Path]
    tokenizer: Path
    encoder: Encoder
    whole: WholeWithImages
    ctx_tokens: int = CTX
    n_vocab: int = len(TOKENS)


@pytest.fixture(scope="module", name="model")
def model_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with made(request.param, tmp_path_factory.mktemp("model")) as model:
        yield model


@contextlib.contextmanager
def made(name: str, directory: Path, ctx_tokens: int = CTX) -> Iterator[Model]:
    """Make the files of a kind of projector, by KINDS, and its model; load the whole one, and start the encoder."""
    family, cuts = KINDS[name]
    n_deepstack = N_DEEPSTACK if family.startswith("qwen3vl") else 0
    values = {"n_deepstack_layers": n_deepstack} if n_deepstack else VALUES.get(name, {})
    kind = name.partition(":")[0]
    tokens = MEDIA_TOKENS.get(kind, ())
    whole = make_tiny(family, directory / "model.gguf", tokenizer=True, more_tokens=tokens, extra_values=values)
    file = split_model(whole, directory / "out", cuts=cuts)
    projector = make_projector(directory / "mmproj.gguf", kind, n_embd=file.n_embd, n_deepstack=n_deepstack)
    paths = [directory / "out" / stage.file for stage in file.stages]
    tokenizer = directory / "out" / file.tokenizer.file
    assert check_projector(projector, file).images == kind
    max_tokens = MAX_TOKENS.get(kind, 0)
    encoder = Encoder(projector, tokenizer, file.media_width, max_tokens)
    with WholeWithImages(whole, projector, ctx_tokens, max_tokens) as reference:
        try:
            encoder.start()
            assert encoder.are_mutual == (kind in MUTUAL and file.n_embd != WIDE)
            yield Model(file, paths, tokenizer, encoder, reference, ctx_tokens, len(TOKENS) + len(tokens))
        finally:
            encoder.close()


class Chats:
    """A client of one served pipeline."""

    def __init__(self, session: aiohttp.ClientSession, url: str, running: Fleet) -> None:
        self._session, self.url, self.running = session, url, running

    async def post(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        async with self._session.post(self.url + path, json=body) as response:
            found: dict[str, Any] = await response.json()
            assert response.status == status, found
            return found

    async def answer(self, *parts: str | bytes, n_tokens: int = 12, **fields: Any) -> dict[str, Any]:
        """Ask with texts and images; returns the answer."""
        body = {"messages": [{"role": "user", "content": content(*parts)}], "max_tokens": n_tokens, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True}
        return await self.post("/v1/chat/completions", body | more | fields)


def content(*parts: str | bytes) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} if isinstance(part, str) else file_part(part) for part in parts]


def file_part(file: bytes) -> dict[str, Any]:
    if is_audio_file(file):
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}
    if is_video(file):
        return {"type": "video_url", "video_url": {"url": url_of(file, "video/mp4")}}
    return {"type": "image_url", "image_url": {"url": url_of(file)}}


def url_of(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


@contextlib.asynccontextmanager
async def chats(model: Model, **settings: Any) -> AsyncIterator[Chats]:
    tokenizer = Tokenizer.load(model.tokenizer)
    template = ChatTemplate(CHAT_TEMPLATE)
    settings = {"ctx_tokens": model.ctx_tokens, **settings}
    async with fleet(model.paths, file=model.file, n_vocab=model.n_vocab, **settings) as running:
        served = ServedModel("tiny", 1, tokenizer, template, Borrowed(model.encoder))
        app = make_app(running.pipeline, served)
        runner, port = await start_http(app, "127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as session:
                yield Chats(session, f"http://127.0.0.1:{port}", running)
        finally:
            await runner.cleanup()
            tokenizer.close()


class Borrowed(Encoder):
    """The module's encoder, which keeps running when an application ends."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self.n_embd, self.are_mutual = encoder, encoder.n_embd, encoder.are_mutual
        self.takes, self.sampling = encoder.takes, encoder.sampling
        self.n_asked: list[int] = []

    @property
    def identity(self) -> bytes:  # type: ignore[override]
        return self._encoder.identity

    def encode(self, data: bytes, rows_max: int, *, is_video: bool = False) -> Any:
        self.n_asked.append(rows_max)
        return self._encoder.encode(data, rows_max, is_video=is_video)

    def close(self) -> None:
        """Keep it."""


def assert_as_whole(model: Model, answer: dict[str, Any], *parts: str | bytes) -> None:
    """Every token of an answer is the whole model's, and its prompt has as many positions."""
    text, is_after_text = "", False
    for part in parts:
        text += ("\n" if is_after_text else "") + part if isinstance(part, str) else MARKER.decode()
        is_after_text = isinstance(part, str)
    rendered = f"<|user|>{text}<|end|><|assistant|>"
    tokens = answer["choices"][0]["token_ids"]
    files = [part for part in parts if isinstance(part, bytes)]
    n_prompt, logits = model.whole.logits_along(rendered, files, tokens)
    behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    assert behind.max() <= NEAR_TIE, f"token {int(behind.argmax())} of {len(tokens)} is {behind.max()} behind"
    assert answer["usage"]["prompt_tokens"] == n_prompt


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", KINDS, indirect=True)
async def test_answers_are_those_of_the_whole_model_alone_and_together(model: Model) -> None:
    asked = [
        ("what is in", picture(1), "this?"),
        (picture(2), picture(1, size=(64, 20)), "compare these"),
        ("no image at all",),
        ("the same", "twice", picture(3), picture(3)),
    ]
    async with chats(model) as client:
        alone = [await client.answer(*parts) for parts in asked]
        together = await asyncio.gather(*(client.answer(*parts) for parts in asked))
    for parts, one, other in zip(asked, alone, together, strict=True):
        assert_as_whole(model, one, *parts)
        assert_as_whole(model, other, *parts)
    assert -1 in alone[0]["prompt_token_ids"]
    texts = [model.whole.logits_along(f"<|user|>x{MARKER.decode()}?", [picture(seed)], [0])[1] for seed in (1, 2)]
    assert np.abs(texts[0] - texts[1]).max() > 100 * NEAR_TIE, "the model does not look at its images"


@each_way
async def test_the_next_turn_reads_only_new_rows_and_images_are_not_confused(model: Model) -> None:
    question = "look at this with care, and tell all that you see: "
    async with chats(model, prefix_lanes=4, kv_layout="per-lane") as client:
        first = await client.answer(question, picture(5))
        n_prompt = first["usage"]["prompt_tokens"]
        await until_kept(client.running, 1)
        before = await rows_of(client.running)
        again = await client.answer(question, picture(5))
        n_again = (await rows_of(client.running))[0] - before[0]
        other = await client.answer(question, picture(6))
        cached = other["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert n_again < n_prompt, "the same image was read again"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == n_prompt - 1
    assert cached <= other["prompt_token_ids"].index(-1), "another image was copied"
    for answer, seed in ((first, 5), (again, 5), (other, 6)):
        assert_as_whole(model, answer, question, picture(seed))


@pytest.mark.sampled(2)
@each_way
async def test_a_lost_stage_and_a_lost_link_are_pauses(model: Model) -> None:
    parts = ("what is in", picture(7), "this?")
    async with chats(model, proxied=True) as client:
        asking = asyncio.create_task(client.answer(*parts, n_tokens=60))
        await _until_running(client)
        await cut(client.running, 0)
        await client.running.lose(0)
        await client.running.start(0)
        answer = await asking
    assert len(answer["choices"][0]["token_ids"]) == 60
    assert_as_whole(model, answer, *parts)


async def _until_running(client: Chats) -> None:
    async with asyncio.timeout(60):
        while not any(slot.n_generated for slot in client.running.pipeline.slots()):
            await client.running.pipeline.describe()


@in_grids
async def test_images_larger_than_a_chunk_are_read_in_parts(model: Model) -> None:
    asked = [
        (picture(30, size=(120, 90)), "and", picture(31, size=(60, 140)), "which is taller?"),
        ("here", picture(32, size=(140, 50))),
    ]
    async with chats(model, prefix_lanes=4, kv_layout="per-lane") as client:
        both = await asyncio.gather(*(client.answer(*parts) for parts in asked))
        again = await client.answer(*asked[0])
    for parts, answer in zip((*asked, asked[0]), (*both, again), strict=True):
        assert_as_whole(model, answer, *parts)
    assert both[0]["prompt_token_ids"].count(-1) > 64
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 64


@in_tiles
async def test_large_images_are_cut_into_tiles_with_tokens_between(model: Model, n_tiles: int) -> None:
    parts = ("look at", picture(60, size=(800, 800)), "with care")
    async with chats(model) as client:
        answer = await client.answer(*parts)
    assert_as_whole(model, answer, *parts)
    prompt = answer["prompt_token_ids"]
    runs = sum(before != -1 and after == -1 for before, after in itertools.pairwise(prompt))
    assert runs == n_tiles + 1, "the tiles and the image as a whole"
    assert max(prompt) >= len(TOKENS), "no token of its own marks an image"


@pytest.mark.sampled(2)
@each_way
async def test_wrong_guesses_behind_an_image_are_taken_back(model: Model) -> None:
    parts = ("what is in", picture(50), "this?")
    async with chats(model, draft=4, rewind_rows=4) as client:
        first = await client.answer(*parts, n_tokens=40)
        answer_text = first["choices"][0]["message"]["content"]
        predicted = {"type": "content", "content": answer_text[:20] + "wrong" + answer_text[20:]}
        again = await asyncio.gather(
            *(client.answer(*parts, n_tokens=40, prediction=predicted, seed=n) for n in (1, 2))
        )
    for answer in (first, *again):
        assert_as_whole(model, answer, *parts)
    details = again[0]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0


@in_grids
async def test_lanes_with_images_come_back_from_the_tier(model: Model) -> None:
    first, second = ("look here with care: ", picture(40), "well?"), ("a text of another kind: ", picture(41), "so?")
    async with chats(model, prefix_lanes=1, tier_bytes=1 << 26, kv_layout="per-lane") as client:
        answers = [await client.answer(*parts) for parts in (first, second)]
        await until_kept(client.running, 1)
        again = await client.answer(*first)
        stored = (await client.running.pipeline.describe())["stored_prefixes"]
    assert stored["restored"] >= 1  # type: ignore[index]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
    for parts, answer in zip((first, second, first), (*answers, again), strict=True):
        assert_as_whole(model, answer, *parts)


@one_kind
async def test_images_that_cannot_fit_are_refused_before_they_are_encoded(model: Model) -> None:
    async with chats(model) as client:
        images = [picture(20 + seed) for seed in range(16)]
        body = {"messages": [{"role": "user", "content": content(*images, *images, "!")}]}
        refusal = await client.post("/v1/chat/completions", body, 400)
        assert "at most 16 images" in refusal["error"]["message"]
        body["messages"][0]["content"] = content("x" * 200, *images[:15])
        refusal = await client.post("/v1/chat/completions", body, 400)
        assert refusal["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
async def test_steps_too_small_for_an_image_that_is_one_step_are_refused_by_name(model: Model) -> None:
    async with chats(model, max_rows=15) as client:
        body = {"messages": [{"role": "user", "content": content("see", picture(1))}]}
        refusal = await client.post("/v1/chat/completions", body, 501)
        assert "16 rows of an image are one native step, and a stage takes 15" in refusal["error"]["message"]
        assert "--max-rows 16" in refusal["error"]["message"]
        text = await client.answer("text is served", n_tokens=2)
    assert_as_whole(model, text, "text is served")


@pytest.mark.parametrize("model", ["idefics3"], indirect=True)
async def test_an_image_of_a_size_that_the_encoder_does_not_take_is_the_clients_mistake(model: Model) -> None:
    async with chats(model) as client:
        body = {"messages": [{"role": "user", "content": content("see", picture(1, size=(300, 7)))}]}
        refusal = await client.post("/v1/chat/completions", body, 400)
    assert "llama.cpp cannot cut an image of 300 x 7 pixels" in refusal["error"]["message"]
    assert refusal["error"]["param"] == "messages[0].content[1].image_url"


@one_kind
async def test_other_dialects_and_counts(model: Model) -> None:
    file = picture(8)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": base64.b64encode(file).decode()}}  # fmt: skip
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, block]}]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "see"},
                                          {"type": "input_image", "image_url": url_of(file)}]}]  # fmt: skip
    async with chats(model) as client:
        chat = await client.answer("see", file, n_tokens=4)
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
        message = await client.post("/v1/messages", body)
        counted = await client.post("/v1/messages/count_tokens", body)
        response = await client.post("/v1/responses", {"input": items, "max_output_tokens": 4, "temperature": 0})
        n_input = await client.post("/v1/responses/input_tokens", {"input": items})
    n_prompt = chat["usage"]["prompt_tokens"]
    assert message["usage"]["input_tokens"] + message["usage"].get("cache_read_input_tokens", 0) == n_prompt
    assert counted["input_tokens"] == n_input["input_tokens"] == n_prompt
    assert response["usage"]["input_tokens"] == n_prompt
    text = chat["choices"][0]["message"]["content"]
    assert message["content"][0]["text"] == response["output"][0]["content"][0]["text"] == text
