"""Chats with audio over real stages give the answers of llama.cpp's own encoder and the whole model, also after
losses.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError

from relayline.coordinator.engine import token_sender
from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.projectors import check_projector
from relayline.coordinator.model.split import split_model
from relayline.wire.common.errors import InvalidRequestError
from tests.end_to_end.test_going_on import cut
from tests.end_to_end.test_images_pipeline import NEAR_TIE, Model, _until_running, assert_as_whole, chats, content
from tests.end_to_end.test_prefix_lanes import rows_of, until_kept
from tests.support.family_check import covering_cuts
from tests.support.openai_client import openai_client
from tests.support.tiny_audio import make_audio_projector, sound
from tests.support.tiny_models import make_tiny
from tests.support.tiny_projectors import picture
from tests.support.whole_with_images import MARKER, WholeWithImages, needs_library

pytestmark = needs_library
# Of each kind the family of its model, and tokens of a stream: three kinds have 750 rows for up to 30 seconds.
KINDS = {"ultravox": ("llama", 512), "voxtral": ("llama", 512), "glma": ("llama", 512), "qwen3a": ("qwen3vl", 512),
         "qwen2a": ("qwen2", 2048), "musicflamingo": ("qwen2", 2048), "qwen2.5o": ("qwen2vl", 2048),
         "gemma4a": ("gemma4:e2b", 1024), "gemma4v+gemma4a": ("gemma4:wide", 1024),
         "gemma4uv+gemma4ua": ("gemma4", 1024), "lfm2a": ("lfm2", 512), "granite_speech": ("granite", 512),
         "meralion": ("gemma2", 512), "mimovl+mimo_audio": ("mimo2", 512), "parakeet": ("nemotron_h", 512),
         "nemotron_v2_vl+parakeet": ("nemotron_h_moe", 512)}  # fmt: skip
ONE_CUT = ("nemotron_h", "nemotron_h_moe")  # whose legal cuts exclude each other
IMAGE_TOKENS = 24  # most of an image of Gemma 4

SECONDS = 20.0  # of a sound that fills most of an encoder's window
one_kind = pytest.mark.parametrize("model", ["ultravox"], indirect=True)
# The second's positions have several axes, and the third's layers take inputs besides rows.
each_way = pytest.mark.parametrize("model", ["ultravox", "qwen3a", "gemma4a"], indirect=True)


@pytest.fixture(scope="module", name="model")
def model_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    directory = tmp_path_factory.mktemp("model")
    family, ctx_tokens = KINDS[request.param]
    values = {"n_deepstack_layers": 0} if family == "qwen3vl" else {}  # as Qwen3-ASR's text model
    whole = make_tiny(family, directory / "model.gguf", tokenizer=True, extra_values=values)
    file = split_model(whole, directory / "out", cuts=covering_cuts(inspect_model(whole))[0])
    projector = make_audio_projector(directory / "mmproj.gguf", request.param, n_embd=file.n_embd)
    paths = [directory / "out" / stage.file for stage in file.stages]
    assert len(paths) > (1 if family in ONE_CUT else 2), "as many legal cuts as go together are cuts"
    assert check_projector(projector, file).audio
    max_tokens = IMAGE_TOKENS if family.startswith("gemma4") else 0
    encoder = Encoder(projector, directory / "out" / file.tokenizer.file, file.n_embd, max_tokens)
    with WholeWithImages(whole, projector, ctx_tokens, max_tokens) as reference:
        try:
            encoder.start()
            yield Model(file, paths, directory / "out" / file.tokenizer.file, encoder, reference, ctx_tokens)
        finally:
            encoder.close()
            encoder._end()  # of the socket, which closing leaves to a call that may wait at it


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", KINDS, indirect=True)
async def test_answers_are_those_of_the_whole_model_alone_and_together(model: Model) -> None:
    asked: list[tuple[str | bytes, ...]] = [
        ("what is said in", sound(1, seconds=SECONDS), "?"),
        ("no sound at all",),
        (sound(2, rate=44_100, channels=2), "and a short one"),
    ]
    if model.encoder.takes.images:
        asked.append((picture(1), "and", sound(3), "together"))
    async with chats(model) as client:
        alone = [await client.answer(*parts) for parts in asked]
        together = await asyncio.gather(*(client.answer(*parts) for parts in asked))
    for parts, one, other in zip(asked, alone, together, strict=True):
        assert_as_whole(model, one, *parts)
        assert_as_whole(model, other, *parts)
    assert -1 in alone[0]["prompt_token_ids"]
    heard = [sound(seed, seconds=SECONDS) for seed in (1, 2)]
    logits = [model.whole.logits_along(f"<|user|>x{MARKER.decode()}?", [each], [0])[1] for each in heard]
    assert np.abs(logits[0] - logits[1]).max() > 10 * NEAR_TIE, "the model does not listen"


@one_kind
async def test_audio_of_more_than_one_window_is_several_runs_of_rows(model: Model) -> None:
    parts = (sound(4, seconds=61, rate=4_000), "what was that?")
    async with chats(model) as client:
        answer = await client.answer(*parts)
    assert_as_whole(model, answer, *parts)
    assert answer["prompt_token_ids"].count(-1) == 3 * 25


@pytest.mark.sampled(1)
@each_way
async def test_the_next_turn_reads_only_new_rows_and_sounds_are_not_confused(model: Model) -> None:
    question = "listen to this with care, and tell all that you hear: "
    heard = {seed: sound(seed, seconds=SECONDS) for seed in (5, 6)}
    async with chats(model, prefix_lanes=4, kv_layout="per-lane") as client:
        first = await client.answer(question, heard[5])
        n_prompt = first["usage"]["prompt_tokens"]
        await until_kept(client.running, 1)
        before = await rows_of(client.running)
        again = await client.answer(question, heard[5])
        n_again = (await rows_of(client.running))[0] - before[0]
        other = await client.answer(question, heard[6])
        cached = other["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert n_again < n_prompt, "the same sound was read again"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == n_prompt - 1
    assert cached <= other["prompt_token_ids"].index(-1), "another sound was copied"
    for answer, seed in ((first, 5), (again, 5), (other, 6)):
        assert_as_whole(model, answer, question, heard[seed])


@pytest.mark.sampled(1)
@each_way
async def test_a_lost_stage_and_a_lost_link_are_pauses(model: Model) -> None:
    parts = ("what is said in", sound(7, seconds=SECONDS), "this?")
    async with chats(model, proxied=True) as client:
        asking = asyncio.create_task(client.answer(*parts, n_tokens=60))
        await _until_running(client)
        await cut(client.running, 0)
        await client.running.lose(0)
        await client.running.start(0)
        answer = await asking
    assert len(answer["choices"][0]["token_ids"]) == 60
    assert_as_whole(model, answer, *parts)


@pytest.mark.sampled(1)
@each_way
async def test_a_stage_lost_while_audio_is_read_is_a_pause(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("what is said in", *(sound(seed, seconds=6) for seed in (8, 9)), "these?")
    write, is_leaving = token_sender.write_tokens, asyncio.Event()

    def written(buffer: Any, frames: Any, *arguments: Any) -> Any:
        if any(frame.rows is not None for frame in frames):
            is_leaving.set()
        return write(buffer, frames, *arguments)

    monkeypatch.setattr(token_sender, "write_tokens", written)
    async with chats(model) as client:
        asking = asyncio.create_task(client.answer(*parts))
        async with asyncio.timeout(60):
            await is_leaving.wait()
        await client.running.lose(0)
        await client.running.start(0)
        answer = await asking
    assert_as_whole(model, answer, *parts)


@pytest.mark.parametrize("model", ["lfm2a"], indirect=True)
async def test_sounds_that_would_end_the_encoder_are_refused(model: Model) -> None:
    assert model.encoder._process is not None
    before = model.encoder._process.pid
    for seconds, problem in ((0.018, "there is no sound"), (181, "audio of 181 seconds; at most 180")):
        with pytest.raises(InvalidRequestError, match=problem):
            model.encoder.encode(sound(1, seconds=seconds), 0)
    assert model.encoder._process.pid == before


@one_kind
async def test_a_crash_of_the_encoder_fails_one_request(model: Model) -> None:
    parts = ("what is said in", sound(10), "this?")
    async with chats(model) as client:
        assert model.encoder._process is not None
        os.kill(model.encoder._process.pid, signal.SIGKILL)
        body = {"messages": [{"role": "user", "content": content(*parts)}], "max_tokens": 2}
        failed = await client.post("/v1/chat/completions", body, 500)
        answer = await client.answer(*parts)
    assert "the next file starts another" in failed["error"]["message"]
    assert_as_whole(model, answer, *parts)


@one_kind
async def test_openais_own_client_sends_audio_and_asks_for_transcriptions(model: Model) -> None:
    file = sound(12)
    part: Any = {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}
    async with chats(model) as client, openai_client(client.url) as openai:
        messages: Any = [{"role": "user", "content": [*content("Transcribe audio to text"), part]}]
        chat = await openai.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0)
        given: Any = {"model": "tiny", "file": ("said.wav", file), "extra_body": {"max_tokens": 6}}
        whole = await openai.audio.transcriptions.create(**given)
        text = await openai.audio.transcriptions.create(**given, response_format="text")
        stream = await openai.audio.transcriptions.create(**given, stream=True)
        events: list[Any] = [event async for event in stream]
        with pytest.raises(BadRequestError, match="times of words"):
            await openai.audio.transcriptions.create(**given, response_format="verbose_json")
    answer = chat.choices[0].message.content
    assert whole.text == answer
    assert str(text).rstrip("\n") == (answer or "").rstrip("\n")
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == "".join(event.delta for event in events[:-1]) == answer
    assert events[-1].usage.total_tokens == whole.usage.total_tokens


@one_kind
async def test_bad_files_get_one_line_and_other_dialects_count_alike(model: Model) -> None:
    file = sound(11)
    data = base64.b64encode(file).decode()
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hear"},
                                          {"type": "input_audio", "input_audio": {"data": data}}]}]  # fmt: skip
    of_vllm = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}
    async with chats(model) as client:
        damaged = "the audio cannot be read: it is a damaged MP3 file, or none"
        for bad, problem in ((b"ID3" + bytes(100), damaged), (file[:40], "no sound in")):
            body = {"messages": [{"role": "user", "content": content("hear", bad)}]}
            refusal = (await client.post("/v1/chat/completions", body, 400))["error"]
            assert refusal["param"] == "messages[0].content[1].input_audio"
            assert problem in refusal["message"]
            assert "\n" not in refusal["message"]
        chat = await client.answer("hear", file, n_tokens=4)
        body = {"messages": [{"role": "user", "content": [*content("hear"), of_vllm]}], "max_tokens": 4}
        same = await client.post("/v1/chat/completions", body | {"temperature": 0})
        response = await client.post("/v1/responses", {"input": items, "max_output_tokens": 4, "temperature": 0})
        n_input = await client.post("/v1/responses/input_tokens", {"input": items})
        body = {"input": "again?", "previous_response_id": response["id"], "max_output_tokens": 4, "temperature": 0}
        next_turn = await client.post("/v1/responses", body)
        refusal = await client.post("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_audio", "input_audio": {"data": "!"}}]}]}, 400)  # fmt: skip
    n_prompt = chat["usage"]["prompt_tokens"]
    text = chat["choices"][0]["message"]["content"]
    assert same["choices"][0]["message"]["content"] == response["output"][0]["content"][0]["text"] == text
    assert response["usage"]["input_tokens"] == n_input["input_tokens"] == n_prompt
    assert next_turn["usage"]["input_tokens"] > n_prompt
    assert refusal["error"]["message"].startswith("input[0].content[0].input_audio: ")
