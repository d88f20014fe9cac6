"""The conductor's instructions, the only thing that its shell has to carry out. Plain values without behaviour.

Instructions are carried out in their order. `Send`, `Tell`, `Draft`, `Wake`, `Lose`, `Dispatch` and `TryLanes` are the
work; the others are for telemetry and the log. Every token brings a `Tell` and a `Generated`: structs are made three
times as fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec

from relayline.coordinator.drafting.messages import ToDrafter
from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.generation import PromptProgress, TokenEvent
from relayline.wire.common.errors import RelaylineError


class Send(NamedTuple):
    """Send these frames to stage 0 as one envelope."""

    frames: tuple[Frame, ...]


class Tell(msgspec.Struct, frozen=True):
    """Give this event to every reader of a session; an error, or a finish reason, is the last."""

    session_id: int
    event: TokenEvent | RelaylineError


class Progressed(NamedTuple):
    """Tell every reader of a session how far its prompt has been read."""

    session_id: int
    progress: PromptProgress


class Lose(NamedTuple):
    """End the epoch: the connection cannot be used any more."""

    error: RelaylineError


class Note(NamedTuple):
    """Let stage 0 keep these notes on stored prefixes, by key."""

    notes: Mapping[int, bytes]


class Draft(NamedTuple):
    """Tell this to the model that drafts."""

    messages: list[ToDrafter]


class Wake(NamedTuple):
    """Call `Conductor.dispatch` after so long: rows may have waited for guesses in vain."""

    after_s: float


class Dispatch(NamedTuple):
    """Call `Conductor.dispatch` once everything else that has come by now has been dealt with."""


class TryLanes(NamedTuple):
    """Call `Conductor.try_lanes` after so long."""

    after_s: float


class Started(NamedTuple):
    """A session has a lane and its first rows are about to leave; not only the first time."""

    session_id: int
    n_copied: int
    """Tokens of it that another session has computed, or will have."""


class Generated(msgspec.Struct, frozen=True, gc=False):
    """A session has got the token for a position."""

    session_id: int
    position: int
    finish_reason: str | None
    is_drafted: bool


class Replayed(NamedTuple):
    """A session restarts after a failure of only this session."""

    session_id: int
    why: str


class Ended(NamedTuple):
    """A session is over, for whatever reason. Only its readers' last events follow."""

    session_id: int
    error: RelaylineError | None


class Log(NamedTuple):
    """Write a line to the log."""

    level: int  # of the logging module
    text: str
    fields: Mapping[str, object] = MappingProxyType({})
    bug: BaseException | None = None
    """An unexpected exception; its traceback belongs in the log."""


Instruction: TypeAlias = (
    "Send | Tell | Progressed | Note | Draft | Wake | Lose | Dispatch | TryLanes | Started | Generated | Replayed"
    " | Ended | Log"
)
