"""Goal: a place has one holder at a time, the right one, and it is always known which places are empty. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.engine.membership import Introduction, Membership
from relayline.coordinator.engine.roster import JoinedRoster, loopback_gaps
from relayline.coordinator.joining.config import JoinConfig, JoiningStage, TelemetryDefaults, engine_message
from relayline.wire.common import bounds
from relayline.wire.common.errors import PlaceTakenError, RelaylineError, UnauthenticatedError, UsageError, VersionError
from relayline.wire.common.phase import HostState
from relayline.wire.links.revocation import IS_REVOKED
from relayline.wire.links.roles import Credential
from relayline.wire.settings.setting import read_message
from relayline.wire.settings.table import EngineSettings

NAMES = ("box1", "box2", "box3")
VERSION = "1.4.2"


def stage(name: str = "box1", process_id: str = "p1", **more: object) -> Introduction:
    facts = {"protocol_version": bounds.PROTOCOL_VERSION, "software_version": VERSION, "host": "10.0.0.7"} | more
    return Introduction(name, process_id, **facts)  # type: ignore[arg-type]


def places() -> Membership:
    return Membership(NAMES, VERSION, now_ns=0)


def test_everybody_is_missing_at_first() -> None:
    membership = places()
    assert membership.missing() == list(NAMES)
    assert membership.addresses() is None
    assert [entry["state"] for entry in membership.describe(0)] == ["waiting"] * 3


def test_a_place_goes_through_its_states() -> None:
    membership = places()
    ticket = membership.join(stage("box2"), now_ns=1_000_000_000)
    place = membership.places[1]
    assert (place.state, membership.place_of(ticket)) == (HostState.STARTING, place)
    membership.progress(ticket, HostState.FETCHING, 10, 100, now_ns=2_000_000_000)
    entry = membership.describe(5_000_000_000)[1]
    assert (entry["fetched_bytes"], entry["fetch_total_bytes"], entry["state_s"]) == (10, 100, 3.0)
    membership.progress(ticket, HostState.FETCHING, 10, 100, now_ns=3_000_000_000, trouble="the hub stalls")
    assert membership.describe(5_000_000_000)[1]["fetch_trouble"] == "the hub stalls"
    membership.progress(ticket, HostState.FETCHING, 90, 100, now_ns=4_000_000_000)
    assert not membership.describe(5_000_000_000)[1]["fetch_trouble"]
    assert membership.describe(5_000_000_000)[1]["state_s"] == 3.0, "the state began once"
    membership.progress(ticket, HostState.LOADING, 60, 100, now_ns=5_000_000_000)
    entry = membership.describe(5_000_000_000)[1]
    assert (entry["loaded_bytes"], entry["load_total_bytes"]) == (60, 100)
    membership.serving(ticket, "10.0.0.7:4000", "engine-1", now_ns=6_000_000_000)
    assert place.state is HostState.READY
    assert membership.missing() == ["box1", "box3"]


def test_addresses_are_in_layer_order_once_all_serve() -> None:
    membership = places()
    for name in reversed(NAMES):
        membership.serving(membership.join(stage(name, name), 0), f"{name}:1", name, 0)
    assert membership.addresses() == ("box1:1", "box2:1", "box3:1")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no stage 'bxo1'.*box1, box2, box3"):
        places().check(stage("bxo1"))


def test_another_protocol_is_refused_in_one_line_that_names_both_versions() -> None:
    theirs = stage(protocol_version=bounds.PROTOCOL_VERSION + 1, software_version="2.0.0")
    with pytest.raises(VersionError, match=r"relayline 2\.0\.0.*relayline 1\.4\.2.*the stage waits") as caught:
        places().check(theirs)
    assert caught.value.retryable
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("version", ["1.4.9", "1.3.0", "2.0.0", ""])
def test_versions_of_one_protocol_mix(version: str) -> None:
    assert places().check(stage(software_version=version)).name == "box1"


def test_a_second_process_is_refused_while_the_first_is_there() -> None:
    membership = places()
    ticket = membership.join(stage(process_id="first", hostname="attic"), 0)
    with pytest.raises(PlaceTakenError, match=r"box1 is already here, from 10.0.0.7 \(attic\)"):
        membership.join(stage(process_id="second"), 1)
    membership.leave(ticket, 2)
    assert membership.place_of(membership.join(stage(process_id="second"), 3)) is membership.places[0]


def test_the_same_process_takes_its_place_again_and_its_old_membership_means_nothing_more() -> None:
    membership = places()
    old = membership.join(stage(), 0)
    membership.serving(old, "10.0.0.7:1", "engine", 0)
    new = membership.join(stage(), 1)
    assert membership.places[0].state is HostState.STARTING, "its address must be reported again"
    assert membership.leave(old, 2) is None
    membership.serving(old, "10.0.0.7:9", "ghost", 2)
    membership.progress(old, HostState.FETCHING, 1, 2, 2)
    membership.failed(old, "ghost")
    place = membership.places[0]
    assert (place.ticket, place.state, place.address, place.failure) == (new, HostState.STARTING, "", "")


def test_why_a_stage_failed_stays_known_until_the_next_one_comes() -> None:
    membership = places()
    ticket = membership.join(stage(), 0)
    membership.failed(ticket, "no space left")
    membership.leave(ticket, 1)
    assert membership.describe(1)[0]["failure"] == "no space left"
    membership.join(stage(process_id="p2"), 2)
    assert "failure" not in membership.describe(2)[0]


def test_a_stage_on_loopback_behind_one_on_another_host_is_pointed_out() -> None:
    membership = places()
    for name, host in zip(NAMES, ("127.0.0.1", "10.0.0.7", "127.0.0.1"), strict=True):
        membership.serving(membership.join(stage(name, name), 0), f"{host}:1", name, 0)
    (line,) = loopback_gaps(membership.places)
    assert line.startswith("stage box3 is at 127.0.0.1:1")
    assert "--advertise" in line


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("join", "serving", "leave", "progress")),
            st.sampled_from(NAMES),
            st.sampled_from("abc"),
            st.integers(0, 20),
        ),
        max_size=60,
    )
)
def test_a_place_never_has_two_holders_and_only_holders_serve(events: list[tuple[str, str, str, int]]) -> None:
    membership = places()
    tickets = [0]
    for what, name, process_id, pick in events:
        ticket = tickets[pick % len(tickets)]
        if what == "join":
            before = next(place for place in membership.places if place.name == name).member
            try:
                tickets.append(membership.join(stage(name, process_id), 0))
            except PlaceTakenError:
                assert before is not None
                assert before.process_id != process_id
        elif what == "serving":
            membership.serving(ticket, f"host:{ticket}", f"engine-{ticket}", 0)
        elif what == "progress":
            membership.progress(ticket, HostState.LOADING, 1, 1, 0)
        else:
            membership.leave(ticket, 0)
        for place in membership.places:
            assert (place.member is None) == (place.state in (HostState.WAITING, HostState.LOST))
            assert bool(place.address) == (place.state is HostState.READY)
            if place.state is HostState.READY:
                assert place.address == f"host:{place.ticket}"
        assert (membership.addresses() is None) == bool(membership.missing())


# --- events for the coordinator ---------------------------------------------------------------------------------------


def test_an_order_holds_its_settings() -> None:
    engine = EngineSettings(ctx_tokens=512, gpu_layers=-1, kv_type="q8_0", calibrate=False, prefix_memory_bytes=7)
    assert read_message(EngineSettings, engine_message(engine)) == engine


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: JoinConfig(()), "1 to 256 stages"),
        (lambda: JoinConfig((JoiningStage("Box"),)), "DNS label"),
        (lambda: JoinConfig((JoiningStage("../x"),)), "DNS label"),
        (lambda: JoinConfig((JoiningStage("a"), JoiningStage("a"))), "given twice"),
        (lambda: JoinConfig((JoiningStage("a"),), port=70_000), "outside"),
        (lambda: JoinConfig((JoiningStage("a"),), fetches_max=0), "outside"),
        (lambda: EngineSettings(ctx_tokens=-1), "--ctx -1 is outside 8..1048576"),
        (lambda: TelemetryDefaults(level="loud").message(), "loud"),
        (lambda: TelemetryDefaults(metrics_port=70_000).message(), "70000"),
    ],
)
def test_impossible_memberships_are_refused_at_the_start(make: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()  # type: ignore[operator]


async def test_a_member_that_has_failed_leaves_with_its_own_reason() -> None:
    membership = places()
    roster, lost = JoinedRoster(membership), list[RelaylineError]()
    roster.watch(lost.append)
    ticket = roster.join(stage("box2"))
    roster.serving(ticket, "box2:1", "engine-1")
    roster.failed(ticket, "its disk is full")
    roster.leave(ticket, "it said goodbye", is_in_order=True)
    assert [error.message for error in lost] == ["stage box2 left: its disk is full"]


async def test_a_member_that_is_put_out_leaves_with_the_reason() -> None:
    membership = places()
    roster, lost = JoinedRoster(membership), list[RelaylineError]()
    roster.watch(lost.append)
    roster.ask_of_revoked(lambda shown: shown.serial == 7)
    ticket = roster.join(stage("box2", credential=Credential(None, serial=7)))
    roster.serving(ticket, "box2:1", "engine-1")
    roster.leave(ticket, "the connection to the stage was lost")
    (error,) = lost
    assert (type(error), error.stage_index) == (UnauthenticatedError, 1)
    assert error.message == f"stage box2 left: its credential {IS_REVOKED}"
    assert membership.describe(0)[1]["failure"] == f"its credential {IS_REVOKED}"
