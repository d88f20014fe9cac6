"""One lane's KV cells as bytes, in llama.cpp's own format: read from one lane, written to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine.fresh_memory import small_pages
from relayline.stage.engine.ggml import pointer
from relayline.wire.common.errors import PositionGapError

# A lane is read and written again in the time in which llama.cpp copies this many times its cells in one go. Measured
# for half of a llama-1b (20 KB per token): 512 tokens take 4 to 8 ms, whole lanes of 2,048 5 ms and of 16,384 28 to 35.
HELD_COPIES_MAX = 4
_PARTIAL_ONLY = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


def read_lane(context: Any, lane: int) -> npt.NDArray[np.uint8] | None:
    """Return the lane's state as bytes, [n] u8; None where llama.cpp cannot save it."""
    state = np.empty(llama.llama_state_seq_get_size(context, lane), np.uint8)
    is_read = llama.llama_state_seq_get_data(context, pointer(state), state.nbytes, lane) == state.nbytes
    return state if is_read else None


def write_lane(context: Any, lane: int, state: npt.NDArray[np.uint8]) -> bool:
    """Let the lane hold what `read_lane` returned; false, and the lane is empty, where that cannot be."""
    return bool(llama.llama_state_seq_set_data(context, pointer(state), state.nbytes, lane) == state.nbytes)


def filled_at_once(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return fresh memory for a state that is read now. Raises OSError."""
    return small_pages(n_bytes, is_filled_at_once=True)


def read_partial(
    context: Any, lane: int, memory: Callable[[int], npt.NDArray[np.uint8]] = filled_at_once
) -> npt.NDArray[np.uint8] | None:
    """Return the part of the lane's state that forgets: recurrent states, or the cells of sliding windows.

    memory: what it is read into, by its bytes. None where llama.cpp cannot tell, or the system has no memory for it.
    """
    n_bytes = llama.llama_state_seq_get_size_ext(context, lane, _PARTIAL_ONLY)
    try:
        state = memory(n_bytes)
    except OSError:
        return None
    n_bytes = llama.llama_state_seq_get_data_ext(context, pointer(state), state.nbytes, lane, _PARTIAL_ONLY)
    return state if n_bytes == state.nbytes else None


def write_partial(context: Any, lane: int, state: npt.NDArray[np.uint8]) -> bool:
    """Let the lane have a state that `read_partial` returned; its other KV cells stay. False: it cannot be."""
    n_bytes = llama.llama_state_seq_set_data_ext(context, pointer(state), state.nbytes, lane, _PARTIAL_ONLY)
    return bool(n_bytes == state.nbytes)


def copy_lane(context: Any, source_lane: int, target_lane: int) -> bool:
    """Copy the source lane's state into the target lane, which is empty. If that is impossible, return false and leave
    it empty.
    """
    state = read_lane(context, source_lane)
    return state is not None and write_lane(context, target_lane, state)


def has_window(memory: Any, lane: int, position: int, window: int) -> bool:
    """Return whether the lane has all cells that a row at `position`, at most its end, reads through its window."""
    return int(llama.llama_memory_seq_pos_min(memory, lane)) <= max(0, position - window + 1)


def require(memory: Any, lane: int, position: int, window: int) -> None:
    """Raise PositionGapError unless the lane has all that a row at `position`, at most its end, reads.

    Of layers with a sliding window llama.cpp gives cells away that no next row would read: where it meets them in its
    search for free ones, which happens in a unified cache (llama_kv_cache::find_slot). All cells before them go too.
    """
    if window and position and not has_window(memory, lane, position, window):
        raise PositionGapError(
            f"lane {lane} cannot be taken back to position {position}: its layers with a sliding window no longer have "
            "the cells before it"
        )
