"""A client of the cluster, which knows the answer that it must get."""

from __future__ import annotations

from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.deploy.testing.cluster.clock import Violation
from relayline.deploy.testing.cluster.model import Truth
from relayline.wire.common.errors import RelaylineError


class Client:
    """Reads one stream and checks it."""

    def __init__(self, request: GenerationRequest, truth: Truth, leaves_after: int | None) -> None:
        """`leaves_after`: number of tokens after which the client leaves; 0: at once; None: it stays to the end."""
        self.request, self.leaves_after = request, leaves_after
        self.session_id: int | None = None
        self.came_ns, self.came_while_lost = 0, False
        self.may_be_refused = False  # whether a stage that it waits for was lost before it came
        self.n_tokens = 0
        self.end = ""  # a finish reason, or an error's label
        self.has_left = False
        self._truth = truth

    def put(self, event: TokenEvent | RelaylineError) -> None:
        """Take an event from the session."""
        name = self.request.request_id
        if self.end:
            raise Violation(f"request {name} gets something after its end ({self.end})")
        if isinstance(event, RelaylineError):
            self.end = event.label
            return
        self.n_tokens += 1
        if event.token != (expected := self._truth.feed_back()):
            raise Violation(
                f"token {self.n_tokens} of request {name} is {event.token}, not {expected}: lost or doubled"
            )
        self.end = event.finish_reason or ""
        if self.end and self.n_tokens != self.request.max_tokens:
            raise Violation(f"request {name} ends after {self.n_tokens} tokens of {self.request.max_tokens}")

    @property
    def is_done(self) -> bool:
        """Whether it has got all that it must get."""
        return bool(self.end) or self.has_left
