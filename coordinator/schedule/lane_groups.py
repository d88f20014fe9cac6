"""Groups streams of neighbouring lanes, for caches in which each lane has its own KV cells. Pure.

llama.cpp computes rows of neighbouring lanes at once, and other rows in parts (`stage.engine.micro_batches`). So the
cost of a step depends on which lanes meet in it. Decoding streams are cut, in the order of their adapters and lanes,
into *blocks* of one flight's rows. A flight takes rows of one block. A stream that misses its block waits once until
the block comes round, and then stays with it. When a stream joins or leaves, one stream crosses the border of every
later block.
"""

from __future__ import annotations

from collections.abc import Sequence

from relayline.coordinator.sessions.session import OutFrame

PASSES_MAX = 2  # flights that leave before the row that has waited longest


def next_group(pool: Sequence[OutFrame], decoding_lanes: Sequence[int], n_rows: int, n_passes: int) -> list[OutFrame]:
    """Return the rows of the pool (which is not empty) that leave as one flight of at most n_rows, in the pool's order.

    The rows belong to the block with most rows in the pool, or to the block of the oldest row after that row was passed
    over PASSES_MAX times. decoding_lanes: the lanes of all decoding streams, in the pool or under way, in the order in
    which they are cut into blocks.
    """
    blocks = {lane: rank // n_rows for rank, lane in enumerate(decoding_lanes)}
    waiting: dict[int, list[OutFrame]] = {}
    for frame in pool:
        waiting.setdefault(blocks[frame.session.lane], []).append(frame)
    oldest = waiting[blocks[pool[0].session.lane]]
    chosen = oldest if n_passes >= PASSES_MAX else max(oldest, *waiting.values(), key=len)
    return chosen[:n_rows]
