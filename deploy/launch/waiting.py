"""The output of `up` while it waits for the stages of other hosts: members, missing hosts, progress of fetches. Pure.

Nothing is repeated: a line comes when the set of members has changed, or when a fetch has advanced for some seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from relayline.wire.common.phase import HostState
from relayline.wire.common.texts import duration_text

FETCH_LINE_EVERY_S = 5.0
IDLE = (HostState.SPARE, HostState.DRAINED)  # here, and without layers
RESTING = (HostState.SLEEPING, *IDLE)
_JOINED = (HostState.STARTING, HostState.MEASURING, HostState.FETCHING, HostState.LOADING, HostState.READY,
           HostState.SILENT, *RESTING)  # fmt: skip
GB, MB = 1e9, 1e6


@dataclasses.dataclass(slots=True)
class _Fetch:
    began_s: float
    began_bytes: int
    shown_s: float
    trouble: str = ""  # that a line has told, unless bytes have come since


class Waiting:
    """The stages of one launch until all of them serve."""

    def __init__(self, names: Sequence[str], *, tells_members: bool = True) -> None:
        """Take the stages' names in layer order. `tells_members`: whether some are on other hosts, where people start
        them.
        """
        self._tells_members = tells_members
        self._states = dict.fromkeys(names, HostState.WAITING)
        self._fetches: dict[str, _Fetch] = {}
        self._shown: tuple[str, ...] = ()  # the members that the last line was about
        self.is_over = False
        """Set once every stage serves; no more lines follow."""

    def events_for(self, event: dict[str, Any], now_s: float) -> list[dict[str, Any]]:
        """Take the coordinator's event about a stage; returns the events to emit, each with its `message`."""
        name = event["name"]
        if self.is_over or name not in self._states:
            return []
        self._states[name] = HostState(event["state"])
        events = self._members() + self._fetch(name, event, now_s)
        self.is_over = all(state in (HostState.READY, *RESTING) for state in self._states.values())
        return events

    def _members(self) -> list[dict[str, Any]]:
        joined = tuple(name for name, state in self._states.items() if state in _JOINED)
        if joined == self._shown or not self._tells_members:
            return []
        self._shown = joined
        missing = [name for name in self._states if name not in joined]
        text = f"{len(joined)} of {len(self._states)} joined"
        if missing:
            text += f", waiting for {', '.join(missing)}"
        return [{"event": "waiting", "joined": list(joined), "missing": missing, "message": text}]

    def _fetch(self, name: str, event: dict[str, Any], now_s: float) -> list[dict[str, Any]]:
        done_bytes, total_bytes = event.get("done_bytes", 0), event.get("total_bytes", 0)
        trouble = event.get("trouble", "")
        if self._states[name] is not HostState.FETCHING or not total_bytes:
            self._fetches.pop(name, None)
            return []
        fetch = self._fetches.get(name)
        if fetch is None:
            fetch = self._fetches[name] = _Fetch(now_s, done_bytes, now_s)  # most end before there is anything to say
        is_soon = now_s - fetch.shown_s < FETCH_LINE_EVERY_S
        if trouble:  # the first one is told at once, another one not before its time, and the same one only once
            fetch.began_s, fetch.began_bytes = now_s, done_bytes  # the rate counts from the end of the trouble on
            is_told = trouble == fetch.trouble or (is_soon and fetch.trouble != "")
        else:
            is_told = is_soon or now_s - fetch.began_s < FETCH_LINE_EVERY_S
        if is_told or done_bytes >= total_bytes:
            return []
        fetch.shown_s, fetch.trouble = now_s, trouble
        rate = 0.0 if trouble else (done_bytes - fetch.began_bytes) / (now_s - fetch.began_s)
        text = f"{name} fetches its layers: {fetched_text(done_bytes, total_bytes)}"
        text += f"; {waits_text(trouble)}" if trouble else ""
        left_s = (total_bytes - done_bytes) / rate if rate > 0 else None
        if left_s is not None:
            text += f", {rate / MB:.0f} MB/s, {duration_text(left_s)} left"
        return [{"event": "fetch", "name": name, "done_bytes": done_bytes, "total_bytes": total_bytes,
                 "left_s": left_s, "trouble": trouble, "message": text}]  # fmt: skip


def fetched_text(done_bytes: int, total_bytes: int) -> str:
    """Return how far a fetch is: `1.20 of 3.40 GB`."""
    return f"{done_bytes / GB:.2f} of {total_bytes / GB:.2f} GB"


def waits_text(trouble: str) -> str:
    """Return why a fetch does not get on."""
    return f"nothing comes just now: {trouble}"
