"""A planner with one plan, and short names for the calls of schedulers; shared by their tests."""

from __future__ import annotations

from typing import Any

from relayline.coordinator.schedule.groups import GroupPlan, GroupPlanner
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag


class Fixed(GroupPlanner):
    """A planner with one plan."""

    def __init__(
        self, n_groups: int = 2, group_rows: int = 2, flights: int = 1, chunk_rows: int = 8, ride_rows: int = 0,
        *, is_per_lane: bool = False, hold_max_ns: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__([StageCost(CostCurve([(1, 1e6)]), CostCurve([(1, 1e6)]), 64, is_per_lane=is_per_lane)])
        self._only = GroupPlan(
            n_groups, group_rows, 0.0, flights, chunk_rows, ride_rows, hold_max_ns=hold_max_ns
        )  # fmt: skip

    def plan(self, n_streams: int, **_: Any) -> GroupPlan:
        return self._only


def new_session(session_id: int, n_prompt: int = 4, max_tokens: int = 1_000) -> Session:
    request = GenerationRequest(str(session_id), tuple(range(n_prompt)), max_tokens, SamplingParams())
    return Session(session_id, request, lambda _: False)


def row(session_id: int, position: int = 10) -> OutFrame:
    return OutFrame(new_session(session_id), position, (1,), Flag.WANTS_SAMPLE)


def ids(envelopes: list[list[OutFrame]]) -> list[list[int]]:
    return [[frame.session.session_id for frame in envelope] for envelope in envelopes]


def start(scheduler: Scheduler, session: Session) -> None:
    scheduler.control(session.start())
    scheduler.prompt(session)


def answer(scheduler: Scheduler, envelope: list[OutFrame], now_ns: int = 0) -> None:
    for frame in envelope:
        if frame.tokens:
            scheduler.answered(frame.session.session_id, frame.position + len(frame.tokens), now_ns)
