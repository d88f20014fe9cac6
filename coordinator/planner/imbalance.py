"""Notices that another cut would be clearly faster, from the steps that stages measure while they serve. Pure.

A neighbour on a host gets busy, or a laptop throttles: then one stage's steps grow, and the others wait for it. Each
look compares the running cut with the cut that fits the present steps, by the rates that the page shows of both
(`running_plan`). An imbalance is reported once the gain has been large for a while, and until it has become small.

A stage begins with figures from its calibration, while others may have used the host. So an imbalance counts only once
enough real steps have replaced them, and only looks between which steps ran count.

Memory and legal cuts are not known here. `relayline move` refuses a cut that is not legal or does not fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from relayline.coordinator.planner.costs import Edges
from relayline.coordinator.planner.running_plan import cut_by_speed, gain_of
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.texts import layer_ranges

GAIN_MIN = 0.15  # more tokens per second by another cut, from which on it is worth moving weights
GAIN_KEPT = 0.08  # a reported imbalance is over below this: near GAIN_MIN it would come and go
HOLD_NS = 60_000_000_000  # for which the gain must have been large
STEPS_MIN = 60  # decode steps of every stage, after which a curve has their times: it moves by a seventh with each
LOOKS_APART_NS = 10_000_000_000  # between polls; a longer pause restarts the minute, because nothing was measured


@dataclasses.dataclass(frozen=True, slots=True)
class Imbalance:
    """Another cut that would be faster."""

    slowest: int
    """Index of the stage whose steps take longest."""
    layers: Edges
    """Of each stage in the other cut: first layer, and one past the last."""
    gain: float
    """More tokens per second than now, as a share: 0.2 for 20 %."""
    since_ns: int
    """When it was first seen, on the caller's monotonic clock."""

    def words(self, stage_names: Sequence[str]) -> str:
        """Return it as one line for a person."""
        name = stage_names[self.slowest] if self.slowest < len(stage_names) else f"stage {self.slowest}"
        cut = layer_ranges(self.layers)
        return (
            f"{name} slows the pipeline down: with layers {cut} it would make about {self.gain:.0%} more tokens; "
            f"`relayline move --cuts {','.join(str(start) for start, _ in self.layers[1:])}` moves them while it serves"
        )

    def describe(self, now_ns: int) -> dict[str, object]:
        """Return it for GET /v1/pipeline."""
        return {
            "slowest": self.slowest,
            "layers": [list(edge) for edge in self.layers],
            "gain": round(self.gain, 3),
            "for_s": round((now_ns - self.since_ns) / 1e9, 1),
        }


class ImbalanceWatch:
    """The looks at one pipeline. Cuts do not change while it lives."""

    def __init__(self) -> None:
        self._seen: Imbalance | None = None
        self._looked_ns = 0
        self._n_steps = 0  # of every stage, since the epoch began
        self._is_reported = False

    @property
    def reported(self) -> Imbalance | None:
        """The imbalance that has lasted long enough; None if there is none."""
        return self._seen if self._is_reported else None

    def restarted(self) -> None:
        """Another epoch has begun: stages may have been started again, and know no more than their calibration."""
        self._n_steps = 0

    def stepped(self, n_steps: int) -> bool:
        """Note decode steps of every stage since the last time. Return whether it is worth a look."""
        self._n_steps += n_steps
        return n_steps > 0 and self._n_steps >= STEPS_MIN

    def look(self, found: Imbalance | None, now_ns: int) -> Imbalance | None:
        """Take what `faster_cut` found. Returns an imbalance once, when it has lasted long enough."""
        is_apart = now_ns - self._looked_ns > LOOKS_APART_NS
        self._looked_ns = now_ns
        if found is None or found.gain < (GAIN_KEPT if self._is_reported else GAIN_MIN):
            self._seen, self._is_reported = None, False
            return None
        if self._seen is not None and (self._is_reported or not is_apart):
            found = dataclasses.replace(found, since_ns=self._seen.since_ns)
        was_reported = self._is_reported
        self._seen = found
        self._is_reported = was_reported or now_ns - found.since_ns >= HOLD_NS
        return found if self._is_reported and not was_reported else None


def faster_cut(
    costs: Sequence[StageCost], edges: Edges, n_streams: int, round_trip: RoundTrip, now_ns: int
) -> Imbalance | None:
    """Compare the running cut with the one that fits the present steps. Returns None where nothing can be compared.

    `costs`: of each stage, as measured now. `n_streams`: that decode now. `round_trip`: its time beyond the steps.
    Takes tens of milliseconds with many stages or streams.
    """
    if len(costs) < 2 or not all(cost.decode.is_known for cost in costs):
        return None
    n_streams = max(1, n_streams)
    n_rows = min(n_streams, *(cost.rows_max for cost in costs))
    steps_ns = [cost.decode_ns(n_rows) for cost in costs]
    cut, gain = cut_by_speed(steps_ns, edges), 0.0
    if _may_gain(steps_ns, edges, cut):  # else groups need not be planned
        gain = gain_of(costs, edges, cut, n_streams, [round_trip])
    return Imbalance(max(range(len(costs)), key=steps_ns.__getitem__), cut, gain, now_ns)


def _may_gain(steps_ns: Sequence[float], edges: Edges, cut: Edges) -> bool:
    """Return whether the slowest step, or all of them together, would be shorter by a share that counts."""
    moved_ns = [ns * (new[1] - new[0]) / (old[1] - old[0]) for ns, old, new in zip(steps_ns, edges, cut, strict=True)]
    return max(max(steps_ns) / max(moved_ns), sum(steps_ns) / sum(moved_ns)) - 1 >= GAIN_KEPT
