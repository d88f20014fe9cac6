"""Drafts by prompt lookup: guesses of a stream's next tokens, and how likely they are right. Pure.

A draft repeats the tokens that followed the last earlier occurrence of the stream's latest tokens. The search covers
the prompt, the answer so far and the client's prediction (prompt lookup decoding: Saxena, 2023). A match may overlap
the end of the text, as in LZ77. This works well for text that repeats itself, such as edited code, quotations and JSON.

Acceptance rates are known without sending any draft: every new token is compared with the guess for it. A longer match
makes a right guess more likely. So rates are kept by match length, for each stream, and for all streams together as the
start value of a new one. `coordinator.schedule.draft_plan` decides which guesses are worth a row.
"""

from __future__ import annotations

import array
import collections
from collections.abc import Sequence

MATCHES = (4, 2)  # tokens that must stand alike, the best first
LENGTH_MAX = 8  # a longer match says no more
LOOKBACK_TOKENS = 32_768  # latest tokens that are searched: 80 us for a search that finds nothing
AHEAD_TOKENS = 4_096  # of a prediction, searched from the answer's place in it
LOOKALIKES_MAX = 64  # places with equal bytes but other tokens, after which a search ends
CHANCE_MIN = 0.02  # guesses that are less likely right are not worth looking at
SKIPPED_MAX = 16  # tokens of a prediction that an answer may leave out and still be followed at once
TRUSTED = 4.0  # of its own drafted tokens, after which a stream's rate outweighs the shared one
FORGETTING = 0.97  # decay of a stream's counts at each of its guesses
FORGETTING_SHARED = 0.998  # the same for all streams together
# Start values by match length: the share of right guesses, and the number of guesses that this share counts for.
PRIOR_RATES = (0.0, 0.2, 0.35, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8)
PRIOR_WEIGHT = 16.0
_TOKEN_BYTES = 4


class Rates:
    """How often guesses were right, by their kind: here the length of the match that they came from."""

    def __init__(self, forgetting: float, n_kinds: int = LENGTH_MAX + 1) -> None:
        self._forgetting = forgetting
        self._right = [0.0] * n_kinds
        self._all = [0.0] * n_kinds

    def note(self, kind: int, *, is_right: bool) -> None:
        """Take note of one guess."""
        self._right[kind] = self._right[kind] * self._forgetting + is_right
        self._all[kind] = self._all[kind] * self._forgetting + 1.0

    def rate(self, kind: int, expected: float, weight: float) -> float:
        """Return the share of right guesses, where `expected` counts as much as `weight` guesses."""
        return (self._right[kind] + expected * weight) / (self._all[kind] + weight)


class Acceptance(Rates):
    """The statistics over all streams of a pipeline."""

    def __init__(self, prior_rates: Sequence[float] = PRIOR_RATES) -> None:
        """`prior_rates`: the start values, one for each kind of guess."""
        super().__init__(FORGETTING_SHARED, len(prior_rates))
        self._prior_rates = prior_rates
        self.has_predictions = False
        """Whether the last stage's prediction layers guess too, in this epoch."""

    def expected(self, kind: int) -> float:
        """Return the share of right guesses of this kind, such as behind matches of one length."""
        return self.rate(kind, self._prior_rates[kind], PRIOR_WEIGHT)


class Drafter:
    """The drafts of one stream."""

    def __init__(self, history: Sequence[int], prediction: Sequence[int], shared: Acceptance) -> None:
        """`history`: the stream's tokens so far. `prediction`: tokens that its client expects next."""
        history = history[-LOOKBACK_TOKENS:]
        self._text = bytearray(array.array("i", [*history, *prediction]).tobytes())
        self._latest = collections.deque(history[-LENGTH_MAX:], maxlen=LENGTH_MAX)
        self._shared, self._own = shared, Rates(FORGETTING)
        end = len(history) + len(prediction)
        self._predicted = range(len(history), end)  # the prediction's place in the text
        self._predicted_at = len(history)  # how far the answer has come in it
        self._cursor = -1  # where the text continues like the stream's latest tokens; -1: nowhere
        self._length = 0  # tokens that stand alike there and here, at most LENGTH_MAX
        if prediction:
            self._cursor, self._length = self._predicted_at, LENGTH_MAX
        elif history:
            self._search()

    def take(self, token: int) -> bool:
        """Take the stream's next token. Returns whether its client's prediction went on with it."""
        is_predicted, asked_at = False, self._cursor
        if self._cursor >= 0:
            is_right = self._token(self._cursor) == token
            self._own.note(self._length, is_right=is_right)
            self._shared.note(self._length, is_right=is_right)
            is_predicted = is_right and self._cursor in self._predicted
            self._cursor = self._cursor + 1 if is_right else -1
            self._length = min(self._length + 1, LENGTH_MAX)
            if is_predicted:
                self._predicted_at = self._cursor
        self._text += token.to_bytes(_TOKEN_BYTES, "little")
        self._latest.append(token)
        if self._cursor == self._predicted.stop and self._predicted:
            self._cursor = -1  # behind the prediction stands the answer, which does not follow from it
        if self._cursor < 0:
            self._search()
        if self._cursor < 0 and asked_at in self._predicted and not is_predicted:
            self._skip(asked_at, token)
        return is_predicted

    def tokens(self, first: int, n_tokens: int) -> list[int]:
        """Return at most n_tokens guesses for the next tokens, without the `first` ones; [] if there are none.

        A stream that repeats its own end has as many guesses as the caller asks for.
        """
        found: list[int] = []
        n_known, at = len(self._text) // _TOKEN_BYTES, self._cursor
        if at < 0:
            return found
        n_all = first + n_tokens
        if self._predicted and at in self._predicted:
            n_all = min(n_all, self._predicted.stop - at)
        for index in range(at, at + n_all):
            found.append(self._token(index) if index < n_known else found[index - n_known])
        return found[first:]

    def chances(self, first: int, n_tokens: int) -> list[float]:
        """Return for each guess the probability that it and all guesses before it are right.

        The list ends early at the first guess below CHANCE_MIN.
        """
        chances: list[float] = []
        chance = 1.0
        for ahead in range(first + n_tokens):
            length = min(self._length + ahead, LENGTH_MAX)
            chance *= self._own.rate(length, self._shared.expected(length), TRUSTED)
            if chance < CHANCE_MIN:
                break
            chances.append(chance)
        return chances[first:]

    def _token(self, index: int) -> int:
        return int.from_bytes(self._text[index * _TOKEN_BYTES : (index + 1) * _TOKEN_BYTES], "little")

    def _search(self) -> None:
        """Find the last earlier occurrence of the latest tokens. The rest of the prediction is searched first."""
        latest = list(self._latest)
        for n_alike in MATCHES:
            if len(latest) < n_alike:
                continue
            wanted = array.array("i", latest[-n_alike:]).tobytes()
            ahead = min(self._predicted_at + AHEAD_TOKENS, self._predicted.stop)
            found = self._find(wanted, self._predicted_at, ahead) if self._predicted else -1
            if found < 0:
                found = self._latest_place(wanted, n_alike)
            if found >= 0:
                self._cursor = found + n_alike
                self._length = self._count_alike(self._cursor, latest)
                return
        self._cursor, self._length = -1, 0

    def _latest_place(self, wanted: bytes, n_alike: int) -> int:
        n_tokens = len(self._text) // _TOKEN_BYTES
        first, end = max(0, n_tokens - LOOKBACK_TOKENS), n_tokens - 1  # not where they stand now
        # The text is prompt, prediction, answer. What crosses their borders never followed.
        seams = (self._predicted.start, self._predicted.stop) if self._predicted else ()
        while (found := self._rfind(wanted, first, end)) >= 0 and found + n_alike in seams:
            end = found + n_alike - 1
        return found

    def _skip(self, at: int, token: int) -> None:
        """Continue in the prediction behind a token that it lacks here: left out soon after, or replaced."""
        ahead = range(at + 1, min(at + 1 + SKIPPED_MAX, self._predicted.stop))
        behind = next((index + 1 for index in ahead if self._token(index) == token), at + 1)
        if behind < self._predicted.stop:
            self._cursor, self._length = behind, 1

    def _count_alike(self, end: int, latest: list[int]) -> int:
        n_alike = 0
        while n_alike < min(len(latest), end) and self._token(end - 1 - n_alike) == latest[-1 - n_alike]:
            n_alike += 1
        return n_alike

    def _find(self, wanted: bytes, begin: int, end: int) -> int:
        """Return the first place of the tokens between two places of the text with one behind them; -1: none."""
        at, stop = begin * _TOKEN_BYTES, (end - 1) * _TOKEN_BYTES
        for _ in range(LOOKALIKES_MAX):
            at = self._text.find(wanted, at, stop)
            if at < 0 or at % _TOKEN_BYTES == 0:
                return at // _TOKEN_BYTES
            at += 1
        return -1

    def _rfind(self, wanted: bytes, begin: int, end: int) -> int:
        """Return the last such place."""
        low, at = begin * _TOKEN_BYTES, end * _TOKEN_BYTES
        for _ in range(LOOKALIKES_MAX):
            at = self._text.rfind(wanted, low, at)
            if at < 0 or at % _TOKEN_BYTES == 0:
                return at // _TOKEN_BYTES
            at += len(wanted) - 1
        return -1
