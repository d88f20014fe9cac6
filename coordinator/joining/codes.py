"""Short codes of join lines: which are open, and what wrong tries do. Pure: time is an argument.

A code is for the newest invitation of one stage. It is open until it expires, until its invitation is used, or until
too many wrong tries were made, whoever made them. An exchange that was begun and not ended tests no code, so it is not
counted; how many may begin is bounded.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import OrderedDict, deque
from typing import Generic, TypeVar

from relayline.wire.common import bounds
from relayline.wire.common.errors import OverloadedError, UnauthenticatedError
from relayline.wire.common.texts import named_stage
from relayline.wire.links.join_code import JoinCode

E = TypeVar("E")


@dataclasses.dataclass(frozen=True, slots=True)
class CodedInvitation:
    """A join line with its code."""

    code: JoinCode
    name: str
    """Of the stage."""
    token: str = dataclasses.field(repr=False)
    """Of the line; empty once the code has ended."""
    expires: datetime.datetime
    """With its zone; of the code, long before the token."""
    is_relayed: bool = False
    """Whether the line has --relay."""
    n_wrong: int = 0
    """Wrong tries so far."""
    is_used: bool = False
    """Whether a host has joined by the line, with or without the code."""
    is_uncounted: bool = False
    """Whether a wrong try could not be written down."""

    def problem(self, now: datetime.datetime, address: str = "") -> str:
        """Return why the code opens nothing at `now`, in one line; "" if it does.

        `address`: host:port where hosts enrol; empty: not known.
        """
        if self.is_used:
            there = f" at {address}" if address else ""
            how = f"`relayline join --name {self.name}`"
            why = f"was used: {named_stage(self.name)} has joined{there}; on its host {how} goes on"
        elif self.n_wrong >= bounds.JOIN_CODE_WRONG_MAX:
            why = f"is void after {self.n_wrong} wrong tries"
        elif self.is_uncounted:
            why = "is void: a wrong try could not be written down"
        elif now > self.expires or not self.token:
            why = f"expired at {self.expires:%H:%M} UTC"
        else:
            return ""
        return f"the code {self.code.slot}-... {why}; {new_line(self.name)}"


def new_line(name: str) -> str:
    """Return how to get another code for a stage."""
    return f"`relayline invite {name}`, on the coordinator's machine, prints a new one"


def checked(found: CodedInvitation | None, slot: int, now: datetime.datetime, address: str = "") -> CodedInvitation:
    """Return an invitation whose code is open. `address` is as in `problem`. Raises UnauthenticatedError."""
    if found is None:
        raise UnauthenticatedError(
            f"no code here begins with {slot}; copy it again, or: `relayline invite STAGE`, on the coordinator's "
            "machine, prints a new one"
        )
    if problem := found.problem(now, address):
        raise UnauthenticatedError(problem)
    return found


def wrong(found: CodedInvitation) -> UnauthenticatedError:
    """Return the refusal of a wrong code, which was counted in `found`."""
    left = bounds.JOIN_CODE_WRONG_MAX - found.n_wrong
    if left > 0:
        tries = "1 more try is" if left == 1 else f"{left} more tries are"
        return UnauthenticatedError(f"the code is wrong; {tries} allowed, then {new_line(found.name)}")
    return UnauthenticatedError(f"the code is wrong, and void now: that was the last try; {new_line(found.name)}")


class WrongTries:
    """Wrong tries of codes in this process, so that they count before they are written down, and if they cannot be.

    Holds one entry for each slot at most.
    """

    def __init__(self) -> None:
        self._tried: dict[int, CodedInvitation] = {}

    def known(self, found: CodedInvitation) -> CodedInvitation:
        """Return an invitation that was read with all tries of its code."""
        tried = self._tried.get(found.code.slot)
        if tried is None or tried.code != found.code:
            return found
        return dataclasses.replace(found, n_wrong=max(found.n_wrong, tried.n_wrong), is_uncounted=tried.is_uncounted)

    def count(self, found: CodedInvitation) -> CodedInvitation:
        """Count a wrong try; returns the invitation with it."""
        counted = dataclasses.replace(found, n_wrong=found.n_wrong + 1)
        self._tried[found.code.slot] = counted
        return counted

    def make_void(self, found: CodedInvitation) -> None:
        """Let a code open nothing any more: a restart would forget a try that could not be written down."""
        self._tried[found.code.slot] = dataclasses.replace(found, is_uncounted=True)


class Exchanges(Generic[E]):
    """Exchanges that have begun and not ended."""

    def __init__(self) -> None:
        self._begun_ns: deque[int] = deque()
        self._open: OrderedDict[str, tuple[int, E]] = OrderedDict()

    def check_rate(self, now_ns: int) -> None:
        """Count the begin of an exchange. Raises OverloadedError if too many began of late."""
        while self._begun_ns and now_ns - self._begun_ns[0] > bounds.JOIN_CODE_BEGUN_S * 1e9:
            self._begun_ns.popleft()
        if len(self._begun_ns) >= bounds.JOIN_CODE_BEGUN_MAX:
            wait_s = max(1, round((self._begun_ns[0] - now_ns) / 1e9 + bounds.JOIN_CODE_BEGUN_S))
            raise OverloadedError(f"too many hosts try codes here; wait {wait_s} s, or use the long line", wait_s)
        self._begun_ns.append(now_ns)

    def begin(self, name: str, exchange: E, now_ns: int) -> None:
        """Keep an exchange under a name that nobody can guess."""
        self._open[name] = (now_ns, exchange)
        if len(self._open) > bounds.JOIN_CODE_EXCHANGES_MAX:
            self._open.popitem(last=False)

    def end(self, name: str, now_ns: int) -> E:
        """Return an exchange and forget it: it is good for one proof. Raises UnauthenticatedError."""
        began_ns, exchange = self._open.pop(name, (0, None))
        if exchange is None or now_ns - began_ns > bounds.JOIN_CODE_EXCHANGE_S * 1e9:
            raise UnauthenticatedError("this exchange by code took too long; run the command again")
        return exchange
