"""One stream's guesses from all sources: prompt lookup, and a model that drafts where there is one. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from relayline.coordinator.sessions.drafts import Drafter
from relayline.coordinator.sessions.told_guesses import ToldGuesses

COMPARED_GUESSES = 4  # of each source, whose chances decide between them


class Source(Protocol):
    """Where guesses come from."""

    def tokens(self, first: int, n_tokens: int) -> list[int]:
        """Return at most n_tokens guesses for the next tokens, without the `first` ones."""

    def chances(self, first: int, n_tokens: int) -> list[float]:
        """Return for each guess the probability that it and all guesses before it are right."""


class Guesses:
    """The likelier source's guesses, one stretch at a time."""

    def __init__(self, lookup: Drafter) -> None:
        self.lookup = lookup
        self.told: ToldGuesses | None = None
        """Of a model that drafts; None: none drafts for this stream."""

    def take(self, token: int) -> bool:
        """Take the stream's next token. Returns whether its client's prediction went on with it."""
        if self.told is not None:
            self.told.take(token)
        return self.lookup.take(token)

    def tokens(self, ahead: Collection[int], n_tokens: int) -> list[int]:
        """Return at most n_tokens guesses behind those under way, `ahead`."""
        source = self.lookup if self.told is None else _likelier(self.told, self.lookup, ahead)
        return source.tokens(len(ahead), n_tokens)

    def chances(self, ahead: Collection[int], n_tokens: int) -> list[float]:
        """Return for each of them the probability that it and all guesses before it are right."""
        source = self.lookup if self.told is None else _likelier(self.told, self.lookup, ahead)
        return source.chances(len(ahead), n_tokens)

    def coming(self) -> tuple[float, float]:
        """Return the chance that the model's next guess is right, and how long it takes, in ns; (0.0, 0.0) if none
        comes, or if the text's own repetition guesses better.
        """
        told = self.told
        if told is None or not told.follows or not told.facts.guess_ns:
            return 0.0, 0.0
        looked_up = self.lookup.chances(0, COMPARED_GUESSES)
        if sum(looked_up) > (sum(told.chances(0, COMPARED_GUESSES)) if len(told) else told.facts.right_share):
            return 0.0, 0.0
        return told.facts.right_share, told.facts.guess_ns


def _likelier(one: Source, other: Source, ahead: Collection[int]) -> Source:
    """Return the source of the likelier guesses behind those under way, which must be its own ones too."""
    n_ahead = len(ahead)
    if n_ahead:
        under_way = list(ahead)
        if one.tokens(0, n_ahead) != under_way:
            return other
        if other.tokens(0, n_ahead) != under_way:
            return one
    first, second = (sum(each.chances(n_ahead, COMPARED_GUESSES)) for each in (one, other))
    return one if first >= second else other
