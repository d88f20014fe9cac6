"""Planned changes of layers, decision by decision: refusals, held requests, and the end of a change."""

from __future__ import annotations

import itertools

import pytest

from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.moves import (
    PREPARE_MAX_S,
    SETTLE_MAX_S,
    Cut,
    Drop,
    Fetch,
    Moves,
    MoveState,
    Prepare,
    Settle,
    Switch,
)
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import Session
from relayline.wire.common.errors import InvalidRequestError, NotReadyError, RelaylineError
from relayline.wire.common.phase import Phase

S = 1_000_000_000
NAMES = ("a", "b", "c")


class World:
    """Three stages of an eight-layer model, with flights under way if the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = ConductorConfig(ScheduleConfig(), NAMES, 100)
        self.conductor = Conductor(config, lambda _: False, itertools.count(1), 0)
        self.conductor.availability.enter(Phase.READY, 0)
        self.under_way: dict[int, tuple[int, int]] = {}
        monkeypatch.setattr(self.conductor.scheduler, "under_way", lambda: self.under_way)
        self.moves = Moves(self.conductor, NAMES, 8, (3, 6))

    def prepared(self) -> list[object]:
        """Advance a change until all have prepared."""
        assert self.moves.begin((3, 5), 0) == [Cut(1, (3, 5))]
        assert self.moves.cut(1, (True, False, False), S) == [Prepare(1)]
        assert self.moves.prepared(1, 0, S) == self.moves.prepared(1, 2, S) == []
        assert not self.conductor.is_held, "requests go on while stages prepare"
        return list(self.moves.prepared(1, 1, 2 * S))

    @property
    def state(self) -> MoveState:
        assert self.moves.latest is not None
        return self.moves.latest.state


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_an_idle_pipeline_switches_at_once(world: World) -> None:
    assert world.prepared() == [Switch(1)]
    assert world.moves.connected(2 * S + S // 4)
    described = world.moves.describe(9 * S)
    assert described["layers"] == [[0, 3], [3, 5], [5, 8]]
    assert described["move"] == {
        "number": 1, "cuts": [3, 5], "stages": ["a", "b", "c"], "state": "done", "state_s": 6.75, "took_s": 2.25,
        "keep": ["a"], "waiting_for": [], "fetches": {}, "paused_s": 0.25, "kept_tokens": 0, "replayed_tokens": 0,
        "problem": "",
        "layers": [[0, 3], [3, 5], [5, 8]],
        "before": {"stages": ["a", "b", "c"], "layers": [[0, 3], [3, 6], [6, 8]]},
    }  # fmt: skip
    assert not world.moves.connected(3 * S), "a later epoch is no change"


def test_a_change_says_how_far_each_stage_is_and_why_one_does_not_get_on(world: World) -> None:
    def fetches() -> object:
        return world.moves.describe(S)["move"]["fetches"]  # type: ignore[index]

    world.moves.begin((3, 5), 0)
    world.moves.fetching(1, 1, Fetch(5, 10))
    assert fetches() == {}, "the model is not cut yet"
    world.moves.cut(1, (True, False, False), S)
    world.moves.fetching(1, 1, Fetch(5, 10, "the hub stalls"))
    world.moves.fetching(1, 2, Fetch(7, 20))
    world.moves.fetching(2, 2, Fetch(8, 20))  # of a change that is not this one
    b = {"done_bytes": 5, "total_bytes": 10, "trouble": "the hub stalls"}
    assert fetches() == {"b": b, "c": {"done_bytes": 7, "total_bytes": 20, "trouble": ""}}
    world.moves.prepared(1, 2, S)
    world.moves.fetching(1, 2, Fetch(20, 20))
    assert fetches() == {"b": b}, "one that has its slice is no longer on the way"
    world.moves.failed(1, "b: the hub stalls", S)
    assert fetches() == {}


def test_flights_under_way_return_before_a_switch(world: World) -> None:
    world.under_way = {7: (1, 1)}
    assert world.prepared() == [Settle(SETTLE_MAX_S)]
    assert world.conductor.is_held
    assert world.moves.look(2 * S + 1) == []
    world.under_way = {}
    assert world.moves.look(2 * S + 2) == [Switch(1)]


def test_a_step_that_takes_long_is_not_waited_for(world: World) -> None:
    world.under_way = {7: (1, 1)}
    world.prepared()
    assert world.moves.look(2 * S + round(SETTLE_MAX_S * S)) == [Switch(1)]


def test_an_epoch_that_ends_by_itself_is_where_the_switch_is_made(world: World) -> None:
    world.under_way = {7: (1, 1)}
    world.prepared()
    assert world.moves.lost(2 * S + 5) == [Switch(1)]
    assert world.moves.lost(2 * S + 6) == []


def test_between_two_epochs_nothing_has_to_settle(world: World) -> None:
    world.under_way = {7: (1, 1)}
    world.moves.begin((3, 5), 0)
    world.moves.cut(1, (True, True, True), S)
    world.conductor.availability.enter(Phase.RECOVERING, S)
    found = [world.moves.prepared(1, index, S) for index in range(3)]
    assert found == [[], [], [Switch(1)]]


def test_a_pipeline_that_ends_does_not_switch(world: World) -> None:
    world.moves.begin((3, 5), 0)
    world.moves.cut(1, (True, True, True), S)
    world.conductor.availability.enter(Phase.DRAINING, S)
    found = [world.moves.prepared(1, index, S) for index in range(3)]
    assert found == [[], [], [Drop(1)]]
    assert world.moves.cuts == (3, 6)


@pytest.mark.parametrize("state", ["cutting", "preparing", "settling", "switching"])
def test_a_stage_that_leaves_ends_the_change_until_the_switch(world: World, state: str) -> None:
    world.under_way = {7: (1, 1)}
    if state == "cutting":
        world.moves.begin((3, 5), 0)
    elif state == "preparing":
        world.moves.begin((3, 5), 0)
        world.moves.cut(1, (True, False, False), S)
    else:
        world.prepared()
    if state == "switching":
        world.under_way = {}
        world.moves.look(3 * S)
    left = world.moves.left(1, 4 * S)
    if state == "switching":
        assert (left, world.state, world.moves.cuts) == ([], MoveState.SWITCHING, (3, 5))
        return
    assert left == ([] if state == "cutting" else [Drop(1)])
    assert (world.state, world.moves.cuts, world.conductor.is_held) == (MoveState.FAILED, (3, 6), False)
    assert world.moves.cut(1, (True, True, True), 5 * S) == [], "a late event changes nothing"
    assert world.moves.prepared(1, 0, 5 * S) == []
    assert world.moves.begin((2, 5), 6 * S) == [Cut(2, (2, 5))], "another may be begun"


def test_others_take_over_from_a_stage_that_is_lost_in_the_switch(world: World) -> None:
    world.prepared()
    world.conductor.availability.enter(Phase.RECOVERING, 3 * S)
    with pytest.raises(NotReadyError, match=r"already being moved \(switching\)"):
        world.moves.begin((2, 5), 4 * S)
    first = world.moves.latest
    assert first is not None
    assert world.moves.begin((4,), 5 * S, (0, 2)) == [Cut(2, (4,))]
    assert (first.state, first.problem) == (MoveState.FAILED, "b did not come back with the new layers")


def test_stages_that_never_get_ready_end_the_change(world: World) -> None:
    began_ns = 86_400 * S  # the machine has been up for a day
    world.moves.begin((3, 5), began_ns)
    world.moves.cut(1, (True, False, False), began_ns + S)
    world.moves.prepared(1, 0, began_ns + S)
    assert world.moves.tick(began_ns + round(PREPARE_MAX_S * S)) == []
    end_ns = began_ns + round((PREPARE_MAX_S + 2) * S)
    assert world.moves.tick(end_ns) == [Drop(1)]
    found = world.moves.describe(end_ns + 3 * S)["move"]
    assert isinstance(found, dict)
    assert (found["problem"], found["waiting_for"]) == ("not ready after 3600 s: b, c", ["b", "c"])
    assert (found["state"], found["state_s"], found["took_s"]) == ("failed", 3, PREPARE_MAX_S + 2)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [((3,), "3 stages need 2 cuts"), ((3, 3), "ascend"), ((0, 4), "ascend"), ((4, 8), "ascend"), ((3, 6), "already")],
)
def test_cuts_that_cannot_be_are_refused(world: World, cuts: tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        world.moves.begin(cuts, 0)
    assert world.moves.latest is None


def test_one_change_at_a_time_and_only_while_ready(world: World) -> None:
    world.moves.begin((3, 5), 0)
    with pytest.raises(NotReadyError, match="already being moved"):
        world.moves.begin((2, 5), 0)
    world.moves.failed(1, "no room", 0)
    world.conductor.availability.enter(Phase.RECOVERING, 0)
    refused: type[RelaylineError] = NotReadyError
    with pytest.raises(refused, match="recovering"):
        world.moves.begin((2, 5), 0)


def test_others_may_hold_the_layers_and_an_empty_stage_is_not_waited_for(world: World) -> None:
    world.moves = Moves(world.conductor, (*NAMES, "s"), 8, (3, 6), (0, 1, 2))
    assert world.moves.begin((3, 6), 0, (0, 3, 2)) == [Cut(1, (3, 6))]
    assert world.moves.cut(1, (True, False, True), S) == [Prepare(1)]
    assert world.moves.prepared(1, 1, S) == world.moves.prepared(1, 0, S) == world.moves.prepared(1, 2, S) == []
    assert world.moves.left(1, S) == [], "b should hold nothing, so its leaving does no harm"
    assert world.moves.prepared(1, 3, 2 * S) == [Switch(1)]
    assert (world.moves.holders, world.moves.describe(3 * S)["stages"]) == ((0, 3, 2), ["a", "s", "c"])


def test_cuts_for_drained_stages_say_which_these_are(world: World) -> None:
    world.moves = Moves(world.conductor, NAMES, 8, (), (1,))
    with pytest.raises(InvalidRequestError, match=r"^1 stage needs 0 cuts, .* \(no layers are for a, c: drained,"):
        world.moves.begin((3,), 0)


def test_more_and_fewer_stages_than_before(world: World) -> None:
    assert world.moves.add("d") == 3
    with pytest.raises(InvalidRequestError, match="4 stages need 3 cuts"):
        world.moves.begin((3, 6), 0, (0, 1, 2, 3))
    with pytest.raises(InvalidRequestError, match="must be a stage of this pipeline"):
        world.moves.begin((3, 6), 0, (0, 1, 1))
    with pytest.raises(InvalidRequestError, match="must be a stage of this pipeline"):
        world.moves.begin((3, 6), 0, (0, 1, 4))
    world.moves.begin((2, 4, 6), 0, (0, 1, 2, 3))
    world.moves.cut(1, (False,) * 4, S)
    for place in range(4):
        world.moves.prepared(1, place, S)
    assert world.moves.describe(S)["layers"] == [[0, 2], [2, 4], [4, 6], [6, 8]]
    world.moves.connected(S)
    world.moves.begin((), 2 * S, (3,))
    world.moves.cut(2, (False,), 2 * S)
    assert world.moves.prepared(2, 3, 2 * S) == [Switch(2)]
    assert world.moves.describe(3 * S)["layers"] == [[0, 8]]


def test_while_a_stage_is_lost_only_a_change_without_it_can_be_made(world: World) -> None:
    world.moves = Moves(world.conductor, (*NAMES, "s"), 8, (3, 6), (0, 1, 2))
    world.conductor.availability.enter(Phase.RECOVERING, 0)
    with pytest.raises(NotReadyError, match="layers can move only while it is ready"):
        world.moves.begin((3, 5), 0)
    with pytest.raises(NotReadyError, match="layers can move only while it is ready"):
        world.moves.begin((2, 4, 6), 0, (0, 1, 2, 3))
    assert world.moves.begin((3, 6), 0, (0, 3, 2)) == [Cut(1, (3, 6))]
    world.moves.cut(1, (True, False, True), S)
    world.moves.prepared(1, 0, S)
    world.moves.prepared(1, 2, S)
    assert world.moves.prepared(1, 3, S) == [Switch(1)], "nothing is under way"


def test_kept_and_replayed_rows_are_counted(world: World) -> None:
    """The stages hold everything sent by one stream and a part of another's; a third had sent nothing yet."""
    running = [
        Session(at, GenerationRequest(str(at), tuple(range(20)), 5, SamplingParams()), lambda _: False)
        for at in range(3)
    ]
    for session, n_sent in zip(running, (19, 15, 0), strict=True):
        session.start()
        session.n_sent = n_sent
    world.conductor.admission.running.update(enumerate(running))
    world.prepared()
    for session, n_kept in zip(running, (19, 12, 0), strict=True):
        session.start(n_kept)
    assert world.moves.connected(3 * S)
    move = world.moves.latest
    assert move is not None
    assert (move.n_kept, move.n_replayed) == (31, 3)
