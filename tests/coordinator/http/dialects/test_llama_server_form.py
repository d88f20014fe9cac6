"""llama-server's own routes: /completion, /infill and /slots, and the progress of reading a prompt."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.http.replies import answers
from relayline.coordinator.sessions.generation import GenerationRequest, PromptProgress, TokenEvent
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.coordinator.sessions.streams import SessionStream
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import EOS, N_VOCAB, write_tokenizer
from relayline.wire.common.sampler_order import order_of
from tests.support.http_support import FakeGenerator, Script, says, serving, tokens

GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = range(N_VOCAB, N_VOCAB + 5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf", controls=GAP))


async def asked(
    tokenizer: Tokenizer, path: str, script: Script, status: int = 200, **body: object
) -> tuple[Any, list[GenerationRequest]]:
    """Return the answer, for a stream the list of its events, and the generator's requests."""
    async with (
        serving(tokenizer, FakeGenerator(script)) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post(path, json=body) as reply,
    ):
        text = await reply.text()
        assert reply.status == status, text
        if body.get("stream"):
            lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            return [json.loads(line) for line in lines], served.generator.requests
        return json.loads(text), served.generator.requests


def leading(request: GenerationRequest) -> Iterator[TokenEvent]:
    return tokens(request, b"o\nk", top=((111, -0.5), (112, -1.5)))


async def test_a_whole_answer_has_llama_servers_fields(tokenizer: Tokenizer) -> None:
    body = {"prompt": "hey", "n_predict": 3, "n_probs": 1, "return_tokens": True, "seed": 7}
    found, (request,) = await asked(tokenizer, "/completion", leading, **body)
    assert list(found) == [
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
        "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
        "timings", "completion_probabilities",
    ]  # fmt: skip
    n_prompt = len(request.prompt_tokens)
    assert (found["content"], found["tokens"], found["has_new_line"]) == ("o\nk", list(b"o\nk"), True)
    assert (found["tokens_predicted"], found["tokens_evaluated"], found["tokens_cached"]) == (3, n_prompt, n_prompt + 2)
    assert (found["stop_type"], found["stopping_word"], found["prompt"]) == ("limit", "", "hey")
    first = found["completion_probabilities"][0]
    assert first["id"] == ord("o")
    assert first["token"] == "o"
    assert first["bytes"] == [ord("o")]
    assert first["top_logprobs"] == [{"id": 111, "token": "o", "bytes": [111], "logprob": -0.5}]
    timings = found["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (n_prompt, 3)
    steps_ms = 2 * timings["predicted_per_token_ms"]  # the first token comes from the prompt's last step
    assert steps_ms == pytest.approx(timings["predicted_ms"])
    used = found["generation_settings"]
    assert (used["n_predict"], used["seed"], used["n_probs"]) == (3, 7, 1)
    # Fields that the body leaves out have llama-server's defaults, in the answer and at the stages.
    sampling = request.sampling
    assert (used["temperature"], used["top_k"], used["top_p"], used["min_p"]) == (0.8, 40, 0.95, 0.05)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)


async def test_a_stream_ends_with_an_event_that_says_stop(tokenizer: Tokenizer) -> None:
    (*partial, last), (request,) = await asked(tokenizer, "/completion", says(b"abc"), prompt="x", stream=True)
    assert "".join(event["content"] for event in partial) == "abc"
    assert [event["tokens"] for event in partial] == [[97], [98], [99], [EOS]]
    assert [event["tokens_predicted"] for event in partial] == [1, 2, 3, 4]
    assert not any(event["stop"] for event in partial)
    assert all("timings" not in event for event in partial)
    assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "eos")
    assert last["generation_settings"]["stream"] is True
    assert request.max_tokens == 512 - len(request.prompt_tokens)  # n_predict is -1


async def test_a_stream_has_no_event_for_usage_of_its_own(tokenizer: Tokenizer) -> None:
    wished = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "stream": True, "stream_options": wished}
    (*partial, last), _ = await asked(tokenizer, "/completion", says(b"abc"), **body)
    assert [event["stop"] for event in (*partial, last)] == [False] * 4 + [True]
    assert last["tokens_predicted"] == 4


async def test_a_stop_word_is_named_and_fields_are_chosen(tokenizer: Tokenizer) -> None:
    fields = ["content", "stopping_word", "stop_type", "generation_settings/n_predict", "nothing/here"]
    body = {"prompt": "x", "n_predict": 9, "stop": ["c"], "response_fields": fields}
    found, _ = await asked(tokenizer, "/completion", says(b"abcd"), **body)
    wanted = {"content": "ab", "stopping_word": "c", "stop_type": "word", "generation_settings/n_predict": 9}
    assert found == wanted


async def test_prompts_of_every_shape(tokenizer: Tokenizer) -> None:
    prompt = ["ab", [1, 2, "ab"], {"prompt_string": "ab"}]
    found, requests = await asked(tokenizer, "/completion", says(b"y"), prompt=prompt, n_predict=1)
    ab = tuple(tokenizer.encode("ab"))
    assert [request.prompt_tokens for request in requests] == [ab, (1, 2, *ab), ab]
    wanted = [(0, len(ab)), (1, 2 + len(ab)), (2, len(ab))]
    assert [(each["index"], each["tokens_evaluated"]) for each in found] == wanted
    (one, two), requests = await asked(tokenizer, "/completion", says(b"y"), prompt=[1, 2], n_cmpl=2, n_predict=0)
    assert [request.prompt_tokens for request in requests] == [(1, 2), (1, 2)]
    assert requests[0].max_tokens == 1  # as llama-server does it
    assert (one["tokens_evaluated"], two["index"]) == (2, 1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "prompt: required field is missing"),
        ({"prompt": {"other": 1}}, "prompt: must be text"),
        ({"prompt": [[1, None]]}, "prompt: must be text"),
        ({"prompt": "x", "post_sampling_probs": True}, "post_sampling_probs: not supported"),
        ({"prompt": "x", "mirostat": 3}, "mirostat: must be a whole number"),
        ({"prompt": "x", "samplers": ["top_k", "tip_p"]}, "samplers: only some of"),
        ({"prompt": "x", "samplers": ["infill", "top_k"]}, "samplers: penalties come first, then dry"),
        ({"prompt": "x", "samplers": ["temperature", "infill"]}, "samplers: penalties come first, then dry"),
        ({"prompt": "x", "samplers": "ke", "repeat_penalty": 1.1}, "samplers: penalties come first, then dry"),
        (
            {"prompt": "x", "samplers": "de", "repeat_penalty": 1.1, "dry_multiplier": 1},
            "samplers: penalties come first",
        ),
        ({"prompt": "x", "n_indent": -1}, "n_indent"),
        ({"prompt": "x", "t_max_predict_ms": "soon"}, "t_max_predict_ms"),
        ({"prompt": "x", "samplers": "kk"}, "samplers: only some of"),
        ({"prompt": "x", "samplers": "kz"}, "samplers: 'z' is not a sampler's letter"),
        ({"prompt": "x", "n_probs": 21}, "n_probs"),
        ({"prompt": [1, 9_999]}, "prompt: token 9999"),
    ],
)
async def test_bad_bodies_are_refused_in_one_line(tokenizer: Tokenizer, body: dict[str, Any], text: str) -> None:
    found, requests = await asked(tokenizer, "/completion", says(b""), 400, **body)
    assert text in found["error"]["message"]
    assert not requests


async def test_samplers_that_are_left_out_do_nothing(tokenizer: Tokenizer) -> None:
    body = {"prompt": "x", "samplers": ["top_k"], "typical_p": 0.5, "presence_penalty": 1.0, "n_predict": 1}
    found, (request,) = await asked(tokenizer, "/completion", says(b"y"), **body)
    sampling = request.sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature) == (40, 1.0, 0.0, 1.0)
    assert (sampling.numbers, sampling.presence_penalty) == ((), 0.0)
    assert found["generation_settings"]["samplers"] == ["top_k"]
    by_letter, (request,) = await asked(tokenizer, "/completion", says(b"y"), **(body | {"samplers": "kt"}))
    assert (request.sampling.temperature, request.sampling.top_p) == (0.8, 1.0)
    assert by_letter["generation_settings"]["samplers"] == ["top_k", "temperature"]
    none, _ = await asked(tokenizer, "/completion", says(b"y"), **(body | {"samplers": []}))
    assert none["generation_settings"]["samplers"] == []


@pytest.mark.parametrize(
    ("asks", "order"),
    [
        ({"samplers": "tk"}, ["temperature", "top_k"]),
        ({"samplers": ["min_p", "temp", "top_p", "top_k"]}, ["min_p", "temperature", "top_p", "top_k"]),
        ({"samplers": "xkpt", "xtc_probability": 0.5}, ["xtc", "top_k", "top_p", "temperature"]),
        ({"samplers": "xkpt"}, []),  # XTC does not act
        ({"samplers": "tk", "temperature": 1}, []),
        ({"samplers": "tk", "temperature": 0}, []),
        ({"samplers": "tk", "mirostat": 2}, []),
        ({"samplers": "aekt"}, []),  # nor do the first two
        ({"samplers": "kpamt", "adaptive_target": 0.5}, []),
        ({"samplers": "kit"}, []),
        ({"samplers": "pkit"}, ["top_p", "top_k", "temperature"]),
    ],
)
async def test_samplers_that_act_do_so_in_the_order_of_the_list(
    tokenizer: Tokenizer, asks: dict[str, Any], order: list[str]
) -> None:
    _, (request,) = await asked(tokenizer, "/completion", says(b"y"), prompt="x", n_predict=1, **asks)
    number = request.sampling.number("sampler_order")
    assert order_of(int(number))[: len(order)] == tuple(order)
    assert bool(number) == bool(order)


SILLY_TAVERN = {  # version 1.19.0, as its server passes them on to llama.cpp
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "tfs_z", "typical_p", "xtc", "top_p",
                 "adaptive_p", "min_p", "temperature"],
    "top_p": 0.95, "min_p": 0.01, "top_k": 0, "xtc_threshold": 0.1, "xtc_probability": 0, "dry_multiplier": 0,
    "adaptive_target": -0.01, "adaptive_decay": 0.9, "temperature": 0.7, "dynatemp_range": None, "min_keep": 0,
    "n_probs": 10, "logprobs": 10, "smoothing_factor": 0, "typical_p": 1, "typical": 1, "mirostat": 0,
    "repeat_penalty": 1.2, "repetition_penalty": 1.2, "repeat_last_n": 0,
    "stop": [f"\n{name}:" for name in "abcdefghijklmnopqrst"], "n_predict": 2,
}  # fmt: skip


async def test_silly_tavern_is_served(tokenizer: Tokenizer) -> None:
    found, (request,) = await asked(tokenizer, "/completion", leading, prompt="x", **SILLY_TAVERN)
    assert dict(request.sampling.numbers) == {"repetition_penalty": 1.2, "repeat_last_n": 0}
    assert found["generation_settings"]["samplers"] == [
        name
        for name in SILLY_TAVERN["samplers"]
        if name not in ("tfs_z", "typical_p")  # once each
    ]
    preset = {"samplers": ["top_k", "tfs_z", "typical_p", "top_p", "min_p", "temperature"], "typical_p": 0.5}
    found, (request,) = await asked(tokenizer, "/completion", leading, prompt="x", **(SILLY_TAVERN | preset))
    assert dict(request.sampling.numbers) == {"typical_p": 0.5}
    assert found["generation_settings"]["samplers"] == ["top_k", "typ_p", "top_p", "min_p", "temperature"]
    named = {"samplers": ["top-k", "Nucleus", "temp"], "top_p": 0.5}
    _, (request,) = await asked(tokenizer, "/completion", leading, prompt="x", **(SILLY_TAVERN | named))
    assert (request.sampling.top_p, request.sampling.min_p, request.sampling.temperature) == (0.5, 0.0, 0.7)


async def test_adaptive_p_acts_where_samplers_name_it(tokenizer: Tokenizer) -> None:
    asks = {"prompt": "x", "adaptive_target": 0.4, "adaptive_decay": 0.8, "n_predict": 1, "top_k": 0}
    _, (request,) = await asked(tokenizer, "/completion", says(b"y"), **asks)
    assert request.sampling.numbers == ()
    found, (request,) = await asked(tokenizer, "/completion", says(b"y"), samplers="kta", **asks)
    assert request.sampling.numbers == (("adaptive_decay", 0.8), ("adaptive_target", 0.4))
    used = found["generation_settings"]
    assert (used["adaptive_target"], used["adaptive_decay"], used["samplers"][-1]) == (0.4, 0.8, "adaptive_p")


@pytest.mark.parametrize("biases", [{"7": -5, "z": False}, [[7, -5], ["z", False]]])
async def test_biases_go_by_ids_and_by_texts(tokenizer: Tokenizer, biases: object) -> None:
    _, (request,) = await asked(tokenizer, "/completion", says(b"y"), prompt="x", logit_bias=biases, n_predict=1)
    assert dict(request.sampling.logit_bias) == {7: -5, ord("z"): -100.0}


async def test_a_dynamic_temperature_goes_with_the_temperature(tokenizer: Tokenizer) -> None:
    asks = {"prompt": "x", "temperature": 1, "dynatemp_range": 0.5, "dynatemp_exponent": 1.5, "n_predict": 1}
    found, (request,) = await asked(tokenizer, "/completion", says(b"y"), **asks)
    assert request.sampling.numbers == (("dynatemp_exponent", 1.5), ("dynatemp_range", 0.5))
    used = found["generation_settings"]
    assert (used["temperature"], used["dynatemp_range"], used["dynatemp_exponent"]) == (1.0, 0.5, 1.5)
    found, (request,) = await asked(tokenizer, "/completion", says(b"y"), **(asks | {"samplers": ["top_k"]}))
    assert request.sampling.numbers == ()
    assert found["generation_settings"]["dynatemp_range"] == 0.0


async def test_a_temperature_below_0_is_the_likeliest_token(tokenizer: Tokenizer) -> None:
    _, (request,) = await asked(tokenizer, "/completion", says(b"y"), prompt="x", temperature=-1, n_predict=1)
    assert request.sampling.temperature == 0.0


async def test_a_gap_is_filled_in(tokenizer: Tokenizer) -> None:
    extra = [{"filename": "a.py", "text": "A"}]
    body = {"input_prefix": "ab", "input_suffix": "cd", "input_extra": extra, "prompt": "x", "n_predict": 1}
    _, (request,) = await asked(tokenizer, "/infill", says(b"y"), **body)

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    before = [REPOSITORY, *plain("myproject\n"), FILE, *plain("a.py\n"), *plain("A"), FILE, *plain("filename\n")]
    gap = [PREFIX, *plain("ab"), *plain("x"), SUFFIX, *plain("cd"), MIDDLE]
    assert list(request.prompt_tokens) == [*before, *gap]
    _, (request,) = await asked(tokenizer, "/v1/completions", says(b"y"), prompt="ab", suffix="cd", max_tokens=1)
    assert list(request.prompt_tokens) == [PREFIX, *plain("ab"), SUFFIX, *plain("cd"), MIDDLE]
    found, _ = await asked(tokenizer, "/v1/completions", says(b""), 400, prompt=["a"], suffix="b")
    assert "suffix: only with one prompt of text" in found["error"]["message"]


async def test_extra_chunks_give_way_to_the_gap(tokenizer: Tokenizer) -> None:
    extra = [{"text": "A" * 400}, {"text": "B" * 600}]
    body = {"input_prefix": "ab", "input_suffix": "cd", "input_extra": extra, "n_predict": 8}
    _, (request,) = await asked(tokenizer, "/infill", says(b"y"), **body)
    assert len(request.prompt_tokens) == 512 - 8
    assert request.prompt_tokens[-1] == MIDDLE
    assert ord("A") not in request.prompt_tokens  # the end of it stays


async def test_a_vocabulary_without_those_tokens_says_so(tmp_path: Path) -> None:
    without = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.gguf"))
    found, _ = await asked(without, "/infill", says(b""), 501, input_prefix="a", input_suffix="b")
    assert found["error"]["code"] == "not_implemented"
    assert "infill: this model has no fill-in-the-middle tokens" in found["error"]["message"]
    found, _ = await asked(without, "/v1/completions", says(b""), 501, prompt="a", suffix="b")
    assert found["error"]["message"].startswith("suffix: ")


EDITOR = {  # as llama.vim and llama.vscode send it
    "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\n", "prompt": "    x", "n_predict": 128, "stop": [],
    "input_extra": [{"text": "A", "time": 1, "filename": "a.py"}], "top_k": 40, "top_p": 0.90, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "n_indent": 4,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached"],
}  # fmt: skip


async def test_editors_are_served(tokenizer: Tokenizer) -> None:
    found, (request,) = await asked(tokenizer, "/infill", says(b" = 1\n    y\n  z = 2\n"), **EDITOR)
    assert (found["content"], found["timings/predicted_n"]) == (" = 1\n    y\n  ", 14), "z is less indented"
    assert list(found) == EDITOR["response_fields"]
    sampling = request.sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature) == (40, 0.9, 0.0, 1.0)
    assert sampling.numbers == (("infill", 1.0),)
    warm = {"n_predict": 0, "samplers": [], "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""]}
    found, (request,) = await asked(tokenizer, "/infill", says(b"y"), **(EDITOR | warm))
    assert (found, request.max_tokens, request.sampling.numbers) == ({}, 1, ())


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_takes_too_long_ends_with_its_line(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    now_ns = itertools.count(step=10_000_000)  # each token takes 10 ms and more
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic_ns=lambda: next(now_ns)))
    body = {"prompt": "x", "t_max_predict_ms": 45, "stream": streams}
    found, _ = await asked(tokenizer, "/completion", says(b"a\nb c d e f\ng\n"), **body)
    text = "".join(event["content"] for event in found) if streams else found["content"]
    last = found[-1] if streams else found
    assert text == "a\nb c d e f\n"
    assert (last["stop"], last["stop_type"], last["tokens_predicted"]) == (True, "limit", 12)
    whole, _ = await asked(tokenizer, "/completion", says(b"a\nb\n"), prompt="x", t_max_predict_ms=-1)
    assert whole["content"] == "a\nb\n"


async def test_slots_show_the_lanes_states(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served, aiohttp.ClientSession(served.url) as session:
        async with session.get("/slots") as reply:
            busy, idle = await reply.json()
        async with session.get("/slots?fail_on_no_slot=1") as reply:
            assert reply.status == 200
        async with session.get("/props") as reply:
            props = await reply.json()
    assert (busy["id"], busy["is_processing"], busy["state"], busy["id_task"]) == (0, True, "prefill", 7)
    assert (busy["n_ctx"], busy["n_prompt_tokens"], busy["n_prompt_tokens_processed"]) == (512, 9, 4)
    assert busy["next_token"] == [{"has_next_token": True, "n_remain": 5, "n_decoded": 0}]
    assert (idle["is_processing"], idle["id_task"]) == (False, -1)
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["params"]["top_k"] == 40


class ReadingGenerator(FakeGenerator):
    """Its streams report how far the prompt has been read, then one token."""

    def open(self, request: GenerationRequest, record: RequestRecord | None = None) -> Any:
        self.requests.append(request)
        stream = SessionStream(lambda _: None)
        n_total = len(request.prompt_tokens)
        for n_read in (1, 2, n_total):  # of events before the first reader, only the latest is sent
            stream.progressed(PromptProgress(n_total, 1, n_read))
        stream.put(TokenEvent(97, None, (), "length"))
        return stream


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "hey there"}),
        ("/v1/completions", {"prompt": "hey there"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hey"}]}),
    ],
)
async def test_streams_tell_how_far_the_prompt_is_read(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async with (
        serving(tokenizer, ReadingGenerator()) as served,
        aiohttp.ClientSession(served.url) as session,
        session.post(path, json=body | {"stream": True, "return_progress": True, "max_tokens": 1}) as reply,
    ):
        lines = [line.removeprefix("data: ") for line in (await reply.text()).split("\n\n") if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    (request,) = served.generator.requests
    assert request.wants_progress
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    n_total = len(request.prompt_tokens)
    assert [(each["total"], each["cache"], each["processed"]) for each in progress] == [(n_total, 1, n_total)]
    assert progress[0]["time_ms"] >= 0
    assert any("prompt_progress" not in event for event in events)
