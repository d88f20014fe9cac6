"""Goal: a session whose rows are lost is sent again, and one whose rows are only slow is left alone.

Method: tables of looks for the pure part. Then real stages on tiny artifacts and one fault on one message of a standing
link: it is altered, or dropped silently, or a stage loses a frame of it. Every answer must be the whole model's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from relayline.coordinator.sessions.silence import LOOKS_SURE, SILENT_S, TRANSIT_MAX_S, Silence, Work
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.inbound import Inbound
from relayline.wire.envelopes.dtypes import DTYPE_F32, DTYPE_TOKENS
from relayline.wire.envelopes.frames import Flag
from relayline.wire.envelopes.returns import ReturnWriter
from relayline.wire.links.relay_link import RelayLink
from tests.support.fleet import (
    Artifacts,
    artifacts_fixture,
    assert_greedy,
    fleet,
    prompt_of,
    request,
    tokens_of,
    whole_fixture,
)

FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them
S = 1_000_000_000


def idle(n_stages: int = 2, sent: int = 5, **changes: Any) -> list[Work]:
    """Stages that have done everything that was sent, except for given changes."""
    works = [Work(sent, sent, 3, 3, False, frozenset()) for _ in range(n_stages)]
    last = {"envelopes_in": sent, "envelopes_out": 0, "returned": 3, "received": 3, "is_busy": False}
    return [*works[:-1], Work(**(last | {"session_ids": frozenset()} | changes))]


def looks(
    silence: Silence, n: int, works: Callable[[int], list[Work]], sent: Callable[[int], int] = lambda _: 5
) -> int:
    """Look this often, each second, at session 7 that waits for a row; return the look at which it is lost, or 0."""
    for at in range(n):
        silent = silence.silent({7: (3, 1)}, at * S)
        assert bool(silent) == (at >= SILENT_S)
        if silent and silence.lost(silent, sent(at), works(at)):
            return at
    return 0


def test_rows_that_no_stage_has_are_lost_after_a_while() -> None:
    assert looks(Silence(), 60, lambda _: idle()) == SILENT_S + 4
    assert looks(Silence(), 60, lambda _: idle(6)) == SILENT_S + 8, "of more stages it may be on more links in a row"
    assert SILENT_S + LOOKS_SURE < 15


@pytest.mark.parametrize(
    "changes",
    [
        {"session_ids": frozenset({7})},
        {"is_busy": True},
        {"returned": 9, "received": 8},
        {"envelopes_in": 4},
    ],
    ids=["in a queue or a step", "with more to say", "on the way back", "on the way there"],
)
def test_rows_that_a_stage_has_are_only_slow(changes: dict[str, Any]) -> None:
    """A prompt on a slow host, say, for an hour."""
    assert looks(Silence(), 3_600, lambda _: idle(**changes)) == 0


def test_others_that_run_on_hide_nobody() -> None:
    """At every look some frame is on some link, and all frames seen at the look before have arrived."""

    def works(at: int) -> list[Work]:
        n = 100 * at
        return [Work(n + 3, n + 2, 1, 1, False, frozenset({8})), Work(n + 1, 0, n, n - 1, False, frozenset({9}))]

    assert looks(Silence(), 60, works, lambda at: 100 * at + 5) == SILENT_S + 4


def test_a_sign_of_life_begins_the_time_again() -> None:
    silence = Silence()
    for at in range(100):
        assert not silence.silent({7: (at // 5, 1), 8: (3, at // 9)}, at * S)
    assert silence.silent({7: (19, 1), 8: (3, 11)}, 200 * S) == {7, 8}
    assert silence.silent({8: (3, 11)}, 201 * S) == {8}, "an ended session is forgotten"
    assert not silence.silent({7: (19, 1)}, 202 * S)


def test_a_look_that_finds_it_counts_from_the_beginning() -> None:
    held = {SILENT_S + 3, SILENT_S + 6}
    there = looks(Silence(), 60, lambda at: idle(session_ids=frozenset({7} if at in held else ())))
    assert there == SILENT_S + 6 + 4


@pytest.mark.parametrize(
    ("changes", "sent", "way"),
    [({}, 6, 0), ({"envelopes_in": 4}, 5, 1), ({"returned": 4}, 5, 3)],
    ids=["to stage 0", "to stage 1", "back from stage 1"],
)
def test_a_message_that_does_not_come_breaks_its_link(changes: dict[str, int], sent: int, way: int) -> None:
    silence, works = Silence(), idle(**changes)
    assert silence.broken_way(sent, works, 0) is None
    assert silence.broken_way(sent, works, int((TRANSIT_MAX_S - 1) * S)) is None
    assert silence.broken_way(sent, works, int(TRANSIT_MAX_S * S)) == way


def test_a_slow_link_on_which_anything_comes_is_not_broken() -> None:
    silence = Silence()
    for at in range(1_000):
        came = at // 50  # one in 50 s
        assert silence.broken_way(came + 9, idle(sent=came), at * S) is None
    assert silence.broken_way(20, idle(sent=20), 2_000 * S) is None
    assert silence.broken_way(29, idle(sent=20), 3_000 * S) is None, "a late answer counts from its own time"


# --- one fault on a standing link -------------------------------------------------------------------------------------

AT = 4  # the damaged message: within an answer of a dozen tokens


def on_envelopes(monkeypatch: pytest.MonkeyPatch, dtype: int, harm: Callable[[bytes], bytes | None]) -> None:
    """Damage the AT-th envelope of this dtype on the first link that carries one; None drops it, as if it had left."""
    send, n_sent = RelayLink.send, 0
    addresses: list[str] = []

    async def harmed(link: RelayLink, buffer: Any, message: bytes) -> None:
        nonlocal n_sent
        if link.pool.dtype == dtype:
            addresses.append(link.address)
            n_sent += link.address == addresses[0]
            if link.address == addresses[0] and n_sent == AT:
                altered = harm(bytes(bytearray(message)))
                if altered is None:
                    link.envelopes_sent += 1
                    link.pool.give_back(buffer)
                    return
                message = altered
        await send(link, buffer, message)

    monkeypatch.setattr(RelayLink, "send", harmed)


def on_returns(monkeypatch: pytest.MonkeyPatch, harm: Callable[[bytes], bytes | None]) -> None:
    """Do harm to the AT-th message of the last stage's return stream."""
    write, harmed_once = ReturnWriter.write, [False]

    def harmed(writer: ReturnWriter, message: Any) -> list[bytes]:
        written = write(writer, message)
        if message.samples and writer.n_messages >= AT and not harmed_once[0]:
            harmed_once[0] = True
            altered = harm(written[0])
            return [] if altered is None else [altered]
        return written

    monkeypatch.setattr(ReturnWriter, "write", harmed)


def swallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stage lose one frame that it has read."""
    frames, n_frames, was_swallowed = Inbound.frames, [0], [False]

    def fewer(inbound: Inbound, view: Any) -> list[Any]:
        found = frames(inbound, view)
        n_frames[0] += any(frame.flags & Flag.WANTS_SAMPLE for frame in found)
        if was_swallowed[0] or n_frames[0] < AT or not found[0].flags & Flag.WANTS_SAMPLE:
            return found
        was_swallowed[0] = True
        return []

    monkeypatch.setattr(Inbound, "frames", fewer)


def altered_at(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "session id altered before stage 0": lambda patch: on_envelopes(patch, DTYPE_TOKENS, altered_at(75)),
    "position altered between stages": lambda patch: on_envelopes(patch, DTYPE_F32, altered_at(87)),
    "rows altered between stages": lambda patch: on_envelopes(patch, DTYPE_F32, altered_at(165)),
    "token altered on its way back": lambda patch: on_returns(patch, altered_at(-30)),
    "session altered on its way back": lambda patch: on_returns(patch, altered_at(12)),
    "dropped before stage 0": lambda patch: on_envelopes(patch, DTYPE_TOKENS, lambda _: None),
    "dropped between stages": lambda patch: on_envelopes(patch, DTYPE_F32, lambda _: None),
    "dropped on its way back": lambda patch: on_returns(patch, lambda _: None),
    "swallowed by a stage": swallow,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("n_streams", [1, 3])
async def test_a_fault_on_a_standing_link_ends_no_answer(
    fault: str, n_streams: int, artifacts: Artifacts, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.coordinator.engine.connection.LOOK_EVERY_S", 0.02)
    monkeypatch.setattr("relayline.coordinator.sessions.silence.SILENT_S", 0.5)
    monkeypatch.setattr("relayline.coordinator.sessions.silence.TRANSIT_MAX_S", 0.5)
    FAULTS[fault](monkeypatch)
    prompts = [prompt_of(index, 5 + 30 * index) for index in range(n_streams)]
    async with fleet(artifacts([1, 3])) as running:
        async with asyncio.timeout(60):
            outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(request(p, 12))) for p in prompts))
        observed = running.pipeline.epoch > 1 or running.pipeline._observer.metrics.replays._value.get() > 0
        await running.until_free()
    assert observed, "the fault was placed"
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert len(tokens) == 12
        assert_greedy(whole, prompt, tokens)
