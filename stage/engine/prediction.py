"""Drafts by the model's own prediction layers (MTP, "nextn"), on the last stage. Decode thread only.

Such a layer takes the hidden row of one position and the token of the next, and gives logits for the token after that.
It attends to its own KV cells. A second llama.cpp context of type MTP, over the same weights, has these cells. After a
step the engine's hidden rows are paired with the tokens that follow them and decoded there. Where a draft is wanted,
the context goes on from its own output, one token at a time (the driver of llama.cpp's `draft-mtp` does the same).

Guesses are advice, so nothing here has to be right. A lane whose cells do not reach up to the new rows is cleared and
begins there: it was restored or moved, or nothing was told for a while. Attention then sees less, and the guesses are
worse. Whatever fails ends the predictions of this engine, and no step.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.told_rows import Guess, Rows, Told
from relayline.wire.common.errors import NativeError

CHANCE_MIN = 0.1  # a guess that is less likely right, with all before it, is not made

_POINTER = ctypes.c_void_p
# llama.cpp exports these, but declares them in a header of its own, with C++ names: whether a context gives hidden
# rows, and of which; all rows of its last step; one of them.
_FUNCTIONS: tuple[tuple[str, list[Any], Any], ...] = (
    ("_Z26llama_set_embeddings_nextnP13llama_contextbb", [_POINTER, ctypes.c_bool, ctypes.c_bool], None),
    ("_Z26llama_get_embeddings_nextnP13llama_context", [_POINTER], _POINTER),
    ("_Z30llama_get_embeddings_nextn_ithP13llama_contexti", [_POINTER, ctypes.c_int32], _POINTER),
)


class LatestStep(Protocol):
    """The rows of the engine's last step; see stage.engine.step_batch.StepBatch."""

    @property
    def n_rows(self) -> int:
        """How many they are."""

    def places_of(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return rows' places in the batch."""


class Predictor:
    """The prediction layers of one engine, with their cells."""

    begins_with_zeros = True
    """Whether the first token of a lane is paired with a row of zeros."""
    what = "prediction layers"
    _shift = 0  # cells stand so many positions before their tokens

    def __init__(self, model: Any, context: Any, params: Any, batch: LatestStep, n_drafts: int) -> None:
        """`params`, `batch`: those of the engine's own `context`, which gives its hidden rows from now on. `n_drafts`:
        guesses behind a token, at most.

        Raises NativeError where llama.cpp has no such functions, or no memory.
        """
        self._main, self._main_batch = context, batch
        self.n_drafts = n_drafts if llama.llama_model_n_layer_nextn(model) == 1 else 1
        """Guesses behind a token. Of several layers each is for one guess more; the first alone is used."""
        self._begin(model, functools.partial(_open, model, params), params)
        self._give(context, True, False)

    def _begin(self, model: Any, opened: Callable[[], Any], params: Any) -> None:
        """Draft with this model in a context of its own. `params`: those of the engine's own context."""
        self._give, self._all_rows, self._one_row = (_function(*described) for described in _FUNCTIONS)
        context = self._context = opened()
        self._memory = llama.llama_get_memory(context)
        self._n_rows, self._n_wanted_max = rows_of(params), (n_lanes := params.n_seq_max)
        self._width = int(llama.llama_model_n_embd_out(model))
        self._n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))
        self._ctx_tokens = int(llama.llama_n_ctx_seq(context))
        self._give(context, True, True)
        self._ends = [0] * n_lanes  # per lane: one more than the position of its last good cell; 0: it has none
        n_rows = self._n_rows
        self._rows: Rows = np.zeros((n_rows, self._width), np.float32)
        self._tokens, self._positions, self._lanes = (np.zeros(n_rows, np.int32) for _ in range(3))
        self._wants, counts = np.zeros(n_rows, np.int8), np.ones(n_rows, np.int32)
        addresses = np.ascontiguousarray(self._lanes.ctypes.data + 4 * np.arange(n_rows, dtype=np.uintp))
        self._batch = llama.llama_batch(
            n_tokens=0,
            token=ggml.pointer(self._tokens, llama.llama_token),
            embd=ggml.pointer(self._rows, ctypes.c_float),
            pos=ggml.pointer(self._positions, llama.llama_pos),
            n_seq_id=ggml.pointer(counts, ctypes.c_int32),
            seq_id=ggml.pointer(addresses, ctypes.POINTER(llama.llama_seq_id)),
            logits=ggml.pointer(self._wants, ctypes.c_int8),
        )
        self._batch.held = (counts, addresses)  # it points into them

    # --- lanes --------------------------------------------------------------------------------------------------------

    def dropped(self, lane: int, position: int) -> None:
        """Note that a lane was cut at a position. Its cells go with the next rows.

        The cell of that position stays, for its token was sampled behind the rows that are left: a wrong guess is cut
        off behind it. Where another token comes there, as in another turn of a chat, this one cell is wrong.
        """
        self._ends[lane] = min(self._ends[lane], position + 1 if position else 0)

    def copied(self, source: int, target: int, n_tokens: int) -> None:
        """Note that the target lane holds the source's first positions, and copy their cells."""
        if source == target or self._ends[source] < n_tokens:
            self.dropped(target, n_tokens if source == target else 0)
            return
        self._cut(target, 0)
        llama.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self._cut(target, n_tokens)
        self._ends[target] = n_tokens

    def _cut(self, lane: int, position: int) -> None:
        llama.llama_memory_seq_rm(self._memory, lane, max(0, position - self._shift), -1)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def hidden(self, rows: npt.NDArray[np.intp]) -> Rows:
        """Return a copy of rows of the engine's last step as they are before the head, f32 [n, n_embd].

        Raises NativeError where this architecture gives none.
        """
        return self._rows_of(self._main, self._main_batch.n_rows)[self._main_batch.places_of(rows)]

    def _rows_of(self, context: Any, n_rows: int) -> Rows:
        """Return the rows before the head of a context's last step, a view valid until its next one."""
        view: Rows = np.frombuffer(_floats(self._all_rows(context), n_rows * self._width), np.float32)
        return view.reshape(n_rows, self._width)

    def take(self, told: Sequence[Told]) -> list[list[Guess]]:
        """Take one step's rows in, and return the guesses behind each part.

        Raises NativeError; then no lane has any cells.
        """
        try:
            return self._guess(told, self._feed(told))
        except NativeError:
            self.forget()
            raise

    def forget(self) -> None:
        """Let no lane have any cells."""
        llama.llama_memory_clear(self._memory, False)
        self._ends = [0] * len(self._ends)

    def _feed(self, told: Sequence[Told]) -> list[tuple[int, int]]:
        """Decode the rows; return the parts that want guesses, each with the place of its last row.

        Graphs differ in whether they leave out hidden rows that are not wanted. So in the step that gives some, all
        rows are wanted: where they are many, the last ones go alone.
        """
        waiting = [index for index, part in enumerate(told) if part.n_drafts]
        is_small = sum(len(part.tokens) for part in told) <= self._n_wanted_max
        for part in told:
            self._cut(part.lane, part.position if self._ends[part.lane] >= part.position else 0)
            self._ends[part.lane] = part.position + len(part.tokens)
        if is_small:
            places = self._put([(part, 0, len(part.tokens)) for part in told], is_wanted=bool(waiting))
            return [(index, places[index]) for index in waiting]
        self._put([(part, 0, len(part.tokens) - bool(part.n_drafts)) for part in told], is_wanted=False)
        last = [(told[index], len(told[index].tokens) - 1, len(told[index].tokens)) for index in waiting]
        return list(zip(waiting, self._put(last, is_wanted=True), strict=True))

    def _put(self, pieces: Sequence[tuple[Told, int, int]], *, is_wanted: bool) -> list[int]:
        """Decode some rows, from and to such ones of each part; return the place of each piece's last row."""
        n_rows, places = 0, []
        for part, begin, end in pieces:
            rows = slice(n_rows, n_rows + end - begin)
            n_rows = rows.stop
            if n_rows > self._n_rows:
                raise NativeError(f"{n_rows} rows for {self.what} that take {self._n_rows}")
            self._rows[rows], self._tokens[rows], self._lanes[rows] = (
                part.rows[begin:end],
                part.tokens[begin:end],
                part.lane,
            )
            self._positions[rows] = np.arange(part.position + begin, part.position + end) - self._shift
            places.append(n_rows - 1)
        self._decode(n_rows, is_wanted=is_wanted)
        return places

    def _guess(self, told: Sequence[Told], waiting: list[tuple[int, int]]) -> list[list[Guess]]:
        guesses: list[list[Guess]] = [[] for _ in told]
        chances = [1.0] * len(told)
        while waiting:
            goes_on = []
            for index, place in waiting:
                part, guess = told[index], self._best(place)
                chances[index] *= guess.chance
                if not chances[index] >= CHANCE_MIN:  # nor where it is no number
                    continue
                guesses[index].append(guess)
                n_guesses, end = len(guesses[index]), part.position + len(part.tokens)
                if n_guesses < min(part.n_drafts, self.n_drafts, self._ctx_tokens - end):
                    goes_on.append((index, self._row(place), guess.token))
            for row, (index, hidden, token) in enumerate(goes_on):
                part = told[index]
                self._rows[row], self._tokens[row], self._lanes[row] = hidden, token, part.lane
                self._positions[row] = part.position + len(part.tokens) + len(guesses[index]) - 1 - self._shift
            self._decode(len(goes_on), is_wanted=True)
            waiting = [(index, row) for row, (index, _, _) in enumerate(goes_on)]
        return guesses

    def _decode(self, n_rows: int, *, is_wanted: bool) -> None:
        if not n_rows:
            return
        self._batch.n_tokens = n_rows
        self._wants[:n_rows] = is_wanted
        self._check(llama.llama_decode(self._context, self._batch), "llama_decode", n_rows)

    def _encode_batch(self, batch: Any) -> None:
        """Run the encoder of a model that has one."""
        self._check(llama.llama_encode(self._context, batch), "llama_encode", batch.n_tokens)

    def _check(self, code: int, called: str, n_rows: int) -> None:
        if code != 0:
            reason = ggml.LOG.reason("llama.cpp gave no reason")
            ggml.LOG.watch()
            raise NativeError(f"{self.what}: {called} failed with code {code} on {n_rows} rows: {reason}")

    def _best(self, place: int) -> Guess:
        pointer = llama.llama_get_logits_ith(self._context, place)
        address = ctypes.addressof(pointer.contents) if pointer else None
        logits = np.frombuffer(_floats(address, self._n_vocab), np.float32)
        token = int(logits.argmax())
        return Guess(token, 1.0 / float(np.exp(logits - logits[token]).sum(dtype=np.float64)))

    def _row(self, place: int) -> Rows:
        row: Rows = np.frombuffer(_floats(self._one_row(self._context, place), self._width), np.float32).copy()
        return row

    def close(self) -> None:
        """Free the context. May be called twice."""
        if self._context is not None:
            llama.llama_free(self._context)
            self._context = None


def rows_of(params: Any) -> int:
    """Return the rows of a step of drafts. A lane's first row is paired with nothing before it, and comes on top."""
    return int(params.n_batch + params.n_seq_max)


def params_like(params: Any) -> Any:
    """Return the parameters of a context for drafts, like those of the engine's own."""
    own = type(params).from_buffer_copy(params)
    own.n_batch = own.n_ubatch = rows_of(params)
    own.n_outputs_max = params.n_seq_max
    own.n_rs_seq = 0
    own.swa_full = True  # lanes are cut anywhere
    own.cb_eval, own.cb_eval_user_data = type(params.cb_eval)(), None
    return own


def _open(model: Any, params: Any) -> Any:
    """Return a context for the prediction layers, like the engine's own. Raises NativeError."""
    own = params_like(params)
    own.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
    ggml.LOG.watch()
    context = llama.llama_init_from_model(model, own)
    if not context:
        raise NativeError(f"cannot make a context for the prediction layers: {ggml.LOG.reason('no reason given')}")
    return context


def _function(name: str, argument_types: list[Any], result_type: Any) -> Callable[..., Any]:
    try:
        found = llama._lib[name]  # a new object at each call, which an attribute is not
    except AttributeError:
        raise NativeError(f"this llama.cpp has no function {name}") from None
    found.argtypes, found.restype = argument_types, result_type
    return found  # type: ignore[no-any-return]


def _floats(address: int | None, n_values: int) -> Any:
    if not address:
        raise NativeError("llama.cpp gave no rows of the prediction layers")
    return (ctypes.c_float * n_values).from_address(address)
