"""Finds the stage that was lost from the reason of a loss. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.texts import named_stage

_UPSTREAM = re.compile(r"the upstream link of stage (\d+) closed|, which sends to stage (\d+), ")
_WITHIN_HOST = re.compile(r"[\w.-]")


def lost_stage(error: RelaylineError, addresses: Sequence[str], stage_names: Sequence[str] = ()) -> int | None:
    """Return the index of the lost stage; None if the reason does not tell.

    A stage that reports a lost link names the neighbour at its other end. The neighbour is the lost stage.
    """
    reason = error.message
    for index, address in enumerate(addresses):
        if address and _is_named(address, reason):
            return index
    for index, name in enumerate(stage_names):
        if re.search(rf"(?:\bstage {re.escape(name)}|^{re.escape(named_stage(name))})(?![\w-])", reason):
            return index
    upstream = _UPSTREAM.search(reason)
    if upstream is not None:
        reporter = int(upstream[1] or upstream[2])
        return reporter - 1 if reporter else None
    return error.stage_index


def _is_named(address: str, reason: str) -> bool:
    """Return whether an address stands in a text, and not as a part of another one.

    Not with a pattern of its own: stages have new ports after each sleep, and Python remembers 512 patterns.
    """
    around = itertools.pairwise(reason.split(address))
    return any(not _WITHIN_HOST.fullmatch(before[-1:]) and not after[:1].isdecimal() for before, after in around)
