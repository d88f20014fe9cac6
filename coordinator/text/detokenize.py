"""Token bytes become text, one piece at a time, and stop strings end it. Pure: no tokenizer, no clock, no I/O.

House rules, both checked against decoding everything at once:
* Text that was handed out is never taken back. Bytes that may be the start of a longer character, and text that may be
  the start of a stop string, are held until the next piece decides.
* How the bytes were cut into pieces changes nothing about the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopFinder:
    """Finds the first stop string to be completed in text that arrives in pieces.

    When two stop strings end at the same character the longer one, which starts earlier, wins.
    """

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        """`stops` are non-empty strings; with none, text passes straight through.

        With `shows_stop` the one that is completed is returned as well.
        """
        self._shows_stop = shows_stop
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.stopped = False
        self.stop = ""  # the one that was found

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take the next text; return the part that no stop string can begin in.

        With `may_stop` false, no stop string may end in this text.
        """
        if self.stopped:
            return ""
        if not self._stops:
            return text
        if not self._held and self._firsts.isdisjoint(text):  # as nearly always
            return text
        text, n_before = self._held + text, len(self._held)  # what is held may hold a stop string that may not stop
        starts = [(stop, text.find(stop, max(0, n_before - len(stop) + 1))) for stop in self._stops]
        ends = [(at + len(stop), at) for stop, at in starts if at >= 0]
        if ends and may_stop:
            self.stopped, self._held = True, ""
            end, at = min(ends)
            self.stop = text[at:end]
            return text[: end if self._shows_stop else at]
        n_held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def finish(self) -> str:
        """Return the held text: no more text follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class TextAssembler:
    """Turns the byte pieces of one choice into text that is safe to show.

    UTF-8 sequences split over pieces are held back; bytes that are not UTF-8 become U+FFFD, as
    `bytes.decode(errors="replace")` would make them.
    """

    def __init__(self, stops: Sequence[str] = (), *, shows_stop: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._finder = StopFinder(stops, shows_stop=shows_stop)
        self._is_cut = False  # whether the decoder holds the beginning of a character
        self.n_chars_decoded = 0  # characters decoded so far, whether shown, held or cut

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed; nothing after it is ever returned."""
        return self._finder.stopped

    @property
    def stop(self) -> str:
        """The stop string that was completed, empty for none."""
        return self._finder.stop

    def push(self, piece: bytes, *, may_stop: bool = True) -> str:
        """Take one token's bytes; return the text that became safe to show, often empty.

        Without `may_stop` no stop string ends with it.
        """
        if piece.isascii() and not self._is_cut:
            return self._search(piece.decode("ascii"), may_stop=may_stop)
        decoded = self._decoder.decode(piece)
        self._is_cut = bool(self._decoder.getstate()[0])
        return self._search(decoded, may_stop=may_stop)

    def finish(self) -> str:
        """Return the rest at the end of generation. An unfinished UTF-8 sequence becomes U+FFFD."""
        text = self._search(self._decoder.decode(b"", final=True))
        return text + self._finder.finish()

    def _search(self, decoded: str, *, may_stop: bool = True) -> str:
        self.n_chars_decoded += len(decoded)
        return self._finder.push(decoded, may_stop=may_stop) if decoded else ""
