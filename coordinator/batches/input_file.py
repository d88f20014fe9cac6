"""The input of a batch as a file: checked whole before the first request, then read again line by line.

Of each request only a fingerprint of its custom_id stays in memory, and whether it is done: 17 bytes while the file is
checked, 9 afterwards.
"""

from __future__ import annotations

import array
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from relayline.coordinator.batches.lines import BOM, LINE_BYTES_MAX, Asked, LineError, fingerprint, read_request
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.files import naming

REQUESTS_MAX = 50_000_000  # of one file: 850 MB of memory while it is checked
PROBLEMS_SHOWN = 20
SALT_BYTES = 16
REPORT_LINES = 50_000  # between two words on how far it has come
Report = Callable[[int], None]  # takes the number of lines that were read


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """The requests of a checked file, by their places in it, which count from 0 and leave out empty lines."""

    salt: bytes
    sorted_prints: npt.NDArray[np.uint64]
    """Fingerprints of the custom_ids in order of size, (n,)."""
    places: npt.NDArray[np.int64]
    """The place of each fingerprint, (n,)."""
    is_done: npt.NDArray[np.bool_]
    """By place, (n,): whether the output has a line for it. Changes."""

    def place_of(self, custom_id: str) -> int | None:
        """Return where a request stands, None for one that this file does not have."""
        wanted = np.uint64(fingerprint(custom_id, self.salt))
        at = int(np.searchsorted(self.sorted_prints, wanted))
        if at == len(self.sorted_prints) or self.sorted_prints[at] != wanted:
            return None
        return int(self.places[at])


class BadInputError(UsageError):
    """A file that is no input of a batch. `problems`: (number of the line, 0 for the whole file, what is wrong)."""

    def __init__(self, path: Path, problems: list[tuple[int, str]], n_more: int = 0) -> None:
        lines = [f"{path}, line {number}: {text}" if number else f"{path}: {text}" for number, text in problems]
        super().__init__("\n".join([*lines, *([f"{path}: {n_more:,} more lines are wrong"] if n_more else [])]))
        self.problems = problems


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, text) of each line that is not empty. Raises OSError, BadInputError for one too long."""
    with naming(path), path.open("rb") as file:
        number = 0
        while raw := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            if len(raw) > LINE_BYTES_MAX:
                raise BadInputError(path, [(number, f"it has more than {LINE_BYTES_MAX >> 20} MiB")])
            text = raw.removeprefix(BOM) if number == 1 else raw
            if text.strip():
                yield number, text


def check_input(
    path: Path, report: Report = lambda _: None, *, n_max: int = REQUESTS_MAX, url: str | None = None
) -> Known:
    """Read a whole file and return what it asks: at most `n_max` requests, and all of one `url` if it is given.

    Raises BadInputError, a UsageError, with the first 20 problems.
    """
    salt = os.urandom(SALT_BYTES)
    prints, problems, n_bad = array.array("Q"), list[tuple[int, str]](), 0
    for number, raw in lines_of(path):
        if number % REPORT_LINES == 0:
            report(number)
        try:
            asked = read_request(raw)
            if url is not None and asked.url != url:
                raise LineError(f"its url is {asked.url}; the batch is of {url}")
            prints.append(fingerprint(asked.custom_id, salt))
        except LineError as error:
            n_bad += 1
            problems += [(number, str(error))] if n_bad <= PROBLEMS_SHOWN else []
        if len(prints) > n_max:
            raise BadInputError(path, [(0, f"the file has more than {n_max:,} requests; split it")])
    every = np.frombuffer(prints, dtype=np.uint64) if prints else np.zeros(0, np.uint64)
    places = np.argsort(every, kind="stable")
    in_order = every[places]
    again = np.flatnonzero(in_order[1:] == in_order[:-1]) if not n_bad else np.zeros(0, np.int64)
    if len(again):
        shown = {int(places[at + 1]): int(places[at]) for at in again[:PROBLEMS_SHOWN]}
        problems, n_bad = _named_twice(path, shown), len(again)
    if n_bad:
        raise BadInputError(path, problems, n_bad - len(problems))
    if not len(every):
        raise BadInputError(path, [(0, "the file has no requests")])
    return Known(salt, in_order, places, np.zeros(len(every), np.bool_))


def _named_twice(path: Path, earlier_of: dict[int, int]) -> list[tuple[int, str]]:
    """Return the problem of each request whose custom_id an earlier one has; both by their places."""
    wanted = {*earlier_of, *earlier_of.values()}
    found = {at: (number, raw) for at, (number, raw) in enumerate(lines_of(path)) if at in wanted}
    names = {later: read_request(found[later][1]).custom_id for later in earlier_of}
    return [
        (found[later][0], f"its custom_id {names[later]!r} is that of line {found[earlier][0]} too")
        for later, earlier in sorted(earlier_of.items())
    ]


def waiting_requests(path: Path, known: Known) -> Iterator[tuple[int, Asked]]:
    """Yield (place, request) of a checked file, without those that are done.

    Raises StartError where the file is no longer what was checked.
    """
    changed = StartError(f"{path} was changed after it was checked; start again")
    n_seen = 0
    try:
        for place, (_, raw) in enumerate(lines_of(path)):
            n_seen += 1
            if place >= len(known.is_done):
                raise changed
            if not known.is_done[place]:
                asked = read_request(raw)
                if known.place_of(asked.custom_id) != place:
                    raise changed
                yield place, asked
        if n_seen < len(known.is_done):
            raise changed
    except (LineError, BadInputError):
        raise changed from None
