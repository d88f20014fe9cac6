"""A stage's memory. Pure.

Weights are counted once: llama.cpp either maps them or keeps a repacked copy, and the system can take back mapped pages
behind a copy. Compute buffers follow the reservations of llama.cpp 0.3.36's binding for llama-like graphs: a mask of
rows x cells, some rows of the widest matrix, and the logits that a last stage may be asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from relayline.coordinator.planner.instance import (
    KV_VALUE_BYTES,
    Gpu,
    Host,
    Load,
    Machine,
    ModelShape,
    Offload,
)
from relayline.wire.common.bounds import DRAFTED_ROWS_MAX
from relayline.wire.common.checkpoints import CHECKPOINT_BYTES_MAX, CHECKPOINTS_PER_LANE_MAX
from relayline.wire.common.curve import PAD_SEARCH_ROWS
from relayline.wire.common.kv_layout import count_cells, has_scores, keeps_window, window_cells
from relayline.wire.common.units import GIB, MIB

MASK_BYTES = 2  # of one row and cell
CHOICE_BYTES = 6  # of one row and cell in layers with sparse attention: a mask and a score, f32
CHOICE_SCORED_BYTES = 4  # extra without flash attention: the choice, as f32
FF_COPIES, EMBD_COPIES = 4, 4  # rows of each width that a graph holds at once, f32
PROCESS_BYTES = 144 * MIB  # Python, gRPC, llama.cpp and their libraries
COORDINATOR_BYTES = 384 * MIB  # coordinator with tokenizer and HTTP API
LANE_STATES_BYTES = 2 * GIB  # of all lanes and layers, if the number of lanes is the default
LANES_LEAST = 4  # even then
HEADROOM = 0.05  # of a limit, for other work of the host


Pool = Machine | Gpu  # whose memory stages share
GPU_RESERVE = 0.1  # of a GPU's memory, for its driver, a desktop and errors of the estimate
GPU_RESERVE_BYTES_MIN = 768 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one stage in a GPU's own memory."""

    weights_bytes: int
    kv_bytes: int
    """KV cells and recurrent states of the layers that are there."""
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage: of the host's memory, and of its GPU's."""

    weights_bytes: int
    """Layers, head on the last stage, embedding table on the first."""
    kv_bytes: int
    """KV cells, recurrent states of all lanes, and as many checkpoints of what forgets as a stage keeps."""
    compute_bytes: int
    process_bytes: int = PROCESS_BYTES
    prefix_bytes: int = 0
    """Stored prefixes, as much as they may take."""
    gpu: GpuMemory | None = None
    """None: all of it is in the host's memory."""

    @property
    def total_bytes(self) -> int:
        """All of it that is in the host's memory."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.process_bytes + self.prefix_bytes

    @property
    def limited_bytes(self) -> int:
        """The part that a limit of the stage's own is for: in the GPU's memory where it has one."""
        return self.total_bytes if self.gpu is None else self.gpu.total_bytes


def kv_cells(load: Load) -> int:
    """Return the KV cells of one stage: one per token of every lane, and a few spare where lanes share them."""
    n_spare = 0 if load.kv_layout == "per-lane" else 1  # the lane for padding rows
    return count_cells(load.kv_layout, load.n_lanes, n_spare, load.ctx_tokens, 0)


def window_kv_cells(model: ModelShape, load: Load) -> int:
    """Return the KV cells of a layer with a sliding window in one stage: `kv_cells`, or those of the windows alone."""
    n_cells = kv_cells(load)
    is_per_lane = load.kv_layout == "per-lane"
    if not model.window_tokens or model.state_bytes:
        return n_cells
    n_lanes = load.n_lanes if is_per_lane else 1  # that have cells apart from others
    n_needed = window_cells(
        load.kv_layout,
        window=model.window_tokens,
        n_sequences=load.n_lanes + 1,
        n_cells=n_cells // n_lanes,
        n_rows=_rows(load),
    )
    keeps = keeps_window(load.window_cells, n_needed=n_needed, n_cells=n_cells // n_lanes)
    return n_needed * n_lanes if keeps else n_cells


def stage_memory(model: ModelShape, load: Load, start: int, end: int, offload: Offload | None = None) -> StageMemory:
    """Return the memory of a stage with the layers [start, end); `offload`: what of it goes to a GPU."""
    is_last = end == model.n_layers
    head = model.head_bytes if is_last else 0
    weights = sum(model.layer_bytes[start:end]) + head + (model.embedding_bytes if start == 0 else 0)
    weights += sum(load.adapter_bytes[start:end]) + model.before(start, end).weights_bytes
    predicting = _prediction_bytes(model, load) if is_last else (0, 0)
    weights += predicting[0]
    kept = predicting[1] + _cells_bytes(model, load, start, end) + states_bytes(model, load, start, end)
    kept += _cells_before(model, load, start, end)
    compute, prefixes = compute_bytes(model, load, is_last=is_last), load.prefix_memory_bytes
    if offload is None:
        return StageMemory(weights, kept, compute, prefix_bytes=prefixes)
    first = end - offload.n_layers(start, end)
    gpu_weights = sum(_offloaded_bytes(model, offload, start, layer) for layer in range(first, end))
    gpu_weights += sum(load.adapter_bytes[first:end])
    if offload.takes_head(start, end):
        gpu_weights += max(0, head - (offload.kept_head_bytes if is_last else 0)) + predicting[0]
    gpu_kept = (
        (predicting[1] if offload.takes_head(start, end) else 0)
        + _cells_bytes(model, load, first, end)
        + _lanes_states_bytes(model, load, first, end)
    )
    gpu = GpuMemory(gpu_weights, gpu_kept, compute_bytes(model, load, is_last=is_last, is_on_gpu=True))
    is_whole = first == start and (not is_last or offload.takes_head(start, end))
    stays = offload.n_cpu_moe or any(offload.kept_bytes[start:end]) or offload.kept_head_bytes
    if is_whole and not stays:  # the processor computes nothing: only rows and logits pass through
        compute = _passing_bytes(model, load, is_last=is_last)
    return StageMemory(weights - gpu_weights, kept - gpu_kept, compute, prefix_bytes=prefixes, gpu=gpu)


def _prediction_bytes(model: ModelShape, load: Load) -> tuple[int, int]:
    """Return the weights of the last stage's prediction layers, and their cells; (0, 0) where it does not draft."""
    if not load.mtp_drafts:
        return 0, 0
    n_bytes = model.prediction_kv_bytes * kv_cells(load)
    return model.prediction_bytes, int(n_bytes * KV_VALUE_BYTES[load.kv_type] / KV_VALUE_BYTES["f16"])


def _offloaded_bytes(model: ModelShape, offload: Offload, start: int, layer: int) -> int:
    """Return the weights of a layer that go to the GPU, where the stage begins at `start`."""
    kept = offload.kept_bytes[layer] if offload.kept_bytes else 0
    if offload.expert_bytes and layer - start < offload.n_cpu_moe:
        kept += offload.expert_bytes[layer]
    return model.layer_bytes[layer] - kept


def _cells_bytes(model: ModelShape, load: Load, start: int, end: int) -> int:
    windowed = _windowed_kv_bytes(model, start, end)
    whole = sum(model.kv_bytes[start:end]) - windowed
    n_bytes = whole * kv_cells(load) + windowed * window_kv_cells(model, load)
    return int(n_bytes * KV_VALUE_BYTES[load.kv_type] / KV_VALUE_BYTES["f16"])


def _cells_before(model: ModelShape, load: Load, start: int, end: int) -> int:
    n_bytes = model.before(start, end).kv_bytes * kv_cells(load)
    return int(n_bytes * KV_VALUE_BYTES[load.kv_type] / KV_VALUE_BYTES["f16"])


def _windowed_kv_bytes(model: ModelShape, start: int, end: int) -> int:
    """Return the bytes of a token in the layers with a sliding window, with an f16 cache."""
    flags = model.windows[start:end]
    return sum(n_bytes for n_bytes, is_windowed in zip(model.kv_bytes[start:end], flags, strict=False) if is_windowed)


def states_bytes(model: ModelShape, load: Load, start: int, end: int) -> int:
    """Return what recurrent states take: llama.cpp allocates them for every lane, and checkpoints are as large.

    Of a lane there may be several, to take guessed rows back. Where only the cells of windows are kept, checkpoints
    hold these.
    """
    one = sum(model.state_bytes[start:end]) + model.before(start, end).state_bytes
    if window_kv_cells(model, load) < kv_cells(load):
        window_bytes = _windowed_kv_bytes(model, start, end) * model.window_tokens
        one += int(window_bytes * KV_VALUE_BYTES[load.kv_type] / KV_VALUE_BYTES["f16"])
    checkpoints = one * load.n_lanes * CHECKPOINTS_PER_LANE_MAX
    kept = _lanes_states_bytes(model, load, start, end) + _states_before(model, load, start, end)
    return kept + min(checkpoints, CHECKPOINT_BYTES_MAX)


def _lanes_states_bytes(model: ModelShape, load: Load, start: int, end: int) -> int:
    """Return llama.cpp's allocation for states: where their layers are. Checkpoints stay in the host's memory."""
    return sum(model.state_bytes[start:end]) * _n_states(model, load)


def _states_before(model: ModelShape, load: Load, start: int, end: int) -> int:
    return model.before(start, end).state_bytes * _n_states(model, load)


def _n_states(model: ModelShape, load: Load) -> int:
    """Return how many states each layer has for all lanes."""
    n_spare = 0 if load.kv_layout == "per-lane" else 1
    return (1 + (load.rewind_rows if model.rewinds_states else 0)) * (load.n_lanes + n_spare)


def usual_lanes(state_bytes: Sequence[int], n_usual: int) -> int:
    """Return the default lanes of a pipeline: the usual number, or fewer if states are large.

    state_bytes: per layer and lane. Kept prefixes are lanes as well, so there are fewer of these too.
    """
    one = sum(state_bytes)
    return min(n_usual, max(LANES_LEAST, LANE_STATES_BYTES // one)) if one else n_usual


def compute_bytes(model: ModelShape, load: Load, *, is_last: bool, is_on_gpu: bool = False) -> int:
    """Estimate llama.cpp's compute buffers and this project's row buffers."""
    rows = _rows(load)
    widths = FF_COPIES * model.n_ff + EMBD_COPIES * model.widest_row
    graph = rows * (_attention_bytes(model, load, is_on_gpu=is_on_gpu) + 4 * widths)
    return graph + (_logits_bytes(model, load) if is_last else 0)


def _passing_bytes(model: ModelShape, load: Load, *, is_last: bool) -> int:
    """Return the memory on the host for rows in and out of a stage that computes on a GPU."""
    return 2 * 4 * model.widest_row * _rows(load) + (_logits_bytes(model, load) if is_last else 0)


def _rows(load: Load) -> int:
    return max(load.max_rows, load.n_lanes + 1)


def _logits_bytes(model: ModelShape, load: Load) -> int:
    return 4 * model.n_vocab * min(load.n_lanes + DRAFTED_ROWS_MAX + PAD_SEARCH_ROWS, _rows(load))


def _attention_bytes(model: ModelShape, load: Load, *, is_on_gpu: bool) -> int:
    """Return the bytes of masks and scores for each row of a step; there are scores without flash attention alone."""
    choice = CHOICE_BYTES if model.has_indexers else 0
    if load.kv_layout == "unified":
        return MASK_BYTES * _masked_cells(model, load) + choice * kv_cells(load)
    scores = 4 * model.n_heads * load.ctx_tokens
    # As in any build on a CPU: most of those on x86 need no scores, and a stage on a GPU needs none.
    score_bytes = load.max_rows * scores
    gpu_layers = -1 if is_on_gpu else 0
    scored = has_scores(
        load.kv_layout, kv_type=load.kv_type, gpu_layers=gpu_layers, score_bytes=score_bytes, reads_own_cells=False
    )
    if scored:
        scores += CHOICE_SCORED_BYTES * load.ctx_tokens if model.has_indexers else 0
    masks = MASK_BYTES * _masked_cells(model, load) // load.n_lanes
    return masks + choice * load.ctx_tokens + (scores if scored else 0)


def _masked_cells(model: ModelShape, load: Load) -> int:
    """Return the cells in the masks of a row whose lane has all cells."""
    return kv_cells(load) + (model.n_masks - 1) * window_kv_cells(model, load)


def usable_bytes(limit_bytes: int | None) -> int | None:
    """Return what of a limit a plan may use."""
    return None if limit_bytes is None else int(limit_bytes * (1 - HEADROOM))


def machine_usable_bytes(machine: Machine) -> int | None:
    """Return what of a machine's memory its stages may use together."""
    usable = usable_bytes(machine.memory_bytes)
    return None if usable is None else max(0, usable - machine.reserved_bytes)


def gpu_usable_bytes(gpu: Gpu) -> int | None:
    """Return what of a GPU's memory its stages may use together."""
    size = gpu.memory_bytes
    reserved_bytes = 0 if size is None else max(GPU_RESERVE_BYTES_MIN, int(GPU_RESERVE * size)) + gpu.draft_bytes
    return None if size is None else max(0, size - reserved_bytes)


def pools_of(host: Host) -> tuple[Pool, ...]:
    """Return the memories that a stage there takes part of: of its machine, and of its GPU."""
    return (host.machine,) if host.offload is None else (host.machine, host.offload.gpu)


def pool_usable_bytes(pool: Pool) -> int | None:
    """Return how much of one stages may use; None if its size is unknown."""
    return machine_usable_bytes(pool) if isinstance(pool, Machine) else gpu_usable_bytes(pool)
