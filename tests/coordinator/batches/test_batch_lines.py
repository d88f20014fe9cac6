"""OpenAI's lines of a batch: what is read, what is refused and why, and what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relayline.coordinator.batches.lines import (
    ID_CHARS_MAX,
    URLS,
    LineError,
    Outcome,
    fingerprint,
    read_answer,
    read_request,
)

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def raw(**changes: Any) -> bytes:
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value is not None}).encode()


@pytest.mark.parametrize("url", URLS)
def test_a_request_is_read(url: str) -> None:
    asked = read_request(raw(url=url) + b"\n")
    assert (asked.custom_id, asked.url, asked.body) == ("a", url, {"prompt": "x"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "it is no JSON"),
        (b"\xff\n", "it is no JSON"),
        (b"\0\0\0", "it is no JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "a list; it must be a JSON object"),
        (raw(custom_id=None), "no custom_id"),
        (raw(custom_id=7), "no custom_id"),
        (raw(custom_id=""), "no custom_id"),
        (raw(custom_id="x" * (ID_CHARS_MAX + 1)), f"more than {ID_CHARS_MAX}"),
        (raw(method="GET"), 'its method is "GET"; it must be "POST"'),
        (raw(method=None), "its method is missing"),
        (raw(url="/v1/chat/completion"), 'its url is "/v1/chat/completion"; a batch may ask /v1/chat/completions'),
        (raw(url="http://other/v1/completions"), "its url is"),
        (raw(url=["/v1/completions"]), "its url is a list"),
        (raw(body="x"), 'its body is "x"; it must be a JSON object'),
        (raw(body={"stream": True}), "stream: true"),
        (raw(body={"background": True}), "background: true"),
    ],
)
def test_a_bad_line_says_what_is_wrong(text: bytes, says: str) -> None:
    with pytest.raises(LineError) as found:
        read_request(text)
    assert says in str(found.value)
    assert len(str(found.value)) < 400


def test_an_answer_has_openais_form() -> None:
    outcome = Outcome("a", 200, "req-1", {"usage": {"completion_tokens": 7, "prompt_tokens": 3}})
    line = json.loads(outcome.line())
    assert line.pop("id").startswith("batch_req_")
    assert line == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req-1", "body": outcome.body},
        "error": None,
    }
    assert (outcome.is_failed, outcome.n_tokens(), read_answer(outcome.line())) == (False, 7, ("a", False))


def test_a_refused_request_keeps_the_servers_words() -> None:
    outcome = Outcome("a", 400, "", {"error": {"message": "too long"}})
    line = json.loads(outcome.line())
    assert (line["response"]["status_code"], line["response"]["body"], line["error"]) == (400, outcome.body, None)
    assert (outcome.is_failed, outcome.n_tokens(), read_answer(outcome.line())) == (True, 0, ("a", True))


def test_a_request_without_an_answer_has_an_error() -> None:
    line = json.loads((outcome := Outcome("a", error_code="timeout", error_message="too slow")).line())
    assert (line["response"], line["error"]) == (None, {"code": "timeout", "message": "too slow"})
    assert read_answer(outcome.line()) == ("a", True)


@pytest.mark.parametrize(
    ("usage", "n_tokens"),
    [({"output_tokens": 4}, 4), ({"prompt_tokens": 5, "total_tokens": 5}, 5), (None, 0), ([], 0), ({"x": 1}, 0)],
)
def test_tokens_are_counted_in_every_api_s_words(usage: Any, n_tokens: int) -> None:
    assert Outcome("a", 200, "", {"usage": usage}).n_tokens() == n_tokens


@pytest.mark.parametrize("text", [b'{"custom_id": "a"', b'{"custom_id": "a"}', b"[]", b"", json.dumps(GOOD).encode()])
def test_a_request_or_half_a_line_is_no_answer(text: bytes) -> None:
    with pytest.raises(LineError):
        read_answer(text)


def test_a_fingerprint_depends_on_the_salt() -> None:
    assert fingerprint("a", b"1") == fingerprint("a", b"1") != fingerprint("a", b"2")
    assert fingerprint("\ud800", b"1") < 1 << 64
