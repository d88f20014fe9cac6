"""Which pipelines of a gateway are awake, where memory is not enough for all. Pure: events in, decisions out.

At most `limit` pipelines hold a place, that is: are awake, wake, or fall asleep. A request goes at once to one that
holds a place. For any other it waits for a free place. One becomes free when a pipeline falls asleep: the one that has
been idle longest. If all are busy the request waits. After TURN_S the pipeline that has been awake longest, for TURN_S
too, takes no new requests, ends its running ones and falls asleep. Free places go to the request that came first.

What a pipeline says of itself counts: one that was woken or started by others holds a place too, one that is dead holds
none. A report that is older than the last thing that was done to a pipeline is not believed.

An event is a method call with the time; it returns decisions in order. Times are monotonic nanoseconds of the caller.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import NamedTuple, TypeAlias

from relayline.coordinator.gateway.bounds import (
    FALL_MAX_S,
    NS,
    RETRY_AFTER_S,
    SLEEP_AGAIN_MAX_S,
    SLEEP_AGAIN_S,
    TURN_S,
    WAIT_MAX_S,
    WAITING_MAX,
)
from relayline.wire.common.errors import NotReadyError

Pipeline: TypeAlias = Hashable


class Go(NamedTuple):
    """A request goes to its pipeline now."""

    request: int


class GiveUp(NamedTuple):
    """A request waits no longer. Without an error: its pipeline does not answer."""

    request: int
    error: NotReadyError | None


class PutToSleep(NamedTuple):
    """Tell a pipeline to sleep, and say with `told` what came of it."""

    pipeline: Pipeline


class Told(enum.Enum):
    """What came of it that a pipeline was told to sleep."""

    ASLEEP = enum.auto()
    """It has freed its memory."""
    LATER = enum.auto()
    """It sleeps after requests that run there; it is heard when it has."""
    AWAKE = enum.auto()
    """It cannot."""


class Counts(NamedTuple):
    """Figures of one pipeline."""

    n_waiting: int = 0
    """Requests that wait until it may wake."""
    n_waited: int = 0
    """Those that ever did."""
    n_sleeps: int = 0
    """How often it fell asleep because another one was to wake."""


Decision: TypeAlias = "Go | GiveUp | PutToSleep"


@dataclasses.dataclass(slots=True)
class _Place:
    """What is known of one pipeline."""

    is_awake: bool = False
    is_lost: bool = False
    is_busy: bool = False  # with requests of others, or with loading
    is_falling: bool = False  # it was told to sleep
    is_later: bool = False  # it has answered that it sleeps after its running requests
    is_closed: bool = False  # it takes no new requests, because others wait too long
    requests: set[int] = dataclasses.field(default_factory=set)
    known_ns: int = 0  # reports from before that are not believed
    since_ns: int = 0  # awake
    used_ns: int = 0
    falling_ns: int = 0
    not_before_ns: int = 0  # it is not told to sleep again
    n_stays: int = 0  # how often in a row it did not fall asleep
    n_sleeps: int = 0
    n_waited: int = 0

    @property
    def is_held(self) -> bool:
        return self.is_awake or self.is_falling or bool(self.requests)

    @property
    def is_shut(self) -> bool:
        return self.is_falling or self.is_closed

    @property
    def is_idle(self) -> bool:
        return self.is_awake and not (self.requests or self.is_busy or self.is_shut)

    def stays(self, now_ns: int) -> None:
        again_s = min(SLEEP_AGAIN_S * 2 ** min(self.n_stays, 10), SLEEP_AGAIN_MAX_S)
        self.n_stays += 1
        if self.is_later:  # its requests take long
            again_s = SLEEP_AGAIN_MAX_S
        self.is_falling = self.is_later = self.is_closed = False
        self.known_ns, self.not_before_ns = now_ns, now_ns + round(again_s * NS)

    def sleeps(self, now_ns: int) -> None:
        self.is_awake = self.is_falling = self.is_later = self.is_closed = False
        self.known_ns, self.n_stays = now_ns, 0
        self.n_sleeps += 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    pipeline: Pipeline
    came_ns: int
    is_start: bool


class Awake:
    """The places of one gateway."""

    def __init__(self, limit: int) -> None:
        """`limit`: of pipelines that are awake at once; 0: none."""
        self.limit = limit
        self._places: defaultdict[Pipeline, _Place] = defaultdict(_Place)
        self._waiting: dict[int, _Waiting] = {}  # by the request's number, in the order in which they came
        self._running: dict[int, Pipeline] = {}
        self._numbers = itertools.count(1)

    # --- requests -----------------------------------------------------------------------------------------------------

    def came(self, pipeline: Pipeline, now_ns: int, *, is_start: bool = False) -> tuple[int, list[Decision]]:
        """A request for a pipeline came; returns its number too. `is_start`: the pipeline itself is to be started."""
        number, place = next(self._numbers), self._places[pipeline]
        if place.is_lost and not is_start:  # it fails there at once, and says so
            self._run(number, pipeline)
            return number, [Go(number)]
        self._waiting[number] = _Waiting(pipeline, now_ns, is_start)
        decisions = self.look(now_ns)
        if number not in self._waiting:
            return number, decisions
        if len(self._waiting) > WAITING_MAX and not is_start:
            del self._waiting[number]
            decisions.append(GiveUp(number, _refusal(self.limit, "too many requests wait for that")))
        else:
            place.n_waited += 1
        return number, decisions

    def ended(self, number: int, now_ns: int) -> list[Decision]:
        """A request has ended, or its client has left while it waited."""
        self._waiting.pop(number, None)
        pipeline = self._running.pop(number, None)
        if pipeline is not None and (place := self._places.get(pipeline)) is not None:
            place.requests.discard(number)
            place.known_ns = place.used_ns = now_ns
        return self.look(now_ns)

    def _run(self, number: int, pipeline: Pipeline) -> None:
        self._running[number] = pipeline
        self._places[pipeline].requests.add(number)

    # --- pipelines ----------------------------------------------------------------------------------------------------

    def heard(
        self, pipeline: Pipeline, now_ns: int, *, is_asleep: bool, is_busy: bool, asked_ns: int
    ) -> list[Decision]:
        """A pipeline has said how it is. `asked_ns`: when it was asked.

        `is_busy`: with requests of others, or with loading, so that it does not sleep at once.
        """
        place = self._places[pipeline]
        place.is_lost, place.is_busy = False, is_busy
        is_asleep = is_asleep and not place.requests  # one that runs there wakes it
        if place.is_falling:
            if place.is_later and is_asleep and asked_ns >= place.known_ns:
                place.sleeps(now_ns)
        elif asked_ns < place.known_ns and not place.requests:
            pass
        elif is_asleep:
            place.is_awake = place.is_closed = False
        elif not place.is_awake:
            place.is_awake, place.since_ns, place.used_ns = True, now_ns, now_ns
        return self.look(now_ns)

    def lost(self, pipeline: Pipeline, now_ns: int) -> list[Decision]:
        """A pipeline does not answer: what it held is taken to be free."""
        place = self._places[pipeline]
        place.is_lost, place.is_awake, place.is_busy, place.is_closed = True, False, False, False
        place.is_falling = place.is_later = False
        given_up: list[Decision] = []
        for number, waiting in list(self._waiting.items()):
            if waiting.pipeline == pipeline and not waiting.is_start:
                del self._waiting[number]
                given_up.append(GiveUp(number, None))
        return given_up + self.look(now_ns)

    def removed(self, pipeline: Pipeline, now_ns: int) -> list[Decision]:
        """A pipeline is no longer one of this gateway's."""
        given_up: list[Decision] = [
            GiveUp(number, None) for number, waiting in self._waiting.items() if waiting.pipeline == pipeline
        ]
        self._waiting = {number: each for number, each in self._waiting.items() if each.pipeline != pipeline}
        self._places.pop(pipeline, None)
        return given_up + self.look(now_ns)

    def told(self, pipeline: Pipeline, outcome: Told, now_ns: int) -> list[Decision]:
        """A pipeline was told to sleep, and has answered or not."""
        place = self._places.get(pipeline)
        if place is not None and place.is_falling:
            match outcome:
                case Told.ASLEEP:
                    place.sleeps(now_ns)
                case Told.LATER:
                    place.is_later, place.known_ns = True, now_ns
                case Told.AWAKE:
                    place.stays(now_ns)
        return self.look(now_ns)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def look(self, now_ns: int) -> list[Decision]:
        """Look at the clock, about every second."""
        decisions: list[Decision] = [*self._late(now_ns)]
        decisions += self._let_go(now_ns)
        if self._reopen():
            decisions += self._let_go(now_ns)
        self._close(now_ns)
        return [*decisions, *self._put_to_sleep(now_ns)]

    def _late(self, now_ns: int) -> Iterator[Decision]:
        """End what has taken too long."""
        for place in self._places.values():
            if place.is_later and now_ns - place.falling_ns >= FALL_MAX_S * NS:
                place.stays(now_ns)
        for number, waiting in list(self._waiting.items()):
            if now_ns - waiting.came_ns >= WAIT_MAX_S * NS:
                del self._waiting[number]
                yield GiveUp(number, _refusal(self.limit, f"this one has waited {WAIT_MAX_S:.0f} s for its turn"))

    def _let_go(self, now_ns: int) -> Iterator[Decision]:
        n_free = self.limit - self._n_held
        for number, waiting in list(self._waiting.items()):
            place = self._places[waiting.pipeline]
            if place.is_shut or not (place.is_held or n_free > 0):
                continue
            del self._waiting[number]
            if not place.is_held:
                n_free -= 1
            if not place.is_awake:
                place.is_awake, place.since_ns = True, now_ns
            self._run(number, waiting.pipeline)
            yield Go(number)

    def _reopen(self) -> bool:
        """Let pipelines take requests again for which nobody waits any more; return whether there were any."""
        closed = [place for place in self._places.values() if place.is_closed and not place.is_falling]
        surplus = closed[: max(0, self._n_coming - self._n_missing)]
        for place in surplus:
            place.is_closed = False
        return bool(surplus)

    def _close(self, now_ns: int) -> None:
        """Close busy pipelines, the one that has been awake longest first, where others have waited long enough."""
        n_surplus = max(0, self._n_held - self.limit)
        n_served = max(0, self._n_coming + len(self._idle(now_ns)) - n_surplus)
        for since_ns in list(self._wanted().values())[n_served:]:
            busy = [
                each
                for each in self._places.values()
                if each.is_awake
                and not (each.is_shut or each.is_idle)
                and now_ns >= max(each.not_before_ns, each.since_ns + TURN_S * NS)
            ]
            if now_ns - since_ns < TURN_S * NS or not busy:
                return
            min(busy, key=lambda each: each.since_ns).is_closed = True

    def _put_to_sleep(self, now_ns: int) -> Iterator[Decision]:
        idle = self._idle(now_ns)
        chosen = [each for each, place in self._places.items() if place.is_closed and not place.requests]
        chosen += idle[: max(0, self._n_missing - self._n_coming)]
        for pipeline in chosen:
            place = self._places[pipeline]
            if not place.is_falling:
                place.is_falling, place.is_later, place.falling_ns = True, False, now_ns
                yield PutToSleep(pipeline)

    def _idle(self, now_ns: int) -> list[Pipeline]:
        """Return the pipelines that may fall asleep at once, idle longest first."""
        found = [each for each, place in self._places.items() if place.is_idle and now_ns >= place.not_before_ns]
        return sorted(found, key=lambda each: self._places[each].used_ns)

    def _wanted(self) -> dict[Pipeline, int]:
        """Return the pipelines without a place that requests wait for, and since when."""
        found: dict[Pipeline, int] = {}
        for waiting in self._waiting.values():
            if not self._places[waiting.pipeline].is_held:
                found.setdefault(waiting.pipeline, waiting.came_ns)
        return found

    @property
    def _n_held(self) -> int:
        return sum(place.is_held for place in self._places.values())

    @property
    def _n_missing(self) -> int:
        """How many places are to become free."""
        return max(0, len(self._wanted()) + self._n_held - self.limit)

    @property
    def _n_coming(self) -> int:
        """How many places become free by themselves."""
        return sum(place.is_shut for place in self._places.values())

    # --- for those who look -------------------------------------------------------------------------------------------

    @property
    def has_place(self) -> bool:
        """Whether one more pipeline may wake now."""
        return not self.limit or (self._n_held < self.limit and not self._waiting)

    def is_shut(self, pipeline: Pipeline) -> bool:
        """Whether requests wait until a pipeline has slept, though it is awake."""
        return (place := self._places.get(pipeline)) is not None and place.is_shut

    def counts(self, pipeline: Pipeline) -> Counts:
        """Return the figures of a pipeline."""
        place = self._places.get(pipeline)
        if place is None:
            return Counts()
        n_waiting = sum(each.pipeline == pipeline and not each.is_start for each in self._waiting.values())
        return Counts(n_waiting, place.n_waited, place.n_sleeps)


def _refusal(limit: int, why: str) -> NotReadyError:
    return NotReadyError(f"{limit} of the pipelines here may be awake at once; {why}", RETRY_AFTER_S)
