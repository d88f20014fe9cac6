"""When a pipeline sleeps, and when it wakes: stages free their memory while nobody asks anything. Pure.

    AWAKE --> FALLING --> ASLEEP --> WAKING --> AWAKE
      ^          |          ^          |
      +----------+          +----------+
      a request came        stages cannot load

It falls asleep after a time without requests, or as soon as none runs if it was told to. The epoch that stands ends
first, so no request is ever running while stages free their memory. A request that comes later is admitted and waits,
as after a loss. Then all stages load at once, and the next epoch starts it. So sleeping loses no request, and changes
no token.

A wake that fails ends the requests that wait for it. The stages sleep again. For a while, longer after each failure,
new requests are refused at once. A stage that is lost on the way is waited for like any lost stage.

While it is to sleep as soon as no request runs, requests of Level.BATCH are refused: a batch would keep it awake for
hours, and asks again by itself.

A pipeline that waits for a lost stage falls asleep, too: at once, because no epoch stands that would have to be ended.

An event is a method call with the time; it returns instructions in order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from relayline.coordinator.engine.conductor import Conductor
from relayline.coordinator.sessions.tenants import Level, Tenant
from relayline.wire.common.errors import NotReadyError, RelaylineError, StageLostError
from relayline.wire.common.phase import Phase
from relayline.wire.common.texts import named_stage

WAKE_MAX_S = 600.0  # without any stage getting on with its load; then the wake has failed
TAKEN_OVER_S = 10.0  # for others to begin to take over from a stage that is lost, once that is due
RETRY_FIRST_S, RETRY_MAX_S = 5.0, 60.0  # after a failed wake requests are refused for so long, doubled each time


BATCH_AFTER_S = 60  # for requests of batches that are refused because the pipeline is to sleep


class SleepState(enum.StrEnum):
    """How deep a pipeline sleeps."""

    AWAKE = "awake"
    """Its stages have their layers loaded, or load them as at any start."""
    FALLING = "falling"
    """The epoch is being ended; nothing has been freed yet."""
    ASLEEP = "asleep"
    """Its stages hold no weights and no cells."""
    WAKING = "waking"
    """Its stages load."""


class EndEpoch(NamedTuple):
    """End the epoch that stands, then call `ended`."""


class TellStages(NamedTuple):
    """Tell every stage to free its memory, or to load again."""

    is_asleep: bool


class Refuse(NamedTuple):
    """End every request that waits, with this error."""

    error: RelaylineError


class GiveUpMove(NamedTuple):
    """Give up the change of layers that is under way, for this reason: stages that sleep follow none."""

    why: str


class Connect(NamedTuple):
    """Go on as before the epoch ended: nothing was freed."""


SleepInstruction: TypeAlias = "EndEpoch | TellStages | Refuse | GiveUpMove | Connect"


class Sleep:
    """The sleep of one pipeline. Times are monotonic nanoseconds of the caller."""

    def __init__(
        self,
        conductor: Conductor,
        idle_s: float,
        now_ns: int,
        *,
        is_moving: Callable[[], bool] = lambda: False,
        is_closing: Callable[[], bool] = lambda: False,
        missing: Callable[[], list[str]] = list,
        progress: Callable[[], object] = lambda: None,
        takeover_s: float = 0.0,
    ) -> None:
        """`idle_s` without requests put it to sleep; 0: never by itself.

        `is_moving` says whether layers are on the move, `is_closing` whether an epoch that was lost is still being
        closed, or the next one stands in a moment. `missing` names the stages that are not here at all, and `progress`
        is another value whenever a stage got on with its load. After `takeover_s` others take over from a lost stage.
        """
        self._conductor, self._idle_ns = conductor, round(idle_s * 1e9)
        self._is_moving, self._is_closing, self._missing, self._progress = is_moving, is_closing, missing, progress
        self._takeover_ns = round((takeover_s + TAKEN_OVER_S) * 1e9) if takeover_s else 0
        self._seen: object = None  # of `progress`, latest
        self._progressed_ns = now_ns  # when that changed
        self.state, self.since_ns = SleepState.AWAKE, now_ns
        self._used_ns = now_ns  # when a request was last here, or the first epoch began
        self._has_stood = False
        self.is_asked = False
        """Whether it is to sleep as soon as no request runs."""
        self._is_wanted = False  # whether it is to wake, while it falls asleep
        self.n_sleeps = self.n_wakes = self.n_failed = 0
        self._n_failed_in_a_row = 0
        self.woke_ns = 0
        """How long the latest wake took; 0: there was none."""
        self.problem = ""
        """Why the latest wake failed; empty once one has succeeded."""

    @property
    def is_asleep(self) -> bool:
        """Whether no epoch is to be begun: the stages hold nothing."""
        return self.state is SleepState.ASLEEP

    def check(self, tenant: Tenant) -> None:
        """Raise NotReadyError where a new request of this tenant would keep awake what was told to sleep."""
        if self.is_asked and tenant.level is Level.BATCH:
            text = "the pipeline was told to sleep, and takes nothing of batches; try again later"
            raise NotReadyError(text, BATCH_AFTER_S)

    # --- falling asleep -----------------------------------------------------------------------------------------------

    def ask(self, now_ns: int) -> list[SleepInstruction]:
        """Sleep as soon as no request runs or waits."""
        self.is_asked = self.state is not SleepState.ASLEEP
        return self.look(now_ns)

    def look(self, now_ns: int) -> list[SleepInstruction]:
        """Look at the clock, every second."""
        if self.state is SleepState.WAKING:
            return self._look_at_loads(now_ns)
        if self.state is not SleepState.AWAKE:
            return []
        if self._conductor.readers:
            self._used_ns = now_ns
        if not self._may_sleep() or not (self.is_asked or self._is_idle(now_ns)):
            return []
        if self._conductor.availability.phase.is_paused:
            return self._fall_asleep(now_ns)
        self._enter(SleepState.FALLING, now_ns)
        self._is_wanted = False
        return [EndEpoch()]

    def _look_at_loads(self, now_ns: int) -> list[SleepInstruction]:
        if (seen := self._progress()) != self._seen:
            self._seen, self._progressed_ns = seen, now_ns
        if now_ns - self._progressed_ns < WAKE_MAX_S * 1e9:
            return []
        return self.failed(f"no stage has got on with its load for {WAKE_MAX_S:.0f} s", now_ns)

    def _is_idle(self, now_ns: int) -> bool:
        availability = self._conductor.availability
        if availability.phase.is_paused and now_ns - availability.lost_at_ns < self._takeover_ns:
            return False
        return 0 < self._idle_ns <= now_ns - self._used_ns

    def _may_sleep(self) -> bool:
        if self._conductor.readers or self._is_moving():
            return False
        phase = self._conductor.availability.phase
        return phase is Phase.READY or (phase.is_paused and not self._is_closing())

    def ended(self, now_ns: int) -> list[SleepInstruction]:
        """Everything of an epoch is closed."""
        if self.state is not SleepState.FALLING:
            return []
        if self._conductor.readers or self._is_moving() or self._is_wanted:  # it came while the epoch was being ended
            self._enter(SleepState.AWAKE, now_ns)
            return [Connect()]
        return self._fall_asleep(now_ns)

    def _fall_asleep(self, now_ns: int) -> list[SleepInstruction]:
        self.is_asked = False
        self.n_sleeps += 1
        self._enter(SleepState.ASLEEP, now_ns)
        self._conductor.availability.enter(Phase.SLEEPING, now_ns)
        return [TellStages(is_asleep=True)]

    # --- waking -------------------------------------------------------------------------------------------------------

    def came(self, now_ns: int) -> list[SleepInstruction]:
        """A request was admitted."""
        self._used_ns = now_ns
        return self.wake(now_ns) if self.state is SleepState.ASLEEP else []

    def wake(self, now_ns: int) -> list[SleepInstruction]:
        """Wake without a request, and stay awake as long as after one."""
        self._used_ns, self.is_asked = now_ns, False
        self._is_wanted = self.state is SleepState.FALLING
        if self.state is not SleepState.ASLEEP:
            return []
        availability = self._conductor.availability
        if missing := self._missing():
            self._enter(SleepState.AWAKE, now_ns)
            lost = StageLostError(f"{', '.join(missing)}: not here when the pipeline was to wake")
            availability.lost(now_ns, lost)
        else:
            self._enter(SleepState.WAKING, now_ns)
            self._seen, self._progressed_ns = self._progress(), now_ns
            availability.enter(Phase.WAKING, now_ns)
        return [TellStages(is_asleep=False)]

    def stands(self, now_ns: int) -> bool:
        """All stages are connected. Returns whether that completes a wake."""
        if not self._has_stood:  # a first load may take longer than it then stays awake
            self._has_stood, self._used_ns = True, now_ns
        if self.state is not SleepState.WAKING:
            return False
        self.woke_ns, self._used_ns = now_ns - self.since_ns, now_ns
        self.n_wakes, self._n_failed_in_a_row, self.problem = self.n_wakes + 1, 0, ""
        self._enter(SleepState.AWAKE, now_ns)
        return True

    def left(self, name: str, now_ns: int) -> None:
        """A stage that holds layers has left: while it wakes, it is waited for like any lost stage."""
        if self.state is SleepState.WAKING:
            self._enter(SleepState.AWAKE, now_ns)
            self._conductor.availability.lost(now_ns, StageLostError(f"{named_stage(name)} was lost while it loaded"))

    def failed(self, why: str, now_ns: int) -> list[SleepInstruction]:
        """A stage cannot load, and sleeps again: also one that was to load while another was lost."""
        is_serving = self._conductor.availability.phase is Phase.READY
        if self.state not in (SleepState.WAKING, SleepState.AWAKE) or is_serving:
            return []
        self.n_failed += 1
        self._n_failed_in_a_row += 1
        self.problem = why
        move: list[SleepInstruction] = [GiveUpMove(why)] if self._is_moving() else []
        wait_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(self._n_failed_in_a_row - 1, 10))
        availability = self._conductor.availability
        self._enter(SleepState.ASLEEP, now_ns)
        availability.enter(Phase.SLEEPING, now_ns)
        error = availability.cannot_wake(why, now_ns, now_ns + round(wait_s * 1e9))
        return [*move, Refuse(error), TellStages(is_asleep=True)]

    def _enter(self, state: SleepState, now_ns: int) -> None:
        self.state, self.since_ns = state, now_ns

    # --- for those who look -------------------------------------------------------------------------------------------

    def describe(self, now_ns: int) -> dict[str, object]:
        """Return the state, JSON-ready. `idle_s`: since the last request; `after_s`: when it sleeps, 0 for never."""
        idle_ns = 0 if self._conductor.readers else now_ns - self._used_ns
        return {
            "state": self.state.value,
            "state_s": round((now_ns - self.since_ns) / 1e9, 3),
            "after_s": self._idle_ns / 1e9,
            "idle_s": round(idle_ns / 1e9, 3),
            "is_asked": self.is_asked,
            "sleeps": self.n_sleeps,
            "wakes": self.n_wakes,
            "failed": self.n_failed,
            "woke_in_s": round(self.woke_ns / 1e9, 3) if self.woke_ns else None,
            "problem": self.problem,
        }
