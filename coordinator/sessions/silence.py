"""Finds sessions whose frames or tokens were lost while all links stand. Pure: facts and times are arguments.

Messages are numbered and carry checksums, so the next message on a link reveals an altered or lost one. If there is no
next message, or a stage lost a frame, the session would wait forever. The duration of a step proves nothing, since a
prompt on a slow host takes minutes. So after some silence the coordinator asks the stages. A frame in a queue or in the
running step is only slow. A frame at no stage and on no link is lost. A step that never ends is noticed by its own
stage (stage/steps/watchdog.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

LOOK_EVERY_S = 1.0
SILENT_S = 10.0  # without an answer, before the stages are asked; much longer than most answers take
LOOKS_SURE = 3  # times in a row that no stage has anything of a session: stages answer one after the other
TRANSIT_MAX_S = 60.0  # a message that has left and not come, while nothing else moves on its link either, is lost

UnderWay = Mapping[int, tuple[int, int]]
"""Session id -> (end of its first frame under way, frames under way). A changed value is progress."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One stage's counts of messages on the route since the epoch began, and the sessions that it has frames of."""

    envelopes_in: int
    envelopes_out: int
    returned: int
    received: int  # return messages of it that have come here
    is_busy: bool  # it has results that it has not sent yet
    session_ids: frozenset[int]


class Silence:
    """The sessions of one epoch."""

    def __init__(self) -> None:
        self._since_ns: dict[int, tuple[tuple[int, int], int]] = {}  # session id -> (its UnderWay value, since when)
        self._looks: dict[int, int] = {}  # session id -> looks in a row in which no stage had a frame of it
        self._left: list[int] = []  # messages sent on each link, at the last look
        self._late: dict[int, tuple[int, int]] = {}  # link -> (messages arrived while more were sent, since when)

    def silent(self, under_way: UnderWay, now_ns: int) -> set[int]:
        """Take the current waits. Returns the sessions that have waited for the same token for SILENT_S."""
        self._since_ns = {
            session_id: known
            if (known := self._since_ns.get(session_id)) is not None and known[0] == waits_for
            else (waits_for, now_ns)
            for session_id, waits_for in under_way.items()
        }
        found = {key for key, (_, since_ns) in self._since_ns.items() if now_ns - since_ns >= SILENT_S * 1e9}
        self._looks = {key: n for key, n in self._looks.items() if key in found}
        return found

    def lost(self, silent: set[int], sent: int, works: Sequence[Work]) -> set[int]:
        """Return the silent sessions that are lost. `sent` envelopes have left for stage 0, and none waits to leave.

        A look counts only if everything that was on a link at the last look has arrived since. A session is lost if no
        stage has its frame in more looks in a row than there are links.
        """
        ways, before = _ways(sent, works), self._left
        self._left = [left for left, _ in ways]
        has_come = len(before) == len(ways) and all(came >= left for (_, came), left in zip(ways, before, strict=True))
        if not has_come or any(work.is_busy for work in works):
            return set()
        at_stages = frozenset[int]().union(*(work.session_ids for work in works))
        self._looks = {key: self._looks.get(key, 0) + 1 for key in silent - at_stages}
        n_sure = max(LOOKS_SURE, len(works) + 2)
        found = {key for key, n_looks in self._looks.items() if n_looks >= n_sure}
        for key in found:
            del self._looks[key]
            self._since_ns.pop(key, None)
        return found

    def broken_way(self, sent: int, works: Sequence[Work], now_ns: int) -> int | None:
        """Return the link on which a message has been under way for TRANSIT_MAX_S without any arrival; None: no link.

        Way i < len(works) is into stage i, else it is back from stage i - len(works).
        """
        late: dict[int, tuple[int, int]] = {}
        for way, (left, came) in enumerate(_ways(sent, works)):
            if came < left:
                known = self._late.get(way, (-1, 0))
                late[way] = known if known[0] == came else (came, now_ns)
        self._late = late
        return next((way for way, (_, since_ns) in late.items() if now_ns - since_ns >= TRANSIT_MAX_S * 1e9), None)


def _ways(sent: int, works: Sequence[Work]) -> list[tuple[int, int]]:
    """Return how many messages have left and come: into each stage, then back from each."""
    left = [sent, *(work.envelopes_out for work in works[:-1])]
    into = [(out, work.envelopes_in) for out, work in zip(left, works, strict=True)]
    return into + [(work.returned, work.received) for work in works]
