"""A model in which every row depends on all earlier rows of its lane, so that its tokens are known.

A layer's row is a hash of its lane so far, small enough to be exact as f16. So a row that was lost, doubled, computed
in another lane, by another layer, with another adapter or after another history changes the next tokens. It runs below
the real StepExecutor, in place of stage.engine.native.NativeEngine.

Rows of images have separate values. Where they attend to each other, each has the sum of all added on its way in; a
part of an image then has another sum. Where they have places in a grid, the engine notes them with the code that serves
(stage.engine.lane_places), and refuses to take a lane back to the middle of an image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from relayline.coordinator.sessions.generation import ROW_TOKEN_MIN
from relayline.deploy.testing.cluster.clock import Violation
from relayline.deploy.testing.cluster.pieces import CELLS, ModelPieces
from relayline.deploy.testing.cluster.windows import ModelWindows
from relayline.stage.engine.checkpoints import Checkpoints, State
from relayline.stage.engine.lane_places import Grid, LanePlaces
from relayline.stage.engine.layer_cells import Form, LayerCells
from relayline.stage.engine.tier import Tier
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.policy import POLICIES, StepLimits
from relayline.wire.common.curve import CostCurve
from relayline.wire.common.errors import NativeError, PositionGapError
from relayline.wire.envelopes.dtypes import DTYPE_F16

DTYPE = DTYPE_F16  # of rows between stages
WIDTH, N_VOCAB, ROWS_MAX = 2, 509, 64
PREFILL_ROWS = 32  # in a step with running decoders, with policy drain
N_LAYERS = 6  # of the whole model
ADAPTERS = ("", "first", "second")  # a key of each choice
_MARK = np.zeros(1, np.int32).view(np.uint8)  # in place of a recurrent state
_MODULUS = 1_021  # below 2048: up to there integers are exact in f16


def _next(before: int, value: int, layer: int, adapter: int) -> int:
    return (before * 31 + value + 7 * layer + 101 * adapter + 1) % _MODULUS


def _row(before: Sequence[int], value: int, layers: range, adapter: int) -> tuple[int, ...]:
    """Return the value after each of the layers, one after the other, computed with an adapter."""
    row = []
    for layer, held in zip(layers, before, strict=True):
        value = _next(held, value, layer, adapter)
        row.append(value)
    return tuple(row)


def value_of(token: int) -> int:
    """Return the first layer's input for a token, or for a row of an image by its number in a history."""
    return token if token < ROW_TOKEN_MIN else token % N_VOCAB


class Truth:
    """The model's tokens for one history."""

    def __init__(self, tokens: Sequence[int], adapter: int = 0, *, are_mutual: bool = False) -> None:
        """`are_mutual`: rows of its image, if it has one, attend to each other."""
        self._hashes, self._adapter = (0,) * N_LAYERS, adapter
        self.token = 0
        image = [value_of(token) for token in tokens if token >= ROW_TOKEN_MIN]
        for token in tokens:
            value = value_of(token)
            self.feed((value + sum(image)) % _MODULUS if are_mutual and token >= ROW_TOKEN_MIN else value)

    def feed(self, token: int) -> int:
        """Append one token; returns the next one."""
        self._hashes = _row(self._hashes, token, range(N_LAYERS), self._adapter)
        self.token = self._hashes[-1] % N_VOCAB
        return self.token

    def answer(self, n_tokens: int) -> list[int]:
        """Return the next tokens, each fed back."""
        return [self.feed_back() for _ in range(n_tokens)]

    def feed_back(self) -> int:
        """Return the next token and append it."""
        token = self.token
        self.feed(token)
        return token


class ModelEngine:
    """Satisfies stage.steps.step_types.Engine. Raises Violation where a row does not continue its lane."""

    def __init__(
        self, layers: range, n_lanes: int, *, is_last: bool, keeps_state: bool = False, keeps_window: bool = False
    ) -> None:
        """A lane with a recurrent state can only be rewound to checkpoints, as in stage.engine.lane_rewinds. One that
        keeps windows alone can also be rewound by some rows.
        """
        self.n_embd, self.max_rows, self.max_wanted, self.is_last = WIDTH, ROWS_MAX, ROWS_MAX, is_last
        self.n_vocab = N_VOCAB if is_last else 0
        self.input_rows = np.zeros((ROWS_MAX, WIDTH), np.float32)
        self.positions = np.zeros(ROWS_MAX, np.int32)
        self.seq_ids = np.zeros(ROWS_MAX, np.int32)
        self.wants = np.ones(ROWS_MAX, np.int8)
        self.output_rows = np.zeros((0 if is_last else ROWS_MAX, WIDTH), np.float32)
        self.micro_batches: tuple[int, ...] = ()
        self.hidden = self.device = None
        self.n_runs = 0
        self.lanes: list[list[tuple[int, ...]]] = [[] for _ in range(n_lanes)]
        self.memory: list[dict[int, tuple[int, ...]]] = [{} for _ in range(n_lanes)]
        """What was last written to each position of a lane; emptying the lane leaves it there."""
        self.windows = ModelWindows(layers, n_lanes) if keeps_window else None
        self.checkpoints = Checkpoints() if keeps_state or keeps_window else None
        plain = [place for place in range(len(layers)) if self.windows is None or place not in self.windows.places]
        self.pieces = ModelPieces(self, plain) if plain and not keeps_state else None
        self._layers, self._empty = layers, (0,) * len(layers)
        self.n_layers = len(layers)
        self._tokens: dict[int, int] = {}
        self._places = LanePlaces(n_lanes)

    def decode(
        self,
        n_rows: int,
        *,
        adapter: int = 0,
        is_mutual: bool = False,
        grids: Sequence[Grid] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Compute rows, with an adapter. `is_mutual`: each depends on all of them."""
        self.void_logits()
        values = self.input_rows[:n_rows, 0].tolist()
        self._places.note(grids)
        if is_mutual and set(self.seq_ids[:n_rows].tolist()) != {int(self.seq_ids[0])}:
            raise Violation(f"layers {self._layers}: rows that attend to each other are in a step with others")
        if is_mutual and not self._layers.start:
            values = [(value + sum(values)) % _MODULUS for value in values]
        lanes, positions = self.seq_ids[:n_rows].tolist(), self.positions[:n_rows].tolist()
        for row, (value, index, position) in enumerate(zip(values, lanes, positions, strict=True)):
            lane = self.lanes[index]
            if position != len(lane):
                raise Violation(
                    f"layers {self._layers}: lane {index} holds {len(lane)} rows, and is fed row {position}"
                )
            before = lane[-1] if lane else self._empty
            if self.windows is not None:
                before = self.windows.seen(index, position, before)
            self.fill(index, [_row(before, int(value), self._layers, adapter)])
            if self.windows is not None:
                self.windows.wrote(index, position, lane[-1])
            if self.is_last:
                self._tokens[row] = lane[-1][-1] % N_VOCAB
            else:
                self.output_rows[row, 0] = lane[-1][-1]

    def void_logits(self) -> None:
        """Do what any run of llama.cpp does to the logits of the one before."""
        self.n_runs += 1
        self._tokens.clear()

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return logits with one largest."""
        logits = np.zeros(N_VOCAB, np.float32)
        logits[self._tokens[row]] = 1.0
        return logits

    def lane_tokens(self, lane: int) -> int:
        """Return how many rows a lane holds."""
        return len(self.lanes[lane])

    def checkpoint(self, lane: int) -> None:
        """Remember a lane's end."""
        if self.checkpoints is not None:
            self.checkpoints.add(lane, len(self.lanes[lane]), self._end_state(lane))

    def _end_state(self, lane: int) -> State:
        """Return what is kept of a lane's end: its windows. A recurrent state is no more than a mark here."""
        return _MARK if self.windows is None else self.windows.state(lane, len(self.lanes[lane]))

    def check_rewind(self, lane: int, position: int) -> None:
        """Raise PositionGapError if the lane cannot be rewound."""
        self._places.check_cut(lane, position)
        if not self._can_rewind(lane, position):
            raise PositionGapError(f"lane {lane} has no checkpoint at {position}")

    def _cut(self, lane: int, position: int) -> None:
        try:
            self._places.check_cut(lane, position)
        except PositionGapError as error:
            raise Violation(f"layers {self._layers}: {error.message}, and nobody has asked") from None
        self._places.cut(lane, position)

    def _can_rewind(self, lane: int, position: int) -> bool:
        return not self._needs_checkpoint(lane, position) or self._checkpoint(lane, position) is not None

    def _needs_checkpoint(self, lane: int, position: int) -> bool:
        if self.checkpoints is None or not 0 < position < len(self.lanes[lane]):
            return False
        return self.windows is None or not self.windows.has(lane, position)

    def _checkpoint(self, lane: int, position: int) -> State | None:
        return self.checkpoints.state(lane, position) if self.checkpoints is not None else None

    def drop_from(self, lane: int, position: int) -> None:
        """Forget rows from a position on."""
        if not self._can_rewind(lane, position):
            raise Violation(
                f"layers {self._layers}: lane {lane} is taken back to {position}, where it has no checkpoint"
            )
        if self.windows is not None:
            if self._needs_checkpoint(lane, position) and (state := self._checkpoint(lane, position)) is not None:
                self.windows.put(lane, state)
            self.windows.cut(lane, position)
        self._cut(lane, position)
        del self.lanes[lane][position:]
        if self.checkpoints is not None:
            self.checkpoints.drop_beyond(lane, position)

    def copy_prefix(self, source_lane: int, target_lane: int, n_tokens: int) -> None:
        """Copy the first rows of a lane."""
        if not self._can_rewind(source_lane, n_tokens):
            raise Violation(f"layers {self._layers}: a copy of {n_tokens} rows, where the source has no checkpoint")
        self._places.copy(source_lane, target_lane)
        if self.checkpoints is not None:
            self.checkpoints.drop_beyond(target_lane, 0)
            self.checkpoints.hand_on(source_lane, target_lane, n_tokens)
        if self.windows is not None:
            self.windows.copy(source_lane, target_lane)
        self.lanes[target_lane] = []
        self.fill(target_lane, self.lanes[source_lane])
        self.drop_from(target_lane, n_tokens)

    def fill(self, lane: int, rows: Sequence[tuple[int, ...]]) -> None:
        """Append rows to a lane."""
        held = self.lanes[lane]
        self.memory[lane].update(enumerate(rows, len(held)))
        held.extend(rows)

    def pieces_of(self, lane: int) -> ModelPieces | None:
        """Return how a lane is copied in pieces."""
        return None if self._places.holds_images(lane) else self.pieces

    def size(self, lane: int) -> int:
        """Return about how many bytes `save` would return."""
        return 4 * len(self.lanes[lane]) * len(self._layers)

    def settle(self, lane: int) -> None:
        """Nothing is put off here."""

    @property
    def token_ns(self) -> float:
        """Time to restore one token of a saved lane."""
        return 0.0

    def save(self, lane: int) -> npt.NDArray[np.uint8]:
        """Return a lane's contents, as stage.engine.saved_lanes.SavedLanes does."""
        rows, images = self.lanes[lane], self._places.saved(lane).tolist()
        marks = self.checkpoints.positions(lane) if self.checkpoints is not None else []
        states = [self._checkpoint(lane, mark) for mark in marks] + [self._end_state(lane)]
        parts = [marks, images, *(state.view(np.int32).tolist() for state in states if state is not None)]
        parts.append([value for row in rows for value in row])
        numbers = [len(self._layers), len(rows), *(number for part in parts for number in (len(part), *part))]
        return np.array(numbers, np.int32).view(np.uint8)

    def restore(self, lane: int, saved: npt.NDArray[np.uint8]) -> int:
        """Restore the value of `save` into an empty lane; returns its rows."""
        if self.lanes[lane]:
            raise Violation(f"layers {self._layers}: lane {lane} is to be restored, and holds rows")
        width, n_rows, *numbers = saved.view(np.int32).tolist()
        if width != len(self._layers):
            raise Violation(f"layers {self._layers}: a lane of {width} layers is restored")
        parts = []
        while numbers:
            end = 1 + numbers[0]
            parts.append(numbers[1:end])
            numbers = numbers[end:]
        marks, images, *states, end_state, values = parts
        for mark, state in zip(marks, states, strict=True):
            if self.checkpoints is not None:
                self.checkpoints.add(lane, mark, np.array(state, np.int32).view(np.uint8))
        if self.windows is not None:
            self.windows.put(lane, np.array(end_state, np.int32).view(np.uint8))
        self._places.put_back(lane, np.array(images, np.int64))
        self.fill(lane, [tuple(values[at : at + width]) for at in range(0, len(values), width)])
        return int(n_rows)

    def forms(self) -> tuple[Form, ...]:
        """Return the form of each layer's cells."""
        return (CELLS,) * len(self._layers) if self.checkpoints is None else ()

    def cells(self, lane: int) -> list[LayerCells]:
        """Return a lane's contents by layer, as stage.engine.saved_lanes.SavedLanes does."""
        if self.checkpoints is not None or self._places.holds_images(lane):
            raise NativeError("a recurrent state, a window, or an image in a grid, cannot be taken apart")
        values = np.array(self.lanes[lane], np.int32).T
        return [LayerCells(CELLS, (np.array(column).view(np.uint8).reshape(1, -1, 4),)) for column in values]

    def put_cells(self, lane: int, cells: Sequence[LayerCells]) -> int:
        """Let an empty lane hold the values of `cells` of engines with its layers; returns its rows."""
        if self.lanes[lane]:
            raise Violation(f"layers {self._layers}: lane {lane} is to be taken over, and holds rows")
        if len(cells) != len(self._layers):
            raise NativeError(f"{len(cells)} layers for {self._layers}")
        columns = [np.ascontiguousarray(layer.tensors[0]).view(np.int32).ravel().tolist() for layer in cells]
        self.fill(lane, list(zip(*columns, strict=True)))
        return len(self.lanes[lane])

    def clear(self, lane: int) -> None:
        """Empty a lane."""
        self.drop_from(lane, 0)


@dataclasses.dataclass(slots=True)
class Memory:
    """How a stage keeps lanes."""

    keeps_state: bool = False
    """Whether lanes have a recurrent state."""
    keeps_window: bool = False
    """Whether lanes keep the cells of sliding windows alone."""
    tier_bytes: int = 0
    tier_survives: bool = False
    """Whether stored prefixes survive a restart, as on a disk."""
    is_copying: bool = False
    """Whether a piece of a lane is copied soon, since no step runs."""
    _tiers: dict[range, Tier] = dataclasses.field(default_factory=dict)  # by their layers

    def tier(self, layers: range) -> Tier | None:
        """Return the tier of a process that starts now with these layers."""
        if not self.tier_bytes:
            return None
        if not self.tier_survives:
            self._tiers.clear()
        return self._tiers.setdefault(layers, Tier(self.tier_bytes))


class ModelEmbeddings:
    """Satisfies stage.steps.step_types.Embeddings: a token's row encodes the token."""

    def lookup(self, tokens: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
        """Write the rows of tokens."""
        out[:, 0] = tokens

    def take(self, rows: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """Write rows of images."""
        out[:] = rows


def new_batcher(policy: str) -> Batcher:
    """Return the batcher of a process that starts now, with the policy of this name."""
    return Batcher(POLICIES[policy](StepLimits(ROWS_MAX, PREFILL_ROWS, CostCurve())))
