"""Turns the stages' latest native steps into a series of pictures for people who watch a running pipeline. Pure.

A look asks every stage for its steps since the last look, at most the newest few. If steps are short, the ones in
between are counted and not shown. Every time that is shown has the steps of all stages.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from relayline.coordinator.observe.overlap import Interval, overlap_between
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

STEPS_PER_STAGE_MAX = 64  # of one look
STEPS_MAX = 128  # of one look over all stages: some milliseconds of work
MEMBERS_MAX = 16  # frames that are named per step; `n_members` says how many there were
MEMBERS_READ_MAX = 64  # frames that are looked at per step: enough to know its group and a usual wait
HOPS_MAX = 2  # frames of each step by which the way between two stages is measured
COLOURS = 8  # groups that can be distinguished at the same time
SESSIONS_MAX = 4_096  # whose numbers and colours are remembered; the oldest go first
NO_GROUP = -1  # of a step without decode rows


def steps_asked(n_stages: int) -> int:
    """Return how many steps a look asks of each stage."""
    return max(1, min(STEPS_PER_STAGE_MAX, STEPS_MAX // max(1, n_stages)))


class Colours:
    """Colour numbers of groups of streams. A group keeps its number while some of its streams stay in it."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}  # by session
        self._latest: dict[int, frozenset[int]] = {}  # the streams of each group's latest flight

    def flight(self, sessions: frozenset[int]) -> int:
        """Return the group number of these streams, whose flight enters the first stage."""
        colour = self.known(sessions)
        if not sessions or self._latest.get(colour) == sessions:
            return colour  # nearly always
        # Where the latest flight of that number was of other streams altogether, its group has been divided.
        if colour == NO_GROUP or sessions.isdisjoint(self._latest.get(colour, frozenset())):
            colour = self._free()
        for session in sessions:
            self._of[session] = colour
        self._latest[colour] = sessions
        return colour

    def known(self, sessions: frozenset[int]) -> int:
        """Return the number that most of these streams have; NO_GROUP where none has any."""
        for session in sessions:
            colour = self._of.get(session, NO_GROUP)
            if self._latest.get(colour) == sessions:
                return colour
            break
        votes = collections.Counter(self._of[session] for session in sessions if session in self._of)
        return min(votes, key=lambda colour: (-votes[colour], colour)) if votes else NO_GROUP

    def keep(self, sessions: Iterable[int]) -> None:
        """Forget all streams but these."""
        self._of = {session: self._of[session] for session in sessions if session in self._of}
        used = set(self._of.values())
        self._latest = {colour: flight for colour, flight in self._latest.items() if colour in used}

    def _free(self) -> int:
        used = collections.Counter(self._of.values())
        return min(range(COLOURS), key=lambda colour: (used[colour], colour))


@dataclasses.dataclass(frozen=True, slots=True)
class StageFigures:
    """Figures of a stage from the steps of one look, in milliseconds; None if unknown."""

    wait_p50_ms: float | None
    """Median wait of frames for their step."""
    hop_ms: float | None
    """Median time from the end of a step at the stage before to the arrival of its rows here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """The result of one look. Times are microseconds since the zero of the looks."""

    from_us: int
    to_us: int
    n_skipped: int
    """Steps between the last look and `from_us` that are not shown."""
    steps: list[list[object]]
    """Each: stage, step, start, duration, rows, padded rows, group, close reason, longest wait, predicted duration (0:
    not known), rows queued before and after, bytes out, number of members. Then stream and rows of each of the first
    MEMBERS_MAX members, one after the other; rows of a prompt are below zero. Last: the rows that the last stage sent
    back under a grant."""
    streams: dict[int, int]
    """Session ids by the numbers that `steps` call them."""
    overlap: dict[str, float]
    """See coordinator.observe.overlap."""
    stages: list[StageFigures]


class _Step(NamedTuple):
    """A batch and some fields of its frames, each read once, because reading fields of a message is slow."""

    batch: pb.BatchRecord
    start_ns: int
    end_ns: int
    sessions: list[int]
    rows: list[int]
    """Of each frame, those of a prompt below zero."""
    waits_ns: list[int]
    positions: list[int]
    """Of the first HOPS_MAX frames."""
    n_granted: int
    """Rows that came from the last stage under a grant, not from the coordinator: on the first stage alone."""


def _read(stage: int, batch: pb.BatchRecord) -> _Step:
    sessions, rows, waits_ns = [], [], []
    n_granted, is_first = 0, stage == 0 and batch.taken_ns > 0  # stages of before leave out both times
    for member in batch.members[:MEMBERS_READ_MAX]:
        sessions.append(member.session_id)
        rows.append(-member.n_rows if member.is_prefill else member.n_rows)
        waits_ns.append(member.wait_ns)
        n_granted += is_first and not member.sent_ns
    positions = [member.position for member in batch.members[:HOPS_MAX]]
    start_ns = batch.start_ns
    return _Step(batch, start_ns, start_ns + batch.decode_ns, sessions, rows, waits_ns, positions, n_granted)


class StepLooks:
    """Takes the answers of one look after another."""

    def __init__(self, zero_ns: int) -> None:
        self.zero_ns = zero_ns
        self._seen: list[tuple[str, int]] = []  # of each stage: its process, and the latest step known of it
        self._numbers: dict[int, int] = {}  # of streams, by session id
        self._n_streams = 0
        self._until_ns = zero_ns
        self._colours = Colours()

    def after(self, stage: int, instance_id: str) -> int:
        """Return the step after which this stage's steps are new: 0 for a process that was never looked at."""
        known = self._seen[stage] if stage < len(self._seen) else ("", 0)
        return known[1] if known[0] == instance_id else 0

    def look(self, answers: Sequence[pb.BatchesResponse | None], now_ns: int) -> Picture:
        """Take the stages' answers in layer order (None: none), start times on this process's clock."""
        n_skipped, cut_ns = 0, 0
        by_stage: list[list[pb.BatchRecord]] = []
        for stage, answer in enumerate(answers):
            # A stage that sends more than it was asked for is not read to its end.
            batches = list(answer.batches[-STEPS_PER_STAGE_MAX:]) if answer is not None else []
            skipped = self._note(stage, answer, batches)
            if skipped:
                n_skipped += skipped
                cut_ns = max(cut_ns, batches[0].start_ns)
            by_stage.append(batches)
        from_ns = cut_ns or self._until_ns
        to_ns = self._until_ns = max(now_ns, from_ns)
        shown = [
            [_read(stage, batch) for batch in batches if batch.start_ns + batch.decode_ns > cut_ns]
            for stage, batches in enumerate(by_stage)
        ]
        n_skipped += sum(map(len, by_stage)) - sum(map(len, shown))
        spans: list[list[Interval]] = [[(step.start_ns, step.end_ns) for step in steps] for steps in shown]
        steps, streams = self._steps(shown)
        return Picture(
            from_us=(from_ns - self.zero_ns) // 1000,
            to_us=(to_ns - self.zero_ns) // 1000,
            n_skipped=n_skipped,
            steps=steps,
            streams=streams,
            overlap=overlap_between(spans, from_ns, to_ns) if all(spans) else {},
            stages=_figures(shown),
        )

    def _note(self, stage: int, answer: pb.BatchesResponse | None, batches: Sequence[pb.BatchRecord]) -> int:
        """Remember the latest step of a stage. Returns how many steps are missing before the first of these."""
        while len(self._seen) <= stage:
            self._seen.append(("", 0))
        if answer is None or not batches:
            return 0
        before = self.after(stage, answer.instance_id)
        self._seen[stage] = (answer.instance_id, batches[-1].step)
        return max(0, batches[0].step - before - 1)

    def _steps(self, shown: Sequence[Sequence[_Step]]) -> tuple[list[list[object]], dict[int, int]]:
        """Return the steps in order of time, and the session id for each stream number in them."""
        first = next((stage for stage, steps in enumerate(shown) if steps), 0)
        ordered = sorted(
            ((step.start_ns, stage, step) for stage, steps in enumerate(shown) for step in steps),
            key=lambda item: item[:2],
        )
        rows: list[list[object]] = []
        named: dict[int, int] = {}
        for start_ns, stage, step in ordered:
            decoding = frozenset(session for session, n in zip(step.sessions, step.rows, strict=True) if n > 0)
            colour = self._colours.flight(decoding) if stage == first else self._colours.known(decoding)
            flat: list[int] = []
            for session, n_rows in zip(step.sessions[:MEMBERS_MAX], step.rows, strict=False):
                number = self._number(session)
                named[number] = session
                flat += (number, n_rows)
            batch = step.batch
            rows.append(
                [stage, batch.step, (start_ns - self.zero_ns) // 1000, (step.end_ns - start_ns) // 1000, batch.n_rows,
                 batch.padded_rows, colour, batch.close_reason, max(step.waits_ns, default=0) // 1000,
                 batch.predicted_ns // 1000, batch.queued_rows_before, batch.queued_rows_after, batch.bytes_out,
                 len(batch.members), flat, step.n_granted]
            )  # fmt: skip
        if rows:
            self._colours.keep({session for _, _, step in ordered for session in step.sessions})
        return rows, named

    def _number(self, session_id: int) -> int:
        number = self._numbers.get(session_id)
        if number is None:
            self._n_streams += 1
            number = self._numbers[session_id] = self._n_streams
            if len(self._numbers) > SESSIONS_MAX:
                del self._numbers[next(iter(self._numbers))]
        return number


def _figures(shown: Sequence[Sequence[_Step]]) -> list[StageFigures]:
    """Return each stage's figures from its steps."""
    figures = []
    ends: Mapping[tuple[int, int], int] = {}  # of the stage before, by session and position
    for steps in shown:
        hops, own = [], {}
        for step in steps:
            for at, position in enumerate(step.positions):
                key = (step.sessions[at], position)
                own[key] = step.end_ns
                if key in ends:
                    hops.append(step.start_ns - step.waits_ns[at] - ends[key])
        waits = [wait_ns for step in steps for wait_ns in step.waits_ns]
        figures.append(StageFigures(_median_ms(waits), _median_ms(hops)))
        ends = own
    return figures


def _median_ms(durations_ns: Sequence[int]) -> float | None:
    return round(max(0.0, statistics.median(durations_ns)) * 1e-6, 3) if durations_ns else None
