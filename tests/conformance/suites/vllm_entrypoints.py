"""What vLLM's tests of its entrypoints require of a server, required of this one. vLLM's wheel has no tests, so these
are ours.

The sources, read in November 2026, are named above each part; none of their code is here. Left out are tests of vLLM's
own classes, of adapters (LoRA), of audio and images, and those that need the answers of a certain model.
"""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import json
import os
import re

import httpx
import jsonschema
import openai
import pytest

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
CHAT, TEXTS = CLIENT.chat.completions.create, CLIENT.completions.create
REFUSED = openai.BadRequestError
TALK = [{"role": "system", "content": "you are helpful"}, {"role": "user", "content": "what is 1+1?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
ADDRESS = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
LANGUAGES = ["Python", "Java", "C++", "Rust"]


def text(prompt="def f(", length=5, more=None, **fields):
    return TEXTS(
        **{"model": MODEL, "prompt": prompt, "max_tokens": length, "temperature": 0, **fields}, extra_body=more
    )


def chat(length=5, more=None, **fields):
    return CHAT(
        **{"model": MODEL, "messages": TALK, "max_completion_tokens": length, "temperature": 0, **fields},
        extra_body=more,
    )


def post(path, **body):
    return httpx.post(f"{URL}{path}", json=body, timeout=60)


# tests/entrypoints/openai/completion/test_completion.py


def test_completion_and_its_usage():
    found = text()
    assert found.id
    assert (len(found.choices), found.choices[0].finish_reason) == (1, "length")
    usage = found.usage
    assert (usage.completion_tokens, usage.total_tokens) == (5, usage.prompt_tokens + 5)
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_completion_of_token_ids():
    assert text([5, 6, 7, 8]).usage.prompt_tokens == 4


@pytest.mark.parametrize(("side", "kept"), [("right", [10, 11, 12, 13]), ("left", [14, 15, 16, 17])])
def test_completion_of_a_cut_prompt(side, kept):
    more = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
    assert text([*range(10, 18)], 1, more).choices[0].prompt_token_ids == kept


@pytest.mark.parametrize(("asked", "n_least", "n_most"), [(None, 0, 0), (0, 1, 1), (1, 1, 2), (5, 5, 6)])
def test_completion_logprobs(asked, n_least, n_most):
    found = text([5, 6, 7, 8], logprobs=asked).choices[0].logprobs
    if asked is None:
        assert found is None
    else:
        assert len(found.token_logprobs) == 5
        assert all(n_least <= len(top) <= n_most for top in found.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_completion_logprobs(stream):
    with pytest.raises(openai.APIError):
        list(text(logprobs=21, stream=stream))
    assert text().choices[0].text is not None


@pytest.mark.parametrize("asked", [None, 0, 1])
def test_completion_prompt_logprobs(asked):
    found = text(["A robot may not", "My name is"], more={} if asked is None else {"prompt_logprobs": asked})
    for choice in found.choices:
        assert (choice.model_extra.get("prompt_logprobs") is None) == (asked is None)


def test_completion_stream_is_the_whole():
    whole = text().choices[0].text
    parts = [chunk.choices[0] for chunk in text(stream=True)]
    assert "".join(part.text for part in parts) == whole
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    assert parts[-1].finish_reason == "length"


def test_the_last_event_of_a_completion_has_text():
    assert [*text(stream=True)][-1].choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_one_prompt_are_unlike(stream):
    found = text("import ", 20, n=3, temperature=1.0, seed=42, stream=stream)
    texts = ["", "", ""]
    for chunk in found if stream else [found]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert len(set(texts)) == 3


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}]
)
def test_no_usage_in_a_stream(route, options):
    ask = text if route == "completions" else chat
    assert all(chunk.usage is None for chunk in ask(stream=True, stream_options=options))


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("continuous", [False, True])
def test_usage_in_a_stream(route, continuous):
    ask = text if route == "completions" else chat
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *parts, last = ask(stream=True, stream_options=options)
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert all((part.usage is not None) == continuous for part in parts)
    counts = [part.usage.completion_tokens for part in parts if part.usage]
    assert counts == sorted(counts)


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize(
    "options",
    [
        {"include_usage": None},
        {"include_usage": True},
        {"continuous_usage_stats": None},
        {"continuous_usage_stats": True},
    ],
)
def test_stream_options_without_a_stream(route, options):
    with pytest.raises(REFUSED):
        (text if route == "completions" else chat)(stream=False, stream_options=options)


@pytest.mark.parametrize("prompts", [["Hello, my name is"] * 2, [[5, 6, 7, 8]] * 2])
def test_equal_prompts_get_equal_answers(prompts):
    one, other = text(prompts).choices
    assert one.text == other.text
    texts = ["", ""]
    for chunk in text(prompts, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
    assert texts[0] == texts[1]


def test_beams():
    found = text(["import "] * 2, n=2, more={"use_beam_search": True}).choices
    assert found[0].text != found[1].text
    assert found[0].text == found[2].text


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("prompt", ["Hello, my name is", [5, 6, 7, 8]])
def test_echo_with_logprobs(prompt, asked):
    found = text(prompt, echo=True, logprobs=asked).choices[0]
    scored = found.logprobs
    if isinstance(prompt, str):
        assert found.text.startswith(prompt)
    assert scored.token_logprobs[0] is None
    assert scored.top_logprobs[0] is None
    assert len(scored.tokens) == len(scored.text_offset) == len(scored.token_logprobs) > 5
    assert all(max(asked, 1) <= len(top) <= asked + 1 for top in scored.top_logprobs[1:])


@pytest.mark.parametrize(
    "structure",
    [
        {"json": {"type": "object", "properties": {"foo": "bar"}}},
        {"regex": r"[.*"},
        {"grammar": 'root ::= statementinvalidsyntax\nstatement ::= "SELECT " column'},
    ],
)
def test_a_structure_that_is_none(structure):
    with pytest.raises(openai.APIError):
        text(more={"structured_outputs": structure})


# tests/entrypoints/openai/completion/test_prompt_validation.py, test_empty_prompt_list.py


@pytest.mark.parametrize("prompt", [None, []])
def test_no_prompt(prompt):
    with pytest.raises(REFUSED):
        text(prompt)


def test_token_ids_beyond_the_vocabulary():
    with pytest.raises(REFUSED, match="999999"):
        text([999_999])


# tests/entrypoints/openai/completion/test_completion_text_offset.py


def test_offsets_of_a_stream_are_those_of_the_whole():
    fields = {"length": 8, "logprobs": 0, "stop": ["\n\n"]}
    whole = text(**fields).choices[0].logprobs.text_offset
    chunks = text(stream=True, **fields)
    assert [at for chunk in chunks for c in chunk.choices if c.logprobs for at in c.logprobs.text_offset] == whole


# tests/entrypoints/openai/chat_completion/test_chat.py


@pytest.mark.parametrize("asked", [None, 0, 5])
def test_chat_logprobs(asked):
    found = chat(logprobs=asked is not None, top_logprobs=asked).choices[0].logprobs
    assert (found is None) == (asked is None)
    assert found is None or len(found.content[0].top_logprobs) == asked


@pytest.mark.parametrize(("asked", "stream"), [(21, True), (30, False)])
def test_too_many_chat_logprobs(asked, stream):
    with pytest.raises(openai.APIError):
        list(chat(logprobs=True, top_logprobs=asked, stream=stream))


@pytest.mark.parametrize("asked", [0, 1, 2, None])
def test_chat_prompt_logprobs(asked):
    found = chat(more={} if asked is None else {"prompt_logprobs": asked}).model_extra.get("prompt_logprobs")
    assert (found is None) == (asked is None)
    assert not asked or asked <= len(found[3]) <= asked + 1


def test_a_chat_goes_on():
    first = chat()
    assert (first.choices[0].finish_reason, first.usage.completion_tokens) == ("length", 5)
    answer = first.choices[0].message
    assert answer.role == "assistant"
    more = [*TALK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "as json"}]
    assert chat(messages=more).choices[0].message.content is not None


def test_chat_stream_is_the_whole():
    whole = chat(10).choices[0]
    deltas = [choice for chunk in chat(10, stream=True) for choice in chunk.choices]
    assert "".join(each.delta.content or "" for each in deltas) == whole.message.content
    assert [each.finish_reason for each in deltas if each.finish_reason] == [whole.finish_reason]
    assert {each.delta.role for each in deltas if each.delta.role} == {"assistant"}


def test_the_last_event_of_a_chat_has_text():
    assert [*chat(stream=True)][-1].choices[0].delta.content


def test_usage_grows_with_each_event():
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens for chunk in chat(10, {"min_tokens": 10}, stream=True, stream_options=options)
    ]
    assert counts[-1] == 10


def test_choices():
    found = chat(10, {"structured_outputs": {"choice": LANGUAGES}}, temperature=0.7, logprobs=True, top_logprobs=5)
    assert found.choices[0].message.content in LANGUAGES
    assert all(top.logprob >= -9999.0 for top in found.choices[0].logprobs.content[0].top_logprobs)


def test_json_by_schema():
    found = chat(400, {"structured_outputs": {"json": PERSON}}).choices[0].message.content
    jsonschema.validate(json.loads(found), PERSON)


def test_regex():
    found = chat(40, {"structured_outputs": {"regex": ADDRESS}}).choices[0].message.content
    assert re.fullmatch(ADDRESS, found)


def test_a_structure_of_the_wrong_type():
    with pytest.raises(REFUSED):
        chat(more={"structured_outputs": {"regex": {"1": "Python"}}})


def test_json_object():
    found = chat(400, response_format={"type": "json_object"})
    assert found.choices[0].finish_reason == "length" or isinstance(json.loads(found.choices[0].message.content), dict)


def test_text_format():
    assert chat(response_format={"type": "text"}).choices[0].message.content is not None


def test_further_fields_of_a_message():
    assert chat(messages=[{"role": "user", "content": "hi", "extra_field": "0"}]).choices


def test_parts_are_read_as_their_text():
    answers = [chat(messages=[{"role": "user", "content": c}]) for c in ("hi", [{"type": "text", "text": "hi"}])]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_a_role_of_ones_own():
    assert chat(messages=[{"role": "my-custom-role", "content": "hi"}]).choices


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_a_seed_too_long(seed):
    with pytest.raises(REFUSED):
        chat(seed=seed)


def test_invocations():
    body = {"model": MODEL, "messages": TALK, "max_completion_tokens": 5, "temperature": 0}
    assert post("/invocations", **body).json()["choices"] == chat().model_dump()["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(stream):
    answers = {}
    found = chat(20, n=3, temperature=0.7, seed=42, stream=stream)
    for chunk in found if stream else [found]:
        for choice in chunk.choices:
            part = choice.delta if stream else choice.message
            answers[choice.index] = answers.get(choice.index, "") + (part.content or "")
    assert sorted(answers) == [0, 1, 2]
    assert all(answers.values())
    assert len(set(answers.values())) > 1


# tests/entrypoints/openai/chat_completion/test_chat_echo.py


@pytest.mark.parametrize("echo", [True, False])
def test_a_last_message_is_gone_on_with(echo):
    saying = "An apple a day, keeps"
    messages = [{"role": "user", "content": "a saying"}, {"role": "assistant", "content": saying}]
    more = {"echo": echo, "continue_final_message": True, "add_generation_prompt": False}
    answer = chat(8, more, messages=messages).choices[0].message
    assert (saying in answer.content) == echo


def test_all_logprobs_of_a_chat():
    found = chat(more={"top_logprobs": -1, "logprobs": True})
    assert found.choices[0].logprobs.content


def test_all_logprobs_of_a_prompt():
    assert chat(more={"prompt_logprobs": -1}).model_extra["prompt_logprobs"]


# tests/entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py, test_chat_stop_token_ids_validation.py


def test_a_bias_for_a_token():
    assert chat(logit_bias={"7": 1.0}).choices[0].message.content is not None


@pytest.mark.parametrize(
    ("bias", "named"),
    [({"999999": 1.0}, ["999999"]), ({"not_a_token": 50}, ["logit_bias"]), ({"1": "none"}, ["logit_bias"])],
)
def test_a_bias_that_is_none(bias, named):
    with pytest.raises(REFUSED) as refused:
        chat(logit_bias=bias)
    assert all(each in str(refused.value) for each in named)


@pytest.mark.parametrize("ids", [[999_999], [-1]])
def test_stop_token_ids_beyond_the_vocabulary(ids):
    with pytest.raises(REFUSED):
        chat(more={"stop_token_ids": ids})


# tests/entrypoints/openai/chat_completion/test_completion_with_function_calling.py

TOOL = {"type": "function", "function": {"name": "person", "description": "a person", "parameters": PERSON}}
NO_ARGUMENTS = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "person"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call(choice, stream):
    found = chat(400, tools=[TOOL], tool_choice=choice, stream=stream)
    if stream:
        deltas = [c for chunk in found for c in chunk.choices]
        assert not any(c.delta.content for c in deltas)
        assert len([c.finish_reason for c in deltas if c.finish_reason]) == 1
        text = "".join(call.function.arguments or "" for c in deltas for call in c.delta.tool_calls or ())
    else:
        assert not found.choices[0].message.content
        text = found.choices[0].message.tool_calls[0].function.arguments
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("arguments", ["{}", ""])
def test_a_call_without_arguments_goes_back(arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "noon"})
    assert chat(messages=messages).choices[0].message.content is not None
    assert chat(messages=messages, tools=[NO_ARGUMENTS]).choices


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": NAMED},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [TOOL], "tool_choice": {}},
    ],
)
def test_a_choice_of_no_tool(fields):
    with pytest.raises(REFUSED):
        chat(**fields)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_cut_at_once(choice):
    found = chat(1, tools=[TOOL], tool_choice=choice).choices[0]
    assert found.finish_reason == "length"
    assert not found.message.content


# tests/entrypoints/openai/chat_completion/test_non_object_body_validation.py, serve/instrumentator/test_basic.py


@pytest.mark.parametrize("body", ["no json{{{", '["not", "an", "object"]', "42", "null", '"text"', ""])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "embeddings", "responses", "messages"])
def test_a_body_that_is_no_object(path, body):
    found = httpx.post(f"{URL}/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert 400 <= found.status_code < 500
    assert found.json()["error"]["message"]


def test_a_body_of_another_type():
    with pytest.raises(openai.APIStatusError):
        CHAT(model=MODEL, messages=TALK, extra_headers={"Content-Type": "application/x-www-form-urlencoded"})


@pytest.mark.parametrize("path", ["health", "version", "ping", "load"])
def test_small_routes(path):
    assert httpx.get(f"{URL}/{path}").status_code == 200


async def test_clients_that_go_free_their_places():
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    fields = {"model": MODEL, "messages": TALK, "extra_body": {"ignore_eos": True}}
    hasty = client.with_options(timeout=0.5)
    asked = [asyncio.ensure_future(hasty.chat.completions.create(**fields, max_tokens=900)) for _ in range(40)]
    for each in asked:
        with pytest.raises((openai.APITimeoutError, openai.RateLimitError)):
            await each
    found = await client.with_options(timeout=10).chat.completions.create(**fields, max_tokens=10)
    assert len(found.choices) == 1


# tests/entrypoints/openai/basic/test_return_token_ids.py


@pytest.mark.parametrize("is_asked", [True, False])
def test_token_ids(is_asked):
    prompt = "I love coding \N{ROCKET}"
    found = text(prompt, 10, {"return_token_ids": is_asked}, logprobs=1).choices[0].model_extra
    assert (found.get("token_ids") is not None) == is_asked
    assert (found.get("prompt_token_ids") is not None) == is_asked
    if is_asked:
        assert post("/detokenize", tokens=found["prompt_token_ids"]).json()["prompt"].endswith(prompt)


def test_token_ids_of_a_chat():
    found = chat(20, {"return_token_ids": True})
    prompt = post("/detokenize", tokens=found.model_extra["prompt_token_ids"]).json()["prompt"]
    assert TALK[1]["content"] in prompt
    ids, first = [], None
    for chunk in chat(20, {"return_token_ids": True}, stream=True):
        if first is None:
            first = chunk.model_extra["prompt_token_ids"]
        else:
            assert chunk.model_extra.get("prompt_token_ids") is None
        ids += [each for c in chunk.choices for each in c.model_extra.get("token_ids") or ()]
    assert first == found.model_extra["prompt_token_ids"]
    assert ids == found.choices[0].model_extra["token_ids"]


def test_tokens_as_token_ids():
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    found = text(more=more, logprobs=1, echo=True).choices[0]
    ids = [int(each.removeprefix("token_id:")) for each in found.logprobs.tokens]
    assert ids[-5:] == found.model_extra["token_ids"]


# tests/entrypoints/openai/test_tokenization.py


@pytest.mark.parametrize("special", [False, True])
def test_tokenize_a_text(special):
    prompt = "This is a test prompt."
    found = post("/tokenize", model=MODEL, prompt=prompt, add_special_tokens=special).json()
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == CLIENT.models.list().data[0].model_extra["max_model_len"]
    assert found["token_strs"] is None
    assert post("/detokenize", model=MODEL, tokens=found["tokens"]).json()["prompt"].endswith(prompt)


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}])
@pytest.mark.parametrize(("begun", "gone_on"), [(True, False), (False, False), (False, True)])
def test_tokenize_a_chat(begun, gone_on, tools):
    talk = [*TALK, {"role": "assistant", "content": "Sure,"}] if gone_on else TALK
    fields = {"add_generation_prompt": begun, "continue_final_message": gone_on, **tools}
    found = post("/tokenize", model=MODEL, messages=talk, add_special_tokens=False, **fields).json()
    asked = chat(1, {"return_token_ids": True, **fields}, messages=talk)
    assert found["tokens"] == asked.model_extra["prompt_token_ids"]


def test_tokenize_with_texts():
    found = post("/tokenize", model=MODEL, prompt="a token test", return_token_strs=True).json()
    assert len(found["token_strs"]) == found["count"]


def test_tokenizer_info():
    found = httpx.get(f"{URL}/tokenizer_info").json()
    assert found["tokenizer_class"]
    assert found["chat_template"].strip()


# tests/entrypoints/openai/responses/test_simple.py, test_stateful.py


def respond(text="Hello", length=8, more=None, **fields):
    return CLIENT.responses.create(model=MODEL, input=text, max_output_tokens=length, extra_body=more, **fields)


def test_a_response_is_stored_unless_told():
    stored = respond()
    assert CLIENT.responses.retrieve(stored.id).id == stored.id
    other = respond(store=False)
    with pytest.raises(openai.NotFoundError):
        CLIENT.responses.retrieve(other.id)


def test_a_response_in_the_background():
    assert respond(background=True).status == "queued"


def test_a_response_in_the_background_is_stored():
    with pytest.raises(REFUSED):
        respond(background=True, store=False)


def test_a_response_that_ended_is_not_cancelled():
    with pytest.raises(REFUSED):
        CLIENT.responses.cancel(respond().id)


def test_two_responses_go_on_from_one():
    first = respond()
    two = [respond(text, previous_response_id=first.id) for text in ("one", "two")]
    assert all(each.previous_response_id == first.id for each in two)
    assert all(each.usage.input_tokens > first.usage.input_tokens for each in two)


@pytest.mark.parametrize("has_ids", [True, False])
def test_items_of_an_earlier_answer(has_ids):
    named = {"id": "msg_1", "status": "completed"} if has_ids else {}
    thought = {"id": "rs_1", "status": "completed"} if has_ids else {}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "be concise"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}], **named},
        {"type": "reasoning", "summary": [], "encrypted_content": None, **thought},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ]
    assert respond(items).output_text is not None


def test_a_thought_of_an_earlier_answer():
    thought = {"type": "reasoning_text", "text": "We greet."}
    items = [
        {"type": "message", "role": "user", "content": "Hello."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]},
    ]
    assert respond(items).output_text is not None


def test_events_build_the_response():
    events = [*respond(length=16, stream=True)]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    open_parts = []
    for event in events:
        if event.type.endswith(".added"):
            open_parts.append(event.type.removesuffix(".added"))
        elif event.type in ("response.content_part.done", "response.output_item.done"):
            assert open_parts.pop() == event.type.removesuffix(".done")
    assert not open_parts
    assert [event.sequence_number for event in events] == [*range(len(events))]


def test_logprobs_in_events():
    events = [*respond(stream=True, top_logprobs=3, include=["message.output_text.logprobs"])]
    scored = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert scored
    assert all(one.logprob <= 0 and 0 < len(one.top_logprobs) <= 3 for each in scored for one in each)


def test_a_response_that_is_cut():
    found = respond(length=5)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_further_sampling_fields_of_a_response():
    found = respond(length=20, more={"top_k": 40, "repetition_penalty": 1.2, "seed": 42}, temperature=0.7, top_p=0.9)
    assert found.output[0].content[0].text


def test_messages_of_a_response():
    found = respond(more={"enable_response_messages": True})
    assert isinstance(found.model_extra["input_messages"][0]["message"], str)


# tests/entrypoints/anthropic/test_messages.py


def test_a_message():
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "how are you?"}]}
    found = post("/v1/messages", **body).json()
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert found["usage"]["output_tokens"] == 8
    lines = post("/v1/messages", **body, stream=True).text.splitlines()
    assert [line for line in lines if line.startswith("event: ")][-1] == "event: message_stop"
