"""The streams that a drafting model reads, and which rows it computes next. Pure.

A stream's text is what the coordinator has confirmed; its guesses follow behind. The model's cells hold rows of both,
from the beginning on. A guess that turns out right needs no work: its row is there. After a wrong one the cells behind
it are dropped, and the model goes on from the right token.

One step has the next row of every stream whose text has been read, and prompt rows besides. The model is small: its
steps are short even so.

A stream that finds no cells, or loses them, has no guesses until another one ends and leaves room for it. Its text is
then read anew. It must have room to grow as well: else it would soon be dropped once more, and its text read in vain.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relayline.coordinator.drafting.messages import Begin, End, Guessed, ToDrafter, Took
from relayline.wire.common.bounds import DRAFT_AHEAD_MAX, DRAFT_SEQUENCES_MAX

STEP_ROWS_MAX = 256
PROMPT_ROWS = 64  # of a step that has rows of streams which draft
NEAR_ROWS = 16  # that a stream may lack, and still counts as one that drafts
ROOM_TO_GROW = 0.125  # of all cells, that must be free besides where a stream is to have some again
CHANCE_STOP = 0.05  # that all guesses are right, as the model says: behind it no more are made


class Row(NamedTuple):
    """One row of a step."""

    sequence: int  # of the model's cells
    position: int
    token: int
    is_last: bool  # whether its logits are wanted


class Step(NamedTuple):
    """What the model does next."""

    trims: list[tuple[int, int]]
    """(sequence, position): drop the cells from this position on, before the rows are computed."""
    rows: list[Row]


@dataclasses.dataclass(slots=True, eq=False)
class _Stream:
    key: int
    text: list[int]
    sequence: int = -1  # none
    n_cells: int = 0  # rows of text and guesses that the model has
    n_held: int = 0  # cells that it has, before those behind n_cells are dropped
    guesses: list[int] = dataclasses.field(default_factory=list)
    probabilities: list[float] = dataclasses.field(default_factory=list)
    chance: float = 1.0  # that all guesses are right
    is_over: bool = False  # a guess ended the text
    is_foreign: bool = False  # the text has a token that the model lacks

    @property
    def n_missing(self) -> int:
        """Rows that it lacks for its next guess."""
        return len(self.text) + len(self.guesses) - self.n_cells

    @property
    def drafts(self) -> bool:
        """Whether another guess is wanted."""
        if self.sequence < 0:
            return False
        return len(self.guesses) < DRAFT_AHEAD_MAX and self.chance >= CHANCE_STOP and not self.is_over

    def take(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the text."""
        n_right = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, self.guesses, strict=False))
        )
        if n_right < len(tokens):
            self.n_cells = min(self.n_cells, len(self.text) + n_right)
            self.guesses, self.probabilities, self.is_over = [], [], False
        else:
            del self.guesses[:n_right], self.probabilities[:n_right]
        self.text += tokens
        self.chance = 1.0
        for each in self.probabilities:
            self.chance *= each


class Streams:
    """All streams of one drafting model."""

    def __init__(self, cells_max: int, n_vocab: int, ends: Callable[[int], bool]) -> None:
        """`cells_max`: tokens that the model holds, of all streams. `n_vocab`: its vocabulary, which may lack some
        tokens of the served model. `ends`: whether a token ends an answer.
        """
        self._cells_max, self._n_vocab, self._ends = cells_max, n_vocab, ends
        self._running: dict[int, _Stream] = {}
        self._kept: list[_Stream] = []  # ended ones whose cells stand, the oldest first
        self._free = list(range(DRAFT_SEQUENCES_MAX - 1, -1, -1))
        self._trims: list[tuple[int, int]] = []

    def hear(self, message: ToDrafter) -> list[Guessed]:
        """Take a message of the coordinator. Returns what it should know at once: that no guess follows."""
        match message:
            case Begin(key, tokens):
                self._end(key)
                self._running[key] = self._placed(_Stream(key, list(tokens)))
            case Took(key, position, tokens):
                stream = self._running.get(key)
                if stream is None or position != len(stream.text):
                    return []
                stream.take(tokens)
                if max(tokens, default=0) >= self._n_vocab:
                    stream.is_foreign = True
                    if stream.sequence >= 0:
                        self._drop(stream)
            case End(key):
                self._end(key)
                self._place_again()
                return []
        stream = self._running[message.stream]
        return [] if stream.drafts else [self._said(stream)]

    def next_step(self) -> Step:
        """Return the rows of the next step; none if there is nothing to do."""
        wanting = [stream for stream in self._running.values() if stream.drafts]
        near = [stream for stream in wanting if stream.n_missing <= NEAR_ROWS]
        rows: list[Row] = []
        for stream in near:
            rows += self._rows_of(stream, STEP_ROWS_MAX - len(rows))
        room = PROMPT_ROWS if near else STEP_ROWS_MAX
        for stream in wanting:
            if stream.n_missing > NEAR_ROWS and room > 0:
                found = self._rows_of(stream, min(room, STEP_ROWS_MAX - len(rows)))
                room -= len(found)
                rows += found
        trims, self._trims = self._trims, []
        return Step(trims, rows)

    def computed(self, rows: Sequence[Row], results: Sequence[tuple[int, float]]) -> list[Guessed]:
        """Take what the model guessed behind the last rows of a step, in their order: tokens and probabilities.

        Returns what the coordinator should know.
        """
        by_sequence = {stream.sequence: stream for stream in self._running.values()}
        for row in rows:
            stream = by_sequence[row.sequence]
            stream.n_cells = stream.n_held = row.position + 1
        heard = []
        for row, (token, probability) in zip((row for row in rows if row.is_last), results, strict=True):
            stream = by_sequence[row.sequence]
            if self._ends(token):
                stream.is_over = True
            else:
                stream.guesses.append(token)
                stream.probabilities.append(probability)
                stream.chance *= probability
            heard.append(self._said(stream))
        return heard

    def full(self) -> list[Guessed]:
        """The model had no cells for a step: make room. Returns what the coordinator should know."""
        if self._kept:
            self._drop(self._kept.pop(0))
            return []
        placed = [stream for stream in self._running.values() if stream.sequence >= 0]
        if not placed:
            return []
        self._drop(placed[-1])
        return [self._said(placed[-1])]

    def _said(self, stream: _Stream) -> Guessed:
        # Lists of their own: these go on.
        return Guessed(
            stream.key, len(stream.text), list(stream.guesses), list(stream.probabilities), follows=stream.drafts
        )

    def _rows_of(self, stream: _Stream, n_max: int) -> list[Row]:
        at = stream.n_cells
        end = at + min(n_max, stream.n_missing)
        if end == at:
            return []
        if stream.n_held > at:
            self._trims.append((stream.sequence, at))
            stream.n_held = at
        n_text = len(stream.text)
        tokens = stream.text[at:end] + stream.guesses[max(0, at - n_text) : max(0, end - n_text)]
        last = n_text + len(stream.guesses) - 1
        return [
            Row(stream.sequence, position, token, position == last) for position, token in enumerate(tokens, start=at)
        ]

    def _placed(self, stream: _Stream) -> _Stream:
        """Give a new stream cells: those of an ended one that begins as it does, or free ones."""
        stream.is_foreign = stream.is_foreign or max(stream.text, default=0) >= self._n_vocab
        if len(stream.text) + DRAFT_AHEAD_MAX > self._cells_max or stream.is_foreign:
            return stream
        best, n_best = None, 0
        for kept in self._kept:
            n_alike = min(_n_alike(kept.text, stream.text), kept.n_cells, len(stream.text) - 1)
            if n_alike > n_best:
                best, n_best = kept, n_alike
        if best is None and not self._free and self._kept:
            self._drop(self._kept.pop(0))
        if best is not None:
            self._kept.remove(best)
            stream.sequence, stream.n_held, stream.n_cells = best.sequence, best.n_held, n_best
        elif self._free:
            stream.sequence = self._free.pop()
        self._make_room(stream)
        return stream

    def _make_room(self, stream: _Stream) -> None:
        """Drop kept cells until the new stream's text fits beside the running ones."""
        wanted = self._n_wanted(stream)
        while self._kept and wanted + sum(each.n_held for each in self._kept) > self._cells_max:
            self._drop(self._kept.pop(0))

    def _n_wanted(self, stream: _Stream) -> int:
        """Return the cells that a stream needs beside the running ones, with these."""
        placed = [each for each in self._running.values() if each.sequence >= 0 and each is not stream]
        return sum(len(each.text) + DRAFT_AHEAD_MAX for each in (stream, *placed))

    def _place_again(self) -> None:
        """Give streams without cells some again where there is room, the oldest first."""
        most = int(self._cells_max * (1 - ROOM_TO_GROW))
        for stream in self._running.values():
            if stream.sequence < 0 and not stream.is_foreign and self._n_wanted(stream) <= most:
                self._placed(stream)

    def _end(self, key: int) -> None:
        stream = self._running.pop(key, None)
        if stream is None or stream.sequence < 0:
            return
        stream.text += stream.guesses
        stream.guesses, stream.probabilities = [], []
        self._kept.append(stream)

    def _drop(self, stream: _Stream) -> None:
        self._trims.append((stream.sequence, 0))
        self._free.append(stream.sequence)
        stream.sequence, stream.n_cells, stream.n_held = -1, 0, 0
        stream.guesses, stream.probabilities, stream.is_over = [], [], False
        stream.chance = 1.0  # of no guesses


def _n_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    n_both = min(len(one), len(other))
    if one[:n_both] == other[:n_both]:
        return n_both
    return next(at for at, (first, second) in enumerate(zip(one, other, strict=False)) if first != second)
