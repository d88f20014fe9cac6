"""Which sessions a model drafts for, and what it is told of them. Pure.

The model reads each session's text from the beginning, beside the stages. It is told every token that is sampled, and
tells its guesses back. It may die at any time: its guesses are missed and nothing else.

It drafts for DRAFT_STREAMS_MAX sessions at once. Others wait: when one of these ends, the oldest that waits takes its
place, and its text is read from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable

from relayline.coordinator.drafting.messages import Begin, End, Guessed, ToDrafter, Took
from relayline.coordinator.sessions.drafts import Acceptance
from relayline.coordinator.sessions.session import Session, State
from relayline.coordinator.sessions.told_guesses import ToldFacts, ToldGuesses
from relayline.wire.common.bounds import DRAFT_STREAMS_MAX


class Drafted:
    """Who may draft in one pipeline, and the sessions that have a draft model."""

    def __init__(self, *, drafts: bool, model_tokens: int, n_vocab: int) -> None:
        """`drafts`: whether guesses leave at all. `model_tokens`: how many a draft model holds; 0: there is none.
        `n_vocab`: tokens of the served model.
        """
        self.acceptance = Acceptance() if drafts else None
        """What all streams know of guesses by prompt lookup; None: no guesses leave."""
        self.has_model, self._model_tokens = drafts and model_tokens > 0, model_tokens
        self._told_facts = ToldFacts(n_vocab, is_own_model=True) if self.has_model else None
        self.predicted_facts = ToldFacts(n_vocab)
        """What is known of the guesses of the last stage's prediction layers, over all epochs."""
        self._sessions: dict[int, Session] = {}
        self._waiting: dict[int, Session] = {}  # with a lane, for which there is no place yet; the oldest first
        self._is_lost = False
        self.news: list[ToDrafter] = []
        """What the model is to be told next; whoever tells it takes it away."""

    def began(self, session: Session) -> None:
        """A session with a lane starts, or starts again."""
        if self._told_facts is None or session.session_id in self._sessions:
            return
        if session.acceptance is None or session.request.images or len(session.history) >= self._model_tokens:
            return
        if len(self._sessions) >= DRAFT_STREAMS_MAX:
            self._waiting[session.session_id] = session
            return
        self._admit(session)

    def _admit(self, session: Session) -> None:
        self._waiting.pop(session.session_id, None)
        self._sessions[session.session_id] = session
        self._begin(session)

    def took(self, session: Session, position: int, token: int, now_ns: int) -> None:
        """A session got its token for a position."""
        if session.session_id not in self._sessions or session.guesses is None or self._told_facts is None:
            return
        told = session.guesses.told
        if told is None or told.facts is not self._told_facts:
            told = session.guesses.told = ToldGuesses(session.history, self._told_facts)
        if self._is_lost:
            return
        told.asked(now_ns)
        last = self.news[-1] if self.news else None
        if isinstance(last, Took) and last.stream == session.session_id:
            last.tokens.append(token)
        else:
            self.news.append(Took(session.session_id, position, [token]))

    def ended(self, session_id: int) -> None:
        """A session is over."""
        self._waiting.pop(session_id, None)
        if self._sessions.pop(session_id, None) is None:
            return
        if not self._is_lost:
            self.news.append(End(session_id))
        fitting = (each for each in self._waiting.values() if len(each.history) < self._model_tokens)
        if (session := next(fitting, None)) is not None:
            self._admit(session)

    def guessed(self, guesses: Iterable[Guessed], now_ns: int) -> bool:
        """Take the model's guesses. Returns whether any of them tells something new."""
        is_new = False
        for guess in guesses:
            session = self._sessions.get(guess.stream)
            told = session.guesses.told if session is not None and session.guesses is not None else None
            if told is not None and told.facts is self._told_facts:
                is_new |= told.tell(guess.position, guess.tokens, guess.probabilities, now_ns, follows=guess.follows)
        return is_new

    def figures(self) -> dict[str, object] | None:
        """Return what is known of the model's guesses, for GET /v1/pipeline; None where there is no model."""
        facts = self._told_facts
        if facts is None:
            return None
        return {
            "streams": len(self._sessions),
            "is_lost": self._is_lost,
            "guess_ns": round(facts.guess_ns),
            "right_share": round(facts.right_share, 3),
        }

    def lost(self) -> None:
        """The model ended: it knows nothing any more."""
        self._is_lost = True
        self.news.clear()
        for session in self._sessions.values():
            if session.guesses is not None and session.guesses.told is not None:
                session.guesses.told.lose()

    def back(self) -> None:
        """Another one has started: it reads all sessions from the beginning."""
        self._is_lost = False
        for session in self._sessions.values():
            self._begin(session)

    def _begin(self, session: Session) -> None:
        if not self._is_lost and session.state is not State.DONE and len(session.history) < self._model_tokens:
            self.news.append(Begin(session.session_id, list(session.history)))
