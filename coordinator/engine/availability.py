"""The pipeline's state as clients see it, since when, and when each stage was last heard. Pure.

A hung stage counts as lost from its last heartbeat, not from the moment of detection. A request that arrives after
that heartbeat waits at most `lost_wait_s`. Then its client gets a status that says to retry. Requests that were
already running wait longer, see PipelineConfig.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from relayline.coordinator.sessions.abilities import image_refusal, refusal
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.wire.common import bounds
from relayline.wire.common.errors import NotReadyError, NotServedError, RelaylineError, UnauthenticatedError
from relayline.wire.common.phase import Phase
from relayline.wire.common.sampler_fields import OPTIONS
from relayline.wire.links.silence import Silence, looks_of

DOUBTED_AFTER_S = 3.0  # of silence: from then on a stage is not asked for figures, which others wait for


class Availability:
    """The phase of one pipeline, and the heartbeats of its stages. Times are monotonic nanoseconds of the caller."""

    def __init__(self, names: Sequence[str], lost_wait_s: float, now_ns: int) -> None:
        """`names` of the stages in layer order, for people."""
        self.phase, self.since_ns = Phase.LOADING, now_ns
        self.lost_at_ns = 0
        """When the stage that is waited for was last there."""
        self.options: Set[str] = OPTIONS
        """The options that the last stage's sampler knows."""
        self.mutual_rows_max = bounds.ROWS_PER_FRAME_MAX
        """The most rows that may attend to each other, see EpochFacts."""
        self.takes_grids = True
        """Whether every stage takes rows with places on several axes."""
        self._names, self._lost_wait_ns = names, int(lost_wait_s * 1e9)
        self._silences = [Silence() for _ in names]
        self._heard_ns = [0] * len(names)  # 0: never
        self._instances = [""] * len(names)
        self._n_restarts = [0] * len(names)
        self._wake_problem, self._wakes_at_ns = "", 0  # why the latest wake failed, and when the next one may be tried
        self._refused: dict[int, str] = {}  # by index, why a stage is kept out: waiting does not end that

    # --- phases -------------------------------------------------------------------------------------------------------

    def enter(self, phase: Phase, now_ns: int) -> None:
        """Be in another phase from now on."""
        if phase is not self.phase:
            self.phase, self.since_ns = phase, now_ns

    def lost(self, now_ns: int, error: RelaylineError) -> None:
        """A stage or a link was lost, for this reason."""
        self.refused(error)
        heard_ns = [heard for index, heard in enumerate(self._heard_ns) if self.is_silent(index)]
        self.lost_at_ns = min([now_ns, *heard_ns])
        self.enter(Phase.RECOVERING, now_ns)

    def refused(self, error: RelaylineError) -> None:
        """No epoch can be begun, for this reason. Counts if it names a stage whose credential is refused."""
        if isinstance(error, UnauthenticatedError) and error.stage_index is not None:
            self._refused[error.stage_index] = error.message

    def check(self, now_ns: int) -> None:
        """Raise NotReadyError, which says why, unless a new request may start, or wait for a stage that was lost."""
        if self.phase.rests:
            if self.phase is Phase.SLEEPING and now_ns < self._wakes_at_ns:
                raise self._wake_refusal(now_ns)
        elif not self.phase.is_up or self._waited_enough(now_ns):
            raise self.refusal(now_ns)

    def cannot_wake(self, why: str, now_ns: int, until_ns: int) -> NotReadyError:
        """A wake has failed, and is not tried again until then. Returns what to tell the requests that wait."""
        self._wake_problem, self._wakes_at_ns = why, until_ns
        return self._wake_refusal(now_ns)

    def _wake_refusal(self, now_ns: int) -> NotReadyError:
        after_s = max(1, math.ceil((self._wakes_at_ns - now_ns) / 1e9))
        return NotReadyError(f"the pipeline cannot wake: {self._wake_problem}; try again in {after_s} s", after_s)

    def refusal(self, now_ns: int) -> NotReadyError:
        """Return what to tell a request that can't start within its time."""
        if self.phase.is_paused:
            if self._refused:
                return NotReadyError(f"the pipeline is unreachable: {'; '.join(self._refused.values())}")
            lost_s = (now_ns - self.lost_at_ns) / 1e9
            silent = [f"{self._names[index]} ({seconds:.0f} s)" for index, seconds in self._quiet(now_ns)]
            who = f"; no heartbeat: {', '.join(silent)}" if silent else ""
            return NotReadyError(f"the pipeline is unreachable: a stage was lost {lost_s:.0f} s ago{who}; try again")
        return NotReadyError(f"the pipeline is {self.phase.value}; try again shortly")

    def not_served(self, request: GenerationRequest) -> NotServedError | None:
        """Return why the stages cannot serve a request, whenever it comes; None: they can."""
        return refusal(request, self.options) or self._image_refusal(request)

    def _image_refusal(self, request: GenerationRequest) -> NotServedError | None:
        return image_refusal(request, self.mutual_rows_max, takes_grids=self.takes_grids) if request.images else None

    def came_while_lost(self, admitted_ns: int) -> bool:
        """Return whether a request that was admitted then came after the loss of the stage that is waited for."""
        return self.phase.is_paused and admitted_ns >= self.lost_at_ns

    def _waited_enough(self, now_ns: int) -> bool:
        return self.phase.is_paused and now_ns - self.lost_at_ns >= self._lost_wait_ns

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def heard(self, index: int, now_ns: int) -> str:
        """A stage sent a heartbeat. Returns what to say where it had been silent, else nothing."""
        self._refused.pop(index, None)
        was_silent, silent_s = self.is_silent(index), (now_ns - self._heard_ns[index]) / 1e9
        self._silences[index].heard()
        self._heard_ns[index] = now_ns
        return f"{self._names[index]} answers again after {silent_s:.0f} s" if was_silent else ""

    def serves(self, index: int, instance_id: str) -> None:
        """A stage takes part in a new epoch; `instance_id` is new at every start of it."""
        if self._instances[index] not in ("", instance_id):
            self._n_restarts[index] += 1
        self._instances[index] = instance_id

    def changes_engines(self, names: Sequence[str]) -> None:
        """Stages of these names, in layer order, take up other layers.

        Their reports afterwards differ, but that is not a restart. The record of a name stays with it.
        """
        before = {name: index for index, name in enumerate(self._names)}
        known = [before.get(name) for name in names]
        self._silences = [Silence() if at is None else self._silences[at] for at in known]
        self._heard_ns = [0 if at is None else self._heard_ns[at] for at in known]
        self._n_restarts = [0 if at is None else self._n_restarts[at] for at in known]
        self._names, self._instances = tuple(names), [""] * len(known)
        self._refused.clear()

    def look(self, now_ns: int) -> tuple[list[str], bool]:
        """Look at the stages and the clock; call it every BEAT_EVERY_S.

        Returns what to say of stages that have just become silent, and whether requests that `came_while_lost` have
        waited for long enough just now.
        """
        n_quiet = looks_of(bounds.QUIET_AFTER_S)
        lines = [
            f"{name} has not answered for {bounds.QUIET_AFTER_S:.0f} s"
            for name, silence, heard_ns in zip(self._names, self._silences, self._heard_ns, strict=True)
            if heard_ns and silence.look() == n_quiet
        ]
        is_over = self.phase is Phase.RECOVERING and self._waited_enough(now_ns)
        if is_over:
            self.enter(Phase.UNREACHABLE, now_ns)
        return lines, is_over

    def is_silent(self, index: int) -> bool:
        """Return whether a stage that was heard before does not answer."""
        return self._silences[index].n_looks >= looks_of(bounds.QUIET_AFTER_S)

    def is_doubted(self, index: int) -> bool:
        """Return whether an answer of this stage had better not be waited for."""
        return self._silences[index].n_looks >= looks_of(DOUBTED_AFTER_S)

    def _quiet(self, now_ns: int) -> list[tuple[int, float]]:
        return [
            (index, (now_ns - heard_ns) / 1e9)
            for index, heard_ns in enumerate(self._heard_ns)
            if heard_ns and self.is_silent(index)
        ]

    def describe(self, now_ns: int) -> dict[str, object]:
        """Return the phase as a JSON-ready value."""
        return {"phase": self.phase.value, "phase_s": round((now_ns - self.since_ns) / 1e9, 3)}

    def describe_stage(self, index: int, now_ns: int) -> dict[str, object]:
        """Return one stage's heartbeats and its number of restarts.

        `last_heard_s` is null for a stage that was never heard.
        """
        heard_ns = self._heard_ns[index]
        return {
            "last_heard_s": round((now_ns - heard_ns) / 1e9, 3) if heard_ns else None,
            "silent": self.is_silent(index),
            "restarts": self._n_restarts[index],
        }
