"""Which streams travel together where lanes have KV cells of their own: those of neighbouring lanes. Pure.

llama.cpp computes rows of neighbouring lanes at once and others in parts (`stage.engine.micro_batches`), so what a step
costs depends on who meets in it. The streams that decode are cut into *blocks* of a flight's rows, in the order of
their lanes, and a flight takes rows of one block. A stream whose block is under way without it waits for that to come
round, once, and stays with it from then on; one that comes or goes moves a stream across the border of every block
above.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from relayline.coordinator.sessions.session import OutFrame

PASSES_MAX = 2  # flights that leave before the row that has waited longest


def next_group(pool: Sequence[OutFrame], decoding_lanes: Collection[int], n_rows: int, n_passes: int) -> list[OutFrame]:
    """Return the rows of the pool (which is not empty) that leave as one flight of at most n_rows, in the pool's order.

    They are of the block that has most of them in the pool, or that of the oldest row once it was passed over
    PASSES_MAX times. decoding_lanes: of all streams that decode, in the pool or under way.
    """
    blocks = {lane: rank // n_rows for rank, lane in enumerate(sorted(decoding_lanes))}
    waiting: dict[int, list[OutFrame]] = {}
    for frame in pool:
        waiting.setdefault(blocks[frame.session.lane], []).append(frame)
    oldest = waiting[blocks[pool[0].session.lane]]
    chosen = oldest if n_passes >= PASSES_MAX else max(oldest, *waiting.values(), key=len)
    return chosen[:n_rows]
