"""The decode-frame batcher: frames of independent sessions in, one step for the native engine out.

Pure: frames are pushed as they arrive, `take` is asked when the engine is free, time is an argument. The decode
thread and the event loop share it under the runner's lock.

Theory of operation. Each session has its own queue, so frames of one session never overtake each other. The *head* of
every non-empty session queue waits in one of two lines, decode or prefill. `take` asks the policy how far down each
line to go. A new head goes to the end of its line, so a session with many frames does not keep others waiting. There is
one exception: a head that follows a control, or frames of an earlier envelope, joins the frames of its own envelope if
these are in line. Otherwise the rest of a prompt, whose first part has just left, would fall behind the frames that it
was sent with, and cost an extra step.

A control at the head is applied by the next step and takes no rows. The frame behind it becomes the head at once, so an
open and the first rows of a prompt run in the same step. The controls of a step are applied in order of arrival across
sessions: a close gives the lane that the next open takes. A prefix is copied only after the source's earlier rows.
Nothing is opened before the earlier closes, and nothing is closed before the earlier copies from it. So frames only
wait for earlier ones, and never forever.

Most steps run one envelope of decode rows that found nothing else waiting. Such an envelope is kept whole (`_whole`),
and leaves whole if the policy takes all of it. Any other event first spreads it over queues and lines, as if its frames
had arrived one by one. The result is the same, only slower.

A step has rows of one adapter alone (`wire.envelopes.session_ids`), that of the frame that is oldest in line.
Under a policy that takes turns, decode rows of another one are next after a step with prompt rows.

Rows that attend to each other (Flag.MUTUAL) are a step of their own, whatever the policy says: with others in it,
guesses of those would see their successors. Such a frame goes once it is the oldest in line, so decode rows do not keep
it off.

When a close arrives, the session's waiting rows are dropped, except rows that other sessions are to copy. Its controls
stay, because other sessions may copy what it was to copy.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import operator
from collections.abc import Mapping

from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.steps.policy import MUTUAL_ROWS, OTHER_ADAPTER, Policy
from relayline.wire.common import bounds
from relayline.wire.envelopes.frames import CONTROL, Flag
from relayline.wire.envelopes.session_ids import ADAPTER_SHIFT

Ranked = tuple[int, QueuedFrame]
"""A waiting frame behind its rank: its place in line, or when it came, counted in frames. The lower goes first."""
CONTROLS_ONLY = "controls_only"
# One step's results leave as one envelope per route: its controls with their options, and at most one frame for each of
# its rows.
CONTROLS_PER_STEP_MAX = bounds.FRAMES_PER_ENVELOPE_MAX - bounds.ROWS_PER_ENVELOPE_MAX


class Batcher:
    """Waiting frames of one stage.

    Rows are bounded by the links' credits, which are given back as frames leave; frames without rows by
    stage.intake.QUEUED_FRAMES_MAX, past which no link is read.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.queued_rows = self._n_frames = 0
        self._whole: list[QueuedFrame] = []  # all that waits, or nothing
        # By QueuedFrame.session_key:
        self._sessions: dict[tuple[int, int], collections.deque[Ranked]] = {}  # ranked by arrival
        self._decode: dict[tuple[int, int], Ranked] = {}  # heads, ranked by place in line
        self._prefill: dict[tuple[int, int], Ranked] = {}
        self._controls: dict[tuple[int, int], Ranked] = {}  # heads, ranked by arrival
        self._copies: dict[tuple[int, int], list[int]] = {}  # session key -> arrivals of waiting copies from it
        self._closes: dict[int, int] = {}  # arrivals of waiting closes, ascending -> their routes
        self._arrivals, self._places = itertools.count(), itertools.count()
        self._has_passed_decode = False  # the step before had prompt rows, and left decode rows of another adapter

    def push_together(self, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        """Queue the frames of one envelope in order. Returns those that closes made pointless."""
        if not self._n_frames and _are_decode_rows(frames):
            self._whole, self._n_frames = frames, len(frames)
            self.queued_rows = sum([frame.n_rows for frame in frames])
            return []
        return [dropped for frame in frames for dropped in self.push(frame)]

    def push(self, frame: QueuedFrame) -> list[QueuedFrame]:
        """Queue one frame. Returns the session's frames that a close made pointless (their credit is free again)."""
        self._spread()
        dropped: list[QueuedFrame] = []
        if frame.flags & Flag.CLOSE:
            dropped = self._drop_rows(frame.session_key)
        self.queued_rows += frame.n_rows
        self._n_frames += 1
        self._queue(frame)
        return dropped

    def _queue(self, frame: QueuedFrame) -> None:
        arrival = next(self._arrivals)
        if frame.flags & Flag.COPY_PREFIX:
            self._copies.setdefault((frame.route_id, frame.argument), []).append(arrival)
        elif frame.flags & Flag.CLOSE:
            self._closes[arrival] = frame.route_id
        queue = self._sessions.get(frame.session_key)
        if queue is None:
            queue = self._sessions[frame.session_key] = collections.deque()
        queue.append((arrival, frame))
        if len(queue) == 1:
            self._stand_in_line(queue[0])

    def drop_route(self, route_id: int) -> list[QueuedFrame]:
        """Forget every waiting frame of a route (its epoch ended). Returns the dropped frames."""
        self._spread()
        self._copies = {key: arrivals for key, arrivals in self._copies.items() if key[0] != route_id}
        self._closes = {arrival: route for arrival, route in self._closes.items() if route != route_id}
        mine = [key for key in self._sessions if key[0] == route_id]
        return [frame for key in mine for _, frame in self._drop(key)]

    def take(self, now_ns: int) -> Step | None:
        """Return the next step, or None when nothing waits or the policy holds everything back."""
        if not self._n_frames:  # as nearly always when a step has just ended
            return None
        before = self.queued_rows
        if self._whole:
            frames, choice = self._whole, self.policy.choose(self._whole, (), is_prefill_first=False)
            if choice.n_decode == len(frames):
                self._whole, self._n_frames, self.queued_rows = [], 0, 0
                return Step([], frames, choice.close_reason, now_ns, before, 0)
            self._spread()
        controls = self._take_controls() if self._controls else []
        if not self._decode and not self._prefill:
            return Step(controls, [], CONTROLS_ONLY, now_ns, before, before) if controls else None
        frames, close_reason = self._choose(now_ns)
        if not frames and not controls:
            return None
        for frame in frames:
            self._remove_head(frame)
        return Step(controls, frames, close_reason, now_ns, before, self.queued_rows)

    def _choose(self, now_ns: int) -> tuple[list[QueuedFrame], str]:
        """Return the heads that the policy takes, and why it takes no more."""
        decode, prefill = _in_order(self._decode), _in_order(self._prefill)
        is_prefill_first = bool(prefill) and (not decode or prefill[0][0] < decode[0][0])
        if self._has_passed_decode and self.policy.takes_turns and decode:
            is_prefill_first = is_prefill_first and prefill[0][1].adapter == decode[0][1].adapter
        oldest = (prefill if is_prefill_first else decode)[0][1].adapter
        decoders = [frame for _, frame in decode if frame.adapter == oldest]
        chunks = [frame for _, frame in prefill if frame.adapter == oldest]
        others_decode = len(decoders) < len(decode)
        if chunks and chunks[0].is_mutual and (is_prefill_first or not decoders):
            self._has_passed_decode = others_decode
            return chunks[:1], MUTUAL_ROWS
        choice = self.policy.choose(decoders, chunks, is_prefill_first=is_prefill_first, others_decode=others_decode)
        taken, close_reason = chunks[: choice.n_prefill], choice.close_reason
        n_before = next((at for at, frame in enumerate(taken) if frame.is_mutual), None)
        if n_before is not None:
            taken, close_reason = taken[:n_before], MUTUAL_ROWS
        frames = decoders[: choice.n_decode] + taken
        self._has_passed_decode = others_decode and bool(taken)
        if len(frames) == len(decoders) + len(chunks) < len(decode) + len(prefill):
            close_reason = OTHER_ADAPTER
        return frames, close_reason

    def session_ids(self, route_id: int) -> set[int]:
        """Return the sessions of a route of which anything waits."""
        waiting = [frame.session_key for frame in self._whole] + list(self._sessions)
        return {session_id for route, session_id in waiting if route == route_id}

    def __len__(self) -> int:
        return self._n_frames

    def _spread(self) -> None:
        whole, self._whole = self._whole, []
        for frame in whole:  # which are counted already
            self._queue(frame)

    def _take_controls(self) -> list[QueuedFrame]:
        """Take those that are due, in the order in which they came."""
        taken: list[QueuedFrame] = []
        heads = list(self._controls.values())
        heapq.heapify(heads)
        options_bytes = 0
        while heads and len(taken) < CONTROLS_PER_STEP_MAX:
            arrival, head = heapq.heappop(heads)
            if self._waits(head, arrival):  # for rows: controls that came before it have been looked at before it
                continue
            if head.options is not None:
                options_bytes += head.options.ByteSize()
                if options_bytes > bounds.OPTIONS_PER_ENVELOPE_BYTES_MAX:
                    break
            self._remove_head(head)
            taken.append(head)
            following = self._controls.get(head.session_key)
            if following is not None:
                heapq.heappush(heads, following)
        return taken

    def _waits(self, control: QueuedFrame, arrival: int) -> bool:
        """Return whether the control that it depends on has arrived earlier and is not done yet."""
        if control.flags & Flag.OPEN:
            return next(iter(self._closes), arrival) < arrival
        if control.flags & Flag.CLOSE:
            return self._copies.get(control.session_key, [arrival])[0] < arrival
        if not control.flags & Flag.COPY_PREFIX:
            return False
        source = self._sessions.get((control.route_id, control.argument), ())
        return any(came < arrival for came, _ in source)

    def _control_gone(self, control: QueuedFrame, arrival: int) -> None:
        self._closes.pop(arrival, None)
        source = (control.route_id, control.argument)
        if control.flags & Flag.COPY_PREFIX and (arrivals := self._copies.get(source)):
            arrivals.remove(arrival)
            if not arrivals:
                del self._copies[source]

    def _line_of(self, frame: QueuedFrame) -> dict[tuple[int, int], Ranked]:
        if frame.is_control:
            return self._controls
        return self._prefill if frame.is_prefill else self._decode

    def _stand_in_line(self, head: Ranked, place: int | None = None) -> None:
        """Put the first of a session's queue into its line: at the end, or at `place`."""
        _, frame = head
        if frame.is_control:
            self._controls[frame.session_key] = head
        else:
            self._line_of(frame)[frame.session_key] = (next(self._places) if place is None else place, frame)

    def _place_of_mates(self, frame: QueuedFrame) -> int | None:
        """Return where others of its envelope stand, in whichever line, if any do."""
        heads = itertools.chain(self._decode.values(), self._prefill.values())
        return min((place for place, head in heads if head.envelope == frame.envelope), default=None)

    def _remove_head(self, head: QueuedFrame) -> None:
        del self._line_of(head)[head.session_key]
        queue = self._sessions[head.session_key]
        arrival, _ = queue.popleft()
        self.queued_rows -= head.n_rows
        self._n_frames -= 1
        if head.is_control:
            self._control_gone(head, arrival)
        if queue:
            _, following = queue[0]
            # Several frames of one session in an envelope take turns with others: together they would keep these off.
            has_gone = following.envelope == head.envelope and not head.is_control
            joins = not (has_gone or following.is_control)
            self._stand_in_line(queue[0], self._place_of_mates(following) if joins else None)
        else:
            del self._sessions[head.session_key]

    def _drop_rows(self, session_key: tuple[int, int]) -> list[QueuedFrame]:
        copied_before = self._copies.get(session_key, [0])[-1]
        place, _ = self._decode.get(session_key) or self._prefill.get(session_key) or (None, None)
        waiting = self._drop(session_key)
        left = collections.deque(each for each in waiting if each[1].is_control or each[0] < copied_before)
        if left:
            self._sessions[session_key] = left
            self.queued_rows += sum(frame.n_rows for _, frame in left)
            self._n_frames += len(left)
            self._stand_in_line(left[0], place if left[0] is waiting[0] else None)
        return [frame for arrival, frame in waiting if not (frame.is_control or arrival < copied_before)]

    def _drop(self, session_key: tuple[int, int]) -> list[Ranked]:
        queue = self._sessions.pop(session_key, None)
        if not queue:
            return []
        del self._line_of(queue[0][1])[session_key]
        self.queued_rows -= sum(frame.n_rows for _, frame in queue)
        self._n_frames -= len(queue)
        return list(queue)


def _are_decode_rows(frames: list[QueuedFrame]) -> bool:
    """Return whether these are nothing but decode rows, of as many sessions as there are frames, and of one adapter."""
    flags = 0
    for frame in frames:
        flags |= frame.flags
    if flags & (CONTROL | Flag.PREFILL):
        return False
    keys = {frame.session_key for frame in frames}
    return len(keys) == len(frames) and len({session_id >> ADAPTER_SHIFT for _, session_id in keys}) == 1


def _in_order(heads: Mapping[tuple[int, int], Ranked]) -> list[Ranked]:
    return sorted(heads.values(), key=operator.itemgetter(0))
