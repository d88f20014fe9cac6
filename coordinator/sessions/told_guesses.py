"""Guesses that a model made for one stream, and how likely they are right. Pure.

A model that drafts (`coordinator.drafting`) says each guess with the probability that it gave to it. That is not the
chance that the pipeline's model picks the same token. So the share of right guesses is counted by probability, for each
stream, and for all streams together as the start value of a new one. As with prompt lookup, every new token is compared
with the guess for it, whether or not that guess was sent.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from relayline.coordinator.sessions.drafts import CHANCE_MIN, FORGETTING, TRUSTED, Acceptance, Rates

TOKENS_MAX = 1 << 31  # of any vocabulary
LEARNING = 0.05  # weight of the latest guess in a running mean
N_KINDS = 10  # of guesses, by probability in tenths
RECENT_TOKENS = 64  # of a stream, with which late guesses are compared: more than guesses are ahead of it
# A small model is as sure as it is right, about, until its guesses have been compared.
_PRIOR_RATES = tuple((kind + 0.5) / N_KINDS for kind in range(N_KINDS))


class ToldFacts:
    """What is known of one model's guesses over all streams of a pipeline."""

    def __init__(self, n_vocab: int = TOKENS_MAX, *, is_own_model: bool = False) -> None:
        """`n_vocab`: tokens of the served model. `is_own_model`: whether a model of its own drafts, and not layers of
        the served one.
        """
        self.n_vocab, self.is_own_model = n_vocab, is_own_model
        self.acceptance = Acceptance(_PRIOR_RATES)
        self.right_share = 0.6
        """Of its guesses, a running mean."""
        self.guess_ns = 0.0
        """How long it takes to make one and tell it, a running mean; 0.0: not known yet."""

    def compared(self, kind: int, *, is_right: bool) -> None:
        """A guess was compared with the token."""
        self.acceptance.note(kind, is_right=is_right)
        self.right_share += (is_right - self.right_share) * LEARNING

    def took(self, guess_ns: float) -> None:
        """A guess took so long."""
        self.guess_ns += (guess_ns - self.guess_ns) * LEARNING if self.guess_ns else guess_ns


class ToldGuesses:
    """The guesses of one stream."""

    def __init__(self, history: Sequence[int], facts: ToldFacts) -> None:
        """`history`: the stream's tokens so far."""
        self.facts = facts
        self._n_tokens = len(history)
        self._recent = collections.deque(history[-RECENT_TOKENS:], maxlen=RECENT_TOKENS)
        self._own = Rates(FORGETTING, N_KINDS)
        self._since_ns = 0  # when the guess that comes next could be begun; 0: not known
        self._tokens: list[int] = []
        self._kinds: list[int] = []  # of the guesses
        self._is_heard = False
        self.follows = False
        """Whether the model is at work on the guess that comes next."""

    def __len__(self) -> int:
        """Count the guesses that are known."""
        return len(self._tokens)

    def asked(self, now_ns: int) -> None:
        """The model was told the latest token."""
        if not self._tokens:
            self._since_ns = now_ns

    def take(self, token: int) -> None:
        """Take the stream's next token."""
        self._n_tokens += 1
        self._recent.append(token)
        self.follows = self._is_heard  # it goes on from this token
        if not self._tokens:
            return
        is_right, kind = self._tokens[0] == token, self._kinds[0]
        self._own.note(kind, is_right=is_right)
        self.facts.compared(kind, is_right=is_right)
        if is_right:
            del self._tokens[0], self._kinds[0]
        else:
            self._tokens, self._kinds = [], []

    def tell(
        self, position: int, tokens: Sequence[int], probabilities: Sequence[float], now_ns: int, *, follows: bool
    ) -> bool:
        """Take the model's guesses for the tokens from `position` on; they replace those before.

        The model may not have known the latest tokens. What it guessed for them must be what they are, or the rest is
        worth nothing. Guesses that are no tokens are not taken either. Returns whether they fit.
        """
        if len(tokens) != len(probabilities) or not all(0 <= token < self.facts.n_vocab for token in tokens):
            return False
        n_late = self._n_tokens - position
        if not 0 <= n_late <= min(len(tokens), len(self._recent)):
            return False
        if n_late and list(tokens[:n_late]) != list(self._recent)[-n_late:]:
            return False
        if self._since_ns and len(tokens) - n_late == len(self._tokens) + 1:
            self.facts.took(now_ns - self._since_ns)
        self._since_ns = now_ns if follows else 0
        self._tokens = list(tokens[n_late:])
        self._kinds = [_kind(each) for each in probabilities[n_late:]]
        self._is_heard = follows or bool(tokens)  # one that says nothing has no guesses for this stream
        self.follows = follows or n_late > 0
        return True

    def give_up(self) -> None:
        """A row has waited in vain: none waits again until the model is heard."""
        self._is_heard = self.follows = False

    def lose(self) -> None:
        """The model ended: no guess follows until it is heard again."""
        self._tokens, self._kinds = [], []
        self._is_heard = self.follows = False
        self._since_ns = 0

    def tokens(self, first: int, n_tokens: int) -> list[int]:
        """Return at most n_tokens guesses for the next tokens, without the `first` ones; [] if there are none."""
        return self._tokens[first : first + n_tokens]

    def chances(self, first: int, n_tokens: int) -> list[float]:
        """Return for each guess the probability that it and all guesses before it are right.

        The list ends early at the first guess below CHANCE_MIN.
        """
        chances: list[float] = []
        chance = 1.0
        for kind in self._kinds[: first + n_tokens]:
            chance *= self._own.rate(kind, self.facts.acceptance.expected(kind), TRUSTED)
            if chance < CHANCE_MIN:
                break
            chances.append(chance)
        return chances[first:]


def _kind(probability: float) -> int:
    return min(N_KINDS - 1, int(probability * N_KINDS)) if 0.0 <= probability <= 1.0 else 0
