"""Goal: every reported phase is true, and requests since a loss are distinguished from those that ran before it."""

from __future__ import annotations

import pytest

from relayline.coordinator.engine.availability import Availability
from relayline.wire.common import bounds
from relayline.wire.common.errors import NotReadyError, StageLostError, UnauthenticatedError
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.links.silence import looks_of

S = 1_000_000_000
GONE = StageLostError("gone")
QUIET, LOST = looks_of(bounds.QUIET_AFTER_S), looks_of(bounds.LOST_AFTER_S)


class World:
    """Two stages that beat once a second, unless the test stops one."""

    def __init__(self, lost_wait_s: float = 15.0) -> None:
        self.available = Availability(["desk", "laptop"], lost_wait_s, 0)
        self.now_s = 0
        self.lines_logged: list[str] = []
        self.n_refusals = 0
        self.hung: set[int] = set()
        self.second()
        self.available.enter(Phase.READY, self.now_ns)

    @property
    def now_ns(self) -> int:
        return self.now_s * S

    def second(self, n_times: int = 1) -> None:
        for _ in range(n_times):
            self.now_s += 1
            for index in {0, 1} - self.hung:
                self.lines_logged.append(self.available.heard(index, self.now_ns))
            lines, is_over = self.available.look(self.now_ns)
            self.lines_logged += lines
            self.n_refusals += is_over
        self.lines_logged = [line for line in self.lines_logged if line]


def test_a_stage_that_beats_or_was_never_heard_is_not_silent():
    world = World()
    world.second(100)
    assert world.lines_logged == []
    fresh = Availability(["desk", "laptop"], 15, 0)
    for second in range(100):
        assert fresh.look(second * S) == ([], False)
    assert fresh.describe_stage(1, 100 * S) == {"last_heard_s": None, "silent": False, "restarts": 0}


def test_a_silent_host_is_named_once_and_again_when_it_answers():
    world = World()
    world.hung = {1}
    world.second(QUIET - 2)  # the first look at the last heartbeat has been
    assert world.lines_logged == []
    world.second(30)
    assert world.lines_logged == ["laptop has not answered for 5 s"]
    described = world.available.describe_stage(1, world.now_ns)
    assert (described["last_heard_s"], described["silent"]) == (QUIET + 28, True)
    world.hung = set()
    world.second()
    assert world.lines_logged[1:] == [f"laptop answers again after {QUIET + 29} s"]
    assert world.available.describe_stage(1, world.now_ns)["silent"] is False


def test_a_coordinator_that_was_stopped_itself_accuses_no_stage():
    world = World()
    world.now_s += 3_600
    world.second()
    assert world.lines_logged == []


def test_a_loss_is_recovering_then_unreachable_then_ready():
    world = World(lost_wait_s=15)
    lost_s = world.now_s
    world.available.lost(world.now_ns, GONE)
    world.available.check(world.now_ns)
    world.second(14)
    assert (world.available.phase, world.n_refusals) == (Phase.RECOVERING, 0)
    world.available.check(world.now_ns)
    world.second(5)
    assert (world.available.phase, world.n_refusals) == (Phase.UNREACHABLE, 1)
    with pytest.raises(NotReadyError, match=f"unreachable: a stage was lost {world.now_s - lost_s} s ago"):
        world.available.check(world.now_ns)
    world.available.enter(Phase.READY, world.now_ns)
    world.available.check(world.now_ns)
    world.second(4)
    assert world.available.describe(world.now_ns) == {"phase": "ready", "phase_s": 4.0}


def test_a_hung_stage_is_lost_from_its_last_sign_of_life_on():
    world = World()
    heard_ns = world.now_ns
    world.hung = {1}
    world.second(LOST)
    assert not world.available.came_while_lost(world.now_ns), "nothing is known to be lost yet"
    world.available.lost(world.now_ns, GONE)
    assert world.available.came_while_lost(heard_ns + S)
    assert not world.available.came_while_lost(heard_ns - 1)
    world.second(15 - LOST)
    assert world.available.phase is Phase.UNREACHABLE
    assert world.n_refusals == 1
    assert "no heartbeat: laptop (15 s)" in world.available.refusal(world.now_ns).message


def test_a_second_loss_during_the_first_one_counts_separately():
    world = World()
    world.available.lost(world.now_ns, GONE)
    world.second(10)
    world.available.enter(Phase.READY, world.now_ns)
    world.available.lost(world.now_ns, GONE)
    world.second(10)
    assert world.available.phase is Phase.RECOVERING


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.DRAINING])
def test_other_phases_refuse_by_their_own_word(phase: Phase):
    world = World()
    world.available.enter(phase, world.now_ns)
    with pytest.raises(NotReadyError, match=f"the pipeline is {phase.value}"):
        world.available.check(world.now_ns)


def test_restarts_are_processes_not_epochs():
    world = World()
    for instance in ("a", "a", "b", "b", "c"):
        world.available.serves(1, instance)
    assert world.available.describe_stage(1, world.now_ns)["restarts"] == 2
    assert world.available.describe_stage(0, world.now_ns)["restarts"] == 0


def test_every_word_means_one_thing():
    assert not {Phase.RECOVERING, Phase.UNREACHABLE} ^ {phase for phase in Phase if phase.is_paused}
    shared = {phase.value for phase in Phase} & {state.value for state in HostState}
    assert shared == {"starting", "loading", "ready", "sleeping", "stopped", "failed"}, "these say the same of both"


def refused(index: int, text: str) -> UnauthenticatedError:
    error = UnauthenticatedError(text)
    error.stage_index = index
    return error


def test_a_client_reads_which_credential_is_refused_and_not_that_all_stages_are_silent():
    """With given addresses nobody asks any stage until the refused one is let in."""
    world = World()
    world.hung = {0, 1}
    world.available.lost(world.now_ns, refused(1, "the credential of laptop is revoked; do this"))
    world.second(20)
    assert world.available.refusal(world.now_ns).message == (
        "the pipeline is unreachable: the credential of laptop is revoked; do this"
    )


def test_a_refused_credential_is_not_named_any_more_once_its_stage_is_back():
    world = World()
    world.hung = {1}
    world.available.lost(world.now_ns, GONE)
    world.available.refused(refused(1, "the credential of laptop is revoked"))
    world.available.refused(UnauthenticatedError("of no stage that is known"))
    world.second(20)
    world.hung = set()
    world.second()
    assert world.available.refusal(world.now_ns).message == (
        "the pipeline is unreachable: a stage was lost 21 s ago; try again"
    )
