"""The prompts that are being read, and whose rows go next. Pure.

The prompt that brings a first token soonest goes first, which keeps time to first token short for most; every
OLDEST_EVERY-th turn the oldest does, so that a long prompt among many short ones still advances.

A prompt may follow another that begins alike (`Session.follow`): none of its rows go before the other's have, and then
it copies them. Whose rows others wait for is as urgent as the most urgent of them.

All this is among the prompts of the best level of tenants there is: those of lower ones wait for them. But every
LOWER_EVERY-th turn is one among all levels but the batches', or a lower one might hold its lane for ever and never be
read. Prompts of batches are read while there are no others.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import ValuesView

from relayline.coordinator.schedule.groups import pressure_of
from relayline.coordinator.schedule.tiles import StepRows, TileRule, n_of_whole_tiles
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.coordinator.sessions.tenants import Level

BURST_PRESSURE = 2  # prompts per running stream that make a crowd; also their weight until they are read
OLDEST_EVERY, LOWER_EVERY = 4, 32  # turns; the second is a multiple of the first
_NO_RULE = TileRule()


class PromptLine:
    """Sessions with prompt rows to send, in the order in which they came."""

    def __init__(self) -> None:
        self._prompts: collections.OrderedDict[int, Session] = collections.OrderedDict()
        # Prompts that once waited when there were more of them than running streams; read ones may be among them.
        self._crowding: set[int] = set()
        self._n_turns = 0
        self._has_levels = False  # some may not be of the usual one

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def sessions(self) -> ValuesView[Session]:
        """Whose prompts they are."""
        return self._prompts.values()

    @property
    def n_rows(self) -> int:
        """Rows that have not left."""
        return sum(session.prefill_left for session in self.sessions)

    @property
    def is_crowd(self) -> bool:
        """Whether prompts wait that did so when there were BURST_PRESSURE for every running stream."""
        return not self._crowding.isdisjoint(self._prompts)

    def add(self, session: Session, n_decoding: int) -> None:
        """Release a session's rows until none are left, with n_decoding running streams."""
        self._has_levels = session.request.tenant.level is not Level.NORMAL or (
            self._has_levels and bool(self._prompts)
        )
        self._prompts[session.session_id] = session
        self._crowding &= self._prompts.keys()
        if pressure_of(max(1, n_decoding), len(self)) >= BURST_PRESSURE:
            self._crowding |= self._prompts.keys()

    def forget(self, session_id: int) -> None:
        """Nothing more of the session goes."""
        self._prompts.pop(session_id, None)

    def orphans(self) -> list[Session]:
        """Return those whose leader is gone: they are to be started again."""
        return [session for session in self.sessions if session.is_orphan] if self._prompts else []

    def catch_up(self) -> list[OutFrame]:
        """Continue the sessions whose leader has sent the rows that they copy. Returns the frames that copy it."""
        return [frame for session in self.sessions for frame in session.catch_up()] if self._prompts else []

    def upcoming(self) -> Session:
        """Return the session whose rows go next, or could if it did not wait for others'."""
        return self._next(self._n_turns + 1) or next(iter(self.sessions))

    def next_chunks(self, rows_max: int, rule: TileRule = _NO_RULE, n_decode: int = 0) -> list[OutFrame]:
        """Return chunks that together have at most rows_max rows, one of a session, for a step with n_decode others.

        The last may have more, see `Session.next_chunk`.
        """
        frames: list[OutFrame] = []
        left, step = rows_max, StepRows(n_decode)
        while left > 0:
            session = self._next(self._n_turns + 1)
            room_rows = rule.room(session, left, step) if session is not None else 0
            if session is None or not room_rows:
                break
            is_whole = n_of_whole_tiles(session) > 0
            self._n_turns += 1
            chunk = session.next_chunk(room_rows)
            if chunk is not None:
                frames.append(chunk)
                left -= len(chunk.tokens)
                step.add(len(chunk.tokens), is_whole=is_whole)
            if session.prefill_left:
                break
            del self._prompts[session.session_id]
        return frames

    def all_chunks(self, rows_max: int) -> list[list[OutFrame]]:
        """Return all that can go, a list for each session, in chunks of at most rows_max rows."""
        chunks: list[list[OutFrame]] = []
        for session in [session for session in self.sessions if session.leader is None]:
            del self._prompts[session.session_id]
            frames = list(iter(functools.partial(session.next_chunk, rows_max), None))
            if frames:
                chunks.append(frames)
        return chunks

    def _next(self, turn: int) -> Session | None:
        ready = [session for session in self.sessions if session.leader is None]
        if self._has_levels and len(ready) > 1:
            ready = self._of_best_level(ready, Level.HIGH if turn % LOWER_EVERY else Level.LOW)
        if not ready or turn % OLDEST_EVERY == 0:
            return ready[0] if ready else None
        n_before_token = {session.session_id: session.prefill_left for session in ready}
        for follower in self.sessions:
            if (leader := follower.leader) is not None and leader.session_id in n_before_token:
                n_shared = follower.n_copied - leader.n_sent
                if n_shared > 0:
                    own = n_before_token[leader.session_id]
                    n_before_token[leader.session_id] = min(own, n_shared + follower.prefill_left)
        return min(ready, key=lambda session: n_before_token[session.session_id])

    def _of_best_level(self, ready: list[Session], worst: Level) -> list[Session]:
        """Return those that are of the best level or of one up to `worst`, or whose rows such a session waits for."""
        levels = {session.session_id: session.request.tenant.level for session in ready}
        for follower in self.sessions:
            if follower.leader is not None and (reader := follower.reader.session_id) in levels:
                levels[reader] = min(levels[reader], follower.request.tenant.level)
        worst = max(worst, min(levels.values()))
        return [session for session in ready if levels[session.session_id] <= worst]
