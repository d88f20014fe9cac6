"""Planned changes of layers: serving stages get new ranges. No request is refused and no token is lost. Pure.

    begin --> CUTTING --> PREPARING --> SETTLING --> SWITCHING --> DONE
                 |            |            |
                 +-- fails ---+            +-- an epoch that ends by itself: the switch is made there

While the model is cut and stages load their new slices next to the serving ones, nothing changes for requests. A change
that fails by then changes nothing. SETTLING holds frames for stage 0 back until all frames in flight have returned: the
boundary of a step. From the switch on the new layers are final: a stage that dies comes back with them. Sessions pause
and resume as after any loss (`coordinator.engine.conductor`), but it counts against no session.

A pipeline has places, one for each stage that may join. Those that hold layers are the *holders*, in layer order: they
are the stages of an epoch. A place that holds none stands by. A change may name other holders, and so more or fewer
stages. It may also be made while a holder is lost that is to hold nothing any more.

An event is a method call with the time; it returns instructions in order.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from relayline.coordinator.engine.conductor import Conductor
from relayline.wire.common.errors import InvalidRequestError, NotReadyError
from relayline.wire.common.phase import Phase
from relayline.wire.common.texts import counted

PREPARE_MAX_S = 3_600.0  # for the slowest stage to get and load its slice; then the change is off
SETTLE_MAX_S = 1.0  # for frames in flight to return; a long step is not waited for, and its rows are replayed


class MoveState(enum.StrEnum):
    """How far a change of layers is."""

    CUTTING = "cutting"
    """The model is being split again."""
    PREPARING = "preparing"
    """Stages get and load their new slices while requests continue."""
    SETTLING = "settling"
    """Frames in flight return; no new ones leave."""
    SWITCHING = "switching"
    """The stages take up the new layers."""
    DONE = "done"
    """Requests continue with the new layers."""
    FAILED = "failed"
    """Nothing has changed."""


class Cut(NamedTuple):
    """Split the model at these layers, then call `cut` or `failed`."""

    number: int
    cuts: tuple[int, ...]


class Prepare(NamedTuple):
    """Tell every stage to prepare its new slice; call `prepared` or `failed`."""

    number: int


class Drop(NamedTuple):
    """Tell every stage to drop the slice it prepared."""

    number: int


class Settle(NamedTuple):
    """Call `look` whenever something has come back, and after so long."""

    after_s: float


class Switch(NamedTuple):
    """End the epoch if one stands; then serve the new layers."""

    number: int


class Fetch(NamedTuple):
    """How far a place is with its new slice."""

    done_bytes: int
    total_bytes: int
    trouble: str = ""
    """Why no bytes come just now; it goes on trying."""


MoveInstruction: TypeAlias = "Cut | Prepare | Drop | Settle | Switch"
_OPEN = (MoveState.CUTTING, MoveState.PREPARING, MoveState.SETTLING, MoveState.SWITCHING)
_UNCHANGED = _OPEN[:-1]


@dataclasses.dataclass(slots=True)
class Move:
    """One change of layers. Times are monotonic nanoseconds of the caller."""

    number: int
    cuts: tuple[int, ...]
    holders: tuple[int, ...]
    """The places that are to hold layers, in layer order."""
    before: tuple[tuple[int, ...], tuple[int, ...]]
    """The cuts and the holders that it began with."""
    state: MoveState
    began_ns: int
    since_ns: int  # of the state
    keeps: tuple[bool, ...] = ()
    """Which holders keep their loaded slice, in layer order; known once the model is cut."""
    awaited: set[int] = dataclasses.field(default_factory=set)
    """Places that still prepare."""
    fetches: dict[int, Fetch] = dataclasses.field(default_factory=dict)
    """Of these, once they have said so."""
    held_ns: int = 0  # when sessions began to pause
    paused_ns: int = 0
    """From the switch until the stages were ready with their new layers; replayed rows come on top."""
    n_kept: int = 0
    """Tokens of running sessions that all stages hold with the new layers."""
    n_replayed: int = 0
    """Tokens of running sessions that had been sent, and are sent again."""
    problem: str = ""


class Moves:
    """The planned changes of one pipeline, one after the other."""

    def __init__(
        self,
        conductor: Conductor,
        names: Sequence[str],
        n_layers: int,
        cuts: tuple[int, ...],
        holders: tuple[int, ...] = (),
    ) -> None:
        """`names` of all places, and the `cuts` that are served now: the first layer of each stage but the first.

        `holders`: the places that hold layers, in layer order; by default the first ones.
        """
        self._conductor, self._names, self._n_layers = conductor, list(names), n_layers
        self.cuts, self.holders = cuts, holders or tuple(range(len(cuts) + 1))
        self.latest: Move | None = None
        self._n_read: dict[int, int] = {}  # tokens that running sessions had sent when the latest switch began
        self.n_done = 0

    def _move(self, number: int, *states: MoveState) -> Move | None:
        move = self.latest
        return move if move is not None and move.number == number and move.state in states else None

    @property
    def is_settling(self) -> bool:
        """Whether `look` is to be called."""
        return self.latest is not None and self.latest.state is MoveState.SETTLING

    @property
    def is_open(self) -> bool:
        """Whether a change is under way."""
        return self.latest is not None and self.latest.state in _OPEN

    @property
    def is_switching(self) -> bool:
        """Whether stages take up new layers: one that is lost now comes back with them, or others take them over."""
        return self.latest is not None and self.latest.state is MoveState.SWITCHING

    # --- before the switch --------------------------------------------------------------------------------------------

    def begin(self, cuts: tuple[int, ...], now_ns: int, holders: tuple[int, ...] = ()) -> list[MoveInstruction]:
        """Begin a change to other layers, or to other holders; by default the present ones.

        Raises InvalidRequestError for an impossible change, NotReadyError if it is impossible only now.
        """
        holders = holders or self.holders
        self._check(cuts, holders)
        phase = self._conductor.availability.phase
        if phase.rests:
            raise NotReadyError(f"the pipeline is {phase}; `relayline wake` comes before layers can move")
        gone = set(self.holders) - set(holders) if phase.is_paused else set()
        if self.latest is not None and self.is_open:
            if not (self.is_switching and gone):
                raise NotReadyError(f"layers are already being moved ({self.latest.state}); wait until that ends")
            self.latest.problem = f"{', '.join(self._named(sorted(gone)))} did not come back with the new layers"
            self._enter(self.latest, MoveState.FAILED, now_ns)
        if phase is not Phase.READY and not gone:
            raise NotReadyError(f"the pipeline is {phase}; layers can move only while it is ready")
        number = self.latest.number + 1 if self.latest is not None else 1
        self.latest = Move(number, cuts, holders, (self.cuts, self.holders), MoveState.CUTTING, now_ns, now_ns)
        return [Cut(number, cuts)]

    def _without_layers(self, holders: tuple[int, ...]) -> str:
        names = self._named([at for at in range(len(self._names)) if at not in holders])
        return f" (no layers are for {', '.join(names)}: drained, spare or away)" if names else ""

    def _check(self, cuts: tuple[int, ...], holders: tuple[int, ...]) -> None:
        if len(cuts) != len(holders) - 1:
            raise InvalidRequestError(
                f"{counted(len(holders), 'stage')} {'needs' if len(holders) == 1 else 'need'} "
                f"{counted(len(holders) - 1, 'cut')}, the first layer of each later stage; given: {len(cuts)}"
                f"{self._without_layers(holders)}"
            )
        if len(set(holders)) != len(holders) or not set(holders) <= set(range(len(self._names))):
            raise InvalidRequestError("each stage that is to hold layers must be a stage of this pipeline, named once")
        edges = (0, *cuts, self._n_layers)
        if list(edges) != sorted(set(edges)):
            raise InvalidRequestError(f"cuts must ascend and lie between 1 and {self._n_layers - 1}")
        if (cuts, holders) == (self.cuts, self.holders):
            raise InvalidRequestError("the stages already have these layers")

    def add(self, name: str) -> int:
        """Add a place, which holds nothing; returns its index."""
        self._names.append(name)
        return len(self._names) - 1

    def cut(self, number: int, keeps: Sequence[bool], now_ns: int) -> list[MoveInstruction]:
        """The model is split again; `keeps` says for each holder whether its slice stays the same."""
        if (move := self._move(number, MoveState.CUTTING)) is None:
            return []
        move.keeps, move.awaited = tuple(keeps), set(move.holders)
        self._enter(move, MoveState.PREPARING, now_ns)
        return [Prepare(number)]

    def fetching(self, number: int, index: int, fetch: Fetch) -> None:
        """A place is that far with its new slice."""
        move = self._move(number, MoveState.PREPARING)
        if move is not None and index in move.awaited:
            move.fetches[index] = fetch

    def prepared(self, number: int, index: int, now_ns: int) -> list[MoveInstruction]:
        """A place is ready to switch. One that is to hold nothing is not waited for."""
        if (move := self._move(number, MoveState.PREPARING)) is None or index not in move.holders:
            return []
        move.awaited.discard(index)
        move.fetches.pop(index, None)
        if move.awaited:
            return []
        phase = self._conductor.availability.phase
        if phase is Phase.DRAINING:
            return self.failed(number, "the pipeline is shutting down", now_ns)
        move.held_ns = now_ns
        self._enter(move, MoveState.SETTLING, now_ns)
        if phase is not Phase.READY:  # no epoch stands that would have to be ended
            return self._switch(move, now_ns)
        self._conductor.is_held = True
        return self.look(now_ns) or [Settle(SETTLE_MAX_S)]

    def failed(self, number: int, why: str, now_ns: int) -> list[MoveInstruction]:
        """Something of the change can't be done. After the switch it no longer concerns the change."""
        if (move := self._move(number, *_UNCHANGED)) is None:
            return []
        move.problem = why
        was_cut = move.state is not MoveState.CUTTING
        self._enter(move, MoveState.FAILED, now_ns)
        self._conductor.is_held = False
        return [Drop(number)] if was_cut else []

    def left(self, index: int, now_ns: int) -> list[MoveInstruction]:
        """A stage left or restarted: its prepared slice is gone."""
        move = self.latest
        if move is None or move.state not in _UNCHANGED or index not in move.holders:
            return []
        return self.failed(move.number, f"{self._names[index]} was lost while stages loaded their new layers", now_ns)

    def tick(self, now_ns: int) -> list[MoveInstruction]:
        """Look at the clock, now and then."""
        move = self.latest
        if move is None or move.state is not MoveState.PREPARING or now_ns - move.since_ns < PREPARE_MAX_S * 1e9:
            return []
        late = ", ".join(self._names[index] for index in sorted(move.awaited))
        return self.failed(move.number, f"not ready after {PREPARE_MAX_S:.0f} s: {late}", now_ns)

    # --- the switch ---------------------------------------------------------------------------------------------------

    def look(self, now_ns: int) -> list[MoveInstruction]:
        """A frame has returned, or time has passed, while in-flight frames were to settle."""
        move = self.latest
        if move is None or move.state is not MoveState.SETTLING:
            return []
        if self._conductor.scheduler.under_way() and now_ns - move.since_ns < SETTLE_MAX_S * 1e9:
            return []
        return self._switch(move, now_ns)

    def lost(self, now_ns: int) -> list[MoveInstruction]:
        """The epoch ended by itself: nothing is in flight any more."""
        return self._switch(self.latest, now_ns) if self.latest is not None and self.is_settling else []

    def _switch(self, move: Move, now_ns: int) -> list[MoveInstruction]:
        self._enter(move, MoveState.SWITCHING, now_ns)
        running = self._conductor.admission.running
        self._n_read = {session_id: session.n_held for session_id, session in running.items()}
        self.cuts, self.holders = move.cuts, move.holders
        return [Switch(move.number)]

    def connected(self, now_ns: int) -> bool:
        """All stages are connected in a new epoch. Returns whether that completes a change."""
        move = self.latest
        if move is None or move.state is not MoveState.SWITCHING:
            return False
        move.paused_ns = now_ns - move.held_ns
        for session_id, session in self._conductor.admission.running.items():
            move.n_kept += session.n_kept
            move.n_replayed += max(0, self._n_read.get(session_id, 0) - session.n_kept)
        self._enter(move, MoveState.DONE, now_ns)
        self.n_done += 1
        return True

    def _enter(self, move: Move, state: MoveState, now_ns: int) -> None:
        move.state, move.since_ns = state, now_ns

    # --- for those who look -------------------------------------------------------------------------------------------

    def describe(self, now_ns: int) -> dict[str, object]:
        """Return the layers that are served and the latest change, JSON-ready."""
        move = self.latest
        return {
            "cuts": list(self.cuts),
            "layers": self._layers(self.cuts),
            "stages": self._named(self.holders),
            "move": None if move is None else self._described(move, now_ns),
        }

    def _layers(self, cuts: tuple[int, ...]) -> list[list[int]]:
        edges = (0, *cuts, self._n_layers)
        return [list(pair) for pair in itertools.pairwise(edges)]

    def _named(self, places: Iterable[int]) -> list[str]:
        return [self._names[index] for index in places]

    def _described(self, move: Move, now_ns: int) -> dict[str, object]:
        keep = [holder for holder, keeps in zip(move.holders, move.keeps, strict=False) if keeps]
        return {
            "number": move.number,
            "cuts": list(move.cuts),
            "stages": self._named(move.holders),
            "layers": self._layers(move.cuts),
            "before": {"stages": self._named(move.before[1]), "layers": self._layers(move.before[0])},
            "state": move.state.value,
            "state_s": round((now_ns - move.since_ns) / 1e9, 3),
            "took_s": round(((now_ns if move.state in _OPEN else move.since_ns) - move.began_ns) / 1e9, 3),
            "keep": self._named(keep),
            "waiting_for": self._named(sorted(move.awaited)),
            "fetches": {
                self._names[index]: fetch._asdict()
                for index, fetch in move.fetches.items()
                if move.state is MoveState.PREPARING
            },
            "paused_s": round(move.paused_ns / 1e9, 3) if move.state is MoveState.DONE else None,
            "kept_tokens": move.n_kept,
            "replayed_tokens": move.n_replayed,
            "problem": move.problem,
        }
