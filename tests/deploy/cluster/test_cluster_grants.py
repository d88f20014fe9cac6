"""Grants in whole histories without faults: streams that join, end and leave are never read again, nor wait in vain."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable

import pytest

from relayline.coordinator.engine.instructions import Instruction, Replayed, Started
from relayline.coordinator.schedule.grants import Grants
from relayline.coordinator.sessions.session import OutFrame
from relayline.deploy.testing.cluster.clock import MS, S, Violation
from relayline.deploy.testing.cluster.model import Truth
from relayline.deploy.testing.cluster.plan import CALM, Plan, Wish
from relayline.deploy.testing.cluster.run import Cluster
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.grants import Grants as StageGrants

N_HISTORIES = 40
Canary = Callable[[pytest.MonkeyPatch], None]


def plan_of(seed: int) -> Plan:
    rng = random.Random(seed)
    wishes = tuple(
        Wish(
            at_ns=rng.randrange(500 * MS),
            coordinator=0,
            prompt=tuple(rng.randrange(9) for _ in range(rng.choice((1, 4, 40)))),
            max_tokens=rng.choice((1, 2, 5, 30)),
            leaves_after=rng.choice((None, None, None, 3)),
            is_predicted=False,
            kills_stage=None,
        )
        for _ in range(rng.choice((1, 3, 6)))
    )
    schedule = dataclasses.replace(CALM.schedule, grant_steps=rng.choice((1, 2, 8, 32)))
    delay_ns = rng.choice((MS // 10, MS, 10 * MS))
    n_stages = rng.choice((2, 3))
    return dataclasses.replace(CALM, schedule=schedule, wishes=wishes, delay_ns=delay_ns, n_stages=n_stages)


def play(plan: Plan) -> Cluster:
    """Raise Violation where a stream begins again, or ends later than streams that are never lost do."""
    cluster = Cluster(plan)
    watched_run(cluster)
    return cluster


def watched_run(cluster: Cluster) -> list[Started]:
    """Run it to its end; returns the starts of sessions that copy their beginning. Raises Violation as `play`."""
    (coordinator,) = cluster.coordinators
    carry, copied = coordinator.carry, list[Started]()

    def watched(instructions: Iterable[Instruction]) -> None:
        found = list(instructions)
        for instruction in found:
            if isinstance(instruction, Replayed):
                raise Violation(f"session {instruction.session_id} begins again: {instruction.why}")
            if isinstance(instruction, Started) and instruction.n_copied:
                copied.append(instruction)
        carry(found)

    coordinator.carry = watched  # type: ignore[method-assign]
    outcome = cluster.run()
    if outcome.n_epochs_lost or cluster.clock.now_ns > 8 * S:
        raise Violation(
            f"{outcome.n_epochs_lost} epochs were lost, and the last stream ended at {cluster.clock.now_ns}"
        )
    return copied


def play_all() -> list[Grants]:
    return [grants_of(play(plan_of(seed))) for seed in range(N_HISTORIES)]


def grants_of(cluster: Cluster) -> Grants:
    return cluster.coordinators[0].conductor.grants


def test_streams_come_and_go() -> None:
    played = play_all()
    assert sum(grants.n_granted for grants in played) > 10 * N_HISTORIES, "else little was tried"
    assert sum(grants.n_repeated for grants in played) > N_HISTORIES // 4


def test_a_stream_goes_on_without_its_coordinator() -> None:
    schedule = dataclasses.replace(CALM.schedule, grant_steps=8)
    cluster = play(dataclasses.replace(CALM, schedule=schedule))
    assert grants_of(cluster).n_granted > 40
    assert sum(route.grants.n_rows for node in cluster.nodes for route in node.routes.values()) > 40


def copying_plan_of(seed: int) -> Plan:
    """A long answer under grants; others come while it runs, and begin like its prompt and what it has said so far."""
    rng = random.Random(f"copying {seed}")
    prompt = tuple(rng.randrange(9) for _ in range(rng.choice((33, 40))))
    said = Truth(prompt).answer(20)
    first = dataclasses.replace(CALM.wishes[0], at_ns=0, prompt=prompt, max_tokens=60)
    others = [
        dataclasses.replace(
            first,
            at_ns=rng.randrange(700 * MS),
            prompt=(*prompt, *said[: rng.randrange(20)], *(rng.randrange(9) for _ in range(rng.choice((1, 3, 20))))),
            max_tokens=rng.choice((1, 5, 30)),
            leaves_after=rng.choice((None, 3)),
        )
        for _ in range(rng.choice((1, 2, 4)))
    ]
    plan = plan_of(seed)
    return dataclasses.replace(
        plan, wishes=(first, *others), prefix_lanes=rng.choice((1, 2)), n_lanes=rng.choice((4, 6))
    )


def test_prompts_copy_from_streams_under_a_grant() -> None:
    """No copy is refused, whichever way is the slower: the coordinator's, or that of the last stage's tokens."""
    n_copied = 0
    for seed in range(12):
        rng, cluster = random.Random(seed), Cluster(copying_plan_of(seed))
        (coordinator,) = cluster.coordinators
        while not coordinator.is_connected:
            cluster.clock.step()
        links = [*coordinator.links]
        links += [link for node in cluster.nodes for route in node.routes.values()
                  for link in (route.downstream, route.back) if link is not None]  # fmt: skip
        for link in links:
            link.delay_ns = rng.choice((MS // 10, MS, 5 * MS, 20 * MS))
        n_copied += len(watched_run(cluster))
        assert grants_of(cluster).n_granted > 0
    assert n_copied > 10, "else little was tried"


def test_a_far_coordinator_costs_a_stream_next_to_nothing() -> None:
    """Tokens of one stream over three stages that are near each other, while their coordinator is 30 ms away."""
    took_ns: dict[int, int] = {}
    for grant_steps in (0, 32):
        schedule = dataclasses.replace(CALM.schedule, grant_steps=grant_steps)
        wishes = (dataclasses.replace(CALM.wishes[0], max_tokens=100),)
        cluster = Cluster(dataclasses.replace(CALM, schedule=schedule, wishes=wishes, delay_ns=MS // 2))
        (coordinator,) = cluster.coordinators
        while not coordinator.is_connected:
            cluster.clock.step()
        *returns, out = [*coordinator.links[::2], coordinator.links[5]]
        for link in (*returns[:3], out):
            link.delay_ns = 30 * MS
        begins_ns = cluster.clock.now_ns
        while not coordinator.clients or not coordinator.clients[0].is_done:
            cluster.clock.step()
        took_ns[grant_steps] = cluster.clock.now_ns - begins_ns
    assert took_ns[32] < 0.4 * took_ns[0]


# --- broken code is found -------------------------------------------------------------------------------------------


def takes_tokens_of_ended_grants(patch: pytest.MonkeyPatch) -> None:
    def fed_back(self: StageGrants, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        return list(frames)

    patch.setattr(StageGrants, "fed_back", fed_back)


def counts_on_rows_that_nobody_computes(patch: pytest.MonkeyPatch) -> None:
    def is_done(self: Grants, rows: list[OutFrame]) -> bool:
        return all(frame.session.session_id in self._by_session for frame in rows)

    patch.setattr(Grants, "_is_done", is_done)


def parks_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StageGrants, "_extended", lambda self, frame: [])


CANARIES = [
    takes_tokens_of_ended_grants,
    counts_on_rows_that_nobody_computes,
    parks_for_ever,
]


@pytest.mark.parametrize("canary", CANARIES)
def test_broken_code_is_found(canary: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    canary(monkeypatch)
    with pytest.raises(Violation) as found:
        play_all()
    print(found.value)
