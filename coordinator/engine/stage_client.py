"""The coordinator's side of one stage: describe, configure, status, and its return stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import grpc
import grpc.aio

from relayline.wire.common import bounds
from relayline.wire.common.errors import HandshakeError, InternalError, ProtocolError, RelaylineError, StageLostError
from relayline.wire.common.logs import LogLine
from relayline.wire.common.tasks import end_task
from relayline.wire.common.texts import printable, tidy
from relayline.wire.envelopes.returns import ReturnReader
from relayline.wire.links import rpc
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.links.trouble import explained
from relayline.wire.links.watch import Watch
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.clock import OffsetEstimate

log = logging.getLogger("relayline.coordinator")

_U64 = 1 << 64
STATUS_TIMEOUT_S = 2.0  # a status that takes longer is left out of the picture


def clock_offset_ns(sent_ns: int, received_ns: int, theirs_ns: int) -> int:
    """Return the offset that turns a peer's monotonic times into ours: it reported `theirs_ns` between sent_ns and
    received_ns.

    A time within that interval comes from this very machine's clock, which all its processes share. Then 0 is exact,
    and the midpoint would be off by half of the call's duration. Pure.
    """
    return 0 if sent_ns <= theirs_ns <= received_ns else (sent_ns + received_ns) // 2 - theirs_ns


class RoundTrip(NamedTuple):
    """A question and its answer, in nanoseconds of monotonic clocks: ours, ours and the peer's."""

    sent_ns: int
    received_ns: int
    theirs_ns: int


class StageClient:
    """One stage as seen from the coordinator. Event loop only."""

    def __init__(
        self, address: str, security: LinkSecurity = PLAINTEXT, who: Identity | None = None, generation: int = 0
    ) -> None:
        """`who`: the stage that is there, and `generation` how often its token was revoked, see LinkSecurity.shown_to.

        Raises UsageError when `security` does not allow a link to `address`.
        """
        self.address, self._security = address, security
        self._channel = rpc.open_channel(address, security, who, generation)
        self.clock = OffsetEstimate()
        """What the heartbeat has learned of this stage's clock."""
        self.max_rows = 1
        """Rows of one native step, once the stage has described itself."""
        self.returns = ReturnReader(f"the stage at {address}")
        self._reader: asyncio.Task[None] | None = None
        self._watch: Watch | None = None

    async def describe(self) -> pb.DescribeResponse:
        """Ask for the stage's description. Raises StageLostError, HandshakeError, UnauthenticatedError."""
        request = pb.DescribeRequest(protocol_version=bounds.PROTOCOL_VERSION)
        try:
            facts: pb.DescribeResponse = await rpc.call(
                self._channel, "Describe", request, pb.DescribeResponse, self.address, bounds.HANDSHAKE_TIMEOUT_S
            )
        except StageLostError as error:
            reason = await explained(error, self.address, self._security)
            if reason is error:
                raise
            raise reason from error
        tidy(facts)
        if facts.protocol_version != bounds.PROTOCOL_VERSION:
            raise HandshakeError(
                f"{self.address} speaks protocol {facts.protocol_version}, this coordinator "
                f"{bounds.PROTOCOL_VERSION}; run the same relayline version on both"
            )
        self.max_rows = facts.max_rows
        return facts

    async def configure(self, request: pb.ConfigureRequest) -> pb.ConfigureResponse:
        """Begin a new epoch at the stage; returns what sessions and its tier hold there.

        Raises the stage's typed refusal.
        """
        timeout_s = 2 * bounds.HANDSHAKE_TIMEOUT_S  # during this time the stage shakes hands with its neighbour
        answer: pb.ConfigureResponse = await rpc.call(
            self._channel, "Configure", request, pb.ConfigureResponse, self.address, timeout_s
        )
        if len(answer.held) > bounds.SESSIONS_PER_LINK_MAX:
            raise ProtocolError(f"{self.address} reports {len(answer.held)} sessions, more than a stage can hold")
        return answer

    async def note(self, notes: Mapping[int, bytes]) -> None:
        """Let the stage keep notes on stored prefixes, by key; what does not arrive is lost."""
        await self._notes(pb.NotesRequest(notes=[pb.StoredNote(key=key, note=note) for key, note in notes.items()]))

    async def notes(self) -> dict[int, bytes]:
        """Return the notes on prefixes that the stage has stored, by key; none without an answer."""
        answer = await self._notes(pb.NotesRequest(wants_known=True))
        return {each.key: each.note for each in answer.notes}

    async def _notes(self, request: pb.NotesRequest) -> pb.NotesResponse:
        timeout_s, bytes_max = bounds.HANDSHAKE_TIMEOUT_S, bounds.NOTES_ANSWER_BYTES_MAX
        try:
            answer: pb.NotesResponse = await rpc.call(
                self._channel, "Notes", request, pb.NotesResponse, self.address, timeout_s, bytes_max
            )
        except RelaylineError:
            return pb.NotesResponse()
        return answer

    async def revoke(self, crl_pem: bytes) -> None:
        """Hand the stage a list of revoked certificates. Raises the stage's typed refusal, or its loss."""
        request = pb.RevokeRequest(crl_pem=crl_pem)
        timeout_s = bounds.HANDSHAKE_TIMEOUT_S
        await rpc.call(self._channel, "Revoke", request, pb.RevokeResponse, self.address, timeout_s)

    async def status(
        self, *, with_recent: bool, with_steps: bool = False, with_memory: bool = False, route_id: int = 0
    ) -> pb.StatusResponse | None:
        """Return live counters, or None without an answer in time. with_recent: also the recent waits and step
        intervals; with_steps: the step intervals alone. with_memory: also the memory use of its process and its host.
        route_id: also the state of that route.

        Step times are moved to this process's clock, see clock_offset_ns. Steps from before this clock began have no
        time on it and are left out.
        """
        sent_ns = time.monotonic_ns()
        try:
            status: pb.StatusResponse = await rpc.call(
                self._channel,
                "Status",
                pb.StatusRequest(
                    with_recent=with_recent, with_steps=with_steps, with_memory=with_memory, route_id=route_id
                ),
                pb.StatusResponse,
                self.address,
                STATUS_TIMEOUT_S,
                bounds.STATUS_BYTES_MAX,
            )
        except RelaylineError:
            return None
        tidy(status)
        offset_ns = clock_offset_ns(sent_ns, time.monotonic_ns(), status.now_ns)
        steps = zip(status.step_start_ns, status.step_end_ns, strict=False)
        moved = [(start_ns + offset_ns, end_ns + offset_ns) for start_ns, end_ns in steps]
        known = [(start_ns, end_ns) for start_ns, end_ns in moved if 0 <= start_ns <= end_ns < _U64]
        status.step_start_ns[:] = [start_ns for start_ns, _ in known]
        status.step_end_ns[:] = [end_ns for _, end_ns in known]
        return status

    async def batches(
        self, session_ids: Sequence[int], *, after_step: int = 0, limit: int = 0
    ) -> pb.BatchesResponse | None:
        """Return the remembered batches with any of the sessions, or None without an answer in time.

        An empty list means all of them. Only batches above `after_step` count, and of these the newest `limit` (0: no
        limit). Its own times are moved to this process's clock, by the heartbeat's estimate or by this very call.
        """
        sent_ns = time.monotonic_ns()
        request = pb.BatchesRequest(session_ids=session_ids, after_step=after_step, limit=limit)
        try:
            found: pb.BatchesResponse = await rpc.call(
                self._channel,
                "Batches",
                request,
                pb.BatchesResponse,
                self.address,
                STATUS_TIMEOUT_S,
                bounds.BATCHES_BYTES_MAX,
            )
        except RelaylineError:
            return None
        received_ns = time.monotonic_ns()
        best = self.clock.best(received_ns)
        offset_ns = best[0] if best is not None else clock_offset_ns(sent_ns, received_ns, found.now_ns)
        for batch in found.batches:
            batch.start_ns = max(0, batch.start_ns + offset_ns)
            batch.taken_ns = max(0, batch.taken_ns + offset_ns) if batch.taken_ns else 0
            batch.close_reason = printable(batch.close_reason, bounds.PEER_NAME_CHARS_MAX)
        return found

    async def logs(self, limit: int) -> list[LogLine] | None:
        """Return the latest lines of the stage's log, oldest first; None without an answer or from an older version."""
        request = pb.LogsRequest(limit=limit)
        try:
            found: pb.LogsResponse = await rpc.call(
                self._channel, "Logs", request, pb.LogsResponse, self.address, STATUS_TIMEOUT_S, bounds.LOGS_BYTES_MAX
            )
        except RelaylineError:
            return None
        return [
            LogLine(line.unix_ms, printable(line.level, 16), printable(line.text, bounds.LOG_LINE_CHARS_MAX))
            for line in found.lines[-limit:]
        ]

    async def beat(self, beat: pb.BeatRequest) -> RoundTrip | None:
        """Send the stage its clock offset and ask for its time; None if there is no answer in time."""
        sent_ns = time.monotonic_ns()
        try:
            answer: pb.BeatResponse = await rpc.call(
                self._channel, "Beat", beat, pb.BeatResponse, self.address, STATUS_TIMEOUT_S
            )
        except RelaylineError:
            return None
        return RoundTrip(sent_ns, time.monotonic_ns(), answer.now_ns)

    async def set_telemetry(self, wanted: pb.SetTelemetryRequest) -> pb.SetTelemetryResponse | None:
        """Set how much the stage traces (UNSPECIFIED: no change); returns its settings, None without an answer."""
        try:
            settings: pb.SetTelemetryResponse = await rpc.call(
                self._channel, "SetTelemetry", wanted, pb.SetTelemetryResponse, self.address, STATUS_TIMEOUT_S
            )
        except RelaylineError:
            return None
        return settings

    async def listen(
        self,
        request: pb.ReturnRequest,
        on_message: Callable[[pb.ReturnResponse], None],
        on_lost: Callable[[RelaylineError], None],
        on_heard: Callable[[], None] = lambda: None,
        shown_pass: str = "",
    ) -> None:
        """Subscribe to samples and faults, and watch the stage; returns once nothing can be missed any more.

        `on_lost` is called when the stream ends or the stage sends no heartbeat, `on_heard` when it does.
        """
        stream = self._channel.unary_stream(
            rpc.method("Return"),
            request_serializer=rpc.serialize,
            response_deserializer=None,  # grpc.aio ends a stream in silence where a deserializer fails
        )
        call = stream(request)
        try:
            async with asyncio.timeout(bounds.HANDSHAKE_TIMEOUT_S):
                first = await call.read()
        except grpc.aio.AioRpcError as error:
            raise rpc.typed(error, self.address) from error
        except TimeoutError as error:
            raise StageLostError(f"{self.address} did not open its return stream") from error
        if not self.returns.read(first).subscribed:
            raise ProtocolError(f"{self.address} opened its return stream with something else")
        self._reader = asyncio.create_task(self._read(call, on_message, on_lost))
        route = (request.route_id, request.epoch)
        who = f"stage at {self.address}"
        self._watch = Watch(
            self.address, route, on_lost, self._security, shown_pass=shown_pass, who=who, on_heard=on_heard
        )

    async def _read(
        self,
        call: grpc.aio.UnaryStreamCall[pb.ReturnRequest, bytes],
        on_message: Callable[[pb.ReturnResponse], None],
        on_lost: Callable[[RelaylineError], None],
    ) -> None:
        error: RelaylineError = StageLostError(f"stage at {self.address} closed its return stream")
        try:
            while isinstance(message := await call.read(), bytes):
                on_message(self.returns.read(message))
        except grpc.aio.AioRpcError as failure:
            error = rpc.typed(failure, f"stage at {self.address}")
        except ProtocolError as failure:
            error = failure
        except Exception as failure:  # a bug of ours: without a word, every stream would wait for ever
            log.exception("taking an answer of %s failed", self.address)
            error = InternalError(f"taking an answer of {self.address} failed: {failure}")
        on_lost(error)

    async def close(self) -> None:
        """Close everything towards this stage."""
        if self._reader is not None:
            await end_task(self._reader)
        if self._watch is not None:
            await self._watch.close()
        await self._channel.close()
