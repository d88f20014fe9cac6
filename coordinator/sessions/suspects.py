"""Finds the request that crashes the pipeline again and again, among those that ran at the same time. Pure.

Every epoch replays the sessions that ran when the last one ended. A request whose rows crash a stage would crash it at
each replay. So losses are counted for each session that ran. The count starts again when the session gets a token, or
when many more rows of its prompt are read than at any earlier loss. A session with LOSSES_ALONE losses is a *suspect*.
Suspects are replayed one at a time. Innocent sessions only see a pause. A session that crashes the pipeline alone, too,
ends with an error.

A loss counts only if a process may have failed because of its work: a stage was started again since, or reported a bug
of ours. Broken connections between living processes never count, and neither does a stage that ended in order or whose
credential was revoked.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from relayline.coordinator.sessions.session import Session
from relayline.wire.common.errors import (
    InternalError,
    NotReadyError,
    RelaylineError,
    StageLostError,
    UnauthenticatedError,
)

LOSSES_ALONE = 2  # times that it was accused without a token of it in between, from which on it is tried alone
LOSSES_MAX = 3  # and at which it ends with an error
FURTHER_ROWS = 256  # further than ever, as good as a token; so a prompt has as many tries at most as it has of these


def crashed_too_often(error: RelaylineError) -> InternalError:
    """Return what to tell a request that is not tried again; `error` is how the pipeline was lost the last time."""
    why = f"stages failed {LOSSES_MAX} times while this request ran without a new token"
    return InternalError(f"{why}; it is not tried again. Last failure: {error.message}")


class Suspects:
    """Counts losses; says who starts when."""

    def __init__(self) -> None:
        self._losses: dict[int, int] = {}  # session id -> times accused since its last token, or since it got further
        self._passed: dict[int, int] = {}  # session id -> most rows of it that have passed all stages before its token
        self._then: dict[int, tuple[int, int]] = {}  # at its last loss: who read for it, and how far that one was
        self._line: collections.deque[Session] = collections.deque()  # suspects that have not been started
        self._tried: Session | None = None
        self._instances: tuple[str, ...] = ()  # of the stages of the latest epoch
        self._paused: list[Session] = []  # sessions that had been started in the epoch when it was lost
        self._paused_by: RelaylineError = StageLostError("")

    def lost(self, running: Iterable[Session], error: RelaylineError) -> None:
        """Note that an epoch was lost while these sessions had lanes."""
        self._paused, self._paused_by = self.paused(running), error

    def guilty(self, running: Mapping[int, Session], instances: tuple[str, ...]) -> list[tuple[Session, InternalError]]:
        """Take the instance ids of all stages at a new epoch. Returns the sessions to give up, each with its error."""
        before, self._instances = self._instances, instances
        paused = [session for session in self._paused if session.session_id in running]
        self._paused, error = [], self._paused_by
        is_on_purpose = isinstance(error, NotReadyError | UnauthenticatedError)
        if is_on_purpose or (instances == before and not isinstance(error, InternalError)):
            return []
        return [(session, crashed_too_often(error)) for session in self.accuse(paused)]

    def paused(self, running: Iterable[Session]) -> list[Session]:
        """Return the sessions that had been started in a lost epoch, of these that had lanes."""
        in_line = {session.session_id for session in self._line}
        self._line.clear()
        self._tried = None
        return [session for session in running if session.session_id not in in_line]

    def accuse(self, sessions: Iterable[Session]) -> list[Session]:
        """These were running when a stage failed. Returns those to give up."""
        guilty: list[Session] = []
        for session in sessions:
            self._count(session)
            if self._losses[session.session_id] >= LOSSES_MAX:
                guilty.append(session)
        return guilty

    def starting(self, running: Iterable[Session]) -> list[Session]:
        """A new epoch begins. Returns the sessions to start now; `cleared` reports the others."""
        self._line.clear()
        self._tried = None
        now: list[Session] = []
        for session in running:
            (self._line if self._is_suspect(session) else now).append(session)
        return now + self._next()

    def joining(self, session: Session) -> list[Session]:
        """A session has got a lane during the epoch. Returns it if it starts now; else `cleared` reports when."""
        if not self._is_suspect(session):
            return [session]
        self._line.append(session)
        return [] if self._tried else self._next()

    def trusted(self, sessions: Iterable[Session]) -> list[Session]:
        """Return those that may resume from the stages' caches: a session accused twice in a row reads everything."""
        return [session for session in sessions if self._losses.get(session.session_id, 0) <= 1]

    def cleared(self, session: Session) -> list[Session]:
        """The session has got a token, or has ended. Returns the sessions to start now."""
        self._passed.pop(session.session_id, None)
        if not self._losses:
            return []
        self._forget(session.session_id)
        if session in self._line:  # its client has left
            self._line.remove(session)
        return self.gave_way(session)

    def passed(self, session_id: int, n_rows: int) -> list[Session]:
        """So many rows of a running session have passed all stages. Returns the sessions to start now."""
        self._passed[session_id] = max(n_rows, self._passed.get(session_id, 0))
        if session_id not in self._losses or not self._is_further(session_id, session_id):
            return []
        self._forget(session_id)
        return self.gave_way(self._tried) if self._tried and self._tried.session_id == session_id else []

    def gave_way(self, session: Session) -> list[Session]:
        """The session waits for a lane again before anything is known of it. Returns the sessions to start now."""
        return self._next() if session is self._tried else []

    def _count(self, session: Session) -> None:
        """Count a loss; the first again where another session has read on for it, which it was to copy from."""
        session_id, reader_id = session.session_id, session.reader.session_id
        if reader_id != session_id and session_id in self._losses and self._is_further(session_id, reader_id):
            self._forget(session_id)
        self._losses[session_id] = self._losses.get(session_id, 0) + 1
        self._then[session_id] = (reader_id, self._passed.get(reader_id, 0))

    def _is_further(self, session_id: int, reader_id: int) -> bool:
        then_id, n_then = self._then[session_id]
        return self._passed.get(reader_id, 0) >= (n_then if then_id == reader_id else 0) + FURTHER_ROWS

    def _forget(self, session_id: int) -> None:
        self._losses.pop(session_id, None)
        self._then.pop(session_id, None)

    def _is_suspect(self, session: Session) -> bool:
        return self._losses.get(session.session_id, 0) >= LOSSES_ALONE

    def _next(self) -> list[Session]:
        self._tried = self._line.popleft() if self._line else None
        return [self._tried] if self._tried else []
