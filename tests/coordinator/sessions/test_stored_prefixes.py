"""When the coordinator has stages store prefixes, and when it has them restored."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable

import pytest

from relayline.coordinator.schedule.prompt_time import read_time
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.generation import Cells, GenerationRequest, SamplingParams
from relayline.coordinator.sessions.prefixes import Prefixes
from relayline.coordinator.sessions.session import OutFrame, Session, State
from relayline.coordinator.sessions.tier import TierFacts, key_of, stored_by_all
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag

NAMES = {
    Flag.OPEN: "open", Flag.COPY_PREFIX: "copy", Flag.CLOSE: "close", Flag.STORE: "store", Flag.RESTORE: "restore",
}  # fmt: skip
CURVE = CostCurve([(1, 1_000_000), (64, 4_000_000)])
COSTS = [StageCost(CURVE, CURVE, 64)]
READ_NS = read_time(COSTS)


def session_of(session_id: int, tokens: list[int], lane: int = 0, *, cached: bool = True) -> Session:
    request = GenerationRequest(str(session_id), tuple(tokens), 8, SamplingParams(), cache_prompt=cached)
    return Session(session_id, request, lambda _: False, lane=lane)


def ended(session_id: int, tokens: list[int], *, cached: bool = True) -> Session:
    session = session_of(session_id, [*tokens, 9], cached=cached)
    session.state = State.DONE
    return session


def controls_of(frames: list[OutFrame]) -> list[tuple[str, int, int]]:
    return [(NAMES[frame.flags], frame.session.session_id, frame.position) for frame in frames]


def prefixes(
    n_max: int | None = None, free: tuple[int, ...] = (), facts: TierFacts | None = None, keeps_state: bool = False
) -> Prefixes:
    made = Prefixes(n_max, itertools.count(100), lambda: free, {})
    made.renew(4, is_per_lane=False, tier=facts or TierFacts(is_used=True), read_ns=READ_NS, keeps_state=keeps_state)
    return made


def run_of(first: int, n_tokens: int) -> list[int]:
    return list(range(first, first + n_tokens))


def test_a_turn_without_a_spare_lane_is_stored_and_restored() -> None:
    made, turn = prefixes(), run_of(0, 50)
    assert controls_of(made.keep(ended(1, turn))) == [("store", 1, 50)]
    following = session_of(2, [*turn, 9, 77])
    assert controls_of(made.start(following)) == [("open", 2, 0), ("restore", 2, 50)]
    assert (following.n_sent, following.n_copied, following.prefill_left) == (50, 50, 2)
    longer = made.keep(ended(2, [*turn, 9, 77, 5]))
    assert controls_of(longer) == [("store", 2, 53), ("store", 2, 0)], "the earlier turn gives its place up"
    assert longer[1].argument == key_of(array("i", turn))
    assert made.tier.figures() == {"prefixes": 1, "tokens": 53, "stored": 2, "restored": 1}


def test_the_prefix_that_was_stored_longest_ago_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.coordinator.sessions.tier.STORED_STATES_MAX", 2)
    made, first = prefixes(), run_of(0, 50)
    made.keep(ended(1, first))
    made.keep(ended(2, run_of(500, 50)))
    assert made.keep(ended(3, first)) == [], "it is there already"
    made.keep(ended(4, run_of(900, 50)))
    assert controls_of(made.start(session_of(5, [*first, 9]))) == [("open", 5, 0), ("restore", 5, 50)]
    assert controls_of(made.start(session_of(6, run_of(500, 51)))) == [("open", 6, 0)]


def test_a_prefix_that_is_soon_read_again_is_not_stored() -> None:
    made = prefixes(facts=TierFacts(is_used=True, store_from_ns=5_000_000))  # more than 64 tokens of CURVE
    assert made.keep(ended(1, run_of(0, 50))) == []
    assert controls_of(made.keep(ended(2, run_of(0, 100)))) == [("store", 2, 100)]
    made.renew(4, is_per_lane=False, tier=TierFacts(is_used=True, store_from_ns=5_000_000))
    assert controls_of(made.keep(ended(3, run_of(500, 50)))) == [("store", 3, 50)], "how long it takes is not known"


def test_a_kept_lane_that_is_taken_goes_to_the_tier_first() -> None:
    made = prefixes(2, (1, 2))
    made.renew(4, is_per_lane=True, tier=TierFacts(is_used=True), read_ns=READ_NS)
    assert controls_of(made.keep(ended(1, run_of(0, 50)))) == [("open", 100, 0), ("copy", 100, 50)]
    assert controls_of(made.start(session_of(2, run_of(900, 40), lane=2))) == [
        ("store", 100, 50), ("close", 100, 0), ("open", 2, 0),
    ]  # fmt: skip
    assert controls_of(made.start(session_of(3, [*run_of(0, 50), 4])))[1:] == [("restore", 3, 50)]


def test_a_part_of_a_stored_prefix_is_enough() -> None:
    made = prefixes()
    made.keep(ended(1, run_of(0, 50)))
    assert controls_of(made.start(session_of(2, [*run_of(0, 44), 7, 7])))[1:] == [("restore", 2, 44)]
    assert controls_of(made.start(session_of(3, [*run_of(0, 20), 7, 7])))[1:] == [], "so few are as quickly read"


def test_with_a_recurrent_state_checkpoints_and_the_end_will_do() -> None:
    made = prefixes(keeps_state=True)
    session = ended(1, run_of(0, 50))
    session.checkpoints = [36]
    made.keep(session)
    assert controls_of(made.start(session_of(2, [*run_of(0, 50), 7])))[1:] == [("restore", 2, 50)]
    part = session_of(3, [*run_of(0, 44), 7, 7])
    assert controls_of(made.start(part))[1:] == [("restore", 3, 36)]
    assert part.checkpoints == [36]
    whole = session_of(4, [*run_of(0, 50), 7])
    whole.stops = [36, 50]
    made.start(whole)
    assert whole.stops == [], "no step ends where its rows are there already"


def test_a_restore_slower_than_prefill_is_not_made() -> None:
    slow = prefixes(facts=TierFacts(is_used=True, token_ns=1_000_000.0))
    slow.keep(ended(1, run_of(0, 60)))
    assert controls_of(slow.start(session_of(2, run_of(0, 60)))) == [("open", 2, 0)]
    assert read_time(COSTS)(128) == 2 * COSTS[0].prefill_ns(64)


def test_nothing_is_stored_against_a_requests_wish_or_without_every_tier() -> None:
    made = prefixes()
    assert made.keep(ended(1, run_of(0, 50), cached=False)) == []
    assert prefixes(facts=TierFacts()).keep(ended(1, run_of(0, 50))) == []
    assert prefixes(0).keep(ended(1, run_of(0, 50))) == [], "prefixes are turned off"
    made.keep(ended(1, run_of(0, 50)))
    assert controls_of(made.start(session_of(2, run_of(0, 50), cached=False))) == [("open", 2, 0)]


def test_a_prefix_that_a_stage_refused_is_forgotten() -> None:
    made = prefixes()
    made.keep(ended(1, run_of(0, 50)))
    session = session_of(2, run_of(0, 60))
    made.start(session)
    made.refused((2, 0), is_full=False)
    assert made.tier.figures()["prefixes"] == 0
    assert controls_of(made.start(session_of(3, run_of(0, 60)))) == [("open", 3, 0)]


def test_a_prefix_that_a_stage_lost_is_offered_no_longer() -> None:
    made = prefixes()
    made.keep(ended(1, run_of(0, 50)))
    key = key_of(array("i", run_of(0, 50)))
    (frame,) = made.lost([key, 12345])
    assert (frame.flags, frame.position, frame.argument) == (Flag.STORE, 0, key), "the other stages forget it too"
    assert controls_of(made.start(session_of(2, run_of(0, 60)))) == [("open", 2, 0)]
    assert made.lost([key]) == []


def test_prefixes_that_all_stages_have_survive_an_epoch() -> None:
    made = prefixes()
    made.keep(ended(1, run_of(0, 50)))
    made.keep(ended(2, run_of(500, 50)))
    keys = [key_of(array("i", run_of(first, 50))) for first in (0, 500)]
    stored = stored_by_all([{keys[0]: 50, keys[1]: 50}, {keys[1]: 50}])
    made.renew(4, is_per_lane=False, tier=TierFacts(stored, is_used=True), read_ns=READ_NS)
    assert controls_of(made.start(session_of(3, run_of(0, 60)))) == [("open", 3, 0)]
    assert controls_of(made.start(session_of(4, run_of(500, 46))))[1:] == [("restore", 4, 45)], "its tokens are known"


def test_a_prefix_of_an_earlier_coordinator_is_known_by_its_key() -> None:
    stored = {key_of(array("i", run_of(first, n))): n for first, n in ((0, 40), (0, 50), (500, 40))}
    made = prefixes(facts=TierFacts(stored, is_used=True))
    assert controls_of(made.start(session_of(2, run_of(0, 46))))[1:] == [("restore", 2, 40)]
    assert controls_of(made.start(session_of(3, run_of(0, 60))))[1:] == [("restore", 3, 50)]
    assert controls_of(made.start(session_of(4, run_of(0, 45))))[1:] == [("restore", 4, 44)], (
        "by now its tokens are known"
    )


def test_cells_of_rows_that_were_rounded_otherwise_are_other_cells() -> None:
    key = key_of(array("i", run_of(0, 50)), "F16 [0, 4]")
    for rounding, is_found in (("F16 [0, 4]", True), ("F32 [0, 4]", False), ("F16 [0, 2, 4]", False)):
        made = prefixes(facts=TierFacts({key: 50}, is_used=True, rounding=rounding))
        assert (len(controls_of(made.start(session_of(2, run_of(0, 60))))) == 2) is is_found
    made = prefixes(facts=TierFacts({key: 50}, is_used=True, rounding="F16 [0, 4]"))
    made.start(session_of(2, run_of(0, 60)))
    made.renew(4, is_per_lane=False, tier=TierFacts({key: 50}, is_used=True, rounding="F32 [0, 4]"), read_ns=READ_NS)
    assert controls_of(made.start(session_of(3, run_of(0, 60)))) == [("open", 3, 0)], "nor with known tokens"


def test_with_disks_every_answer_is_stored_as_it_ends() -> None:
    made = prefixes(2, (1, 2), TierFacts(is_used=True, is_on_disk=True))
    assert controls_of(made.keep(ended(1, run_of(0, 50)))) == [("store", 1, 50), ("open", 100, 0), ("copy", 100, 50)]
    assert controls_of(made.start(session_of(2, [*run_of(0, 50), 4])))[1:] == [("copy", 2, 50)], "a lane is nearer"


def later(
    made: Prefixes,
    facts: TierFacts,
    *,
    keeps_state: bool = False,
    ends_message: Callable[[int], bool] = lambda _: False,
) -> Prefixes:
    """Return what a coordinator knows that comes later: what the stages list, and the notes that the first one made."""
    notes = made.tier.new_notes
    stored = {key: len(each.tokens or ()) for key, each in made.tier._stored.items()}
    after = Prefixes(None, itertools.count(900), lambda: (), {}, ends_message)
    facts = dataclasses.replace(facts, stored=stored, notes=notes)
    after.renew(4, is_per_lane=False, tier=facts, read_ns=READ_NS, keeps_state=keeps_state)
    return after


NOTED = TierFacts(is_used=True, keeps_notes=True)


def test_a_chat_whose_answer_comes_back_as_other_tokens_is_restored_after_a_restart() -> None:
    made, prompt = prefixes(facts=NOTED), run_of(0, 150)
    session = session_of(1, prompt)
    session.history += [*run_of(500, 40), 9]  # the answer
    session.state = State.DONE
    assert controls_of(made.keep(session)) == [("store", 1, 190)]
    after = later(made, NOTED)
    following = session_of(2, [*prompt, 77, *run_of(501, 39), 4, 5])
    assert controls_of(after.start(following))[1:] == [("restore", 2, 150)], "to where the answer began"
    assert (following.n_sent, following.n_copied) == (150, 150)
    assert controls_of(after.start(session_of(3, [*prompt[:140], 77])))[1:] == [("restore", 3, 128)]
    assert controls_of(after.start(session_of(4, [*session.history, 77])))[1:] == [("restore", 4, 190)], "all of it"
    assert after.tier.figures()["restored"] == 3
    unnoted = later(prefixes(), dataclasses.replace(NOTED, stored={}))
    assert controls_of(unnoted.start(session_of(5, [*prompt, 77]))) == [("open", 5, 0)]


def test_a_turn_ends_where_its_last_message_did() -> None:
    """Some templates leave out of a later prompt what they added for the answer."""
    made = Prefixes(None, itertools.count(100), lambda: (), {}, lambda token: token == 7_777)
    made.renew(4, is_per_lane=False, tier=NOTED, read_ns=READ_NS)
    session = session_of(1, [*run_of(0, 100), 7_777, 1, 2])
    session.history += run_of(500, 40)
    session.state = State.DONE
    made.keep(session)
    after = later(made, NOTED)
    assert controls_of(after.start(session_of(2, [*run_of(0, 100), 7_777, 3, 4])))[1:] == [("restore", 2, 101)]
    assert controls_of(after.start(session_of(3, [*run_of(0, 100), 7_777, 1, 2, 3])))[1:] == [("restore", 3, 103)]


def test_a_kept_lane_is_stored_with_the_turns_of_its_session() -> None:
    made = prefixes(2, (1, 2))
    made.renew(4, is_per_lane=True, tier=NOTED, read_ns=READ_NS)
    session = session_of(1, run_of(0, 50))
    session.history += run_of(500, 40)
    session.state = State.DONE
    made.keep(session)
    made.start(session_of(2, run_of(900, 40), lane=2))
    after = later(made, NOTED)
    assert controls_of(after.start(session_of(3, [*run_of(0, 50), 4])))[1:] == [("restore", 3, 50)]


def test_after_a_restart_too_a_recurrent_state_comes_back_at_checkpoints() -> None:
    made = prefixes(facts=NOTED, keeps_state=True)
    session = ended(1, run_of(0, 150))
    session.checkpoints = [36, 90]
    made.keep(session)
    after = later(made, NOTED, keeps_state=True)
    part = session_of(2, [*run_of(0, 140), 7])
    assert controls_of(after.start(part))[1:] == [("restore", 2, 90)]
    assert part.checkpoints == [36, 90]
    whole = session_of(3, [*run_of(0, 150), 7])
    assert controls_of(after.start(whole))[1:] == [("restore", 3, 150)]
    assert whole.checkpoints == [36, 90]
    assert controls_of(
        later(prefixes_of_plain_lanes(), NOTED, keeps_state=True).start(session_of(4, run_of(0, 140)))
    ) == [("open", 4, 0)], "a place that is no checkpoint"


def prefixes_of_plain_lanes() -> Prefixes:
    made = prefixes(facts=NOTED)
    made.keep(ended(1, run_of(0, 150)))
    return made


def test_an_entry_without_marks_gets_some_once_its_tokens_are_known() -> None:
    made = prefixes(facts=dataclasses.replace(NOTED, stored={key_of(array("i", run_of(0, 150))): 150}))
    made.start(session_of(1, run_of(0, 160)))
    assert len(made.tier.new_notes) == 1
    made.start(session_of(2, run_of(0, 160)))
    after = later(made, NOTED)
    assert controls_of(after.start(session_of(3, run_of(0, 140))))[1:] == [("restore", 3, 128)]


def test_marks_outlast_an_epoch_and_are_not_asked_for_again() -> None:
    after = later(prefixes_of_plain_lanes(), NOTED)
    (key,) = after.tier.keys()
    after.renew(4, is_per_lane=False, tier=dataclasses.replace(NOTED, stored={key: 150}), read_ns=READ_NS)
    assert controls_of(after.start(session_of(2, run_of(0, 140))))[1:] == [("restore", 2, 128)]
    after.lost([key])
    assert controls_of(after.start(session_of(3, run_of(0, 140)))) == [("open", 3, 0)], "a stage does not have it"


def test_an_older_stage_gets_no_notes() -> None:
    made = prefixes()
    made.keep(ended(1, run_of(0, 150)))
    assert made.tier.new_notes == {}


def test_stages_store_kept_lanes_by_themselves_when_an_epoch_ends() -> None:
    made = prefixes(2, (1, 2))
    made.renew(4, is_per_lane=True, tier=NOTED, read_ns=READ_NS)
    opening = made.keep(ended(1, run_of(0, 150)))[0].session.opening()
    key = key_of(array("i", run_of(0, 150)))
    assert (opening.is_kept, opening.kept_key) == (True, key)
    assert made.tier.new_notes.keys() == {key}, "whoever comes later knows marks"
    assert made.known_keys() == {key}, "this one knows the tokens"
    made.renew(4, is_per_lane=True, tier=dataclasses.replace(NOTED, stored={key: 150}), read_ns=READ_NS)
    assert made.lanes == []
    assert controls_of(made.start(session_of(2, [*run_of(0, 141), 7])))[1:] == [("restore", 2, 141)]
    made.renew(4, is_per_lane=True, tier=NOTED, read_ns=READ_NS)
    assert controls_of(made.start(session_of(3, [*run_of(0, 141), 7]))) == [("open", 3, 0)], "no stage stored it"


def test_a_kept_lane_that_is_not_worth_storing_has_no_key() -> None:
    made = prefixes(2, (1, 2))
    made.renew(4, is_per_lane=True, tier=TierFacts(is_used=True, store_from_ns=5_000_000), read_ns=READ_NS)
    opening = made.keep(ended(1, run_of(0, 50)))[0].session.opening()
    assert (opening.is_kept, opening.kept_key) == (True, 0)


def test_prefixes_of_another_adapter_are_other_prefixes() -> None:
    facts = TierFacts(is_used=True, adapters=("", "first", "second"))
    made, turn = prefixes(facts=facts), run_of(0, 50)
    plain, chosen = ended(1, turn), adapted(ended(2, turn), 1)
    keys = {frame.argument for session in (plain, chosen) for frame in made.keep(session)}
    assert len(keys) == 2, "neither takes the place of the other"
    for adapter, restored in ((0, True), (1, True), (2, False)):
        following = adapted(session_of(10 + adapter, [*turn, 9, 77]), adapter)
        kinds = [kind for kind, _, _ in controls_of(made.start(following))]
        assert kinds == (["open", "restore"] if restored else ["open"])


def test_an_earlier_coordinators_prefixes_are_found_with_their_adapter_alone() -> None:
    adapters = ("", "first")
    before, turn = prefixes(facts=TierFacts(is_used=True, adapters=adapters)), run_of(0, 50)
    (stored,) = before.keep(adapted(ended(1, turn), 1))
    later = prefixes(facts=TierFacts({stored.argument: 50}, is_used=True, adapters=adapters))
    assert controls_of(later.start(session_of(2, [*turn, 9, 77]))) == [("open", 2, 0)]
    assert [kind for kind, _, _ in controls_of(later.start(adapted(session_of(3, [*turn, 9, 77]), 1)))] == [
        "open",
        "restore",
    ]


def test_prefixes_of_another_circle_are_other_prefixes() -> None:
    facts = TierFacts(is_used=True, adapters=("", "first"))
    made, turn = prefixes(facts=facts), run_of(0, 50)
    sessions = [ended(1, turn), of_circle(ended(2, turn), "a"), adapted(of_circle(ended(3, turn), "a"), 1)]
    keys = {frame.argument for session in sessions for frame in made.keep(session)}
    assert len(keys) == 3, "none takes the place of another"
    for number, (circle, adapter, is_restored) in enumerate(
        [("", 0, True), ("a", 0, True), ("a", 1, True), ("b", 0, False), ("", 1, False)], 10
    ):
        following = adapted(of_circle(session_of(number, [*turn, 9, 77]), circle), adapter)
        kinds = [kind for kind, _, _ in controls_of(made.start(following))]
        assert kinds == (["open", "restore"] if is_restored else ["open"]), (circle, adapter)


def test_an_earlier_coordinators_prefixes_are_found_by_their_circle_alone() -> None:
    before, turn = prefixes(facts=NOTED), run_of(0, 150)
    (stored,) = before.keep(of_circle(ended(1, turn), "a"))
    facts = dataclasses.replace(NOTED, stored={stored.argument: 150}, notes=dict(before.tier.new_notes))
    for circle, n_restored in (("", 0), ("b", 0), ("a", 128)):
        later = prefixes(facts=facts)
        following = of_circle(session_of(2, [*turn[:140], 9, 77]), circle)
        controls = controls_of(later.start(following))
        assert [position for kind, _, position in controls if kind == "restore"] == [n_restored] * bool(n_restored)


def test_without_adapters_keys_are_those_of_earlier_releases() -> None:
    assert TierFacts(rounding="f16 [0]", adapters=("",)).text_of(Cells()) == "f16 [0]"


def of_circle(session: Session, circle: str) -> Session:
    """The same session, whose prefixes serve a circle alone."""
    session.request = dataclasses.replace(session.request, circle=circle)
    return session


def adapted(session: Session, adapter: int) -> Session:
    """The same session with a choice of adapters."""
    request = dataclasses.replace(session.request, adapter=adapter)
    made = Session(session.session_id, request, lambda _: False, lane=session.lane)
    made.state = session.state
    return made
