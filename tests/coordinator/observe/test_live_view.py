"""The page's data: looks by number, rates between looks, requests; each part is bounded."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from relayline.coordinator.observe.live_view import (
    ANSWERS_MAX,
    ENDED_MAX,
    LOOK_GAP_NS,
    LOOKS_MAX,
    POINTS_MAX,
    RUNNING_MAX,
    LiveView,
    Seen,
)
from relayline.coordinator.observe.step_looks import Picture, StageFigures
from relayline.coordinator.sessions.request_log import RequestLog, RequestRecord, SessionRecord, StreamRecord

MS, S = 1_000_000, 1_000_000_000
STAGE = {"index": 0, "name": "first", "address": "h:1", "layers": [0, 4], "up": True, "instance_id": "a", "steps": 100,
         "rows": 400, "padded_rows": 0, "busy_ns": 0, "payload_bytes_in": 0, "payload_bytes_out": 0,
         "envelopes_out": 0, "queued_rows": 3, "secret": "x"}  # fmt: skip
DESCRIBED = {"phase": "ready", "generated_tokens": 100, "running": 2, "waiting": 1, "lanes": 4, "ctx_tokens": 100,
             "kv_tokens": 40, "stages": [STAGE]}  # fmt: skip
PICTURE = Picture(0, 1000, 2, [[0, 1, 10]], {1: 5}, {"1": 0.75, "2": 0.25, "2+": 0.25}, [StageFigures(0.5, None)])


def seen(described: dict[str, Any] = DESCRIBED, **changed: Any) -> Seen:
    return dataclasses.replace(Seen(described, PICTURE, [MS], None, True), **changed)


def new_view(**facts: object) -> LiveView:
    return LiveView(0, 7 * S, facts)


def page_of(view: LiveView, after: int = 0, now_ns: int = 9 * S) -> dict[str, Any]:
    found = json.loads(view.answer(after, now_ns))
    assert isinstance(found, dict)
    return found


def record_of(number: int, *, ended_ns: int = 0, first_ns: int = 0) -> RequestRecord:
    record = RequestRecord(f"r{number}", "POST", "/v1/completions", number * MS, 0, f"cmpl-{number}", n_prompt=9)
    session = SessionRecord(number, f"cmpl-{number}-0", n_prompt=9, admitted_ns=number * MS, started_ns=number * MS)
    if first_ns:
        session.token(9, first_ns)
    session.ended_ns = record.ended_ns = ended_ns
    record.streams.append(StreamRecord(f"cmpl-{number}-0", session, number * MS, request=record))
    return record


def log_of(*records: RequestRecord) -> RequestLog:
    log = RequestLog()
    for record in records:
        log.add(record)
    return log


def test_a_page_gets_the_looks_after_its_last_one() -> None:
    view = new_view(model_id="m")
    assert page_of(view) == {"look": 0, "now_us": 9_000_000, "zero_unix_ms": 7_000, "facts": {"model_id": "m"},
                          "state": None, "looks": [], "points": []}  # fmt: skip
    log = log_of(record_of(5))
    for second in (1, 2, 3):
        view.update(seen(), log, second * S)
    assert [look[0] for look in page_of(view)["looks"]] == [1, 2, 3]
    assert [look[0] for look in page_of(view, 2)["looks"]] == [3]
    assert len(page_of(view, 2)["points"]) == 1
    assert page_of(view, 3)["looks"] == page_of(view, 3)["points"] == []
    assert page_of(view, 99)["looks"] == page_of(view)["looks"], "a page that knows another process's looks"
    assert page_of(view, 3)["looks"] == [], "and that was kept apart"
    assert page_of(view)["looks"][0][1:] == [0, 1000, 2, [[0, 1, 10]], {"1": "cmpl-5-0"}]


def test_a_page_has_the_clock_of_now_where_it_was_set() -> None:
    view = new_view()
    assert page_of(view)["zero_unix_ms"] == 7_000
    view.follow_clock(7 * S + 500 * MS)
    assert page_of(view)["zero_unix_ms"] == 7_000, "a clock that is kept right makes no page begin anew"
    for offset_ns in (28_807 * S, 3 * S):  # this machine has slept for eight hours, and then it was set back
        view.follow_clock(offset_ns)
        assert page_of(view)["zero_unix_ms"] == offset_ns / MS


def test_all_parts_are_bounded() -> None:
    view, log = new_view(), RequestLog()
    for number in range(1, 2 * POINTS_MAX):
        view.update(seen(), log, number * S)
    found = page_of(view)
    assert len(found["looks"]) == LOOKS_MAX
    assert len(found["points"]) == POINTS_MAX
    running = [record_of(number) for number in range(1, 3 + RUNNING_MAX)]
    ended = [record_of(1000 + number, ended_ns=(2000 - number) * MS) for number in range(3 + ENDED_MAX)]
    view.update(seen(), log_of(*ended, *running), 10_000 * S)
    listed = [each["id"] for each in page_of(view)["state"]["requests"]]
    assert len(listed) == RUNNING_MAX + ENDED_MAX
    assert listed[:2] == [f"cmpl-{RUNNING_MAX + 2}", f"cmpl-{RUNNING_MAX + 1}"], "the newest first"
    assert listed[RUNNING_MAX:][:2] == ["cmpl-1000", "cmpl-1001"], "the latest end first"
    for after in range(10 * ANSWERS_MAX):
        view.answer(after, 0)
    assert len(view._answers) <= ANSWERS_MAX


def test_rates_are_of_the_time_between_two_looks() -> None:
    view, log = new_view(), RequestLog()
    view.update(seen(), log, 10 * S)
    assert page_of(view)["points"][0][1] is None, "nothing to compare with"
    later = STAGE | {"steps": 150, "rows": 600, "padded_rows": 50, "busy_ns": S, "payload_bytes_out": 4_000}
    view.update(seen(DESCRIBED | {"generated_tokens": 160, "stages": [later]}), log, 12 * S)
    found = page_of(view)
    assert found["points"][1] == [12, 30.0, 2, 1, 0.1, 0.25, None, None, None, 3]
    (stage,) = found["state"]["stages"]
    assert stage["steps_per_s"] == 25.0
    assert stage["rows_per_step"] == 4.0
    assert stage["busy_share"] == 0.5
    assert stage["padding_share"] == 0.2
    assert (stage["bytes_out_per_s"], stage["row_bytes"]) == (2_000, 20)
    assert (stage["round_trip_ms"], stage["wait_p50_ms"]) == (1.0, 0.5)
    assert "secret" not in stage


@pytest.mark.parametrize(
    ("later", "now_ns"),
    [
        (STAGE | {"instance_id": "b", "steps": 1}, 11 * S),
        (STAGE | {"up": False}, 11 * S),
        (STAGE, 11 * S + LOOK_GAP_NS),
    ],
)
def test_no_rate_across_a_new_start_a_loss_or_a_pause(later: dict[str, Any], now_ns: int) -> None:
    view, log = new_view(), RequestLog()
    view.update(seen(), log, 10 * S)
    view.update(seen(DESCRIBED | {"stages": [later]}), log, now_ns)
    assert "steps_per_s" not in page_of(view)["state"]["stages"][0]


def test_first_tokens_and_times_between_tokens_since_the_look_before() -> None:
    view = new_view()
    record = record_of(1, first_ns=3 * S)
    session, log = record.streams[0].session, log_of(record)
    view.update(seen(), log, 2 * S)
    session.token(10, 3 * S + 20 * MS)
    session.token(11, 3 * S + 60 * MS)
    view.update(seen(), log, 4 * S)
    assert page_of(view)["points"][-1][6:9] == [2999.0, 30.0, 40.0]
    session.token(12, 3 * S + 65 * MS)
    view.update(seen(), log, 5 * S)
    assert page_of(view)["points"][-1][6:9] == [None, 5.0, 5.0], "each once"
    view.update(seen(), log, 6 * S)
    assert page_of(view)["points"][-1][6:9] == [None, None, None]


def test_a_request_shows_its_state_and_progress() -> None:
    view = new_view()
    records = [record_of(number) for number in range(1, 7)]
    bare, queued, reading, paused, failed, done = records
    bare.streams.clear()
    queued.streams[0].session.started_ns = 0
    reading.streams[0].session.prompt.sent(0, 4, 5 * MS)
    reading.streams[0].session.prompt.sent(4, 4, 5 * MS)
    reading.streams[0].session.prompt.answered(4, 6 * MS)
    paused.streams[0].session.is_paused = True
    failed.error, failed.ended_ns = "overloaded", 8 * MS
    done.ended_ns = 9 * MS
    done.streams[0].session.token(9, 7 * MS)
    done.streams[0].session.token(10, 9 * MS)
    done.streams[0].session.ended_ns = 9 * MS
    view.update(seen(), log_of(*records), 10 * MS)
    found = {each["id"]: each for each in page_of(view)["state"]["requests"]}
    states = [found[record.completion_id]["state"] for record in records]
    assert states == ["tokenise", "queue", "prefill", "paused", "failed", "done"]
    assert found["cmpl-3"]["read_tokens"] == 4
    assert found["cmpl-5"]["error"] == "overloaded"
    assert (found["cmpl-6"]["ttft_ms"], found["cmpl-6"]["tokens_per_s"], found["cmpl-6"]["tokens"]) == (1.0, 500.0, 2)


def test_requests_pause_once_a_stage_is_silent_though_it_is_not_lost_yet() -> None:
    view = new_view()
    records = [record_of(number, first_ns=first_ns) for number, first_ns in ((1, 5 * MS), (2, 0), (3, 0))]
    records[2].streams[0].session.started_ns = 0
    found = []
    for is_silent in (False, True, False):
        described = {**DESCRIBED, "stages": [STAGE, {**STAGE, "index": 1, "silent": is_silent}]}
        view.update(seen(described), log_of(*records), 10 * MS)
        found.append([each["state"] for each in reversed(page_of(view)["state"]["requests"])])
    assert found == [["decode", "prefill", "queue"], ["paused", "paused", "queue"], ["decode", "prefill", "queue"]]


def test_times_are_right_however_long_the_machine_has_been_up() -> None:
    up_ns = 86_400 * S
    view, record = LiveView(up_ns, 7 * S, {}), record_of(1)
    session, stream = record.streams[0].session, record.streams[0]
    record.received_ns = stream.opened_ns = session.admitted_ns = up_ns + S
    session.started_ns = up_ns + S + 250 * MS
    view.update(seen(), log_of(record), up_ns + 2 * S)
    session.token(9, up_ns + 2 * S + 500 * MS)
    record.ended_ns = session.ended_ns = up_ns + 2 * S + 600 * MS
    view.update(seen(), log_of(record), up_ns + 3 * S)
    page = page_of(view, now_ns=up_ns + 4 * S)
    assert page["now_us"] == 4_000_000
    assert [point[0] for point in page["points"]] == [2, 3]
    assert page["points"][-1][6] == 1500.0, "a request that has just ended still counts"
    (line,) = page["state"]["requests"]
    assert (line["took_ms"], line["queue_ms"], line["ttft_ms"]) == (1600.0, 250.0, 1500.0)


def test_the_line_of_an_ended_request_is_kept_and_a_running_ones_is_not() -> None:
    view, ended, running = new_view(), record_of(1, ended_ns=9 * MS), record_of(2)
    log = log_of(ended, running)
    view.update(seen(), log, 10 * MS)
    ended.error = running.error = "changed later"
    for at_ns in (20 * MS, 30 * MS):
        view.update(seen(), log, at_ns)
        found = {each["id"]: each.get("error") for each in page_of(view)["state"]["requests"]}
        assert (found["cmpl-1"], found["cmpl-2"]) == (None, "changed later")


def test_a_loss_is_shown_with_the_stage() -> None:
    view = new_view()
    view.update(seen(loss=(1, "it is gone"), is_recording=False), RequestLog(), S)
    state = page_of(view)["state"]
    assert state["loss"] == {"stage": 1, "why": "it is gone"}
    assert state["is_recording"] is False
