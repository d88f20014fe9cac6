"""The short code of a join line: what a person types where the long token would have to be copied. Pure.

    482-177-309         SLOT-SECRET

The first three digits name the invitation and are public: a host asks the pipelines around it which of them has it. The
other six are secret. Both ends prove to each other that they know them, see `code_exchange`, and never send them.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Collection

from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import counted
from relayline.wire.links import enrolment
from relayline.wire.links.security import is_loopback

SLOT_FIRST, SLOT_LAST = 100, 999
_DIGITS, _SECRET_DIGITS = 9, 6
_CODE = re.compile(r"([1-9]\d{2})[- ]?(\d{3})[- ]?(\d{3})")
_CODE_LIKE = re.compile(r"[\d][\d -]*")  # no host and no token is written so, but a wrong code is


@dataclasses.dataclass(frozen=True, slots=True)
class JoinCode:
    """A code's two parts."""

    slot: int
    """SLOT_FIRST to SLOT_LAST; names the invitation at its pipeline."""
    secret: str = dataclasses.field(repr=False)
    """Six digits."""

    def __str__(self) -> str:
        return f"{self.slot}-{self.secret[:3]}-{self.secret[3:]}"

    @property
    def password(self) -> bytes:
        """What both ends prove to know."""
        return str(self).encode()


def new_code(taken: Collection[int] = ()) -> JoinCode:
    """Return a fresh code whose slot is none of `taken`. Raises UsageError where these leave none."""
    free = [slot for slot in range(SLOT_FIRST, SLOT_LAST + 1) if slot not in taken]
    if not free:
        raise UsageError(f"{len(taken)} join codes are open, which is as many as there can be; let some be used first")
    return JoinCode(secrets.choice(free), f"{secrets.randbelow(10**_SECRET_DIGITS):0{_SECRET_DIGITS}}")


def code_line(code: JoinCode, address: str, *, is_announced: bool) -> str:
    """Return what to run on a host: with the host of `address` (host:port) where it finds no announcement.

    A pipeline on loopback is never announced.
    """
    host, _, port = address.rpartition(":")
    where = "" if is_announced and not is_loopback(host) else f"{host if int(port) == enrolment.PORT else address} "
    return f"relayline join {where}{code}"


def is_code_like(text: str) -> bool:
    """Return whether a word of a command line can only be meant as a code."""
    return _CODE_LIKE.fullmatch(text.strip()) is not None


def read_code(text: str) -> JoinCode:
    """Return a code's parts, written with hyphens, blanks or neither. Raises UsageError."""
    found = _CODE.fullmatch(text.strip())
    if found is None:
        digits = sum(each.isdecimal() for each in text)
        if digits != _DIGITS:
            problem = f"has {counted(digits, 'digit')}; a join code has nine"
        elif text.strip().startswith("0"):
            problem = "begins with 0; the first digit of a join code is 1 to 9"
        else:
            problem = "does not have its nine digits in three groups"
        raise UsageError(f"{text.strip()!r} {problem}, such as 482-177-309; copy it again")
    slot, *secret = found.groups()
    return JoinCode(int(slot), "".join(secret))
