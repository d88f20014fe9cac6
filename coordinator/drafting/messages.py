"""What the coordinator and the process that drafts say to each other.

A frame is a u32 size and a msgpack list of messages.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

SIZE = struct.Struct("<I")


class Begin(msgspec.Struct, frozen=True, tag="begin", array_like=True):
    """Read these tokens and draft what follows."""

    stream: int
    tokens: list[int]


class Took(msgspec.Struct, frozen=True, tag="took", array_like=True):
    """The stream continues with these tokens from `position` on."""

    stream: int
    position: int
    tokens: list[int]


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    """The stream is over."""

    stream: int


ToDrafter: TypeAlias = Begin | Took | End


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The model is loaded."""


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The model can't be used, for this reason; the process ends."""

    why: str
    may_pass: bool = False
    """Whether the next process may load it: memory was missing."""


class Guessed(msgspec.Struct, frozen=True, tag="guessed", array_like=True):
    """All guesses for a stream's tokens from `position` on, where the text that the drafter knows ends."""

    stream: int
    position: int
    tokens: list[int]
    probabilities: list[float]
    """That the drafter's model gives to each guess."""
    follows: bool
    """Whether it is at work on one more."""


FromDrafter: TypeAlias = Ready | Refused | Guessed

_ENCODER = msgspec.msgpack.Encoder()
TO_DRAFTER = msgspec.msgpack.Decoder(list[ToDrafter])
FROM_DRAFTER = msgspec.msgpack.Decoder(list[FromDrafter])


def framed(messages: list[ToDrafter] | list[FromDrafter]) -> bytes:
    """Return one frame of these messages."""
    body = _ENCODER.encode(messages)
    return SIZE.pack(len(body)) + body
