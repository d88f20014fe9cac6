from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relayline.stage.steps.lanes import OWED_NS, LaneTable
from relayline.wire.common.errors import InternalError, LaneLimitError, PositionGapError, RelaylineError, SessionError

CTX = 16


def table_with(*lengths: int, n_lanes: int = 3) -> LaneTable:
    """Route 1 with sessions 0, 1, ... of these lengths."""
    table = LaneTable(n_lanes, CTX)
    for session_id, length in enumerate(lengths):
        table.open(session_id, 1).next_position = length
    return table


def state_of(table: LaneTable) -> object:
    return copy.deepcopy((table._by_session, table._free))


@pytest.mark.parametrize(
    ("position", "n_rows", "drop_from"),
    [(5, 1, None), (5, 11, None), (4, 1, 4), (0, 1, 0), (0, 16, 0), (2, 14, 2)],
    ids=["next", "next to the end", "retry of the last", "from the start", "whole lane again", "rejected speculation"],
)
def test_the_new_position_decides_from_where_a_lane_forgets(position: int, n_rows: int, drop_from: int | None) -> None:
    lane, forgets_from = table_with(5).place(0, 1, position, n_rows)
    assert forgets_from == drop_from
    assert lane.next_position == 5  # moved by the executor, once the rows are decoded


REFUSALS = {
    "gap": (lambda t: t.place(0, 1, 6, 1), PositionGapError, "6.*holds 5"),
    "beyond the context": (lambda t: t.place(0, 1, 5, 12), LaneLimitError, "17.*16"),
    "unknown session": (lambda t: t.place(9, 1, 0, 1), SessionError, "not open"),
    "session of another route": (lambda t: t.place(0, 2, 5, 1), SessionError, "not open"),
    "trim up": (lambda t: t.trim(0, 1, 6), PositionGapError, "trimmed to 6"),
    "trim unknown": (lambda t: t.trim(9, 1, 0), SessionError, "not open"),
    "prefix too long": (lambda t: t.prefix(0, 2, 1, 6), PositionGapError, "6 were asked"),
    "prefix into a used session": (lambda t: t.prefix(0, 1, 1, 2), SessionError, "already holds 3"),
    "prefix of unknown": (lambda t: t.prefix(9, 2, 1, 1), SessionError, "not open"),
    "no lane": (lambda t: t.open(7, 1), LaneLimitError, "all 3 lanes"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_changes_nothing(name: str) -> None:
    table = table_with(5, 3, 0)
    act, error, text = REFUSALS[name]
    before = state_of(table)
    with pytest.raises(error, match=text):
        act(table)
    assert state_of(table) == before
    table.check()


def test_a_session_gets_the_lane_it_wants_if_that_is_free() -> None:
    table = LaneTable(4, CTX)
    assert [table.open(session_id, 1, wanted).index for session_id, wanted in ((0, 2), (1, 0))] == [2, 0]
    assert table.open(2, 1, 2).index in (1, 3), "taken"
    assert table.open(3, 1, 1 << 62).index in (1, 3), "a name of no lane"
    table.check()


def test_opening_and_closing_again_change_nothing() -> None:
    table = table_with(5)
    assert table.open(0, 1).next_position == 5
    assert len(table) == 1
    assert table.close(0, 1) is not None
    assert table.close(0, 1) is None
    assert table.close(0, 2) is None
    assert len(table) == 0


def test_routes_with_the_same_session_id_never_meet() -> None:
    table = LaneTable(2, CTX)
    first, second = table.open(3, 1), table.open(3, 2)
    assert first.index != second.index
    second.next_position = 4
    assert table.place(3, 1, 0, 1)[1] is None
    assert table.close(3, 1) is first
    assert [lane.session_id for lane in table.of_route(2)] == [3]
    assert table.place(3, 2, 4, 1)[0] is second


def test_the_executor_moves_the_next_position_when_it_has_trimmed_or_copied() -> None:
    table = table_with(5, 0)
    assert table.trim(0, 1, 5)[1] is None
    assert table.trim(0, 1, 2)[1] == 2
    source, target = table.prefix(0, 1, 1, 2)
    assert (source.next_position, target.next_position) == (5, 0)


def test_check_finds_a_lane_owned_twice() -> None:
    table = table_with(1, 1)
    table.open(1, 1).index = table.open(0, 1).index
    with pytest.raises(InternalError):
        table.check()


def test_a_kept_session_gives_way_to_whoever_would_find_no_lane() -> None:
    table = LaneTable(3, CTX)
    for session_id, is_kept in ((0, True), (1, False), (2, True)):
        assert table.in_the_way(session_id, 1) is None
        table.open(session_id, 1, is_kept=is_kept)
    assert (table.n_used, table.n_kept) == (1, 2)
    assert table.in_the_way(2, 1) is None, "it is open"
    for route_id, gone in ((2, 0), (1, 2)):
        lane = table.in_the_way(9, route_id)
        assert lane is not None
        assert (lane.session_id, lane.route_id) == (gone, 1), "kept for longest"
        table.close(lane.session_id, lane.route_id)
        table.open(9, route_id)
    assert table.in_the_way(7, 1) is None
    with pytest.raises(LaneLimitError):
        table.open(7, 1)
    assert (table.n_used, table.n_kept) == (3, 0)
    table.check()


class LaneMachine(RuleBasedStateMachine):
    """Any order of events against a model: a dict of lengths."""

    N_LANES = 3
    sessions = st.tuples(st.integers(1, 2), st.integers(0, 4))  # (route, session)

    def __init__(self) -> None:
        super().__init__()
        self.table = LaneTable(self.N_LANES, CTX)
        self.lengths: dict[tuple[int, int], int] = {}

    @rule(key=sessions)
    def open(self, key: tuple[int, int]) -> None:
        try:
            lane = self.table.open(key[1], key[0])
        except LaneLimitError:
            assert len(self.lengths) == self.N_LANES
            assert key not in self.lengths
        else:
            assert lane.next_position == self.lengths.setdefault(key, 0)

    @rule(key=sessions)
    def close(self, key: tuple[int, int]) -> None:
        lane = self.table.close(key[1], key[0])
        assert (lane is None) == (self.lengths.pop(key, None) is None)

    @rule(key=sessions, position=st.integers(0, CTX + 1), n_rows=st.integers(1, CTX))
    def place(self, key: tuple[int, int], position: int, n_rows: int) -> None:
        length = self.lengths.get(key)
        fits = length is not None and position <= length and position + n_rows <= CTX
        try:
            lane, drop_from = self.table.place(key[1], key[0], position, n_rows)
        except RelaylineError:
            assert not fits
            return
        assert fits
        assert drop_from == (position if position != length else None)
        lane.next_position = self.lengths[key] = position + n_rows

    @rule(key=sessions, length=st.integers(0, CTX))
    def trim(self, key: tuple[int, int], length: int) -> None:
        try:
            self.table.trim(key[1], key[0], length)[0].next_position = length
        except RelaylineError:
            assert length > self.lengths.get(key, -1)
        else:
            self.lengths[key] = length

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), into=sessions, length=st.integers(0, CTX))
    def prefix(self, data: st.DataObject, into: tuple[int, int], length: int) -> None:
        _, source = data.draw(st.sampled_from(sorted(self.lengths)))
        held = self.lengths.get((into[0], source), -1)  # a session of the same id on another route is another session
        allowed = held >= length and self.lengths.get(into) == 0
        try:
            _, target = self.table.prefix(source, into[1], into[0], length)
        except RelaylineError:
            assert not allowed
        else:
            assert allowed
            target.next_position = self.lengths[into] = length

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        found = {key: lane.next_position for key, lane in self.table._by_session.items()}
        assert found == self.lengths


TestLaneMachine = LaneMachine.TestCase
TestLaneMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_kept_prefixes_go_before_lanes_that_wait_to_resume() -> None:
    table = LaneTable(2, 10)
    table.open(1, 1).is_left = True
    table.open(2, 1, is_kept=True)
    lane = table.in_the_way(9, 2)
    assert lane is not None
    assert lane.session_id == 2
    table.close(2, 1)
    table.open(3, 1)
    lane = table.in_the_way(9, 2)
    assert lane is not None
    assert lane.session_id == 1


# --- coordinators that share ------------------------------------------------------------------------------------------


def test_the_next_lane_is_for_the_route_that_was_refused_and_has_fewer() -> None:
    table = LaneTable(4, CTX)
    for session_id in range(4):
        table.open(session_id, 1, now_ns=0)
    with pytest.raises(LaneLimitError, match="all 4 lanes"):
        table.open(9, 2, now_ns=10)
    table.close(0, 1)
    with pytest.raises(LaneLimitError, match="another coordinator"):
        table.open(5, 1, now_ns=20)
    table.open(9, 2, now_ns=OWED_NS)
    table.close(1, 1)
    assert table.open(6, 1, now_ns=OWED_NS + 1), "the other one needs no more"


def test_shares_become_equal_and_no_further() -> None:
    table, sessions = LaneTable(6, CTX), iter(range(1_000))
    held: dict[int, list[int]] = {1: [], 2: []}

    def ask(route_id: int, now_ns: int) -> None:
        session_id = next(sessions)
        try:
            table.open(session_id, route_id, now_ns=now_ns)
        except LaneLimitError:
            return
        held[route_id].append(session_id)

    for now_ns in range(6):
        ask(1, now_ns)
    for now_ns in range(100, 200):
        ended = 1 if now_ns % 2 or not held[2] else 2
        table.close(held[ended].pop(0), ended)
        ask(1, now_ns)
        ask(2, now_ns)
        ask(2, now_ns)
        table.check()
    assert {len(each) for each in held.values()} == {3}


def test_a_claim_ends_when_nobody_asks_any_more_and_kept_lanes_have_none() -> None:
    table = LaneTable(1, CTX)
    table.open(1, 1, now_ns=0)
    with pytest.raises(LaneLimitError):
        table.open(2, 2, now_ns=0)
    table.close(1, 1)
    assert table.open(3, 1, now_ns=OWED_NS)
    table.close(3, 1)
    assert table.open(4, 3, is_kept=True, now_ns=OWED_NS)
    assert table._refused_ns == {}
