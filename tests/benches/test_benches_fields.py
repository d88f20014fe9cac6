"""benches.fields: which differences of two answers count, and that a rule explains only the difference it names."""

from __future__ import annotations

from benches.field_requests import CHAT, COMPLETION, REQUESTS, Request
from benches.fields import RULES, Answer, compared, differences, explained


def test_fields_and_values_are_compared_and_near_numbers_are_equal() -> None:
    theirs = {"a": 1, "b": [1.0, 2], "c": {"d": "x"}, "id": "one", "timings": {"n": 1, "m": 2}, "e": True}
    ours = {"a": 1, "b": [1.05, 2, 3], "c": {"d": "y", "f": 0}, "id": "two", "timings": {"n": 3}, "e": 1}
    assert list(differences(theirs, ours)) == [
        "/b: 2 theirs, 3 ours",
        "/c/d: 'x' theirs, 'y' ours",
        "/c/f: only ours (0)",
        "/timings/m: only theirs (2)",
    ]
    assert list(differences({"p": -1.0}, {"p": -1.5})) == ["/p: -1.0 theirs, -1.5 ours"]


def test_statuses_count_and_two_refusals_are_alike() -> None:
    assert compared(Answer(400, {"error": "a"}), Answer(400, {"error": "b"})) == []
    assert compared(Answer(200, {}), Answer(400, {"error": "b"}))[0].startswith("status 200 theirs, 400 ours")


def test_a_rule_is_for_its_route_its_fields_and_its_difference() -> None:
    refused = "status 200 theirs, 400 ours: x | y"
    assert explained(Request("/completion", COMPLETION | {"lora": [1]}), refused)
    assert not explained(Request("/completion", COMPLETION), refused)
    assert not explained(Request("/v1/chat/completions", CHAT | {"lora": [1]}), refused)
    assert not explained(Request("/completion", COMPLETION), "/content: 'a' theirs, 'b' ours")


def test_every_route_is_asked_and_no_request_comes_twice() -> None:
    assert len(REQUESTS) >= 150
    assert len({repr(request) for request in REQUESTS}) == len(REQUESTS)
    assert all(rule.why for rule in RULES)
