"""How often a line is logged that another end can bring about at will. Pure: time is an argument."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable

QUIET_NS = 60 * 1_000_000_000  # between two lines about the same
KEYS_MAX = 256  # that are remembered for that; the one longest silent is forgotten first


@dataclasses.dataclass(slots=True)
class _Logged:
    at_ns: int
    n_skipped: int = 0


class Repeats:
    """Which lines are written: the first of its kind, then one a minute with the number left out."""

    def __init__(self) -> None:
        self._logged: OrderedDict[Hashable, _Logged] = OrderedDict()

    def again(self, key: Hashable, now_ns: int) -> str | None:
        """Return what a line about `key` ends with at `now_ns` (monotonic), None if it was written just now."""
        logged = self._logged.get(key)
        if logged is not None and now_ns - logged.at_ns < QUIET_NS:
            logged.n_skipped += 1
            return None
        self._logged[key] = _Logged(now_ns)
        self._logged.move_to_end(key)
        while len(self._logged) > KEYS_MAX:
            self._logged.popitem(last=False)
        return f" ({logged.n_skipped} more since the last line)" if logged is not None and logged.n_skipped else ""
