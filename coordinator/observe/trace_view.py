"""One request's life as JSON-ready values: its record joined with the batches that the stages remember. Pure.

Times in milliseconds; `at_ms` counts from when the request came in, on this process's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relayline.coordinator.observe.token_times import OF_STAGES, PARTS, Known, Parts, TokenTime, summed, token_times
from relayline.coordinator.observe.tracing import session_text
from relayline.coordinator.sessions.media_record import FileRecord
from relayline.coordinator.sessions.request_log import RequestRecord, SessionRecord, StageRecord, StreamRecord
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

MS = 1e-6  # milliseconds in a nanosecond
NOTHING = Known()
MATES_MAX = 64  # batch mates that are named per batch; `frames` says how many there were


def view(
    record: RequestRecord,
    responses: Sequence[pb.BatchesResponse | None],
    owners: Mapping[int, str],
    now_ns: int,
    known: Known = NOTHING,
) -> dict[str, object]:
    """Return the life of a request.

    `responses` are the stages' answers in layer order (None: no answer), their start times on this process's clock;
    `owners` names the requests behind session ids; `known` is what else the coordinator remembers.
    """
    return {
        "request_id": record.request_id,
        "id": record.completion_id,
        "trace_id": record.trace_id or None,
        "route": f"{record.method} {record.route}",
        "model": record.model,
        "status": record.status or None,
        "error": record.error or None,
        "is_running": not record.ended_ns,
        "received_unix_ms": round((record.received_ns + record.unix_offset_ns) * MS),
        "duration_ms": _ms((record.ended_ns or now_ns) - record.received_ns),
        "tokenize_ms": _ms(record.tokenize_end_ns - record.tokenize_start_ns),
        "media_ms": _ms((record.media.end_ns or now_ns) - record.media.start_ns) if record.media else None,
        "media": [_file(file, record.received_ns) for file in record.media.files] if record.media else [],
        "grammar_ms": _ms(record.grammar_end_ns - record.grammar_start_ns),
        "prompt_tokens": record.n_prompt,
        "streams": [_stream(record, stream, responses, owners, now_ns, known) for stream in record.streams],
    }


def _file(file: FileRecord, zero_ns: int) -> dict[str, object]:
    """Return one image or audio file; `steps` are the work on it that has ended."""
    return {
        "kind": file.kind,
        "bytes": file.n_bytes,
        "rows": file.n_rows,
        "kept": file.is_kept,
        "wait_ms": _ms(file.wait_ns),
        "steps": [
            {"step": name, "at_ms": _ms(start_ns - zero_ns), "took_ms": _ms(end_ns - start_ns)}
            for name, (start_ns, end_ns) in file.steps.items()
        ],
    }


def _stream(
    record: RequestRecord,
    stream: StreamRecord,
    responses: Sequence[pb.BatchesResponse | None],
    owners: Mapping[int, str],
    now_ns: int,
    known: Known,
) -> dict[str, object]:
    reason, error = stream.outcome()
    session, zero_ns = stream.session, record.received_ns
    end_ns = session.ended_ns or now_ns
    first_ns = session.first_token_ns
    token_ns = 0 if session.is_embedding else first_ns
    return {
        "id": stream.request_id,
        "session_id": session_text(session.session_id),
        "shared_with": session.request_id if stream.is_shared else None,
        "finish_reason": reason or None,
        "error": error or None,
        "prompt_tokens": session.n_prompt,
        "copied_tokens": session.n_copied,
        "tokens": stream.n_tokens or session.n_tokens,
        "drafted_tokens": session.guesses.n_sent,
        "accepted_tokens": session.guesses.n_accepted,
        "admitted_at_ms": _ms(session.admitted_ns - zero_ns),
        "queue_ms": _ms((session.started_ns or end_ns) - session.admitted_ns),
        "prefill_ms": _ms((first_ns or end_ns) - session.started_ns) if session.started_ns else None,
        "decode_ms": _ms((session.last_token_ns if session.ended_ns else now_ns) - token_ns) if token_ns else None,
        "ttft_ms": _ms(stream.ttft_ns) if stream.ttft_ns is not None and not session.is_embedding else None,
        "itl_ms": _gaps(session),
        "chunks": [
            {
                "at_ms": _ms(chunk.sent_ns - zero_ns),
                "position": chunk.position,
                "rows": chunk.n_rows,
                "took_ms": _ms(chunk.answered_ns - chunk.sent_ns) if chunk.answered_ns else None,
            }
            for chunk in session.prompt.chunks
        ],
        "chunks_forgotten": session.prompt.n_dropped,
        "events": [
            {"at_ms": _ms(event.at_ns - zero_ns), "name": event.name, "detail": event.detail or None}
            for event in session.events
        ],
        **_times(session, responses, zero_ns, known),
        "stages": [
            _stage(index, response, session, owners, zero_ns) for index, response in enumerate(responses)
        ],
    }  # fmt: skip


def _times(
    session: SessionRecord, responses: Sequence[pb.BatchesResponse | None], zero_ns: int, known: Known
) -> dict[str, object]:
    """Return where the time of a session went: of its two phases in sum, and of each token."""
    times, n_stages = token_times(session, responses, known), len(responses)
    prefill = [each for each in times if not each.index]
    decode_ns = session.last_token_ns - session.first_token_ns
    return {
        "time": {
            "prefill": _parts(summed(prefill, 0, n_stages)) if prefill else None,
            "decode": _parts(summed(times[len(prefill) :], decode_ns, n_stages)) if session.n_tokens > 1 else None,
        },
        "token_times": [_token(each, zero_ns) for each in times],
    }


def _token(time: TokenTime, zero_ns: int) -> dict[str, object]:
    return {
        "token": time.index,
        "position": time.position,
        "at_ms": _ms(time.start_ns - zero_ns),
        **_parts(time.parts),
        "batches": [
            f"{stage}:{passed.batch.step}" if passed is not None else None for stage, passed in enumerate(time.chain)
        ],
    }


def _parts(parts: Parts) -> dict[str, object]:
    found: dict[str, object] = {"took_ms": _ms(parts.took_ns)}
    for part in PARTS:
        of_stages = parts.stage_ns.get(part, [0] * parts.n_stages)
        found[f"{part}_ms"] = [_ms(ns) for ns in of_stages] if part in OF_STAGES else _ms(parts.whole_ns.get(part, 0))
    return found


def _gaps(session: SessionRecord) -> dict[str, object] | None:
    gaps = session.gaps
    if not gaps.n:
        return None
    return {
        "mean": _ms(gaps.mean_ns), "p50": _ms(gaps.p50_ns), "p95": _ms(gaps.p95_ns), "max": _ms(gaps.max_ns),
    }  # fmt: skip


def _stage(
    index: int,
    response: pb.BatchesResponse | None,
    session: SessionRecord,
    owners: Mapping[int, str],
    zero_ns: int,
) -> dict[str, object]:
    found: dict[str, object] = {"stage": index, "up": response is not None}
    if index in session.stages:
        found["summary"] = _summary(session.stages[index])
    if response is not None:
        found["instance_id"] = response.instance_id
        found["forgotten_batches"] = response.n_forgotten
        found["batches"] = [
            _batch(index, batch, member, owners, zero_ns)
            for batch in response.batches
            for member in batch.members
            if member.session_id == session.session_id
        ]
    return found


def _summary(stage: StageRecord) -> dict[str, object]:
    return {
        "prefill_steps": stage.n_prefill_steps,
        "decode_steps": stage.n_decode_steps,
        "prefill_wait_ms": _ms(stage.prefill_wait_ns),
        "decode_wait_ms": _ms(stage.decode_wait_ns),
        "wait_max_ms": _ms(stage.wait_max_ns),
        "batch_rows_mean": round(stage.batch_rows_mean, 2),
        "batch_rows_max": stage.batch_rows_max,
        "decode_ms": _ms(stage.decode_ns),
    }


def _batch(
    index: int, batch: pb.BatchRecord, own: pb.BatchMember, owners: Mapping[int, str], zero_ns: int
) -> dict[str, object]:
    mates = {member.session_id: None for member in batch.members if member.session_id != own.session_id}
    return {
        "id": f"{index}:{batch.step}",
        "at_ms": _ms(batch.start_ns - zero_ns),
        "phase": "prefill" if own.is_prefill else "decode",
        "position": own.position,
        "own_rows": own.n_rows,
        "granted": index == 0 and batch.taken_ns > 0 and not own.sent_ns,  # not the coordinator sent it
        "rows": batch.n_rows,
        "padded_rows": batch.padded_rows,
        "frames": len(batch.members),
        "wait_ms": _ms(own.wait_ns),
        "upstream_wait_ms": _ms(own.upstream_wait_ns),
        "close_reason": batch.close_reason,
        "queued_rows_before": batch.queued_rows_before,
        "queued_rows_after": batch.queued_rows_after,
        "predicted_ms": _ms(batch.predicted_ns) if batch.predicted_ns else None,
        "decode_ms": _ms(batch.decode_ns),
        "encode_ms": _ms(batch.encode_ns),
        "bytes_out": batch.bytes_out,
        "trace_id": batch.context[:16].hex() or None,
        "mates": [owners.get(mate, f"session {session_text(mate)}") for mate in list(mates)[:MATES_MAX]],
    }


def _ms(duration_ns: int) -> float:
    return round(duration_ns * MS, 3)
