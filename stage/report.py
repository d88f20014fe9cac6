"""A stage's reports about itself while it serves: its description, its live counters, its gauges. Event loop only."""

from __future__ import annotations

import time

from relayline.stage.epochs import Epochs
from relayline.stage.intake import Intake
from relayline.stage.observe.metrics import Gauges, is_private
from relayline.stage.observe.stats import StageStats
from relayline.stage.routes import Route
from relayline.stage.steps.lane_states import LaneStates
from relayline.stage.steps.runner import Runner
from relayline.wire.links.security import host_of
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


class StageReport:
    """Combines the figures of one engine's parts."""

    def __init__(self, epochs: Epochs, intake: Intake, states: LaneStates, stats: StageStats) -> None:
        self._epochs, self._intake, self._states, self._stats = epochs, intake, states, stats
        self._started_ns = time.monotonic_ns()
        self.runner: Runner  # set by StageService.attach, before the server starts

    def describe(self) -> pb.DescribeResponse:
        """Return the answer to Describe."""
        message = self._epochs.facts.describe()
        self._states.tell(message)
        return message

    def status(self, request: pb.StatusRequest) -> pb.StatusResponse:
        """Return the answer to Status."""
        facts, held = self._epochs.facts, self.runner.snapshot
        message = self._stats.message(
            with_recent=request.with_recent, with_steps=request.with_steps, with_memory=request.with_memory
        )
        message.stage_index = facts.artifact.stage_index
        message.instance_id = facts.instance_id
        message.uptime_ns = time.monotonic_ns() - self._started_ns
        message.lanes_used, message.lanes_kept = held.lanes_used, held.lanes_kept
        message.lanes_total = held.lanes_total
        message.queued_rows = held.queued_rows
        message.kv_per_lane = facts.config.engine.layout_used == "per-lane"
        message.kernels = facts.kernels
        message.place.CopyFrom(facts.place)
        message.runs_ahead = facts.ahead_rows > 0
        message.metrics_address = address = self._stats.metrics_address
        message.metrics_tls = bool(address) and is_private(host_of(address), facts.config.security)
        facts.curves.tell(message)
        self._states.count(message)
        if (route := self._epochs.routes.get(request.route_id)) is not None:
            message.route.CopyFrom(self._work_of(route))
        message.now_ns = time.monotonic_ns()
        return message

    def _work_of(self, route: Route) -> pb.RouteWork:
        return pb.RouteWork(
            epoch=route.epoch,
            envelopes_in=route.envelopes_in,
            envelopes_out=route.link.envelopes_sent if route.link is not None else 0,
            returned=route.n_returned,
            is_sending=route.is_reporting or self._intake.is_full,
            session_ids=self._intake.session_ids(route.route_id),
        )

    def gauges(self) -> Gauges:
        """Return this stage's present state, for its metrics."""
        held = self.runner.snapshot
        tier = self._states.figures()
        self._stats.tier_lookups = {"hit": tier.n_hits, "miss": tier.n_misses}
        links = [route.link.figures() for route in self._epochs.routes.values() if route.link is not None]
        return Gauges(
            queued_rows=held.queued_rows,
            queued_frames=held.queued_frames,
            lanes_used=held.lanes_used,
            lanes_kept=held.lanes_kept,
            lanes_total=held.lanes_total,
            in_flight_bytes=sum(figures["in_flight_bytes"] for figures in links),
            window_bytes=sum(figures["window_bytes"] for figures in links),
            tier=tier,
        )
