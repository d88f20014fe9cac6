"""Anthropic's lines of results, from the lines that the work on a batch wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relayline.coordinator.batches.lines import Outcome
from relayline.coordinator.batches.message_lines import CANCELLED, EXPIRED, FAILED, is_unasked, result_line

REFUSED = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}, "request_id": "r"}


def own_error(message: str) -> dict[str, Any]:
    error = {"type": "error", "error": {"type": "api_error", "message": message}, "request_id": None}
    return {"type": "errored", "error": error}


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome("é\n", 200, "r", {"id": "msg_1"}), {"type": "succeeded", "message": {"id": "msg_1"}}),
        (Outcome("é\n", 400, "r", REFUSED), {"type": "errored", "error": REFUSED}),
        (Outcome("é\n", 502, "r", {"of": "a proxy"}), own_error("status 502")),
        (Outcome("é\n", 502, "r", [1]), own_error("status 502")),
        (Outcome("é\n", error_code="timeout", error_message="no answer"), own_error("no answer")),
        (Outcome("é\n", error_code=FAILED, error_message="its batch has failed"), own_error("its batch has failed")),
        (Outcome("é\n", error_code=EXPIRED, error_message="too late"), {"type": "expired"}),
        (Outcome("é\n", error_code=CANCELLED, error_message="stopped"), {"type": "canceled"}),
    ],
)
def test_each_outcome_has_its_result(outcome: Outcome, expected: dict[str, Any]) -> None:
    line = result_line(outcome.line())
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"custom_id": "é\n", "result": expected}
    assert is_unasked(outcome.line()) is (expected["type"] in ("expired", "canceled"))
