"""Shares layers out when other stages than before are to hold them. Pure.

If each new holder takes the place of an old one and has room, the cuts stay and no other stage moves layers. Else the
slowest stage is made as fast as possible: layers are shared by a layer's time on each host, within the room that each
has and at cuts that the model allows. Among equal ways the one that moves fewest layers wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from relayline.coordinator.model.cuts import ranges
from relayline.wire.common.errors import NotReadyError
from relayline.wire.common.texts import named_layers
from relayline.wire.common.units import bytes_text

Need = Callable[[int, int], int]
"""Bytes that a stage with the layers [start, end) holds."""
IsAllowed = Callable[[int, int], bool]
"""Whether the layers [start, end) may be one stage."""


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """One place that is to hold layers."""

    name: str
    layer_ns: float = 0.0
    """What one layer takes of a decode step there; 0 where it has not been measured: as long as with the others."""
    room_bytes: int | None = None
    """For layers that it does not hold now, in addition to those; None if unknown."""
    held: tuple[int, int] = (0, 0)
    """The layers that it holds now: the first, and one past the last."""


class NoRoomError(NotReadyError):
    """The holders cannot hold all layers; the message says who lacks what."""


def share_out(
    holders: Sequence[Holder],
    n_layers: int,
    need: Need,
    is_allowed: IsAllowed,
    *,
    same: tuple[int, ...] | None = None,
    must_be_known: bool = False,
) -> tuple[int, ...]:
    """Return the cuts: the first layer of each holder but the first.

    `same`: the present cuts, if each new holder replaces an old one. With `must_be_known`, a holder with unknown room
    gets no more layers than it has. Raises NoRoomError.
    """

    def fits(holder: Holder, start: int, end: int) -> bool:
        if (start, end) == holder.held:
            return True
        if holder.room_bytes is None:
            return not must_be_known
        return need(start, end) <= holder.room_bytes

    if same is not None and all(
        fits(holder, *edge) for holder, edge in zip(holders, ranges(n_layers, same), strict=True)
    ):
        return same
    cuts = _best(holders, n_layers, fits, is_allowed)
    if cuts is None:
        raise NoRoomError(_why(holders, n_layers, need, fits, is_allowed))
    return cuts


def _best(
    holders: Sequence[Holder], n_layers: int, fits: Callable[[Holder, int, int], bool], is_allowed: IsAllowed
) -> tuple[int, ...] | None:
    """Return the cuts with the fastest slowest stage, None where there are none."""
    known = [holder.layer_ns for holder in holders if holder.layer_ns > 0]
    usual_ns = sum(known) / len(known) if known else 1.0
    # After this many layers: the slowest stage's time, the layers that move, the cuts.
    reached: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    for index, holder in enumerate(holders):
        layer_ns = holder.layer_ns if holder.layer_ns > 0 else usual_ns
        following: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        n_behind = len(holders) - index - 1
        for start, (slowest_ns, n_moved, cuts) in reached.items():
            ends = range(start + 1, n_layers - n_behind + 1) if n_behind else (n_layers,)
            for end in ends:
                kept = max(0, min(end, holder.held[1]) - max(start, holder.held[0]))
                found = (
                    max(slowest_ns, layer_ns * (end - start)),
                    n_moved + end - start - kept,
                    (*cuts, start) if index else cuts,
                )
                is_better = end not in following or found < following[end]
                if is_better and is_allowed(start, end) and fits(holder, start, end):
                    following[end] = found
        reached = following
    return reached[n_layers][2] if n_layers in reached else None


def _why(
    holders: Sequence[Holder],
    n_layers: int,
    need: Need,
    fits: Callable[[Holder, int, int], bool],
    is_allowed: IsAllowed,
) -> str:
    """Return in one line how much memory is missing."""
    if not holders:
        return "no stage is left to hold the layers"
    wished = _best(holders, n_layers, lambda holder, start, end: True, is_allowed)
    if wished is None:
        return f"the model's {n_layers} layers cannot be cut for {len(holders)} stages"
    short = [
        f"{holder.name} would need {bytes_text(need(start, end))} for {named_layers(start, end)} and has "
        + (f"{bytes_text(max(0, holder.room_bytes))} free" if holder.room_bytes is not None else "an unknown amount")
        for holder, (start, end) in zip(holders, ranges(n_layers, wished), strict=True)
        if not fits(holder, start, end)
    ]
    return f"no room for all layers: {'; '.join(short)}"
