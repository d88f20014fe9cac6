"""A survey: stages join before there is a plan, and each measures its host. Then a plan is made, and they join again.

Every stage gets an order without an artifact (proto: Survey). It measures hollow slices of the model and its link,
reports the results, and waits. The memberships end when the survey is closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence

from relayline.coordinator.engine.membership import Introduction
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining.config import JoinConfig, engine_message
from relayline.coordinator.joining.members import Context, MemberService, OpenMembership
from relayline.coordinator.planner.instance import Link
from relayline.coordinator.planner.speed import Sample
from relayline.wire.common import bounds
from relayline.wire.common.errors import NotReadyError, ProtocolError, RelaylineError
from relayline.wire.common.texts import named_stage
from relayline.wire.links import rpc
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb_wire

log = logging.getLogger("relayline.coordinator")

LINK_BYTES = 16 << 20  # that a stage takes at most, to measure its link
PIECE_BYTES = 256 << 10  # of it; a slow link brings some within a second
LINK_TURN_S = 5.0  # after which the next host has its turn
POINTS_MAX = 256  # of a curve; ladders have some thirty
STEP_NS_MAX = 3_600 * 10**9


@dataclasses.dataclass(frozen=True, slots=True)
class HostReport:
    """A stage's measurement of its host."""

    who: Introduction
    samples: tuple[Sample, ...] = ()
    """Costs of the slices; empty where none were asked for, or they could not be measured."""
    in_service: float = 0.0
    """How long a step usually takes, as a multiple of the quickest; 0.0: not measured."""
    is_doubtful: bool = False
    """Whether the host was too busy with other work to tell: good for one plan, and measured again for the next."""
    link: Link | None = None
    """To the coordinator; None: not measured."""
    problem: str = ""
    """Why the slices could not be measured."""
    took_ns: int = 0
    is_relayed: bool = False
    """Whether the link is the way through the relay."""


class SurveyService(MemberService):
    """The calls of relayline.v1.PipelineService while there is no plan."""

    def __init__(
        self,
        config: JoinConfig,
        roster: JoinedRoster,
        slices: Mapping[str, Sequence[pb.SurveySlice]],
        security: LinkSecurity = PLAINTEXT,
    ) -> None:
        """`slices`: what each stage is to measure, by its name. Those without any are not waited for."""
        super().__init__(config, roster, security)
        self._slices = slices
        self.reports: dict[str, HostReport] = {}
        """By the names of the stages."""
        self._link_turn = asyncio.Lock()  # one host measures its link at a time
        self.is_complete = asyncio.Event()
        """Set once every stage has reported that has something to measure."""

    @property
    def waits_for(self) -> list[str]:
        """The stages that have something to measure and have not reported."""
        return [name for name, slices in self._slices.items() if slices and name not in self.reports]

    def _name_of(self, member: OpenMembership) -> str:
        return self._config.stages[member.index].name

    def _reason_to_end(self) -> RelaylineError:
        return NotReadyError("there is a plan now; joining again")

    def _first_order(self, member: OpenMembership) -> pb.JoinResponse:
        name, place = self._name_of(member), self._roster.place_of(member.ticket)
        who = place.member if place is not None else None
        slices: Sequence[pb.SurveySlice] = self._slices.get(name, ())
        if who is not None and not who.measures:
            # It would take this order for a mistake. So it comes again, and is planned by its own description.
            self._note(name, HostReport(who, problem="its version cannot measure before there is a plan"))
            raise NotReadyError("there is no plan yet")
        return pb.JoinResponse(
            stage_index=member.index,
            stage_count=len(self._config.stages),
            engine=engine_message(self._config.stages[member.index].engine),
            ticket=member.secret,
            beats=member.beats,
            survey=pb.Survey(slices=slices, link_bytes=LINK_BYTES),
        )

    async def _take(self, member: OpenMembership, report: pb.JoinRequest, context: Context) -> bool:
        place, name = self._roster.place_of(member.ticket), self._name_of(member)
        if report.WhichOneof("report") != "measured" or place is None or place.member is None:
            return False
        self._note(name, report_of(place.member, report.measured, self._slices.get(name, ())))
        return True

    def _note(self, name: str, found: HostReport) -> None:
        if found.problem:
            log.warning("%s could not be measured: %s", name, found.problem)
        self.reports[name] = found
        if not self.waits_for:
            self.is_complete.set()

    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Send zeros, to measure the link."""
        try:
            member = self._member_of(request)
            if request.offset >= LINK_BYTES:
                return  # a call that only takes its time
            async with self._link_turn, asyncio.timeout(LINK_TURN_S):
                for offset in range(request.offset, LINK_BYTES, PIECE_BYTES):
                    if self._members.get(member.index) is not member or self._closing.is_set():
                        raise NotReadyError("this membership has ended")
                    size_bytes = min(PIECE_BYTES, LINK_BYTES - offset)
                    await context.write(pb.FetchResponse(offset=offset, data=bytes(size_bytes)))
        except TimeoutError:
            return  # the bytes received so far show how slow the link is
        except RelaylineError as error:
            await rpc.abort(context, error)


def report_of(who: Introduction, found: pb.HostMeasured, slices: Sequence[pb.SurveySlice]) -> HostReport:
    """Read a stage's measurement. Raises ProtocolError for values that cannot be one."""
    link = None
    if found.round_trip_ns and found.bytes_per_s > 0:
        link = Link(found.round_trip_ns, found.bytes_per_s)
    problem = found.failure.message[: bounds.ERROR_TEXT_BYTES_MAX] if found.HasField("failure") else ""
    samples: tuple[Sample, ...] = ()
    if not problem:
        if len(found.slices) != len(slices):
            raise ProtocolError(f"{named_stage(who.name)} measured {len(found.slices)} slices of {len(slices)}")
        samples = tuple(
            Sample(order.layer_bytes, order.head_bytes, _points(who, costs.decode), _points(who, costs.prefill))
            for order, costs in zip(slices, found.slices, strict=True)
        )
    in_service = found.in_service if 0 < found.in_service < float("inf") else 0.0
    return HostReport(who, samples, in_service, found.is_doubtful, link, problem, found.took_ns, found.is_relayed)


def _points(who: Introduction, points: Sequence[pb_wire.CostPoint]) -> tuple[tuple[int, float], ...]:
    found = tuple((point.n_rows, float(point.cost_ns)) for point in points)
    if len(found) > POINTS_MAX or any(
        not 0 < rows <= bounds.ROWS_PER_ENVELOPE_MAX or not 0 < ns < STEP_NS_MAX for rows, ns in found
    ):
        raise ProtocolError(f"{named_stage(who.name)} reports impossible step times")
    return found
