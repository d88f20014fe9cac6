"""Orders to stages to free their memory and to load again, and their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining.members import OpenMembership
from relayline.wire.common import bounds
from relayline.wire.common.phase import HostState
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

log = logging.getLogger("relayline.coordinator")


class RestListener(Protocol):
    """The receiver of the stages' reports of their sleep."""

    def failed(self, name: str, why: str) -> None:
        """A stage cannot load again."""

    def left(self, name: str) -> None:
        """A stage that holds layers has left."""


class Resting:
    """The rest of one pipeline's stages, as it is ordered. Event loop only."""

    def __init__(
        self,
        roster: JoinedRoster,
        members: Mapping[int, OpenMembership],
        say: Callable[[OpenMembership, pb.JoinResponse], Awaitable[None]],
    ) -> None:
        """`members` by place; `say` sends a member a further order."""
        self._roster, self._members, self._say = roster, members, say
        self._order = pb.Rest()  # the latest one
        self._awaited: set[int] = set()  # places whose members were told to sleep and have not answered
        self.done = asyncio.Event()
        """Set while no stage is about to free its memory."""
        self.done.set()
        self.listener: RestListener | None = None

    def tell(self, *, is_asleep: bool, route_id: int) -> Coroutine[Any, Any, None]:
        """Have every stage that holds layers free its memory, or load again; also those that join later.

        Returns what sends the orders, for a task. `done` is right from now on.
        """
        self._order = pb.Rest(is_asleep=is_asleep, route_id=route_id)
        members = [member for at in self._roster.holders if (member := self._members.get(at)) is not None]
        for member in members if is_asleep else ():
            if member.sleeps:
                # From now on nothing can be sent there. A stage that goes on serving says so again.
                self._roster.progress(member.ticket, HostState.SLEEPING, 0, 0)
                self._awaited.add(member.index)
                self.done.clear()
            else:
                self._say_that_it_stays(member)
        return self._send([member for member in members if member.sleeps], pb.JoinResponse(rest=self._order))

    async def _send(self, members: Sequence[OpenMembership], order: pb.JoinResponse) -> None:
        await asyncio.gather(*(self._say(member, order) for member in members))

    def first(self, member: OpenMembership, order: pb.JoinResponse) -> pb.JoinResponse:
        """Return the first order of a member that holds layers, with whether it is to load them."""
        if self._order.is_asleep and member.sleeps:
            order.rest.CopyFrom(self._order)
        elif self._order.is_asleep:
            self._say_that_it_stays(member)
        return order

    def _say_that_it_stays(self, member: OpenMembership) -> None:
        name = self._roster.places[member.index].name
        log.warning("%s stays loaded while the pipeline sleeps: its version knows no sleep", name)

    # --- answers ------------------------------------------------------------------------------------------------------

    def sleeps(self, member: OpenMembership, report: pb.StageSleeping) -> None:
        """A member has freed its memory, or could not load."""
        self._roster.progress(member.ticket, HostState.SLEEPING, 0, 0)
        self.answered(member.index)
        if report.HasField("failure") and self.listener is not None:
            why = report.failure.message[: bounds.ERROR_TEXT_BYTES_MAX]
            self.listener.failed(self._roster.places[member.index].name, why)

    def answered(self, index: int) -> None:
        """The member at a place sleeps, or goes on serving."""
        self._awaited.discard(index)
        if not self._awaited:
            self.done.set()

    def left(self, index: int) -> None:
        """A membership has ended."""
        self.answered(index)
        if self.listener is not None and index in self._roster.holders:
            self.listener.left(self._roster.places[index].name)
