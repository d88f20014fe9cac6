"""Finds out by trial whether one flight of all streams beats the planned flights. Pure.

A cost curve does not show how a step slows down while another stage on the host reads weights from the same memory.
With several flights the stages of one host compute at the same time, and their curves are learned that way. So the
curves cannot predict that a single flight finds each stage alone, and faster.

If stages share a host, and one flight is not predicted to be much slower, the scheduler tries the other way now and
then for a few tokens. It keeps the way that has made more tokens in this trial and the earlier ones. The speed of a
shared host varies by a tenth within seconds. So when both ways are close, one window proves little, and the next trial
comes soon. Each number of streams has its own contest, which continues when that number returns.
"""

from __future__ import annotations

import dataclasses

from relayline.coordinator.schedule.groups import GroupPlanner

SETTLE_ROUNDS = 2  # tokens of every stream until the flights are those that are to be measured
ROUNDS = 6  # and then until a rate is taken
GIVE_UP_ROUNDS = 2  # after which a trial ends early if it is hopeless
HOPELESS = 0.9  # times as fast as the way that is kept, or less
AGAIN_WINDOWS = 32  # of the better way until the other is tried again: one token in 25 then goes the worse way
AGAIN_SOON_WINDOWS = 16  # if it was ended early, which costs half and may have been a bad moment
AGAIN_CLOSE_WINDOWS = 8  # where both are as fast to within CLOSE: a seventh of the tokens then goes a little worse
CLOSE = 0.1
NEWEST_SHARE = 0.5  # weight of the newest window in a way's average
CLEARLY = 1.03  # times as fast the way that is tried must have been
WORTH_TRYING = 0.7  # a single flight is tried if its predicted rate is at least this share of the planned flights'
ONE_FLIGHT_STREAMS_MIN = 2  # fewer are one flight by every plan
CONTESTS_MAX = 64  # numbers of streams for which one is kept


@dataclasses.dataclass(slots=True)
class _Contest:
    is_single: bool = False  # how rows go now
    is_trial: bool = False  # for one window; the other way is kept if it does not win
    rates: dict[bool, float] = dataclasses.field(default_factory=dict)  # tokens per ns, by whether it is a single one
    n_windows: int = AGAIN_WINDOWS - 1  # since the other way was tried; the first trial is soon


class OneFlight:
    """The contests of one epoch, and the window that is measured now."""

    def __init__(self) -> None:
        self._contests: dict[int, _Contest] = {}
        self._n_streams: int  # that the window is of; 0: none
        self._n_tokens: int  # that have come since rows began to go this way
        self._settled: tuple[int, int]  # tokens by then, and the time, once flights had settled
        self._begin(0)

    def is_chosen(self, n_streams: int) -> bool:
        """Return whether the rows of n_streams go as one flight now."""
        contest = self._contests.get(n_streams)
        return contest is not None and contest.is_single

    def landed(self, n_tokens: int, n_streams: int, now_ns: int) -> None:
        """A flight has brought n_tokens while n_streams decode; 0 streams if only one way is allowed now."""
        if n_streams != self._n_streams:
            self._begin(n_streams)
        if not n_streams:
            return
        self._n_tokens += n_tokens
        settled_tokens, settled_ns = self._settled
        if not settled_tokens:
            if self._n_tokens >= SETTLE_ROUNDS * n_streams:
                self._settled = (self._n_tokens, now_ns)
            return
        n_measured, contest = self._n_tokens - settled_tokens, self._contests[n_streams]
        if n_measured < GIVE_UP_ROUNDS * n_streams or now_ns <= settled_ns:
            return
        rate = n_measured / (now_ns - settled_ns)
        is_early = n_measured < ROUNDS * n_streams
        if is_early and not (contest.is_trial and rate < HOPELESS * contest.rates[not contest.is_single]):
            return
        self._settled = (self._n_tokens, now_ns)
        if is_early:
            _give_up(contest)
        if is_early or _measured(contest, rate):
            self._begin(n_streams)

    def _begin(self, n_streams: int) -> None:
        if n_streams and n_streams not in self._contests:
            if len(self._contests) >= CONTESTS_MAX:
                self._contests.clear()
            self._contests[n_streams] = _Contest()
        self._n_streams, self._n_tokens, self._settled = n_streams, 0, (0, 0)


def may_be_better(planner: GroupPlanner, n_streams: int) -> bool:
    """Return whether one flight of this many streams may beat the best plan by the curves."""
    if not (planner.shares_host and planner.is_known and ONE_FLIGHT_STREAMS_MIN <= n_streams <= planner.rows_max):
        return False
    plan = planner.plan(n_streams, n_prompts=0)
    promised = planner.rate(n_streams, 1, n_streams) / planner.rate(n_streams, plan.n_groups, plan.group_rows)
    return plan.n_groups > 1 and promised >= WORTH_TRYING


def _give_up(contest: _Contest) -> None:
    """End a trial whose rate is not taken note of: it says how bad a moment was at least as much as how bad the way."""
    contest.is_trial, contest.is_single = False, not contest.is_single
    contest.n_windows = AGAIN_WINDOWS - AGAIN_SOON_WINDOWS


def _measured(contest: _Contest, rate: float) -> bool:
    """Take note of a rate; return whether rows are to go the other way from now on."""
    before = contest.rates.get(contest.is_single, rate)
    contest.rates[contest.is_single] = before + NEWEST_SHARE * (rate - before)
    if not contest.is_trial:
        contest.n_windows += 1
        contest.is_trial = contest.n_windows >= AGAIN_WINDOWS
        contest.is_single ^= contest.is_trial
        return contest.is_trial
    gain = contest.rates[contest.is_single] / contest.rates[not contest.is_single]
    contest.is_trial = False
    contest.n_windows = AGAIN_WINDOWS - AGAIN_CLOSE_WINDOWS if abs(gain - 1) < CLOSE else 0
    contest.is_single ^= gain <= CLEARLY
    return gain <= CLEARLY
