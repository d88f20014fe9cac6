"""Chooses the pipeline that answers a request. Pure: reports and times come in, decisions go out.

The model's replicas are compared by the work that a request would find there and bring along. It finds prompts that are
still to be read, and answers that are being written over the replica's lanes. It brings as much of its own prompt as
that replica has not seen. The unit is one token of a prompt. So a conversation stays with the replica that has its
prefix, until that one is so busy that another is faster even without the prefix.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from relayline.coordinator.gateway.awake import Awake
from relayline.coordinator.gateway.bounds import (
    HELD_MAX,
    OUTSTANDING_MAX,
    PREFIXES_PER_BACKEND_MAX,
    RETRY_AFTER_S,
)
from relayline.coordinator.gateway.peek import BYTES_PER_TOKEN, USUAL_OUTPUT_TOKENS, Asked
from relayline.coordinator.sessions.model_names import without_latest
from relayline.wire.common.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    OverloadedError,
    RelaylineError,
)
from relayline.wire.common.phase import Phase

WRITTEN_COST = 16  # one token of an answer, in tokens of a prompt that is read: a step costs about as much
NAMES_SHOWN = 20  # of the models that are served, in an error
LOST = "the connection to it was lost"


class Health(enum.StrEnum):
    """How a pipeline was last heard."""

    UNKNOWN = "unknown"
    """It has not been asked yet. Of its state in words also: it has never answered."""
    READY = "ready"
    """A request starts there now."""
    PAUSED = "paused"
    """It answers, and would refuse or hold a request: it loads, recovers or drains."""
    DEAD = "dead"
    """It does not answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """A pipeline's report of itself."""

    models: tuple[str, ...]
    is_ready: bool
    n_requests: int = 0
    """Running and waiting there, from any client."""
    n_lanes: int = 1
    started_unix_s: int = 0
    """Its start time: a restarted pipeline has forgotten its prefixes."""
    rests: bool = False
    """Whether a request there waits for its stages to load, because it sleeps or wakes."""
    is_asleep: bool = False
    """Whether its stages hold nothing, and do not load either."""
    phase: str = Phase.LOADING.value
    """Its own word for its state, where a request does not start there."""


@dataclasses.dataclass(slots=True)
class _Request:
    """One request on its way."""

    asked: Asked
    unread_tokens: int  # of its prompt, as far as they are not known there; 0 once its answer has begun


class Backend:
    """One pipeline, as a router knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.health = Health.UNKNOWN
        self._phase = Phase.LOADING.value  # as it was last heard
        self.is_leaving = False  # it gets no more requests, and is gone when those that it has have ended
        self.problem = ""
        self.models: tuple[str, ...] = ()  # stays when it dies: its model is not unknown then
        self.n_lanes = 1
        self.rests = False  # whether a request there waits for its stages to load
        self.is_asleep = False  # and whether they do not load yet
        self.is_loading = False  # because a client asked for that; it may still wait for its place
        self.is_unloading = False  # once its requests have ended, because a client asked for that
        self.has_failed = False  # to load, when a client asked for that last
        self.n_others = 0  # requests there that are not this gateway's, when it was last heard
        self.heard_ns = 0
        self.n_sent = 0  # requests in all
        self.n_retried = 0  # that another replica got after this one failed
        self.n_broken = 0  # whose answers were cut short, because this one was lost
        self._started_unix_s = 0
        self._outstanding: dict[int, _Request] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()  # sent there longest ago first

    @property
    def answers(self) -> bool:
        """Whether it says something, be it that it takes no request now."""
        return self.health in (Health.READY, Health.PAUSED)

    @property
    def n_outstanding(self) -> int:
        """Requests of this gateway that have not ended."""
        return len(self._outstanding)

    @property
    def state(self) -> str:
        """One word for people."""
        if self.is_leaving:
            return Phase.DRAINING.value
        if self.health is Health.READY and self.rests:
            return (Phase.SLEEPING if self.is_asleep else Phase.WAKING).value
        if self.health is Health.DEAD and not self.heard_ns:  # it may start just now
            return Health.UNKNOWN.value
        return self._phase if self.health is Health.PAUSED else self.health.value

    def unread_tokens(self, asked: Asked) -> int:
        """Return how many tokens of the prompt this pipeline has not been sent before."""
        n_known = next((mark.n_bytes for mark in reversed(asked.chain) if mark.hash in self._known), 0)
        return (asked.prompt_bytes - n_known) // BYTES_PER_TOKEN

    @property
    def has_lane(self) -> bool:
        """Whether a request would start there at once, as far as is known."""
        return not self.rests and self.n_outstanding + self.n_others < self.n_lanes

    def work(self) -> float:
        """Return the outstanding work, in prompt tokens."""
        requests = self._outstanding.values()
        n_written = sum(request.asked.output_tokens for request in requests) + self.n_others * USUAL_OUTPUT_TOKENS
        return sum(request.unread_tokens for request in requests) + WRITTEN_COST * n_written / self.n_lanes

    def heard(self, heard: Heard, now_ns: int) -> None:
        """Take a pipeline's report of itself."""
        if heard.started_unix_s != self._started_unix_s:  # a new process, which nobody has told to sleep either
            self._known.clear()
            self.is_unloading = False
        self._started_unix_s = heard.started_unix_s
        self.health = Health.READY if heard.is_ready else Health.PAUSED
        self.models, self.n_lanes, self.problem = heard.models, max(1, heard.n_lanes), ""
        self._phase, self.rests, self.is_asleep = heard.phase, heard.rests, heard.is_asleep
        self.has_failed &= heard.is_asleep
        self.is_unloading &= not heard.is_asleep
        self.n_others = max(0, heard.n_requests - self.n_outstanding)
        self.heard_ns = now_ns

    def slept(self) -> None:
        """It has fallen asleep just now."""
        self.rests = self.is_asleep = True

    def failed(self, problem: str) -> None:
        """It does not answer."""
        self.health, self.problem, self.n_others = Health.DEAD, problem, 0

    def sent(self, key: int, asked: Asked) -> None:
        """A request goes there."""
        self._outstanding[key] = _Request(asked, self.unread_tokens(asked))
        self.n_sent += 1
        for mark in asked.chain:
            self._known[mark.hash] = None
            self._known.move_to_end(mark.hash)
        while len(self._known) > PREFIXES_PER_BACKEND_MAX:
            self._known.popitem(last=False)

    def began(self, key: int) -> None:
        """A request's answer has begun."""
        self._outstanding[key].unread_tokens = 0

    def ended(self, key: int) -> None:
        """A request has ended there in some way."""
        del self._outstanding[key]


class Router:
    """The pipelines behind one address. Their order is that of preference where nothing else decides."""

    def __init__(self, names: Iterable[str], awake_max: int = 0) -> None:
        """`awake_max`: how many pipelines may be awake at once; 0: all."""
        self.awake = Awake(awake_max)
        self.backends: tuple[Backend, ...] = ()
        self._holders: OrderedDict[str, Backend] = OrderedDict()  # of stored responses and of conversations, by id
        for name in names:
            self.add(name)

    def add(self, name: str) -> Backend:
        """Take one more pipeline, as the last one."""
        backend = Backend(name)
        self.backends = (*self.backends, backend)
        return backend

    def leave(self, backend: Backend) -> None:
        """Give a pipeline no more requests."""
        backend.is_leaving = True
        self._holders = OrderedDict(held for held in self._holders.items() if held[1] is not backend)

    def remove(self, backend: Backend) -> None:
        """Forget a pipeline."""
        self.leave(backend)
        self.backends = tuple(each for each in self.backends if each is not backend)

    def arrange(self, names: Sequence[str]) -> None:
        """Bring the pipelines into another order of preference; others than these come last."""
        places = {name: place for place, name in enumerate(names)}
        self.backends = tuple(sorted(self.backends, key=lambda each: places.get(each.name, len(places))))

    @property
    def staying(self) -> tuple[Backend, ...]:
        """The pipelines that may get requests."""
        return tuple(backend for backend in self.backends if not backend.is_leaving)

    def named(self, name: str) -> Backend | None:
        """Return a pipeline by its name."""
        return next((backend for backend in self.staying if backend.name == name), None)

    def models(self) -> dict[str, list[Backend]]:
        """Return the pipelines by the names of the models that they serve."""
        found: dict[str, list[Backend]] = {}
        for backend in self.staying:
            for model in backend.models:
                found.setdefault(model, []).append(backend)
        return found

    def learn(self, id: str, backend: Backend) -> None:
        """Remember which pipeline stores a response, or has a conversation."""
        if backend.is_leaving:
            return
        self._holders[id] = backend
        self._holders.move_to_end(id)
        while len(self._holders) > HELD_MAX:
            self._holders.popitem(last=False)

    def holder(self, id: str) -> Backend | None:
        """Return the pipeline that stores a response, or has a conversation; None if it is unknown."""
        return self._holders.get(id)

    def candidates(self, model: str | None) -> list[Backend]:
        """Return the replicas of a model, dead or alive; without a model those of the first pipeline's.

        Raises ModelNotFoundError, NotReadyError while some pipeline has not been heard that might serve it.
        """
        served = self.models()
        if model is None:
            model = next((name for backend in self.staying for name in backend.models), None)
        elif model not in served and without_latest(model) in served:
            model = without_latest(model)
        elif model not in served and any(not backend.models for backend in self.staying):
            raise NotReadyError(f"model {model[:200]!r}: not every pipeline has been reached yet", RETRY_AFTER_S)
        if model is None:
            raise NotReadyError("no pipeline has been reached yet", RETRY_AFTER_S)
        if model not in served:
            names = ", ".join(list(served)[:NAMES_SHOWN]) + (", ..." if len(served) > NAMES_SHOWN else "")
            raise ModelNotFoundError(f"model: {model[:200]!r} is not served here; use one of {names}", "model")
        return served[model]

    def _replicas(self, asked: Asked) -> list[Backend]:
        """Return the pipelines that can answer a request, dead or alive. Raises as `candidates`, and
        InvalidRequestError for a conversation of another model's pipeline.
        """
        keeper = self.holder(asked.conversation_id)
        if keeper is not None and asked.model is None:
            return [keeper]
        replicas = self.candidates(asked.model)
        if keeper is not None and asked.model is not None and keeper not in replicas:
            raise _other_model(asked.model, keeper)
        holder = keeper or self.holder(asked.previous_id)
        return [holder] if holder in replicas else replicas

    def choose(self, asked: Asked, tried: Collection[Backend] = ()) -> Backend:
        """Return the pipeline that answers a request, other than those `tried`.

        One that sleeps is woken only where the others have no free lane, and where not all pipelines may be awake, only
        if nothing waits for that. Where all replicas are paused one of them is returned: it says best when to come
        back. Raises ModelNotFoundError, InvalidRequestError for a conversation of another model's pipeline,
        OverloadedError where all have as many requests as they may, NotReadyError where none lives.
        """
        replicas = self._replicas(asked)
        alive = [each for each in replicas if each.answers and each not in tried]
        if not alive:
            raise no_replica(asked.model, replicas)
        best = [each for each in alive if each.health is Health.READY] or alive
        free = [each for each in best if each.n_outstanding < OUTSTANDING_MAX]
        if not free:
            raise OverloadedError(f"all replicas have {OUTSTANDING_MAX} requests; try again shortly", RETRY_AFTER_S)
        awake = [each for each in free if not (each.rests or self.awake.is_shut(each))]
        if awake and (any(each.has_lane for each in awake) or not self.awake.has_place):
            free = awake
        return min(free, key=lambda each: each.work() + each.unread_tokens(asked))


def _other_model(model: str, holder: Backend) -> InvalidRequestError:
    """Return the error for a response with a conversation that is kept where its model is not served."""
    text = f"it is kept with the model {next(iter(holder.models), '')!r}, and {model[:200]!r} is served elsewhere"
    advice = "name the model that is to answer when you create a conversation"
    return InvalidRequestError.of_field("conversation", f"{text}; {advice}")


def no_replica(model: str | None, replicas: Iterable[Backend]) -> RelaylineError:
    """Return the error for a model without a replica that answers."""
    return NotReadyError(f"no replica of {model or 'the model'} answers ({_states(replicas)})", RETRY_AFTER_S)


def maybe_at(silent: Iterable[Backend]) -> RelaylineError:
    """Return the error for what no pipeline that answers has, while these do not answer."""
    text = f"it may be at a pipeline that does not answer now ({_states(silent)}); try again shortly"
    return NotReadyError(text, RETRY_AFTER_S)


def _states(backends: Iterable[Backend]) -> str:
    """Say why these pipelines did not answer. One that was heard a moment ago has just lost a connection."""
    return "; ".join(
        f"{each.name}: {each.problem or (LOST if each.answers else each.health.value)}" for each in backends
    )
