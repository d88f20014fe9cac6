"""Ollama's official client against its own API: models, chats, streams, tools, schemas, prompts and embeddings."""

# mypy: ignore-errors
from __future__ import annotations

import json
import os

import ollama
import pytest

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
CLIENT = ollama.Client(host=URL)
MESSAGES = [{"role": "user", "content": "What does shutil.copytree do?"}]
SHORT = {"temperature": 0, "num_predict": 16}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def level(is_high: bool) -> str:
    """Set a level."""
    return f"done: {is_high}"


def test_models():
    assert MODEL in [each.model for each in CLIENT.list().models]
    assert MODEL in [each.model for each in CLIENT.ps().models]
    shown = CLIENT.show(MODEL)
    assert {"completion", "tools"} <= {*shown.capabilities}
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] > 0
    assert shown.details.format == "gguf"


def test_chat_and_its_stream():
    whole = CLIENT.chat(MODEL, MESSAGES, options=SHORT)
    parts = [*CLIENT.chat(MODEL, MESSAGES, options=SHORT, stream=True)]
    assert whole.message.content
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert whole.done_reason == "length"
    assert whole.eval_count == 16
    assert whole.total_duration >= whole.eval_duration > 0


def test_the_latest_tag_is_the_model():
    assert CLIENT.chat(f"{MODEL}:latest", MESSAGES, options=SHORT).model == MODEL


def test_tools_are_offered_and_results_are_taken():
    CLIENT.chat(MODEL, MESSAGES, tools=[level], options=SHORT)
    call = {"function": {"name": "level", "arguments": {"is_high": True}}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "level", "content": "done"},
    ]
    assert CLIENT.chat(MODEL, turns, tools=[level], options=SHORT).done


def test_schemas_force_the_answer():
    answer = CLIENT.chat(MODEL, MESSAGES, format=SCHEMA, options={"temperature": 0})
    assert isinstance(json.loads(answer.message.content)["age"], int)


def test_prompts():
    assert CLIENT.generate(MODEL, "import ", raw=True, options=SHORT).response
    parts = [*CLIENT.generate(MODEL, "What is a list?", system="Be brief.", options=SHORT, stream=True)]
    assert parts[-1].done
    assert CLIENT.generate(MODEL).done_reason == "load"


def test_embeddings():
    found = CLIENT.embed(MODEL, ["one", "two"])
    assert len(found.embeddings) == 2
    assert len(found.embeddings[0]) == len(CLIENT.embeddings(MODEL, "one").embedding)


def test_log_probabilities():
    found = CLIENT.chat(MODEL, MESSAGES, options=SHORT, logprobs=True, top_logprobs=2)
    assert len(found.logprobs) == 16
    assert len(found.logprobs[0].top_logprobs) == 2


def test_a_served_model_is_there_already():
    assert CLIENT.pull(MODEL).status == "success"


@pytest.mark.parametrize("ask", [lambda: CLIENT.chat("llama3:8b", MESSAGES), lambda: CLIENT.pull("llama3:8b")])
def test_other_models_are_not_found(ask):
    with pytest.raises(ollama.ResponseError) as caught:
        ask()
    assert caught.value.status_code == 404
