"""Ollama's own API: its bodies, its lines of JSON, its models, its errors."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.http.ollama.asking import read_chat, read_generate, unloads
from relayline.coordinator.http.ollama.models import listed, shown
from relayline.coordinator.http.requests.bodies import CompletionBody
from relayline.coordinator.http.requests.inner_form import Inner
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.common.errors import InvalidRequestError, NotReadyError, OverloadedError, StageLostError
from relayline.wire.common.phase import Phase
from tests.support.http_support import MODEL, FakeGenerator, Served, says, serving, tokens

# A template that has thoughts, and calls as Hermes writes them.
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}"
    + CHATML
    + "{# <think></think> #}{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = b'<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]


async def asked(served: Served, path: str, body: dict[str, Any]) -> tuple[int, str, list[dict[str, Any]]]:
    """Return status, content type, and the objects of an answer, one a line."""
    async with aiohttp.ClientSession() as session, session.post(f"{served.url}{path}", json=body) as reply:
        lines = (await reply.text()).splitlines()
        return reply.status, reply.content_type, [json.loads(line) for line in lines]


async def test_a_chat_is_streamed_as_lines_of_json(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, FakeGenerator(says(b"hey"))) as served:
        status, kind, objects = await asked(served, "/api/chat", {"model": MODEL, "messages": HI})
        (request,) = served.generator.requests
    assert (status, kind) == (200, "application/x-ndjson")
    assert [each["message"]["content"] for each in objects] == ["h", "e", "y", ""]
    assert {each["message"]["role"] for each in objects} == {"assistant"}
    assert [each["done"] for each in objects] == [False, False, False, True]
    assert {each["model"] for each in objects} == {MODEL}
    assert all(each["created_at"].endswith("Z") for each in objects)
    last = objects[-1]
    assert (last["done_reason"], last["eval_count"]) == ("stop", 4)
    assert last["prompt_eval_count"] == len(request.prompt_tokens)
    assert last["total_duration"] >= last["eval_duration"] >= 0
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.9)  # Ollama's defaults


async def test_a_whole_chat_and_the_latest_tag(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, FakeGenerator(says(b"hello"))) as served:
        body = {"model": f"{MODEL}:latest", "messages": HI, "stream": False}
        body |= {"options": {"num_predict": 2, "seed": 7, "temperature": 0, "num_ctx": 99, "unheard_of": 1}}
        status, kind, (whole,) = await asked(served, "/api/chat", body)
        (request,) = served.generator.requests
    assert (status, kind) == (200, "application/json")
    assert whole["message"] == {"role": "assistant", "content": "he"}
    assert (whole["done"], whole["done_reason"], whole["model"]) == (True, "length", MODEL)
    assert (request.max_tokens, request.sampling.seed, request.sampling.temperature) == (2, 7, 0)


async def test_thoughts_and_calls_have_fields_of_their_own(tokenizer: Tokenizer) -> None:
    answer = b"<think>hm</think>" + CALL % b"Paris" + CALL % b"Rome"
    async with serving(tokenizer, FakeGenerator(says(answer)), template=TEMPLATE) as served:
        body = {"model": MODEL, "messages": HI, "tools": [TOOL]}
        _, _, objects = await asked(served, "/api/chat", body)
        _, _, (whole,) = await asked(served, "/api/chat", body | {"stream": False})
    assert "".join(each["message"].get("thinking", "") for each in objects) == "hm"
    streamed = [call for each in objects for call in each["message"].get("tool_calls", [])]
    for calls in (streamed, whole["message"]["tool_calls"]):
        assert [call["function"]["arguments"] for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
        assert [call["function"]["index"] for call in calls] == [0, 1]
    assert whole["message"]["thinking"] == "hm"
    assert objects[-1]["done"]
    assert "tool_calls" not in objects[-1]["message"]


async def test_a_prompt_alone_is_a_question_and_a_raw_one_is_not(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, FakeGenerator(says(b"ok"))) as served:
        _, _, objects = await asked(served, "/api/generate", {"prompt": "hi", "system": "be brief"})
        _, _, (whole,) = await asked(served, "/api/generate", {"prompt": "hi", "raw": True, "stream": False})
        prompts = [tokenizer.decode(each.prompt_tokens) for each in served.generator.requests]
        raw = served.generator.requests[1]
    assert "".join(each["response"] for each in objects) == "ok"
    assert "be brief" in prompts[0]
    assert prompts[1] == "hi"
    assert (whole["response"], whole["done"]) == ("ok", True)
    assert raw.max_tokens > 100  # the rest of the context, not OpenAI's 16


async def test_a_schema_and_json_become_grammars(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    async with serving(tokenizer, FakeGenerator(says(b'{"age": 1}'))) as served:
        for form in (schema, "json"):
            body = {"model": MODEL, "messages": HI, "format": form, "stream": False}
            assert (await asked(served, "/api/chat", body))[0] == 200
        grammars = [each.sampling.grammar for each in served.generator.requests]
    assert '\\"age\\"' in grammars[0] or "age" in grammars[0]
    assert grammars[1]
    assert grammars[0] != grammars[1]


async def test_log_probabilities_come_with_their_tokens(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, FakeGenerator(says(b"hi"))) as served:
        body = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 2}
        _, _, objects = await asked(served, "/api/chat", body)
    (first,) = objects[0]["logprobs"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("h", -0.5, [ord("h")])


class Sleep:
    """Puts a generator to sleep, and wakes it."""

    def __init__(self, generator: FakeGenerator) -> None:
        self.generator = generator
        generator.otherwise = Phase.SLEEPING
        self.problem: Exception | None = None

    def describe(self) -> dict[str, object]:
        return {}

    async def ask(self) -> dict[str, object]:
        return self._set(is_ready=False)

    async def wake(self) -> dict[str, object]:
        return self._set(is_ready=True)

    def _set(self, *, is_ready: bool) -> dict[str, object]:
        if self.problem is not None:
            raise self.problem
        self.generator.ready = is_ready
        return {}


async def test_a_request_without_a_question_loads_or_unloads(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator()
    sleep = Sleep(generator)
    async with serving(tokenizer, generator, sleep=sleep) as served:
        status, _, (plain,) = await asked(served, "/api/generate", {"model": MODEL, "keep_alive": 0})
        assert (status, plain["done"], plain["done_reason"], plain["response"]) == (200, True, "unload", "")
        assert not generator.ready
        status, _, (chat,) = await asked(served, "/api/chat", {"model": MODEL, "messages": []})
        assert (status, chat["done_reason"], chat["message"]["content"]) == (200, "load", "")
        assert generator.ready
        assert (await asked(served, "/api/chat", {"model": MODEL, "messages": HI, "keep_alive": 0}))[0] == 200
        assert generator.ready, "beside a question it is ignored"
        generator.ready, sleep.problem = False, NotReadyError("the pipeline cannot wake: b: no memory")
        assert await asked(served, "/api/generate", {"model": MODEL}) == (
            503,
            "application/json",
            [{"error": "the pipeline cannot wake: b: no memory"}],
        )
        generator.ready, sleep.problem = True, InvalidRequestError("these stages do not sleep")
        status, _, (error,) = await asked(served, "/api/generate", {"model": MODEL, "keep_alive": 0})
        assert (status, error["error"]) == (400, "these stages do not sleep"), "nothing was unloaded"
        assert (await asked(served, "/api/generate", {"model": "other"}))[0] == 404
        assert (await asked(served, "/api/generate", {"images": ["eA=="]}))[0] == 400, "this asks for an answer"
        assert len(generator.requests) == 1, "the question"


@pytest.mark.parametrize(
    ("keep_alive", "expected"),
    [
        (0, True), (0.0, True), ("0", True), ("0s", True), ("0m", True), ("-0h0.0s", True), (None, False),
        (False, False), (-1, False), (0.5, False), ("", False), ("10m", False), ("0s5m", False), ("0 s", False),
        ([], False),
    ],
)  # fmt: skip
def test_a_keep_alive_of_no_time_unloads(keep_alive: Any, expected: bool) -> None:
    assert unloads(keep_alive) is expected


async def test_errors_are_one_line_of_text(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: [*tokens(request, b"he", ends=False), StageLostError("stage 1 is lost")])
    generator.refusals = [OverloadedError("all lanes are taken")]
    async with serving(tokenizer, generator) as served:
        body = {"model": MODEL, "messages": HI}
        assert await asked(served, "/api/chat", body) == (429, "application/json", [{"error": "all lanes are taken"}])
        async with aiohttp.ClientSession() as session, session.post(f"{served.url}/api/chat", json=body) as reply:
            lines = [json.loads(await reply.content.readline()) for _ in range(3)]
        assert lines[-1] == {"error": "stage 1 is lost"}
        status, _, (error,) = await asked(served, "/api/chat", body | {"model": "llama3:8b"})
        assert status == 404
        assert "'llama3:8b' does not exist" in error["error"]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/api/chat", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role: must be one of"),
        ("/api/chat", {"messages": HI, "format": "xml"}, 'format: must be "json" or a JSON schema'),
        ("/api/chat", {"messages": HI, "options": {"temperature": 9}}, "options.temperature"),
        ("/api/chat", {"messages": HI, "options": {"num_predict": "many"}}, "options.num_predict"),
        ("/api/chat", {"messages": HI, "think": "very much"}, "think"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "images"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template: the model's own"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context: not served"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system: not with raw"),
        ("/api/generate", {"prompt": "x", "raw": True, "images": ["eA=="]}, "images: not with raw"),
        ("/api/generate", {"prompt": "", "zzz": "x" * 90_000}, "prompt: required field is missing"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_one_line(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], text: str
) -> None:
    async with serving(tokenizer) as served:
        status, _, (error,) = await asked(served, path, body)
        assert not served.generator.requests
    assert status == 400
    assert text in error["error"]
    assert "\n" not in error["error"]


async def test_the_models_as_its_clients_ask_for_them(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, template=TEMPLATE, model_aliases=("gpt-4o",)) as served:
        async with aiohttp.ClientSession(served.url) as session:
            version = await (await session.get("/api/version")).json()
            tags = await (await session.get("/api/tags")).json()
            running = await (await session.get("/api/ps")).json()
            served.generator.ready, served.generator.otherwise = False, Phase.SLEEPING
            assert (await (await session.get("/api/ps")).json()) == {"models": []}
            served.generator.ready = True
        status, _, (found,) = await asked(served, "/api/show", {"model": f"{MODEL}:latest"})
        assert (await asked(served, "/api/show", {"name": "other"}))[0] == 404
        assert (await asked(served, "/api/pull", {"model": MODEL}))[2] == [{"status": "success"}]
        refused = await asked(served, "/api/create", {"model": "x"})
    assert int(version["version"].split(".")[1]) >= 6  # what editors ask for
    assert [each["name"] for each in tags["models"]] == [MODEL, "gpt-4o"]
    assert tags["models"][0]["details"]["format"] == "gguf"
    assert running["models"][0]["context_length"] == 512
    assert status == 200
    assert found["capabilities"] == ["completion", "tools", "thinking"]
    architecture = found["model_info"]["general.architecture"]
    assert found["model_info"][f"{architecture}.context_length"] == 512
    assert refused[0] == 404
    assert "`relayline up` decides" in refused[2][0]["error"]


async def test_any_name_is_shown_where_any_is_taken(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, any_model_name=True) as served:
        status, _, (found,) = await asked(served, "/api/show", {"model": "llama3:8b"})
    assert (status, found["details"]["format"]) == (200, "gguf")


async def test_to_think_is_a_wish_that_the_template_hears(tokenizer: Tokenizer) -> None:
    template = CHATML + "{% if enable_thinking %}THINK{% endif %}{# <think></think> #}"
    async with serving(tokenizer, FakeGenerator(says(b"ok")), template=template) as served:
        for think in (True, False, None):
            await asked(served, "/api/chat", {"messages": HI, "think": think, "stream": False})
        prompts = [tokenizer.decode(each.prompt_tokens) for each in served.generator.requests]
    assert ["THINK" in prompt for prompt in prompts] == [True, False, False]


def test_a_file_says_its_quantisation_and_size() -> None:
    metadata = {"general.architecture": "llama", "general.file_type": "15", "general.size_label": "8B"}
    (entry,) = listed(["m"], 0, metadata | {"llama.rope.freq_base": "500000.000000"}, 5)
    details = entry["details"]
    assert (details["quantization_level"], details["parameter_size"], details["families"]) == (
        "Q4_K_M",
        "8B",
        ["llama"],
    )
    assert entry["modified_at"] == "1970-01-01T00:00:00Z"
    found = shown(entry, metadata, (), "", 4_096)
    assert found["model_info"]["general.file_type"] == 15
    assert listed(["m"], 0, {"general.file_type": "9999"}, 5)[0]["details"]["quantization_level"] == ""


def test_results_find_their_calls() -> None:
    turns = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"function": {"name": "rain", "arguments": {"city": "Oslo"}}},
                {"function": {"name": "sun", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_name": "sun", "content": "no"},
        {"role": "tool", "content": "yes"},
    ]
    inner = read_chat(json.dumps({"messages": turns}).encode())
    call, sun, rain = inner.chat.messages[1], inner.chat.messages[2], inner.chat.messages[3]
    assert call.tool_calls is not None
    ids = {each["function"]["name"]: each["id"] for each in call.tool_calls}
    assert (sun.tool_call_id, rain.tool_call_id) == (ids["sun"], ids["rain"])


def test_a_suffix_asks_for_the_text_between() -> None:
    found = read_generate(json.dumps({"prompt": "a", "suffix": "b", "options": {"stop": ["x"]}}).encode())
    assert isinstance(found, CompletionBody)
    assert (found.prompt, found.suffix, found.stop) == ("a", "b", ["x"])
    assert isinstance(read_generate(b'{"prompt": "a"}'), Inner)
    with pytest.raises(InvalidRequestError, match="context: not served"):
        read_generate(b'{"prompt": "a", "context": [1, 2]}')
