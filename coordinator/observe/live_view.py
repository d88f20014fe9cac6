"""The data of the page, built once for all open pages: the latest looks, figures of the last minutes, requests. Pure.

Looks are numbered. A page names the last look that it saw and gets the later ones. Every part of an answer is bounded.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from relayline.coordinator.observe.description import percentile
from relayline.coordinator.observe.step_looks import Picture
from relayline.coordinator.sessions.request_log import RequestLog, RequestRecord, SessionRecord, StreamRecord

LOOKS_MAX = 8  # whose steps are remembered, for a page that has just been opened
POINTS_MAX = 300  # of figures over time; five minutes of looks
RUNNING_MAX = 64  # running requests that are listed; `running` says how many there are
ENDED_MAX = 40  # ended ones, the latest
ANSWERS_MAX = 8  # of one look that are kept as bytes: pages that poll ask for the same one or two
TRIPS_MAX = 6  # round trips of a stage; the shortest of them is reported
RECENT_NS = 20_000_000_000  # since its end, in which a request may be in the steps that are shown
LOOK_GAP_NS = 5_000_000_000  # between two looks: over a longer time the rate would not be current
CLOCK_SET_NS = 2_000_000_000  # by which a wall clock that is only kept right does not move at once
MS = 1e-6
_FIELDS = ("model", "architecture", "pipeline_id", "phase", "phase_s", "epoch", "ctx_tokens", "lanes", "running",
         "waiting", "kv_tokens", "shared_requests", "prefixes", "stored_prefixes", "generated_tokens", "prompt_tokens",
         "copied_tokens",
         "drafted_tokens", "accepted_tokens", "plan", "grants", "batches", "imbalance", "sleep", "link", "missing",
         "idle", "layers")  # fmt: skip
_STAGE_FIELDS = ("index", "name", "address", "layers", "artifact_bytes", "up", "state", "silent", "last_heard_s",
                  "restarts", "host", "failure", "fetched_bytes", "fetch_total_bytes", "fetch_trouble",
                  "loaded_bytes",
                  "load_total_bytes", "resident_bytes", "memory_bytes", "memory_free_bytes", "lanes_used", "lanes_kept",
                  "tier", "lanes_total", "kv_layout", "queued_rows", "steps", "rows", "faults",
                  "takeover_in_s", "spare", "drained", "here", "relay")  # fmt: skip
_COUNTED = ("steps", "rows", "padded_rows", "busy_ns", "payload_bytes_in", "payload_bytes_out", "envelopes_out")

encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Everything that one look found."""

    described: Mapping[str, Any]
    """See coordinator.sessions.generation.Generator.describe."""
    picture: Picture
    round_trips_ns: Sequence[int | None]
    """From this process to each stage and back; None: not measured this time."""
    loss: tuple[int | None, str] | None
    """Which stage is lost, where it is known, and why."""
    is_recording: bool
    """Whether steps and requests are remembered at all: not at trace level off."""


class LiveView:
    """The state of one pipeline for its pages. Times are monotonic nanoseconds of the caller."""

    def __init__(self, zero_ns: int, unix_offset_ns: int, facts: Mapping[str, object]) -> None:
        """`facts` are part of every answer, with their values at that time."""
        self._zero_ns, self._unix_offset_ns, self._facts = zero_ns, unix_offset_ns, facts
        self._n_looks = 0
        self._looks: collections.deque[tuple[int, msgspec.Raw]] = collections.deque(maxlen=LOOKS_MAX)
        self._points: collections.deque[tuple[int, msgspec.Raw]] = collections.deque(maxlen=POINTS_MAX)
        self._state = msgspec.Raw(b"null")
        self._before: tuple[int, Mapping[str, Any]] | None = None
        self._trips_ns: list[collections.deque[int]] = []  # of each stage, the latest round trips
        self._ended: dict[int, tuple[RequestRecord, msgspec.Raw]] = {}  # lines of ended requests, by the record's id()
        self._n_gaps: dict[int, int] = {}  # times between tokens that have been looked at, of running sessions
        self._answers: dict[int, bytes] = {}  # of this look, by the look that was asked for

    def follow_clock(self, unix_offset_ns: int) -> None:
        """Take up the wall clock where it was set, or this machine has slept. Pages then begin anew."""
        if abs(unix_offset_ns - self._unix_offset_ns) > CLOCK_SET_NS:
            self._unix_offset_ns = unix_offset_ns
            self._answers.clear()

    def update(self, seen: Seen, log: RequestLog, now_ns: int) -> None:
        """Take the next look."""
        self._n_looks += 1
        before = self._before
        if before is not None and now_ns - before[0] > LOOK_GAP_NS:
            before = None
        picture, described = seen.picture, seen.described
        recent = [record for record in log if not record.ended_ns or record.ended_ns > now_ns - RECENT_NS]
        owners = _owners(recent)
        streams = {number: owners.get(session, "") for number, session in picture.streams.items()}
        look = [self._n_looks, picture.from_us, picture.to_us, picture.n_skipped, picture.steps, streams]
        self._looks.append((self._n_looks, msgspec.Raw(encode(look))))
        stages = _stages(seen, self._shortest_trips(seen.round_trips_ns), before, now_ns)
        point = self._point(seen, stages, recent, before, now_ns)
        self._points.append((self._n_looks, msgspec.Raw(encode(point))))
        state = {
            **{name: described.get(name) for name in _FIELDS},
            "stages": stages,
            "overlap": picture.overlap,
            "loss": None if seen.loss is None else {"stage": seen.loss[0], "why": seen.loss[1]},
            "is_recording": seen.is_recording,
            "requests": self._requests(log, now_ns, has_silent=any(stage.get("silent") for stage in stages)),
        }
        self._state = msgspec.Raw(encode(state))
        self._before = (now_ns, described)
        self._answers.clear()

    def answer(self, after: int, now_ns: int) -> bytes:
        """Return everything after look `after` as JSON; 0 returns all that is remembered."""
        oldest = self._points[0][0] if self._points else 1
        if not oldest <= after <= self._n_looks:
            after = 0  # long ago, or of a process that was here before this one
        known = self._answers.get(after)
        if known is None:
            looks = [raw for number, raw in self._looks if number > after]
            known = encode(
                {
                    "look": self._n_looks,
                    "now_us": (now_ns - self._zero_ns) // 1000,
                    "zero_unix_ms": round((self._zero_ns + self._unix_offset_ns) * MS),
                    "facts": self._facts,
                    "state": self._state,
                    "looks": looks,
                    "points": [raw for number, raw in self._points if number > after],
                }
            )
            if len(self._answers) < ANSWERS_MAX:
                self._answers[after] = known
        return known

    def _shortest_trips(self, round_trips_ns: Sequence[int | None]) -> list[int | None]:
        """Return the shortest of each stage's latest round trips. Longer ones include other waits."""
        while len(self._trips_ns) < len(round_trips_ns):
            self._trips_ns.append(collections.deque(maxlen=TRIPS_MAX))
        for trips, latest_ns in zip(self._trips_ns, round_trips_ns, strict=False):
            if latest_ns is not None:
                trips.append(latest_ns)
        return [min(trips, default=None) for trips in self._trips_ns]

    def _point(
        self,
        seen: Seen,
        stages: Sequence[Mapping[str, Any]],
        recent: Sequence[RequestRecord],
        before: tuple[int, Mapping[str, Any]] | None,
        now_ns: int,
    ) -> list[object]:
        """Return the figures of this look, None for those that are not known.

        In order: second, tokens per second, running, waiting, KV share, overlap of two stages or more. Then, in
        milliseconds, TTFT (median) and time between tokens (mean, 95th percentile). Last: rows queued at stages.
        """
        described = seen.described
        rate = None
        since_ns = now_ns
        if before is not None:
            since_ns = before[0]
            n_tokens = _number(described, "generated_tokens") - _number(before[1], "generated_tokens")
            rate = round(max(0, n_tokens) * 1e9 / max(1, now_ns - since_ns), 1)
        firsts = sorted(
            stream.ttft_ns
            for record in recent
            for stream in record.streams
            if stream.ttft_ns is not None
            and since_ns < stream.session.first_token_ns <= now_ns
            and not stream.is_shared
        )
        gaps = sorted(self._new_gaps(recent))
        capacity = _number(described, "lanes") * _number(described, "ctx_tokens")
        return [
            (now_ns - self._zero_ns) // 1_000_000_000,
            rate,
            _number(described, "running"),
            _number(described, "waiting"),
            round(_number(described, "kv_tokens") / capacity, 4) if capacity else 0.0,
            seen.picture.overlap.get("2+"),
            _ms(percentile(firsts, 0.5)) if firsts else None,
            _ms(sum(gaps) / len(gaps)) if gaps else None,
            _ms(percentile(gaps, 0.95)) if gaps else None,
            sum(stage.get("queued_rows") or 0 for stage in stages),
        ]

    def _requests(self, log: RequestLog, now_ns: int, *, has_silent: bool) -> list[msgspec.Raw]:
        """Return one line for each shown request. Lines of ended requests no longer change and are kept.

        `has_silent`: no row passes a stage that does not answer, though it may not be lost yet.
        """
        known, self._ended = self._ended, {}
        lines = []
        for record in _listed(log):
            kept = known.get(id(record))
            is_same = kept is not None and kept[0] is record
            if is_same and kept is not None:
                line = kept[1]
            else:
                line = msgspec.Raw(encode(_request(record, now_ns, has_silent=has_silent)))
            if record.ended_ns:
                self._ended[id(record)] = (record, line)
            lines.append(line)
        return lines

    def _new_gaps(self, recent: Sequence[RequestRecord]) -> Iterator[int]:
        """Return the times between tokens of running sessions since the last look."""
        known, self._n_gaps = self._n_gaps, {}
        for session in {id(stream.session): stream.session for record in recent for stream in record.streams}.values():
            if not session.ended_ns and session.first_token_ns:
                yield from session.gaps_ns[known.get(session.session_id, 0) :]
                self._n_gaps[session.session_id] = len(session.gaps_ns)


def _stages(
    seen: Seen, trips_ns: Sequence[int | None], before: tuple[int, Mapping[str, Any]] | None, now_ns: int
) -> list[dict[str, Any]]:
    """Return each stage with its work since the last look."""
    found = []
    olds = {stage.get("index"): stage for stage in before[1].get("stages", ())} if before is not None else {}
    for at, stage in enumerate(seen.described.get("stages", ())):
        entry = {name: stage[name] for name in _STAGE_FIELDS if stage.get(name) is not None}
        trip_ns = trips_ns[at] if at < len(trips_ns) else None
        entry["round_trip_ms"] = None if trip_ns is None else _ms(trip_ns)
        if at < len(seen.picture.stages):
            entry |= dataclasses.asdict(seen.picture.stages[at])
        old = olds.get(stage.get("index"))
        if before is not None and old is not None and stage.get("up") and old.get("up"):
            entry |= _rates(old, stage, now_ns - before[0])
        found.append(entry)
    return found


def _rates(old: Mapping[str, Any], new: Mapping[str, Any], elapsed_ns: int) -> dict[str, Any]:
    """Return a stage's work between two looks; {} if it was restarted in between."""
    if old.get("instance_id") != new.get("instance_id"):
        return {}
    done = {name: max(0, _number(new, name) - _number(old, name)) for name in _COUNTED}
    elapsed_s = max(1, elapsed_ns) * 1e-9
    n_steps, n_rows = done["steps"], done["rows"]
    return {
        "steps_per_s": round(n_steps / elapsed_s, 1),
        "rows_per_step": round(n_rows / n_steps, 2) if n_steps else None,
        "padding_share": round(done["padded_rows"] / (n_rows + done["padded_rows"]), 3) if n_rows else 0.0,
        "busy_share": round(min(1.0, done["busy_ns"] * 1e-9 / elapsed_s), 3),
        "bytes_in_per_s": round(done["payload_bytes_in"] / elapsed_s),
        "bytes_out_per_s": round(done["payload_bytes_out"] / elapsed_s),
        "row_bytes": round(done["payload_bytes_out"] / n_rows) if n_rows and done["payload_bytes_out"] else None,
        "envelopes_per_s": round(done["envelopes_out"] / elapsed_s, 1),
    }


def _owners(records: Sequence[RequestRecord]) -> dict[int, str]:
    """Return the id of the stream that opened each session, by session id."""
    return {stream.session.session_id: stream.session.request_id for record in records for stream in record.streams}


def _listed(log: RequestLog) -> list[RequestRecord]:
    """Return the requests that are shown: running ones, then the latest that ended, each the newest first."""
    running: list[RequestRecord] = []
    ended: list[RequestRecord] = []
    for record in log:
        (ended if record.ended_ns else running).append(record)
    return [*running[: -RUNNING_MAX - 1 : -1], *sorted(ended, key=_ended_ns, reverse=True)[:ENDED_MAX]]


def _ended_ns(record: RequestRecord) -> int:
    return record.ended_ns


def _request(record: RequestRecord, now_ns: int, *, has_silent: bool) -> dict[str, object]:
    """Return one line about a request. Several choices give sums, and the times of the first choice."""
    first = record.streams[0] if record.streams else None
    sessions = [stream.session for stream in record.streams]
    return {
        "id": record.completion_id or record.request_id,
        "route": record.route,
        "state": _state(record, first, has_silent=has_silent),
        "error": record.error or None,
        "came_unix_ms": round((record.received_ns + record.unix_offset_ns) * MS),
        "took_ms": _ms((record.ended_ns or now_ns) - record.received_ns),
        "choices": len(record.streams),
        "prompt_tokens": record.n_prompt,
        "read_tokens": _read(first.session) if first is not None else 0,
        "cached_tokens": sum(session.n_copied for session in sessions),
        "tokens": sum(stream.n_tokens or stream.session.n_tokens for stream in record.streams),
        "drafted_tokens": sum(session.guesses.n_sent for session in sessions),
        "accepted_tokens": sum(session.guesses.n_accepted for session in sessions),
        **(_times(first, now_ns) if first is not None else {}),
    }


def _times(stream: StreamRecord, now_ns: int) -> dict[str, object]:
    session = stream.session
    first_ns = session.first_token_ns
    decoding_ns = (session.last_token_ns if session.ended_ns else now_ns) - first_ns
    rate = (session.n_tokens - 1) * 1e9 / decoding_ns if first_ns and session.n_tokens > 1 and decoding_ns > 0 else None
    return {
        "queue_ms": _ms((session.started_ns or session.ended_ns or now_ns) - session.admitted_ns),
        "ttft_ms": _ms(stream.ttft_ns) if stream.ttft_ns is not None else None,
        "tokens_per_s": None if rate is None else round(rate, 1),
    }


def _state(record: RequestRecord, first: StreamRecord | None, *, has_silent: bool) -> str:
    """Return the word for how far a request is."""
    if record.ended_ns:
        return "failed" if record.error else "done"
    if first is None:
        return "tokenise"
    if first.session.is_paused:
        return "paused"
    if not first.session.started_ns:
        return "queue"
    if has_silent:
        return "paused"
    return "decode" if first.session.first_token_ns else "prefill"


def _read(session: SessionRecord) -> int:
    """Return how many tokens of the prompt have passed the last stage."""
    if session.first_token_ns:
        return session.n_prompt
    read = [chunk.position + chunk.n_rows for chunk in session.prompt.chunks if chunk.answered_ns]
    return min(session.n_prompt, max([session.n_copied, *read]))


def _number(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0


def _ms(duration_ns: float) -> float:
    return round(duration_ns * MS, 3)
