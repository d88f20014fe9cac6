"""The sessions of a pipeline, and the number of readers of each. Pure.

Identical deterministic requests may share one session: the later one joins the running session, and the session ends
early only when its last reader has left. Two requests are identical when they must produce the same tokens: same
prompt, same limits, greedy or the same seed and filters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.sessions.session import Session

AUDIENCE_MAX = 1_024  # readers of one session; the next identical request starts a new session


def sharing_key(request: GenerationRequest) -> Hashable:
    """Return a key that is equal for two requests only if their answers and their prediction counts are equal."""
    sampling = request.sampling
    if sampling.temperature == 0:
        sampling = dataclasses.replace(sampling, seed=0, top_k=0, top_p=1.0, min_p=0.0)
    return dataclasses.replace(request, request_id="", sampling=sampling)


@dataclasses.dataclass(slots=True, eq=False)
class _Read:
    session: Session
    key: Hashable
    n_readers: int = 1


class Readers:
    """The sessions of one pipeline that have readers. Bounded by admission."""

    def __init__(self) -> None:
        self._by_id: dict[int, _Read] = {}
        self._by_key: dict[Hashable, _Read] = {}
        self.n_joined = 0  # readers that joined a session of another

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter([read.session for read in self._by_id.values()])

    def get(self, session_id: int) -> Session | None:
        """Return a session that has readers."""
        read = self._by_id.get(session_id)
        return read.session if read is not None else None

    def join(self, key: Hashable) -> Session | None:
        """Count one more reader of the session with this key; None if none has room for it."""
        read = self._by_key.get(key)
        if read is None or read.n_readers >= AUDIENCE_MAX:
            return None
        read.n_readers += 1
        self.n_joined += 1
        return read.session

    def add(self, session: Session, key: Hashable) -> None:
        """Add a session with its first reader. Identical requests join it from now on."""
        self._by_id[session.session_id] = self._by_key[key] = _Read(session, key)

    def leave(self, session_id: int) -> Session | None:
        """Remove one reader. Returns the session if that was the last one; the caller then ends it."""
        read = self._by_id.get(session_id)
        if read is None:
            return None
        read.n_readers -= 1
        return None if read.n_readers else read.session

    def end(self, session_id: int) -> None:
        """Forget a session that is over."""
        read = self._by_id.pop(session_id, None)
        if read is not None and self._by_key.get(read.key) is read:
            del self._by_key[read.key]
