"""What one step gives each route: samples, progress and faults for its coordinator, an envelope for the next stage."""

from __future__ import annotations

import time
from collections.abc import Mapping

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.step_types import RouteOutput, RouteWiring, StepResult
from relayline.wire.common import bounds
from relayline.wire.common.errors import PositionGapError, RelaylineError, SessionError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


class StepOutputs:
    """The outputs of one step, each begun when there is something for its route. Decode thread only."""

    def __init__(self, routes: Mapping[int, RouteWiring], broken: set[tuple[int, int]], stage_index: int) -> None:
        """`broken`: keys of sessions that have a fault already; `fault` adds to them."""
        self.routes = routes
        self._broken, self._stage_index = broken, stage_index
        self._by_route: dict[int, RouteOutput] = {}

    def of(self, route_id: int) -> RouteOutput:
        """Return the output for a route whose epoch stands."""
        found = self._by_route.get(route_id)
        if found is None:
            found = self._by_route[route_id] = RouteOutput(route_id, self.routes[route_id].epoch)
        return found

    def fault(self, frame: QueuedFrame, error: RelaylineError) -> None:
        """Report a session's error. What only follows from an earlier one of the session is not reported."""
        broken = self._broken
        if frame.session_key in broken and isinstance(error, PositionGapError | SessionError):
            return
        if len(broken) < bounds.SESSIONS_PER_LINK_MAX:
            broken.add(frame.session_key)
        self.of(frame.route_id).faults.append(
            pb.SessionFault(
                session_id=frame.session_id,
                stage_index=self._stage_index,
                position=frame.position,
                label=error.label,
                message=error.message,
                retryable=error.retryable,
            )
        )

    def passed(self, frame: QueuedFrame) -> None:
        """Say that the frame has been dealt with, where no sample behind its last row does."""
        passed = pb.Progress(session_id=frame.session_id, position=frame.position + frame.n_rows)
        self.of(frame.route_id).progress.append(passed)

    def finish(self, result: StepResult, since_ns: int) -> None:
        """Put the outputs into the result. since_ns: when the first one was begun."""
        now_ns = time.monotonic_ns()
        result.encode_ns = now_ns - since_ns
        for output in self._by_route.values():
            output.sent_ns = output.sent_ns or now_ns
        result.outputs = list(self._by_route.values())
