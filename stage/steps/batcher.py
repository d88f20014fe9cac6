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

When a close arrives, the session's waiting rows are dropped, except rows that other sessions are to copy. Its controls
stay, because other sessions may copy what it was to copy.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import operator

from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.steps.policy import Policy
from relayline.wire.common import bounds
from relayline.wire.envelopes.frames import CONTROL, Flag

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
        self._sessions: dict[tuple[int, int], collections.deque[QueuedFrame]] = {}  # by QueuedFrame.session_key
        self._decode: dict[tuple[int, int], QueuedFrame] = {}  # heads
        self._prefill: dict[tuple[int, int], QueuedFrame] = {}
        self._controls: dict[tuple[int, int], QueuedFrame] = {}
        self._copies: dict[tuple[int, int], list[int]] = {}  # session key -> push orders of waiting copies from it
        self._closes: dict[int, int] = {}  # push orders of waiting closes, ascending -> their routes
        self._push_orders, self._line_orders = itertools.count(), itertools.count()

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
        frame.push_order = next(self._push_orders)
        if frame.flags & Flag.COPY_PREFIX:
            self._copies.setdefault((frame.route_id, frame.argument), []).append(frame.push_order)
        elif frame.flags & Flag.CLOSE:
            self._closes[frame.push_order] = frame.route_id
        queue = self._sessions.get(frame.session_key)
        if queue is None:
            queue = self._sessions[frame.session_key] = collections.deque()
        queue.append(frame)
        if len(queue) == 1:
            self._stand_in_line(frame)

    def drop_route(self, route_id: int) -> list[QueuedFrame]:
        """Forget every waiting frame of a route (its epoch ended). Returns the dropped frames."""
        self._spread()
        self._copies = {key: orders for key, orders in self._copies.items() if key[0] != route_id}
        self._closes = {order: route for order, route in self._closes.items() if route != route_id}
        mine = [key for key in self._sessions if key[0] == route_id]
        return [frame for key in mine for frame in self._drop(key)]

    def take(self, now_ns: int) -> Step | None:
        """Return the next step, or None when nothing waits or the policy holds everything back."""
        if not self._n_frames:  # as nearly always when a step has just ended
            return None
        before = self.queued_rows
        if self._whole:
            frames, choice = self._whole, self.policy.choose(self._whole, (), now_ns)
            if choice.n_decode == len(frames):
                self._whole, self._n_frames, self.queued_rows = [], 0, 0
                return Step([], frames, choice.close_reason, now_ns, before, 0)
            self._spread()
        controls = self._take_controls() if self._controls else []
        decode, prefill = _in_order(self._decode), _in_order(self._prefill)
        if not decode and not prefill:
            return Step(controls, [], CONTROLS_ONLY, now_ns, before, before) if controls else None
        choice = self.policy.choose(decode, prefill, now_ns)
        frames = decode[: choice.n_decode] + prefill[: choice.n_prefill]
        if not frames and not controls:
            return None
        for frame in frames:
            self._remove_head(frame)
        return Step(controls, frames, choice.close_reason, now_ns, before, self.queued_rows)

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
        heads = [(head.push_order, head) for head in self._controls.values()]
        heapq.heapify(heads)
        options_bytes = 0
        while heads and len(taken) < CONTROLS_PER_STEP_MAX:
            _, head = heapq.heappop(heads)
            if self._waits(head):  # for rows: controls that came before it have been looked at before it
                continue
            if head.options is not None:
                options_bytes += head.options.ByteSize()
                if options_bytes > bounds.OPTIONS_PER_ENVELOPE_BYTES_MAX:
                    break
            self._remove_head(head)
            taken.append(head)
            following = self._controls.get(head.session_key)
            if following is not None:
                heapq.heappush(heads, (following.push_order, following))
        return taken

    def _waits(self, control: QueuedFrame) -> bool:
        """Return whether the control that it depends on has arrived earlier and is not done yet."""
        if control.flags & Flag.OPEN:
            return next(iter(self._closes), control.push_order) < control.push_order
        if control.flags & Flag.CLOSE:
            return self._copies.get(control.session_key, [control.push_order])[0] < control.push_order
        if not control.flags & Flag.COPY_PREFIX:
            return False
        source = self._sessions.get((control.route_id, control.argument), ())
        return any(frame.push_order < control.push_order for frame in source)

    def _control_gone(self, control: QueuedFrame) -> None:
        self._closes.pop(control.push_order, None)
        source = (control.route_id, control.argument)
        if control.flags & Flag.COPY_PREFIX and (orders := self._copies.get(source)):
            orders.remove(control.push_order)
            if not orders:
                del self._copies[source]

    def _line_of(self, frame: QueuedFrame) -> dict[tuple[int, int], QueuedFrame]:
        if frame.is_control:
            return self._controls
        return self._prefill if frame.is_prefill else self._decode

    def _stand_in_line(self, head: QueuedFrame, place: int | None = None) -> None:
        head.line_order = next(self._line_orders) if place is None else place
        self._line_of(head)[head.session_key] = head

    def _place_beside(self, frame: QueuedFrame) -> int | None:
        """Return where others of its envelope stand, in whichever line, if any do."""
        heads = itertools.chain(self._decode.values(), self._prefill.values())
        return min((head.line_order for head in heads if head.envelope == frame.envelope), default=None)

    def _remove_head(self, head: QueuedFrame) -> None:
        del self._line_of(head)[head.session_key]
        queue = self._sessions[head.session_key]
        queue.popleft()
        self.queued_rows -= head.n_rows
        self._n_frames -= 1
        if head.is_control:
            self._control_gone(head)
        if queue:
            # Several frames of one session in an envelope take turns with others: together they would keep these off.
            has_gone = queue[0].envelope == head.envelope and not head.is_control
            joins = not (has_gone or queue[0].is_control)
            self._stand_in_line(queue[0], self._place_beside(queue[0]) if joins else None)
        else:
            del self._sessions[head.session_key]

    def _drop_rows(self, session_key: tuple[int, int]) -> list[QueuedFrame]:
        waiting, copied_before = self._drop(session_key), self._copies.get(session_key, [0])[-1]
        left = collections.deque(f for f in waiting if f.is_control or f.push_order < copied_before)
        if left:
            self._sessions[session_key] = left
            self.queued_rows += sum(frame.n_rows for frame in left)
            self._n_frames += len(left)
            self._stand_in_line(left[0], left[0].line_order if left[0] is waiting[0] else None)
        return [frame for frame in waiting if not (frame.is_control or frame.push_order < copied_before)]

    def _drop(self, session_key: tuple[int, int]) -> list[QueuedFrame]:
        queue = self._sessions.pop(session_key, None)
        if not queue:
            return []
        del self._line_of(queue[0])[session_key]
        self.queued_rows -= sum(frame.n_rows for frame in queue)
        self._n_frames -= len(queue)
        return list(queue)


def _are_decode_rows(frames: list[QueuedFrame]) -> bool:
    """Return whether these are nothing but decode rows, of as many sessions as there are frames."""
    flags = 0
    for frame in frames:
        flags |= frame.flags
    if flags & (CONTROL | Flag.PREFILL):
        return False
    return len({frame.session_key for frame in frames}) == len(frames)


def _in_order(heads: dict[tuple[int, int], QueuedFrame]) -> list[QueuedFrame]:
    return sorted(heads.values(), key=operator.attrgetter("line_order"))
