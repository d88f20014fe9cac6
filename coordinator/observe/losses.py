"""Finds the stage that was lost from the reason of a loss. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from relayline.wire.common.errors import RelaylineError

_UPSTREAM = re.compile(r"the upstream link of stage (\d+) closed")


def lost_stage(error: RelaylineError, addresses: Sequence[str], stage_names: Sequence[str] = ()) -> int | None:
    """Return the index of the lost stage; None if the reason does not tell.

    A stage that reports a lost link names the neighbour at its other end. The neighbour is the lost stage.
    """
    reason = error.message
    for index, address in enumerate(addresses):
        if address and re.search(rf"(?<![\w.-]){re.escape(address)}(?!\d)", reason):
            return index
    for index, name in enumerate(stage_names):
        if re.search(rf"\bstage {re.escape(name)}(?![\w-])", reason):
            return index
    upstream = _UPSTREAM.search(reason)
    if upstream is not None:
        return int(upstream[1]) - 1 if int(upstream[1]) else None
    return error.stage_index
