"""The coordinator's view of stored prefixes: tokens of lanes that other sessions took, and when they are restored.
Pure.

Stages keep it by a key of the tokens, each as long as its bounds allow. The coordinator remembers the keys that all of
them have, with their tokens. It restores the prefix that a new prompt begins with. A stage that loses its copy, or did
not keep it, says so (`Tier.lost`), and the others then forget theirs. If that comes too late, or from an older release
not at all, the stage refuses the restore; then the prefix is forgotten here, and the prompt is read. In each handshake
the stages list their keys. Of entries of an earlier coordinator the length is known, and that coordinator's note at
stage 0: the keys of some beginnings (`coordinator.sessions.marks`). Without one, a prompt must begin with the entire
entry.
"""

from __future__ import annotations

import collections
import dataclasses
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from relayline.coordinator.sessions.generation import Cells
from relayline.coordinator.sessions.marks import MarkIndex, Marks, digest_of, key_of_digest, marks_in, marks_of, note_of
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.common.bounds import STORED_STATES_MAX, STORED_TOKENS_MAX
from relayline.wire.envelopes.frames import Flag


@dataclasses.dataclass(frozen=True, slots=True)
class TierFacts:
    """The merged tiers of all stages of an epoch."""

    stored: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Tokens of each key that all of them have, the one used last at the end."""
    is_used: bool = False
    """Whether all of them have a tier."""
    is_on_disk: bool = False
    """Whether all of them keep it over a restart: then every answer is stored as it ends."""
    token_ns: float = 0.0
    """Time in which one token comes back, in all stages one after the other; 0: not known."""
    store_from_ns: int = 0
    """A prefix that is read in less time is not worth storing."""
    rounding: str = ""
    """Where and how rows are rounded on their way through the stages: cells of another rounding are other cells."""
    keeps_notes: bool = False
    """Whether stage 0 keeps a note with each key."""
    notes: Mapping[int, bytes] = dataclasses.field(default_factory=dict)
    """Those that it has, if any key was not known."""
    adapters: tuple[str, ...] = ()
    """The key of each choice of LoRA adapters: cells of another one are other cells too."""

    def text_of(self, cells: Cells) -> str:
        """Return what makes cells of the same tokens differ, for a hash."""
        key = self.adapters[cells.adapter] if cells.adapter < len(self.adapters) else ""
        parts = [self.rounding, key] if key else [self.rounding]
        return " ".join([*parts, f"circle {cells.circle}"] if cells.circle else parts)


NO_TIER = TierFacts()
_ANYBODYS = Cells()  # of no adapter


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One prefix."""

    key: int
    n_tokens: int
    tokens: array[int] | None
    """None: an earlier coordinator stored it."""
    checkpoints: tuple[int, ...] = ()
    """The positions to which stages can rewind a recurrent state, besides its end."""
    marks: Marks | None = None
    """Without tokens: of what an earlier coordinator noted."""
    cells: Cells = _ANYBODYS
    """Whom it may serve. Not known where the tokens are not."""


class Tier:
    """The stored prefixes of one pipeline, in the order of their last use."""

    def __init__(self) -> None:
        self._facts = TierFacts()
        self._stored: collections.OrderedDict[int, Stored] = collections.OrderedDict()
        self._n_tokens = self._n_stored = self._n_restored = 0
        self._read_ns: Callable[[int], float] = lambda _: 0.0
        self._keeps_state = False
        self._restored: dict[int, int] = {}  # session id -> key, of running sessions
        self._index = MarkIndex()  # of entries whose tokens are not known
        self.new_notes: dict[int, bytes] = {}
        """Notes for stage 0, by key; whoever takes them clears it."""

    @property
    def is_used(self) -> bool:
        """Whether every stage can store and bring back."""
        return self._facts.is_used

    @property
    def is_on_disk(self) -> bool:
        """Whether the tier survives a stage's restart."""
        return self._facts.is_used and self._facts.is_on_disk

    def renew(
        self,
        facts: TierFacts,
        read_ns: Callable[[int], float],
        *,
        kept: Iterable[Stored] = (),
        keeps_state: bool = False,
    ) -> None:
        """Begin an epoch: what some stage no longer has is forgotten. `read_ns(n)` predicts the reading of a prompt.

        kept: what was in lanes, and stages may have stored by themselves. keeps_state: they can rewind to checkpoints
        alone.
        """
        is_alike = (facts.rounding, facts.adapters) == (self._facts.rounding, self._facts.adapters)
        known = {each.key: each for each in kept} | self._stored if is_alike else {}
        self._facts, self._read_ns, self._keeps_state = facts, read_ns, keeps_state
        self._stored, self._n_tokens = collections.OrderedDict(), 0
        self._restored.clear()
        self.new_notes.clear()
        self._index = MarkIndex()
        if not facts.is_used:
            return
        for key, n_tokens in facts.stored.items():
            before = known.get(key)
            self._add(before if before and before.n_tokens == n_tokens else self._unknown(key, n_tokens))
        for stored in self._stored.values():
            if stored.marks is not None:
                self._index.add(stored.key, stored.marks)

    def _unknown(self, key: int, n_tokens: int) -> Stored:
        """Return an entry of an earlier coordinator."""
        marks = marks_in(self._facts.notes.get(key, b""))
        if marks is None or (self._keeps_state and not marks.are_checkpoints):
            return Stored(key, n_tokens, None)
        return Stored(key, n_tokens, None, tuple(marks.places) if marks.are_checkpoints else (), marks)

    def keys(self) -> frozenset[int]:
        """Return the keys of all entries."""
        return frozenset(self._stored)

    def _add(self, stored: Stored) -> None:
        self._stored[stored.key] = stored
        self._n_tokens += _weight(stored)
        while len(self._stored) > STORED_STATES_MAX or self._n_tokens > STORED_TOKENS_MAX:
            self._drop(next(iter(self._stored)))

    def _drop(self, key: int) -> None:
        if (stored := self._stored.pop(key, None)) is not None:
            self._n_tokens -= _weight(stored)

    def name(self, session: Session, n_tokens: int, places: Iterable[int]) -> int:
        """Return the key of the first n_tokens of a session, and let stage 0 have a note of it; 0 where it is not worth
        storing: reading it again would not take long. `places`: where turns of a chat ended.
        """
        if not self.is_used or 0 < self._read_ns(n_tokens) < self._facts.store_from_ns:
            return 0
        tokens = array("i", session.history[:n_tokens])
        key = key_of(tokens, self._facts.text_of(session.request.cells))
        if key not in self._stored:
            checkpoints = [at for at in session.checkpoints if at <= n_tokens]
            self._note(session, key, tokens, checkpoints if self._keeps_state else places)
        return key

    def store(self, session: Session, n_tokens: int, key: int) -> list[OutFrame]:
        """Store the first n_tokens of a session's lane before the lane is given away; entries of earlier turns make
        room.

        key: see `name`. Returns the frames that do it. They go before the session's close, and before frames of the
        lane's next session.
        """
        if not key:
            return []
        if key in self._stored:
            self._stored.move_to_end(key)
            return []
        tokens = array("i", session.history[:n_tokens])
        frames = [
            OutFrame(session, 0, (), Flag.STORE, other.key)
            for other in list(self._stored.values())
            if other.tokens is not None
            and other.cells == session.request.cells
            and other.n_tokens < n_tokens
            and tokens[: other.n_tokens] == other.tokens
        ]
        for frame in frames:
            self._drop(frame.argument)
        checkpoints = tuple(at for at in session.checkpoints if at <= n_tokens)
        self._add(Stored(key, n_tokens, tokens, checkpoints, cells=session.request.cells))
        self._n_stored += 1
        return [OutFrame(session, n_tokens, (), Flag.STORE, key), *frames]

    def _note(self, session: Session, key: int, tokens: array[int], places: Iterable[int]) -> None:
        """Let stage 0 know marks of an entry, for coordinators that come later."""
        if self._facts.keeps_notes:
            text = self._facts.text_of(session.request.cells)
            marks = marks_of(tokens, text, places, are_checkpoints=self._keeps_state)
            self.new_notes[key] = note_of(marks)

    def longest(self, history: Sequence[int], n_least: int, cells: Cells = _ANYBODYS) -> tuple[Stored | None, int]:
        """Return the stored prefix that covers most of a prompt, and how many tokens of it, more than n_least; else
        None. Its cells may serve those with these.

        The prompt's last token is always read. Entries that take longer to restore than to read are left out.
        """
        if not self._stored:
            return None, 0
        known = array("i", history[:-1])
        best, n_best = self._of_others(known, n_least, self._facts.text_of(cells))
        for stored in self._stored.values():
            if stored.cells != cells:
                continue
            n_common = _common(stored, known, n_best, keeps_state=self._keeps_state)
            if n_common > n_best:
                best, n_best = stored, n_common
        if best is None or self._facts.token_ns * best.n_tokens > self._read_ns(n_best - n_least) > 0:
            return None, 0
        return best, n_best

    def _of_others(self, known: array[int], n_least: int, cells: str) -> tuple[Stored | None, int]:
        """Return the prefix that covers most of a prompt, of those that are known by keys alone, which hold `cells`."""
        unknown = sorted((each for each in self._stored.values() if each.tokens is None), key=lambda e: e.n_tokens)
        best, n_best, at, digest = None, n_least, 0, digest_of(cells)
        for stored in unknown:
            if stored.n_tokens > len(known):
                break
            digest.update(known[at : stored.n_tokens].tobytes())
            at = stored.n_tokens
            if at > n_best and key_of_digest(digest) == stored.key:
                best, n_best = stored, at
        marked, n_marked = self._index.longest(known, n_best, cells, self._stored.__contains__)
        return (self._stored[marked], n_marked) if marked is not None else (best, n_best)

    def restore(self, session: Session, stored: Stored, n_tokens: int) -> list[OutFrame]:
        """Let a session that was just started read on behind a prefix; as `Session.continue_from`."""
        if stored.tokens is None and n_tokens == stored.n_tokens:  # they are the prompt's: from now on any part will do
            tokens = array("i", session.history[: stored.n_tokens])
            self._drop(stored.key)
            self._add(Stored(stored.key, stored.n_tokens, tokens, stored.checkpoints, cells=session.request.cells))
            if stored.marks is None:
                self._note(session, stored.key, tokens, stored.checkpoints)
        self._stored.move_to_end(stored.key)
        self._restored[session.session_id] = stored.key
        self._n_restored += 1
        session.n_sent = session.n_copied = n_tokens
        session.checkpoints = [at for at in stored.checkpoints if at <= n_tokens]
        session.stops = [at for at in session.stops if at > n_tokens]
        return [OutFrame(session, n_tokens, (), Flag.RESTORE, stored.key)]

    def ended(self, session_id: int) -> None:
        """A session has ended or begins again."""
        self._restored.pop(session_id, None)

    def refused(self, session_id: int) -> None:
        """A stage refused a frame of a session: what that was brought back from is not trusted any more."""
        if (key := self._restored.pop(session_id, None)) is not None:
            self._drop(key)

    def lost(self, key: int) -> bool:
        """A stage does not have a prefix, or not any more: it is offered no longer. Returns whether it was."""
        was_offered = key in self._stored
        self._drop(key)
        return was_offered

    def figures(self) -> dict[str, int]:
        """Return the number of entries, stores and restores, for GET /v1/pipeline."""
        n_tokens = sum(stored.n_tokens for stored in self._stored.values())
        return {
            "prefixes": len(self._stored),
            "tokens": n_tokens,
            "stored": self._n_stored,
            "restored": self._n_restored,
        }


def stored_by_all(stored: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return the tokens of each key that all stages have alike, in the order of the first."""
    if not stored:
        return {}
    first, *others = stored
    return {key: n for key, n in first.items() if all(other.get(key) == n for other in others)}


def key_of(tokens: array[int], rounding: str = "") -> int:
    """Return the key of a prefix: 63 bits of a hash in which clients cannot construct collisions."""
    digest = digest_of(rounding)
    digest.update(tokens.tobytes())
    return key_of_digest(digest)


def _weight(stored: Stored) -> int:
    return 0 if stored.tokens is None else stored.n_tokens


def _common(stored: Stored, known: array[int], n_best: int, *, keeps_state: bool) -> int:
    """Return how many tokens of a prefix, whose tokens are known, a prompt begins with and stages can bring back."""
    tokens = stored.tokens
    if tokens is None or n_best >= min(len(tokens), len(known)) or tokens[n_best] != known[n_best]:
        return 0  # no better, and comparing long prefixes takes its time
    low, high = 0, min(len(tokens), len(known))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens[low:middle] == known[low:middle] else (low, middle - 1)
    if keeps_state and low < stored.n_tokens:
        return max((at for at in stored.checkpoints if at <= low), default=0)
    return low
