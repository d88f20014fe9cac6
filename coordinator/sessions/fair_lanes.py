"""The line before the lanes, fair between tenants. Pure.

Each tenant has a line of its own. The next lane goes to the tenant with the smallest *load*: its running streams by its
share, plus the lane time that it has had, by its share too. Running streams decide at once: a tenant that comes gets
its part of the lanes as they become free, whatever others have in line. Lane time decides in the long run: where shares
are no whole numbers of lanes, or where one tenant's streams take longer, tenants take turns. So every tenant of the
best level in line is served after a bounded time, also where tenants that nobody has seen before come without end.

* Lane time is counted in streams of mean length. TURNS of them weigh as much as one running stream.
* A tenant that was away starts level with the tenant that was served last: nobody saves lane time up, and nobody pays
  for lane time that others had no use for.
* That start rises with each stream, NEW_RATE times as fast as the lane time of tenants who all stay in line. So
  newcomers do not pass a tenant for ever. Let D be its lane time beyond the start, with its running streams, and S the
  sum of the shares of all who are there. Newcomers pass it for at most TURNS * D / NEW_RATE * S streams of mean length.
* Tenants of a better level go first. While no stream of a lower level runs, and it waits, one of LOWER_EVERY lanes is
  its: it would wait for ever otherwise. While one runs, no lane is: how long it holds its lane nobody knows, and so a
  level has at most one lane at a time that better ones wanted. Batches have no such lane.
* A tenant at its bound of streams is passed over.
* Sessions that had a lane and lost it go before all others, in the order in which they came.
* Within a tenant's line the order is that of arrival, except for requests that asked for another turn.

With one tenant all of this is first come, first served. Each event costs a search in a sorted list.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from relayline.coordinator.sessions.session import Session
from relayline.coordinator.sessions.tenants import Level, Tenant
from relayline.wire.envelopes.session_ids import PLAIN_ID

TURNS = 8
HOLD_MAX = 8.0  # times the mean that one stream's lane time counts at most
HOLD_MIN = 1 / 16
CREDIT_MAX = 1.0  # running streams by share that a tenant can be behind the one that was served last
NEW_RATE = 0.5  # below 1, so that it never overtakes tenants who stay, and their shares hold
LOWER_EVERY = 32  # lanes
FAR_TENANTS_MAX = 1_024  # tenants without a session whose lane time is remembered
_MEAN_OVER = 16  # streams

_Entry = tuple[int, int, Session]  # turn and age of a waiting session: no two are equal
_Place = tuple[int, float, int, str]  # level, load, when it was served last, name


class _Own:
    """One tenant with its line."""

    def __init__(self, tenant: Tenant, past: float) -> None:
        self.tenant, self.past = tenant, past
        self.waiting: list[_Entry] = []  # ascending
        self.n_running = 0
        self.n_returned = 0  # of its sessions, those that lost their lane
        self.served = 0  # number of the latest lane that it got
        self.place: _Place | None = None  # in `FairLanes._ready`

    @property
    def is_full(self) -> bool:
        """Whether it runs as many streams as it may."""
        limit = self.tenant.streams_max
        return limit is not None and self.n_running >= limit

    @property
    def n_waiting(self) -> int:
        """Sessions of it without a lane."""
        return len(self.waiting) + self.n_returned


class FairLanes:
    """The waiting sessions of all tenants, and how many streams of each run."""

    def __init__(self) -> None:
        self._own: dict[str, _Own] = {}  # of tenants with a session
        self._ready: list[_Place] = []  # of tenants whose next session may run; ascending
        self._returned: list[tuple[int, Session]] = []  # by age
        self._far: dict[str, float] = {}  # lane time of tenants without a session, the one that left first in front
        self._n_waiting = self._n_served = 0
        self._past = 0.0  # lane time with which a tenant begins: of the one that was served last, or more; only grows
        self._shares = 0  # of all in `_own`
        self._n_running = [0] * len(Level)  # streams of each level
        self._passed = [0] * len(Level)  # lanes in a row that others got, while one of this level waited and none ran
        self._mean_ns = 0.0  # that a stream holds its lane

    def __len__(self) -> int:
        return self._n_waiting

    def __iter__(self) -> Iterator[Session]:
        """Return the waiting sessions: those that had a lane first, then all others in the order of arrival."""
        yield from [session for _, session in self._returned]
        if len(self._own) == 1:
            yield from [entry[-1] for own in self._own.values() for entry in own.waiting]
        else:
            yield from sorted((entry[-1] for own in self._own.values() for entry in own.waiting), key=age_of)

    def figures(self) -> dict[str, tuple[int, int]]:
        """Return how many sessions of each tenant run, and how many wait, by its name."""
        return {name: (own.n_running, own.n_waiting) for name, own in self._own.items()}

    def n_waiting_of(self, tenant: Tenant) -> int:
        """Return how many of its sessions wait."""
        own = self._own.get(tenant.name)
        return own.n_waiting if own is not None else 0

    def n_running_of(self, tenant: Tenant) -> int:
        """Return how many of its sessions run."""
        own = self._own.get(tenant.name)
        return own.n_running if own is not None else 0

    def part_of(self, tenant: Tenant, n_places: int) -> int:
        """Return the tenant's part of n_places in the line, by its share among those who wait, at least 1 of them."""
        others = sum(own.tenant.share for own in self._own.values() if own.n_waiting and own.tenant != tenant)
        return max(min(1, n_places), n_places * tenant.share // (others + tenant.share))

    def may_run(self, tenant: Tenant) -> bool:
        """Return whether one more stream may run of this tenant, with the options that it has here."""
        return tenant.streams_max is None or self.n_running_of(tenant) < tenant.streams_max

    def add(self, session: Session) -> None:
        """A new session waits. The options that it brings hold for all of its tenant's, so more of them may run now."""
        own = self._of(session)
        bisect.insort(own.waiting, (session.request.turn, age_of(session), session))
        self._n_waiting += 1
        self._put(own)

    def put_back(self, session: Session) -> None:
        """A running session waits again."""
        own = self._own[session.request.tenant.name]
        self._count(own, -1)
        own.n_returned += 1
        self._n_waiting += 1
        bisect.insort(self._returned, (age_of(session), session))
        self._put(own)

    def ended(self, session: Session, held_ns: int) -> None:
        """A running session has ended, after it held its lane for so long; 0: not known."""
        own = self._own[session.request.tenant.name]
        self._count(own, -1)
        self._charge(own, held_ns)
        self._put(own)

    def remove(self, session: Session) -> bool:
        """A waiting session has gone. Returns False if it did not wait."""
        own = self._own.get(session.request.tenant.name)
        if own is None:
            return False
        age = age_of(session)
        at = bisect.bisect_left(own.waiting, (session.request.turn, age, session))
        if at < len(own.waiting) and own.waiting[at][1] == age:
            del own.waiting[at]
        else:
            at = bisect.bisect_left(self._returned, age, key=lambda each: each[0])
            if at == len(self._returned) or self._returned[at][0] != age:
                return False
            del self._returned[at]
            own.n_returned -= 1
        self._n_waiting -= 1
        self._put(own)
        return True

    def next(self) -> Session | None:
        """Return the session that gets the next lane, and count it as running; None if none may run."""
        if self._returned:
            _, session = self._returned.pop(0)
            own = self._own[session.request.tenant.name]
            own.n_returned -= 1
        elif self._ready:
            own = self._own[self._next_place()[-1]]
            *_, session = own.waiting.pop(0)
            self._serve(own)
        else:
            return None
        self._count(own, 1)
        self._n_waiting -= 1
        self._put(own)
        return session

    def _next_place(self) -> _Place:
        """Return whose turn it is: the first of the best level, or of a lower one that was passed over too often."""
        firsts = [self._ready[0]]
        while (at := bisect.bisect_right(self._ready, firsts[-1][0], key=lambda place: place[0])) < len(self._ready):
            firsts.append(self._ready[at])
        waiting = [level for level, *_ in firsts if level < Level.BATCH and not self._n_running[level]]
        self._passed = [passed + 1 if level in waiting else 0 for level, passed in enumerate(self._passed)]
        found = next((first for first in reversed(firsts) if self._passed[first[0]] >= LOWER_EVERY), firsts[0])
        self._passed[found[0]] = 0
        return found

    def _of(self, session: Session) -> _Own:
        """Return the tenant's line, with the options that its latest request brought."""
        tenant = session.request.tenant
        own = self._own.get(tenant.name)
        if own is None:
            past = max(self._far.pop(tenant.name, 0.0), self._past)
            own = self._own[tenant.name] = _Own(tenant, past)
            self._shares += tenant.share
            self._n_served += 1
            own.served = self._n_served  # of tenants that begin alike, the first goes first
        self._shares += tenant.share - own.tenant.share
        n_running = own.n_running
        self._count(own, -n_running)
        own.tenant = tenant
        self._count(own, n_running)
        return own

    def _count(self, own: _Own, change: int) -> None:
        """So many more streams of the tenant run."""
        own.n_running += change
        self._n_running[own.tenant.level] += change

    def _serve(self, own: _Own) -> None:
        self._n_served += 1
        own.served = self._n_served
        self._past = max(self._past, own.past)

    def _charge(self, own: _Own, held_ns: int) -> None:
        hold = 1.0
        if held_ns:
            self._mean_ns += (held_ns - self._mean_ns) / _MEAN_OVER if self._mean_ns else held_ns
            hold = min(max(held_ns / self._mean_ns, HOLD_MIN), HOLD_MAX)
        own.past += hold / (TURNS * own.tenant.share)
        self._past += NEW_RATE * hold / (TURNS * self._shares)

    def _put(self, own: _Own) -> None:
        """Bring a tenant to its place, after anything about it has changed."""
        if own.place is not None:
            del self._ready[bisect.bisect_left(self._ready, own.place)]
            own.place = None
        tenant = own.tenant
        if own.waiting and not own.is_full:
            own.past = max(own.past, self._past - CREDIT_MAX)
            load = own.n_running / tenant.share + own.past
            own.place = (tenant.level, load, own.served, tenant.name)
            bisect.insort(self._ready, own.place)
        elif not (own.waiting or own.n_returned or own.n_running):
            del self._own[tenant.name]
            self._shares -= tenant.share
            self._far[tenant.name] = own.past
            if len(self._far) > FAR_TENANTS_MAX:
                del self._far[next(iter(self._far))]


def age_of(session: Session) -> int:
    """Return a number that is smaller for a session that was admitted earlier."""
    return session.session_id & PLAIN_ID
