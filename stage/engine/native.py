"""The native engine of a stage: one llama.cpp context over one layer range, one decode per batch of many lanes.

It knows rows, positions and lanes. It does not know sessions, frames, sampling or clocks. Every method runs on the
stage's one decode thread: llama.cpp contexts are not thread-safe, and the GIL is released while it computes.

Every stage is fed hidden rows, stage 0 too (embedding.py looks tokens up). The batch arrays are allocated once and
llama_batch points into them for good, so a step in steady state allocates nothing payload-sized here.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact, open_artifact
from relayline.stage.engine.block_rows import parts_of
from relayline.stage.engine.capture import RowCapture, entry_name, output_name, output_names
from relayline.stage.engine.claims import Claims
from relayline.stage.engine.device_greedy import DeviceGreedy, gives_parts, is_asked_for
from relayline.stage.engine.hidden import HiddenRows, gives_hidden
from relayline.stage.engine.kv_cache import FLASH_ATTN, Attention, goes_by_tiles, lay_out, remedy, window_of
from relayline.stage.engine.kv_state import multiplied
from relayline.stage.engine.lane_places import Grid
from relayline.stage.engine.lane_rewinds import LaneRewinds, predictor_of
from relayline.stage.engine.lane_state import read_lane, require, write_lane
from relayline.stage.engine.loading import Load
from relayline.stage.engine.model_load import abandonable, load_model
from relayline.stage.engine.own_cells import NodeNotes
from relayline.stage.engine.saved_lanes import SavedLanes
from relayline.stage.engine.step_batch import StepBatch
from relayline.wire.common.errors import InternalError, LaneLimitError, NativeError, UsageError
from relayline.wire.model_files.adapters import Adapter
from relayline.wire.settings.table import EngineSettings

LANES_MAX: int = llama.llama_max_parallel_sequences()  # compiled into llama.cpp
_NO_KV_SLOT = 1  # return code of llama_decode


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to load one artifact. KV cells for all lanes are allocated at load."""

    artifact_path: Path  # a stage's GGUF
    settings: EngineSettings  # the user's settings; the engine's own copy is resolved
    flash_attn: str = "auto"  # a key of FLASH_ATTN; auto: see stage.engine.kv_cache
    spare_lanes: int = 0  # further sequences, numbered after the lanes, with a few cells: for rows of no session
    held_lanes: int = 0  # further ones, behind those, without own cells: they keep shared cells that are being copied
    max_wanted: int = 0  # last stage: rows of one step that may want logits (4 x n_vocab bytes each); 0: max_rows
    adapters: tuple[Adapter, ...] = ()  # of LoRA
    inner_layers: tuple[int, ...] = ()  # of the model: those whose inputs rows hand on, see stage.engine.inner_rows
    drafter: Path | None = None  # last stage: a model that reads them and drafts, see stage.engine.eagle

    @property
    def n_sequences(self) -> int:
        """Lanes, spare lanes and those that keep others' cells."""
        return self.settings.n_lanes + self.spare_lanes + self.held_lanes

    def check(self) -> None:
        """Raise UsageError for values that each setting may have alone, but not with the others or in this build."""
        n_lanes = self.settings.n_lanes
        if self.n_sequences > LANES_MAX:
            raise UsageError(
                f"--lanes {n_lanes} is too many; this build of llama.cpp has {LANES_MAX - self.spare_lanes}"
            )
        if not 0 <= self.max_wanted <= self.settings.max_rows:
            raise UsageError(f"{self.max_wanted} rows with logits do not fit a step of {self.settings.max_rows} rows")
        n_back = self.settings.rewind_rows
        if n_back and n_back + 1 >= self.settings.max_rows:  # llama.cpp would abort
            raise UsageError(f"--rewind-rows {n_back} needs --max-rows {n_back + 2} or more")
        if self.flash_attn not in FLASH_ATTN:
            raise UsageError(f"flash attention is {self.flash_attn!r}; it must be one of {', '.join(FLASH_ATTN)}")


class NativeEngine:
    """One loaded slice with its KV cache.

    A caller fills rows [0:n_rows) of `input_rows`, `positions`, `seq_ids` and, on the last stage, `wants`, calls
    `decode(n_rows)`, and reads `output_rows` or `logits`. Rows of one lane have ascending, consecutive positions that
    continue the lane; rows of several lanes may be mixed in any order.
    """

    input_rows: npt.NDArray[np.float32]  # [max_rows, width_in], C-contiguous; filled by the caller
    positions: npt.NDArray[np.int32]  # [max_rows]; filled by the caller
    seq_ids: npt.NDArray[np.int32]  # [max_rows], lane of each row; filled by the caller
    wants: npt.NDArray[np.int8]  # [max_rows]; last stage: 1 where logits are wanted, by the caller; else all ones
    output_rows: npt.NDArray[np.float32]  # [max_rows, width_out]; hidden state after the last layer, not on the last
    # stage (there it has no rows). Filled by decode, valid until the next one.

    def __init__(self, config: EngineConfig, load: Load | None = None) -> None:
        """Load the artifact and prove with a one-row decode that it works.

        Raises UsageError, ArtifactError, ModelFileError (the file), NativeError (everything else) or LoadStoppedError.
        """
        load = load or Load()
        config.check()
        settings = config.settings.resolved()
        self.config = dataclasses.replace(config, settings=settings)
        self.artifact: StageArtifact = open_artifact(config.artifact_path).handing_on(config.inner_layers)
        if 0 < self.artifact.n_positions < settings.ctx_tokens:  # llama.cpp would abort at the first one beyond
            n_positions = self.artifact.n_positions
            raise UsageError(
                f"--ctx is {settings.ctx_tokens}, but this model has only {n_positions} positions; "
                f"give --ctx {n_positions}"
            )
        self.max_rows = settings.max_rows
        self.max_wanted = config.max_wanted or settings.max_rows
        self.n_embd = self.artifact.n_embd
        self.is_last = self.artifact.is_last
        self.n_vocab = self.artifact.n_vocab if self.is_last else 0
        self._model: Any = None
        self._context: Any = None
        self._capture: RowCapture | None = None
        self.hidden: HiddenRows | None = None  # of the last stage, where it can give them
        self.device: DeviceGreedy | None = None  # where rows of logits stay on the device
        self.copies_wait = False  # llama.cpp copies whole lanes when the next step begins
        try:
            self._model, self._adapters = load_model(self.artifact, settings, load, config.adapters)
            self._check_model()
            self.rewinds = LaneRewinds(self._model, self.artifact.architecture, settings.kv_layout)
            # A lane with a state or a window is copied whole and never held, and further ones would take memory.
            if self.rewinds.are_recurrent or llama.llama_model_n_swa(self._model):
                self.config = dataclasses.replace(self.config, held_lanes=0)
            self._allocate()
            self._context = self._open_context()
            self._adapters.begin(self._context)
            self._memory: Any = llama.llama_get_memory(self._context)
            # In a step that is cut, the graph of its last part is all that would be left.
            if self.is_last and not self.rewinds.cut_steps and is_asked_for(settings, self.artifact):
                parts = gives_parts(settings)
                self.device = DeviceGreedy(self.n_vocab, self.wants, self.max_wanted, gives_parts=parts)
                self.device.install(self._context, self.config.n_sequences)
            self.saved = SavedLanes(self, self._context, self.rewinds, self._batch.places)
            self._check_itself(load)
        except BaseException:
            self.close()
            raise

    # --- loading ------------------------------------------------------------------------------------------------------

    def _check_model(self) -> None:
        model, name = self._model, self.artifact.architecture
        widths = (llama.llama_model_n_embd(model), llama.llama_model_n_embd_inp(model))
        if widths != (self.n_embd, self.artifact.media_width):
            wanted = f"{self.artifact.media_width} and {self.n_embd}"
            raise NativeError(f"{name} takes rows of {widths[1]} values and gives {widths[0]}, not {wanted}")
        n_layers = self.artifact.file_layers
        if llama.llama_model_n_layer(model) != n_layers:
            found = llama.llama_model_n_layer(model)
            raise NativeError(f"{self.artifact.path}: holds {found} layers, but its metadata states {n_layers}")
        self.vocab: Any = llama.llama_model_get_vocab(model)  # llama.cpp's own, freed by `close`
        n_vocab = llama.llama_vocab_n_tokens(self.vocab)
        if self.is_last and n_vocab != self.n_vocab:
            raise NativeError(f"{self.artifact.path}: vocabulary of {n_vocab}, but its metadata states {self.n_vocab}")

    def _allocate(self) -> None:
        n_rows, settings = self.max_rows, self.config.settings
        self.input_rows = np.zeros((n_rows, self.artifact.width_in), np.float32)
        self.positions = np.zeros(n_rows, np.int32)
        self.seq_ids = np.zeros(n_rows, np.int32)
        self.wants = np.ones(n_rows, np.int8)
        self.output_rows = np.zeros((0 if self.is_last else n_rows, self.artifact.width_out), np.float32)
        self._batch = StepBatch(self.input_rows, self.positions, self.seq_ids, self.wants, self.rewinds)
        entry, names = entry_name(self.artifact), output_names(self.artifact)
        parts = parts_of(self.artifact, self._batch.rows, self.output_rows, entry, names)
        self._batch.bind(parts, self._model, self.config.n_sequences)
        if self.is_last and (settings.embeddings or self.artifact.rank_head or not computes_apart(settings)):
            self.hidden = HiddenRows.of(self.artifact, n_rows, parts.nodes)
            self._capture = self.hidden.capture
        elif not self.is_last or parts.nodes.entries or parts.nodes.taps:
            target = "" if self.is_last else output_name(self.artifact)
            self._capture = RowCapture(target, parts.hidden, parts.nodes)

    def _open_context(self) -> Any:
        config, settings = self.config, self.config.settings
        # llama.cpp sizes its graphs for one row of each lane, and aborts where a batch or its outputs could hold fewer.
        n_rows = max(settings.max_rows, config.n_sequences)
        params = llama.llama_context_default_params()
        params.n_batch = params.n_ubatch = n_rows
        params.n_seq_max = config.n_sequences
        window = llama.llama_model_n_swa(self._model)
        lay_out(
            params,
            settings,
            self._model,
            flash_attn=config.flash_attn,
            spare_lanes=config.spare_lanes,
            window=0 if self.rewinds.are_recurrent else window_of(self.artifact.architecture, window),
        )
        self.attention = Attention(
            window=window,
            keeps_window=not params.swa_full,
            has_scores=params.flash_attn_type == FLASH_ATTN["off"],
            goes_by_tiles=goes_by_tiles(self._model, settings.kv_type),
        )
        params.n_outputs_max = max(self.max_wanted, config.n_sequences) if self.is_last else n_rows
        params.n_outputs_max_per_seq = 0  # no fewer of one lane: with guesses, each of its rows is wanted
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.embeddings = False
        params.no_perf = True
        if self.artifact.n_placeholders:  # else weights that nothing computes with would be copied to a GPU
            params.op_offload = False
        params.n_rs_seq = settings.rewind_rows if self.rewinds.are_recurrent else 0
        if self._capture is not None:
            self._capture.install(params)
        ggml.LOG.watch()
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            reason = ggml.LOG.reason("llama.cpp gave no reason")
            what = f"cannot make a context of {params.n_ctx} tokens ({settings.kv_type})"
            raise NativeError(f"{what}: {reason}; {remedy(reason)}")
        self.rewinds.predictor = predictor_of(
            self.artifact, settings, config.drafter,
            model=self._model, context=context, params=params, batch=self._batch,
        )  # fmt: skip
        self.rewinds.keep_recent(llama.llama_n_rs_seq(context))  # 0 of a family that it cannot do this for
        if self.attention.keeps_window:
            self.rewinds.keep_windows(llama.llama_get_memory(context), window)
        return context

    def _check_itself(self, load: Load) -> None:
        """Decode one row and forget it: proves that the output arrives, and touches the weights once."""
        self.input_rows[0] = 0.01
        notes = NodeNotes()
        with contextlib.ExitStack() as stack:
            stack.enter_context(abandonable(self._context, load))  # mapped weights are read from the disk here
            if self._capture is not None:
                stack.enter_context(self._capture.every_node(notes.note))
            self.decode(1)
        row = self.logits(0) if self.is_last else self.output_rows[0]
        if not np.isfinite(row).all():
            raise NativeError(f"{self.artifact.path}: the self-check at load gave values that are not finite")
        claims = None
        if self._capture is not None and notes.first:
            run = functools.partial(_run, self._context, is_mutual=False)
            claims = Claims(self, self._batch, self._capture, notes.first, run)
        self.saved.measure(0, notes, claims)
        self.clear(0)
        if self.hidden is not None and not gives_hidden(self, self.hidden):
            self.hidden = None  # its capture stays, and is never armed
        self.input_rows[0] = 0.0

    # --- steps --------------------------------------------------------------------------------------------------------

    def decode(
        self,
        n_rows: int,
        *,
        adapter: int = 0,
        is_mutual: bool = False,
        grids: Sequence[Grid] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Run one llama_decode over rows [0:n_rows); returns once they have been computed, on every backend.

        `adapter`: the choice of LoRA adapters that all rows are computed with, see wire.model_files.adapters.choices.

        `is_mutual`: each row attends to the later ones of its lane in the step, too, as far as windows reach. `grids`:
        rows of images in a model whose positions have several axes. `meanwhile` is called while a GPU computes; where
        the processor does, nothing would be gained, and it is not called.

        Raises ProtocolError for a choice of adapters that is not there, LaneLimitError when no KV cells are left and
        NativeError otherwise. After an error every lane of this batch ends before its first row of the batch, and no
        other lane has changed. With a recurrent state, a lane may be empty instead.
        """
        if not 0 < n_rows <= self.max_rows:
            raise InternalError(f"a step of {n_rows} rows; the engine was made for 1 to {self.max_rows}")
        self._adapters.use(self._context, adapter)
        capture = self._capture
        if capture is not None:
            capture.begin(n_rows)
        if not self.is_last:
            self.wants[:n_rows] = 1  # a row that is not wanted would be dropped inside the last layer
        elif np.count_nonzero(self.wants[:n_rows]) > self.max_wanted:  # llama.cpp would abort the process
            raise InternalError(f"a step wants more than {self.max_wanted} rows of logits")
        if self.device is not None:
            self.device.begin(n_rows)
        if grids and not self._batch.has_axes:
            raise InternalError("rows of images came with places on axes that this model does not have")
        batch = self._batch.fill(n_rows, grids)
        if is_mutual and (self.rewinds.are_recurrent or len(self.micro_batches) > 1):
            raise InternalError("rows that attend to each other must be one lane's, of a model that attends alone")
        code = _run(self._context, batch, is_mutual=is_mutual)
        try:
            if code != 0:
                self._raise_for(code, n_rows)
            if meanwhile is not None and computes_apart(self.config.settings):
                meanwhile()
            # A GPU still computes after llama_decode has returned. Wait for it here, so that the step's time is the
            # whole time. Otherwise the sampler would wait inside llama_get_logits_ith, where no clock of the step runs.
            llama.llama_synchronize(self._context)
            step_cut = self._batch.cut
            if capture is not None:
                capture.check(n_rows, len(step_cut.sizes) if step_cut else 1)
                if self.artifact.output_scale != 1.0 and not self.is_last:
                    self._batch.parts.hidden[:n_rows] *= np.float32(self.artifact.output_scale)
        except BaseException:
            self._drop_batch(n_rows)
            raise
        self.copies_wait = False
        self._batch.places.note(grids)
        self.rewinds.ran(self.seq_ids[:n_rows], step_cut)
        if self.hidden is not None:
            self.hidden.note(self.wants[:n_rows], step_cut)
        if step_cut and not step_cut.is_in_order and capture is not None:
            capture.put_in_order(step_cut.computed)
        self._batch.parts.pass_on(self.input_rows[:n_rows], self.output_rows[:n_rows])

    @property
    def keeps_state(self) -> bool:
        """Whether a lane can be taken back to checkpoints alone, but for some rows at its end.

        Some layer has a recurrent state, which knows no position but that end, or keeps the cells of a window alone.
        """
        return self.rewinds.need_checkpoints

    @property
    def n_runs(self) -> int:
        """How often llama.cpp has computed, for whatever purpose: logits are those of the latest run."""
        return self._batch.n_filled

    @property
    def rewind_rows(self) -> int:
        """By how many rows of its last step a lane with a recurrent state can be taken back; 0: it cannot."""
        return self.rewinds.n_recent

    @property
    def _is_per_lane(self) -> bool:
        return self.config.settings.kv_layout == "per-lane"

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Rows of each part in which llama.cpp ran the last step; empty where it runs all at once."""
        return self._batch.cut.sizes if self._batch.cut else ()

    def _raise_for(self, code: int, n_rows: int) -> None:
        reason = ggml.LOG.reason("llama.cpp gave no reason")
        ggml.LOG.watch()
        if code == _NO_KV_SLOT:
            raise LaneLimitError(f"no KV cells are left for a step of {n_rows} rows")
        raise NativeError(f"llama_decode failed with code {code} on {n_rows} rows: {reason}")

    def _drop_batch(self, n_rows: int) -> None:
        self.rewinds.failed()
        first = np.full(self.config.n_sequences, np.iinfo(np.int32).max, np.int32)
        lanes = self.seq_ids[:n_rows]
        known = (lanes >= 0) & (lanes < self.config.n_sequences)  # the failure may be an impossible lane
        np.minimum.at(first, lanes[known], self.positions[:n_rows][known])
        for lane in np.unique(lanes[known]).tolist():
            position = max(0, min(int(first[lane]), self.lane_tokens(lane)))
            can_rewind = self.rewinds.can_rewind(lane, position, self.lane_tokens(lane))
            self.drop_from(lane, position if can_rewind else 0)  # some micro-batch may have moved its state

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of a wanted row of the last step: f32 [n_vocab], a view valid until the next decode.

        Raises InternalError if the row was not wanted, or on a stage that is not last.
        """
        if not self.is_last:
            raise InternalError("this stage has no head and so no logits")
        if self.device is not None:
            return self.device.logits(row)
        pointer = llama.llama_get_logits_ith(self._context, self._batch.place_of(row))
        if not pointer:
            ggml.LOG.watch()
            raise InternalError(f"the step did not keep the logits of row {row}")
        memory: Any = (ctypes.c_float * self.n_vocab).from_address(ctypes.addressof(pointer.contents))
        view: npt.NDArray[np.float32] = np.frombuffer(memory, np.float32)
        return view

    # --- lanes --------------------------------------------------------------------------------------------------------

    def check_rewind(self, lane: int, position: int) -> None:
        """Raise PositionGapError if the lane, rewound to `position`, could not continue from there: see `require`.

        Where `keeps_state`, a lane can be rewound to its checkpoints and to its beginning, and by some rows at its end.
        """
        self._check_lanes(lane)
        self._batch.places.check_cut(lane, position)
        self.rewinds.require(lane, position, self.lane_tokens(lane))
        if not self.keeps_state:
            require(self._memory, lane, position, self.attention.window)

    def checkpoint(self, lane: int) -> None:
        """Remember the lane's state at its end, to be able to come back to it. Does nothing unless `keeps_state`.

        Bounded, see stage.engine.checkpoints. Raises NativeError where llama.cpp does not give the state.
        """
        self.rewinds.checkpoint(self._context, lane, self.lane_tokens(lane))

    def drop_from(self, lane: int, position: int) -> None:
        """Drop the lane's positions from `position` on; inside an image that has one place on an axis, all its rows.

        Dropping absent positions does nothing. Call `check_rewind` first to see whether it is possible. Raises
        NativeError where it is not.
        """
        self._check_lanes(lane)
        position, n_tokens = max(0, position), self.lane_tokens(lane)
        if self.attention.keeps_window and self.rewinds.needs_checkpoint(lane, position, n_tokens):
            self.saved.settle(lane)  # a copy into the lane that waits would undo it
        self.rewinds.take_back(self._context, lane, position, n_tokens)
        if not llama.llama_memory_seq_rm(self._memory, lane, self._batch.places.cut(lane, position), -1):
            raise NativeError(
                f"{self.artifact.architecture}: llama.cpp cannot cut the cells of lane {lane} at position {position}"
            )

    def copy_prefix(self, source_lane: int, target_lane: int, n_tokens: int) -> None:
        """Make the target lane hold exactly the source's first `n_tokens` positions.

        Unified, no cell is copied: both share. Where lanes have their own cells, the used ones are copied at once, or
        all of them before the next step, whichever is quicker.
        """
        self._check_lanes(source_lane, target_lane)
        if source_lane == target_lane:
            self.drop_from(target_lane, n_tokens)
            return
        self.rewinds.require_copy(source_lane, n_tokens, self.lane_tokens(source_lane))
        self.clear(target_lane)
        self.rewinds.copy(source_lane, target_lane, n_tokens)
        places = self._batch.places
        if n_tokens > 0:
            places.copy(source_lane, target_lane)
        if n_tokens > 0 and (self._is_per_lane or self.keeps_state):  # a state is copied whole, then taken back
            is_whole = not self.rewinds.needs_checkpoint(source_lane, n_tokens, self.lane_tokens(source_lane))
            if not self.saved.copy_held(source_lane, target_lane, is_whole=is_whole):
                llama.llama_memory_seq_cp(self._memory, source_lane, target_lane, -1, -1)
                self.copies_wait = self._is_per_lane
            self.drop_from(target_lane, n_tokens)
            if is_whole and not self._is_per_lane:
                self.rewinds.own(self._context, target_lane)
        elif n_tokens > 0:
            end = places.cut(target_lane, n_tokens)
            llama.llama_memory_seq_cp(self._memory, source_lane, target_lane, 0, end)

    def multiply(self, lane: int, free_lane: int, n_times: int) -> bool:
        """Make the lane hold its content n_times, at the same positions: a long context without computing it.

        Good for timing steps only. `free_lane` is empty before and after. False where llama.cpp cannot copy cells or
        has no room; some copies may have been made then, or the lane may be empty.
        """
        self._check_lanes(lane, free_lane)
        if self.rewinds.are_recurrent:  # the longer context would have another state
            return False
        state = read_lane(self._context, lane)
        if state is None:
            return False
        # A copy into a lane of its own cells would replace its content, and there is no room for many windows.
        if self._is_per_lane or self.attention.keeps_window:
            longer = multiplied(state.tobytes(), n_times, is_first_alone=self.attention.keeps_window)
            return longer is not None and write_lane(self._context, lane, np.frombuffer(longer, np.uint8))
        for _ in range(n_times - 1):
            if not write_lane(self._context, free_lane, state):
                return False
            llama.llama_memory_seq_cp(self._memory, free_lane, lane, -1, -1)
            self.clear(free_lane)
        return True

    def clear(self, lane: int) -> None:
        """Forget everything the lane holds and give its cells back."""
        self.drop_from(lane, 0)

    def lane_tokens(self, lane: int) -> int:
        """Return how many positions the lane holds, counted from 0."""
        self._check_lanes(lane)
        return self._batch.places.n_rows(lane, int(llama.llama_memory_seq_pos_max(self._memory, lane)) + 1)

    def _check_lanes(self, *lanes: int) -> None:
        for lane in lanes:  # llama.cpp aborts the process on a sequence id out of range
            if not 0 <= lane < self.config.n_sequences:
                raise InternalError(f"lane {lane} of an engine with {self.config.n_sequences} lanes")

    def close(self) -> None:
        """Free context and model. Views that `logits` returned must not be read afterwards. May be called twice."""
        if self._context is not None:
            if self.rewinds.predictor is not None:
                self.rewinds.predictor.close()
            llama.llama_free(self._context)
            self._context = None
        if self.device is not None:
            self.device.close()
        if self._model is not None:
            llama.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> NativeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def computes_apart(settings: EngineSettings) -> bool:
    """Return whether a device computes some layers while this processor continues."""
    return settings.gpu_layers != 0 and _offloads()


@functools.cache
def _offloads() -> bool:
    return bool(llama.llama_supports_gpu_offload())


def _run(context: Any, batch: Any, *, is_mutual: bool) -> int:
    """Return what llama_decode does. `is_mutual`: rows attend to later ones too; llama.cpp builds another graph for
    that."""
    if not is_mutual:
        return int(llama.llama_decode(context, batch))
    llama.llama_set_causal_attn(context, False)
    try:
        return int(llama.llama_decode(context, batch))
    finally:
        llama.llama_set_causal_attn(context, True)
