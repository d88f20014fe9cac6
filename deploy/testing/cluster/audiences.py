"""The clients of a coordinator, the sessions that they listen to, and the events that they get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relayline.coordinator.sessions.generation import TokenEvent
from relayline.coordinator.sessions.streams import Audience
from relayline.deploy.testing.cluster.client import Client
from relayline.wire.common.errors import RelaylineError


class Audiences:
    """The listeners of one coordinator, as its pipeline keeps them."""

    def __init__(self, leave: Callable[[Client], None], late_ns: int) -> None:
        """`leave(client)` is called when a client has all that it stays for.

        late_ns: how long a stage may have been silent before a client is said to have come after its loss.
        """
        self._leave, self._late_ns = leave, late_ns
        self.by_session: dict[int, Audience] = {}

    def join(self, session_id: int, client: Client, *, is_new: bool) -> None:
        """A client listens to a session, which begins with it where that is new."""
        if is_new:
            self.by_session[session_id] = Audience(session_id)
        self.by_session[session_id].join(client)

    def left(self, session_id: int, client: Client) -> None:
        """A client listens no more."""
        audience = self.by_session.get(session_id)
        if audience is not None:
            audience.streams.remove(client)
            if not audience.streams:
                del self.by_session[session_id]

    def tell(self, session_id: int, event: TokenEvent | RelaylineError, silent_ns: Sequence[int]) -> None:
        """Tell a session's clients something. silent_ns: since when the stages that give no answer have given none."""
        audience = self.by_session.get(session_id)
        if audience is None:
            return
        readers = list(audience.streams)
        audience.put(event)
        if isinstance(event, RelaylineError) or event.finish_reason is not None:
            del self.by_session[session_id]
        for reader in readers:
            assert isinstance(reader, Client)
            is_later = any(reader.came_ns >= since_ns - self._late_ns for since_ns in silent_ns)
            reader.may_be_refused = reader.came_while_lost or is_later
            if reader.leaves_after and reader.n_tokens == reader.leaves_after:
                self._leave(reader)
