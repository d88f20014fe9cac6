"""Stages that store the content of lanes: chats on few lanes are restored, also after a restart; a wrong state is
found.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from relayline.deploy.testing.cluster.clock import MS, S, Violation
from relayline.deploy.testing.cluster.plan import CALM, Plan, Trouble, Wish
from relayline.deploy.testing.cluster.run import Cluster
from relayline.stage.engine.tier import Tier
from relayline.stage.steps.lane_copies import LaneCopies
from relayline.stage.steps.lane_states import LaneStates

LONG = [tuple(range(first, first + 40)) for first in (100, 200, 300)]  # three prompts that have nothing in common


def wish(at_ns: int, prompt: tuple[int, ...]) -> Wish:
    return Wish(at_ns, 0, prompt, 6, None, is_predicted=False, kills_stage=None)


def chats(*, tier_bytes: int = 1_000_000, survives: bool = False, troubles: tuple[Trouble, ...] = ()) -> Plan:
    """Three chats on one lane, one after the other, and each continues seconds later."""
    first = [wish(50 * MS + number * S, prompt) for number, prompt in enumerate(LONG)]
    later = [wish(6 * S + number * S, (*prompt, 7, 8, 9)) for number, prompt in enumerate(LONG)]
    return dataclasses.replace(
        CALM,
        n_lanes=1,
        prefix_lanes=1,
        tier_bytes=tier_bytes,
        tier_survives=survives,
        wishes=(*first, *later),
        troubles=troubles,
    )


def close_together() -> Plan:
    """The same chats, each waiting for the one before: a lane gets new rows while its last ones are still copied."""
    first = [wish(50 * MS, prompt) for prompt in LONG]
    later = [wish(3 * S, (*prompt, 7, 8, 9)) for prompt in LONG]
    return dataclasses.replace(chats(), wishes=(*first, *later))


def figures(cluster: Cluster) -> dict[str, int]:
    return cluster.coordinators[0].conductor.prefixes.tier.figures()


@pytest.mark.parametrize("keeps_window", [False, True], ids=["all cells", "windows"])
def test_chats_are_restored_after_others_took_their_lanes(keeps_window: bool) -> None:
    cluster = Cluster(dataclasses.replace(chats(), keeps_window=keeps_window))
    assert cluster.run().ends == {"length": 6}
    found = figures(cluster)
    assert (found["stored"], found["restored"]) == (6, 3)
    hits = [node.executor.sessions.states.figures().n_hits for node in cluster.nodes]
    assert hits == [3, 3, 3], "on every stage alike"


def test_without_a_tier_nothing_is_stored() -> None:
    cluster = Cluster(chats(tier_bytes=0))
    assert cluster.run().ends == {"length": 6}
    assert (figures(cluster)["stored"], figures(cluster)["restored"]) == (0, 0)


def test_a_stage_with_less_room_has_its_prompts_read_again() -> None:
    cluster = Cluster(chats(tier_bytes=450))  # a state has 2 layers of 46 rows, 4 bytes each
    assert cluster.run().ends == {"length": 6}
    assert figures(cluster)["restored"] < 3, "else nothing was lost here"
    misses = sum(node.executor.sessions.states.figures().n_misses for node in cluster.nodes)
    assert misses == 0, "stages say what they lose, so nothing is offered that one does not have"


def test_what_one_stage_loses_is_given_up_by_all() -> None:
    cluster = Cluster(chats())
    lost = cluster.nodes[1].executor.sessions.states

    def loses() -> None:
        lost._tier._spare_bytes = lambda: -1_000_000  # type: ignore[union-attr]
        lost.give_back()

    cluster.clock.at(4 * S, loses)
    assert cluster.run().ends == {"length": 6}
    assert figures(cluster)["restored"] == 0
    hits = [node.executor.sessions.states.figures() for node in cluster.nodes]
    assert [(each.n_hits, each.n_misses) for each in hits] == [(0, 0)] * 3


def test_a_stage_that_does_not_say_what_it_lost_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of an older release."""
    monkeypatch.setattr(Tier, "_tell", lambda self, keys: None)
    cluster = Cluster(chats(tier_bytes=450))
    assert cluster.run().ends == {"length": 6}
    assert sum(node.executor.sessions.states.figures().n_misses for node in cluster.nodes) > 0


@pytest.mark.parametrize("survives", [False, True], ids=["in memory", "on disk"])
def test_after_a_restart_of_one_stage(survives: bool) -> None:
    trouble = Trouble(4 * S, "dies", 1, 50 * MS, 0)
    cluster = Cluster(chats(survives=survives, troubles=(trouble,)))
    outcome = cluster.run()
    assert (outcome.n_deaths, outcome.ends) == (1, {"length": 6})
    assert figures(cluster)["restored"] == (3 if survives else 0), "a state that one stage lost is restored by none"


@pytest.mark.parametrize("keeps_window", [False, True], ids=["all cells", "windows"])
def test_a_lane_is_stored_while_the_next_stream_fills_it(keeps_window: bool) -> None:
    cluster = Cluster(dataclasses.replace(close_together(), keeps_window=keeps_window))
    assert cluster.run().ends == {"length": 6}
    assert figures(cluster)["restored"] == 3


def test_rows_written_over_a_lane_that_is_still_stored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneCopies, "before_rows", lambda self, lane, end: None)
    with pytest.raises(Violation):
        Cluster(close_together()).run()


def test_a_stage_that_brings_back_another_lane_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = Tier.fetch

    def another(self: Tier, key: int) -> Any:
        return fetch(self, next(reversed(self._memory)))

    monkeypatch.setattr(Tier, "fetch", another)
    with pytest.raises(Violation):
        Cluster(chats()).run()


def test_a_stage_that_brings_back_nothing_and_does_not_say_so_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneStates, "restore", lambda self, key, lane, n, done, **_: done(True))
    with pytest.raises(Violation):
        Cluster(chats()).run()
