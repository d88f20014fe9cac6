"""The positions at which sessions can be, and should be, resumed where stages forget what was before. Pure.

A recurrent state describes the end of its lane and cannot be rewound, nor can a sliding window whose cells alone are
kept. So stages keep checkpoints of them behind the rows that the coordinator marks (Flag.CHECKPOINT), and it asks for
these positions alone. It marks:

* the end of the first message, which all chats with one system prompt share,
* the end of the last one: the next turn's prompt agrees with this one so far, whatever the chat template then adds,
* the end of the prompt minus one, for the same prompt again, unless the last message ends shortly before: each mark is
  one more step before the first token,
* the position where a waiting prompt stops agreeing with this one.

A message ends with a token that ends answers, as nearly all chat templates have it, or with one that is known for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from relayline.coordinator.sessions.session import Session, State
from relayline.wire.common.checkpoints import CHECKPOINTS_PER_LANE_MAX

STOP_TOKENS_MIN = 32  # a checkpoint that saves fewer would save hardly more than it costs
TAIL_TOKENS_MAX = 256  # that a chat template adds behind the last message, for the answer
SEARCHED_TOKENS_MAX = 32_768  # of each end of a history: 2 ms, where no message ends there


def stops_of(session: Session, ends_message: Callable[[int], bool]) -> list[int]:
    """Return the ends of a starting session's chunks, ascending, all beyond the part that it need not read.

    ends_message(token) tells whether a message of a chat ends with a token.
    """
    history = session.history
    n_searched = min(len(history) - 1, SEARCHED_TOKENS_MAX)
    forwards, backwards = range(n_searched), range(len(history) - 2, len(history) - 2 - n_searched, -1)
    ends = [next((at + 1 for at in places if ends_message(history[at])), 0) for places in (forwards, backwards)]
    last = len(history) - 1
    found = {*ends, *(() if last - ends[1] < STOP_TOKENS_MIN else (last,))}
    return sorted(at for at in found if at >= STOP_TOKENS_MIN and at > session.n_sent)


def turn_ends(session: Session, ends_message: Callable[[int], bool]) -> tuple[int, ...]:
    """Return where the next turn's prompt may stop agreeing with a session: behind the last message of its prompt, and
    where its answer begins.
    """
    prompt = session.request.prompt_tokens
    tail = range(len(prompt) - 1, max(-1, len(prompt) - 1 - TAIL_TOKENS_MAX), -1)
    return (*(at + 1 for at in itertools.islice(filter(lambda at: ends_message(prompt[at]), tail), 1)), len(prompt))


def nearest(source: Session, n_tokens: int, *, is_held: bool) -> int:
    """Return how many of a session's first n_tokens others can copy, or it can resume from itself: perhaps 0.

    `is_held`: only counting positions that it has sent already. Otherwise it may also be made to stop there, if it has
    not read so far.
    """
    if source.kept_key is not None and n_tokens >= source.n_sent:  # a lane that stands still is copied whole
        return source.n_sent
    there = [at for at in source.checkpoints if at <= n_tokens]
    if not is_held and source.state is State.PREFILL and n_tokens > source.n_sent:
        n_marked = len(source.checkpoints) + len(source.stops)
        if n_marked < CHECKPOINTS_PER_LANE_MAX or n_tokens in source.stops:
            return n_tokens
        there += [at for at in source.stops if at <= n_tokens]
    return max(there, default=0)


def stop_at(leader: Session, n_tokens: int) -> None:
    """Let a session stop where another one will copy it from."""
    if n_tokens > leader.n_sent and n_tokens not in leader.stops:
        leader.stops = sorted([*leader.stops, n_tokens])
