"""Typed view of _weigh.c."""

from typing import Literal

FIELD_NUMBER_MAX: int  # fields of higher numbers count as ones that nobody knows

def weigh(message: bytes, table: bytes, root: int, cost_max: int, fields_max: int, /) -> int:
    """Return an upper bound of the bytes that reading the message would allocate; more than cost_max as soon as it is.

    `table` is that of wire.messages, `root` the message's type in it. More than fields_max fields are too many too.
    """

def find(message: bytes, number: int, /) -> tuple[int, int, int] | Literal[False] | None:
    """Return where the one length-delimited field of a number is, at the top of a message: its tag, its data, its end.

    None if there is none, False if there are several or the message is not well formed.
    """
