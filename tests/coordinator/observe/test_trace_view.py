"""The JSON of a request's life: phases, batches of each stage, mates by the names of their requests."""

from __future__ import annotations

from relayline.coordinator.engine.stage_client import clock_offset_ns
from relayline.coordinator.observe.trace_view import MATES_MAX, view
from relayline.coordinator.sessions.media_record import FileRecord, MediaRecord
from relayline.coordinator.sessions.request_log import RequestRecord, SessionRecord, StageRecord, StreamRecord
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

MS = 1_000_000


def lived() -> RequestRecord:
    """A request that was received at 10 ms and answered at 110 ms."""
    record = RequestRecord("req", "POST", "/v1/completions", 10 * MS, 1_000 * MS, "cmpl-a", "m", 200, n_prompt=7)
    record.tokenize_start_ns, record.tokenize_end_ns, record.ended_ns = 11 * MS, 12 * MS, 110 * MS
    session = SessionRecord(5, "cmpl-a-0", n_prompt=7, admitted_ns=12 * MS, started_ns=20 * MS)
    session.prompt.sent(0, 7, 20 * MS)
    session.token(7, 40 * MS)
    session.token(8, 50 * MS)
    session.token(9, 70 * MS)
    session.event("paused", 55 * MS, "stage 1 is gone")
    session.guesses.n_sent, session.guesses.n_accepted = 5, 2
    session.end(71 * MS)
    session.finish_reason = "length"
    session.stages[0] = StageRecord(n_prefill_steps=1, n_decode_steps=2, batch_rows_sum=7, batch_rows_max=4)
    record.streams.append(StreamRecord("cmpl-a-0", session, 12 * MS, ended_ns=72 * MS, request=record))
    return record


def test_an_embedding_has_no_first_token_and_no_decode_phase() -> None:
    record = lived()
    record.streams[0].session.is_embedding = True
    (stream,) = view(record, [], {}, 500 * MS)["streams"]  # type: ignore[misc]
    assert (stream["prefill_ms"], stream["decode_ms"], stream["ttft_ms"]) == (20.0, None, None)


def member(session_id: int, position: int = 0, **more: int) -> pb.BatchMember:
    return pb.BatchMember(session_id=session_id, position=position, n_rows=1, **more)


def test_phases_and_batches() -> None:
    batch = pb.BatchRecord(
        step=3, start_ns=45 * MS, decode_ns=2 * MS, predicted_ns=3 * MS, n_rows=4, padded_rows=1,
        close_reason="row_cap", queued_rows_before=9, queued_rows_after=5, bytes_out=12, context=bytes(range(24)),
        members=[member(6), member(5, 8, wait_ns=MS), member(77), member(6)],
    )  # fmt: skip
    other = pb.BatchRecord(step=4, members=[member(6)])  # of a mate alone: a stage may answer with more than asked
    answer = pb.BatchesResponse(stage_index=0, instance_id="i", batches=[batch, other], n_forgotten=2)
    found = view(lived(), [answer, None], {5: "cmpl-a-0", 6: "cmpl-b-0"}, 500 * MS)
    assert (found["duration_ms"], found["tokenize_ms"], found["received_unix_ms"]) == (100.0, 1.0, 1010)
    (stream,) = found["streams"]  # type: ignore[misc]
    assert stream["session_id"] == f"{5:016x}"
    assert (stream["queue_ms"], stream["prefill_ms"], stream["decode_ms"], stream["ttft_ms"]) == (8.0, 20.0, 30.0, 28.0)
    assert (stream["drafted_tokens"], stream["accepted_tokens"]) == (5, 2)
    assert stream["itl_ms"] == {"mean": 15.0, "p50": 20.0, "p95": 20.0, "max": 20.0}
    assert stream["chunks"] == [{"at_ms": 10.0, "position": 0, "rows": 7, "took_ms": 20.0}]
    assert stream["events"] == [{"at_ms": 45.0, "name": "paused", "detail": "stage 1 is gone"}]
    assert (stream["finish_reason"], stream["error"], stream["shared_with"]) == ("length", None, None)
    answered, silent = stream["stages"]
    assert silent == {"stage": 1, "up": False}
    assert answered["summary"]["batch_rows_mean"] == 3.5
    assert answered["forgotten_batches"] == 2
    (shown,) = answered["batches"]
    assert shown == {
        "id": "0:3", "at_ms": 35.0, "phase": "decode", "position": 8, "own_rows": 1, "granted": False,
        "rows": 4, "padded_rows": 1,
        "frames": 4, "wait_ms": 1.0, "upstream_wait_ms": 0.0, "close_reason": "row_cap", "queued_rows_before": 9,
        "queued_rows_after": 5, "predicted_ms": 3.0, "decode_ms": 2.0, "encode_ms": 0.0, "bytes_out": 12,
        "trace_id": bytes(range(16)).hex(), "mates": ["cmpl-b-0", f"session {77:016x}"],
    }  # fmt: skip


def test_a_running_request_is_shown_as_far_as_it_got() -> None:
    record = lived()
    record.ended_ns = record.status = 0
    stream = record.streams[0]
    stream.ended_ns = stream.session.ended_ns = stream.session.first_token_ns = 0
    stream.session.finish_reason = ""
    found = view(record, [], {}, 200 * MS)
    assert (found["is_running"], found["status"], found["duration_ms"]) == (True, None, 190.0)
    (shown,) = found["streams"]  # type: ignore[misc]
    assert (shown["prefill_ms"], shown["decode_ms"], shown["ttft_ms"]) == (180.0, None, None)
    assert shown["finish_reason"] is None


def test_a_batch_says_whether_its_row_came_back_under_a_grant() -> None:
    own = member(5)
    own.sent_ns = 0
    found = [
        pb.BatchesResponse(batches=[pb.BatchRecord(step=1, taken_ns=taken_ns, members=[own])]) for taken_ns in (9, 0)
    ]
    shown = [
        stage["batches"][0]["granted"]
        for responses in ([found[0], found[0]], [found[1]])
        for stage in view(lived(), responses, {}, 0)["streams"][0]["stages"]  # type: ignore[index]
    ]
    assert shown == [True, False, False], "on the first stage, from stages that say when they took a batch"


def test_mates_are_bounded() -> None:
    batch = pb.BatchRecord(step=1, members=[member(5), *(member(100 + at) for at in range(MATES_MAX + 9))])
    found = view(lived(), [pb.BatchesResponse(batches=[batch])], {}, 0)
    (shown,) = found["streams"][0]["stages"][0]["batches"]  # type: ignore[index]
    assert (len(shown["mates"]), shown["frames"]) == (MATES_MAX, MATES_MAX + 10)


def test_stages_of_this_machine_share_its_clock_and_others_are_moved() -> None:
    assert clock_offset_ns(1_000, 1_800, 1_700) == 0
    assert clock_offset_ns(1_000, 1_800, 1_000_000) == 1_400 - 1_000_000
    assert clock_offset_ns(1_000_000, 1_000_800, 5) == 1_000_400 - 5


def test_each_image_says_what_was_done_with_it() -> None:
    record = lived()
    assert (view(record, [], {}, 0)["media_ms"], view(record, [], {}, 0)["media"]) == (None, [])
    kept = FileRecord("audio", 7, 3, is_kept=True, wait_ns=MS)
    read = FileRecord("image", 9, 4, steps={"count rows": (13 * MS, 14 * MS), "encode": (14 * MS, 24 * MS)})
    record.media = MediaRecord(11 * MS, 25 * MS, [kept, read])
    found = view(record, [], {}, 0)
    assert found["media_ms"] == 14.0
    assert found["media"] == [
        {"kind": "audio", "bytes": 7, "rows": 3, "kept": True, "wait_ms": 1.0, "steps": []},
        {"kind": "image", "bytes": 9, "rows": 4, "kept": False, "wait_ms": 0.0, "steps": [
            {"step": "count rows", "at_ms": 3.0, "took_ms": 1.0}, {"step": "encode", "at_ms": 4.0, "took_ms": 10.0},
        ]},
    ]  # fmt: skip
    (stream,) = found["streams"]  # type: ignore[misc]
    assert stream["ttft_ms"] == 29.0, "the client waits from the first work on its images on"
    record.media.end_ns = 0
    assert view(record, [], {}, 40 * MS)["media_ms"] == 29.0, "it is under way"
