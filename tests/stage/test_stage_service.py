"""A stage over real gRPC with a fake engine: its answers, accepted requests, and garbage."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import numpy as np
import pytest

from relayline.stage.engine import ggml
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    ChecksumError,
    HandshakeError,
    NotReadyError,
    ProtocolError,
    RelaylineError,
    SessionError,
    StageLostError,
    StaleEpochError,
)
from relayline.wire.envelopes import dtypes
from relayline.wire.envelopes.frames import Flag
from relayline.wire.links import rpc
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import (
    EPOCH,
    MAX_ROWS,
    ROUTE,
    WIDTH,
    control,
    greedy,
    hidden,
    rows_frame,
)
from tests.support.served_stage import Coordinator, envelope_of, served
from tests.support.stage_links import (
    OTHER,
    PREFILL,
    SAMPLE,
    prompt,
    token_after,
)

# --- answers and accepted requests ------------------------------------------------------------------------------------


async def test_describe_status_and_one_token() -> None:
    async with served() as stage, Coordinator(stage) as one:
        facts = await one.client.describe()
        assert (facts.stage_index, facts.n_lanes, facts.max_rows, facts.instance_id) == (1, 4, MAX_ROWS, "fake-1")
        await one.start()
        await one.send(*prompt(5))
        (sample,) = (await one.reply()).samples
        assert (sample.session_id, sample.position) == (5, 3)
        assert sample.token == token_after(hidden(3, 500.0))
        status = await one.client.status(with_recent=True)
        assert status is not None
        assert (status.lanes_used, status.n_rows, status.envelopes_in) == (1, 3, 1)
        assert dict(status.steps_by_rows) == {3: 1}
        assert status.kernels == ggml.kernels()
        await one.send(control(5, Flag.CLOSE))
        await one.send(*prompt(6))
        while not (await one.reply()).samples:  # the close's report may come first
            pass
        assert (await stage.settled())[0] == 1


async def test_status_and_gauges_never_look_at_lanes_while_the_decode_thread_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They read the snapshot published after its latest step."""

    class Changing:
        n_lanes = 4

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was read by another thread")

    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(5))
        await one.reply()
        table = stage.executor.lanes
        monkeypatch.setattr(stage.executor, "lanes", Changing())
        status = await one.client.status(with_recent=True)
        assert status is not None
        gauges = stage.service.report.gauges()
        monkeypatch.setattr(stage.executor, "lanes", table)
        for found in (status, gauges):
            assert (found.lanes_used, found.lanes_kept, found.lanes_total) == (1, 0, 4)


def guesses(session_id: int, position: int, tokens: list[int], flags: int = 0) -> Any:
    frame = rows_frame(session_id, position, hidden(len(tokens), float(position)), SAMPLE | Flag.DRAFTED | flags)
    frame.draft_tokens = tuple(tokens)
    return frame


async def test_guesses_are_answered_over_links() -> None:
    """Sent at once: right ones of two sessions, a wrong one, what follows it, and the next true row."""
    read = [hidden(3, 500.0), hidden(3, 600.0)]
    first = [token_after(each) for each in read]
    second = [token_after(each, hidden(1, 3.0)) for each in read]
    third = token_after(read[0], hidden(2, 3.0))
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(5), *prompt(6), guesses(5, 3, [first[0], second[0]]), guesses(6, 3, [first[1], 99, 1]))
        await one.send(guesses(5, 5, [third], Flag.GUESSED), guesses(6, 6, [7, 8], Flag.GUESSED))
        await one.send(rows_frame(6, 4, hidden(1, 9.0), SAMPLE))
        samples: list[pb.Sampled] = []
        passed: list[tuple[int, int]] = []
        while not samples or (samples[-1].session_id, samples[-1].position) != (6, 5):
            reply = await one.reply()
            assert not reply.faults
            samples += reply.samples
            passed += [(each.session_id, each.position) for each in reply.progress]
        assert [(each.position, each.token) for each in samples if each.session_id == 5][:3] == [
            *((3, first[0]), (4, second[0]), (5, third)),
        ]
        assert [(each.position, each.token) for each in samples if each.session_id == 6] == [
            *((3, first[1]), (4, second[1]), (5, token_after(read[1], hidden(1, 3.0), hidden(1, 9.0)))),
        ]
        assert passed == [(6, 6), (6, 8)]
        _, lanes = await stage.settled()
        assert sorted(len(lane) for lane in lanes if lane) == [5, 6]


async def test_a_link_with_rows_that_are_a_control_too_is_ended() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        frame = guesses(5, 0, [1, 2])
        frame.flags |= Flag.TRIM
        await one.send(control(5, Flag.OPEN), frame)
        error = await one.refusal()
        assert isinstance(error, ProtocolError)
        assert "either carry rows or be a control" in error.message


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"protocol_version": 99}, HandshakeError, "protocol 99"),
        ({"pipeline_id": "another"}, HandshakeError, "pipeline another"),
        ({"stage_index": 0}, HandshakeError, "asked to be stage 0"),
        ({"instance_id": "fake-0"}, NotReadyError, "has restarted"),
        ({"next_address": "127.0.0.1:1"}, HandshakeError, "only the last stage"),
        ({"epoch": EPOCH}, StaleEpochError, "not newer"),
        ({"epoch": EPOCH - 1}, StaleEpochError, "not newer"),
    ],
)
async def test_configure_refuses_an_order_that_does_not_fit(
    changes: dict[str, Any], error: type[RelaylineError], text: str
) -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(5))
        await one.reply()
        with pytest.raises(error, match=text):
            await one.configure(**({"epoch": EPOCH + 1} | changes))
        await one.send(rows_frame(5, 3, 1, SAMPLE))
        assert (await one.reply()).samples[0].position == 4, "a refusal leaves the running epoch alone"


async def test_configure_refuses_a_downstream_that_is_not_there() -> None:
    async with served(0, 2) as stage, Coordinator(stage) as one:
        with pytest.raises(StageLostError, match=r"127\.0\.0\.1:1"):
            await one.configure(next_address="127.0.0.1:1")
        with pytest.raises(HandshakeError, match="only the last stage"):
            await one.configure()
        assert stage.service.epochs.routes == {}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"protocol_version": 99}, HandshakeError, f"protocol is 99, here {bounds.PROTOCOL_VERSION}"),
        ({"pipeline_id": "another"}, HandshakeError, "pipeline is another"),
        ({"source_sha256": "f" * 64}, HandshakeError, "model is ffffffffffff"),
        ({"next_layer": 3}, HandshakeError, "next layer is 3, here 1"),
        ({"n_embd": 8}, HandshakeError, "width is 8, here 4"),
        ({"dtype": pb.DTYPE_TOKENS}, HandshakeError, "token rows go to stage 0"),
        ({"dtype": 77}, ProtocolError, "unknown dtype 77"),
        ({"epoch": EPOCH - 1}, StaleEpochError, "epoch 0 is over"),
        ({"epoch": EPOCH + 1}, HandshakeError, "not been configured"),
        ({"route_id": 1234}, HandshakeError, "not been configured"),
    ],
)
async def test_a_neighbour_that_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[RelaylineError], text: str
) -> None:
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage) as right:
        await right.configure()
        with pytest.raises(error, match=text):
            await one.upstream(**changes)
        await right.listen()
        await right.upstream()
        await right.send(*prompt(1))
        assert (await right.reply()).samples


async def test_hidden_rows_are_refused_by_stage_0() -> None:
    async with served(0, 1) as stage, Coordinator(stage) as one:
        await one.configure()
        with pytest.raises(HandshakeError, match="token rows go to stage 0"):
            await one.upstream(dtype=pb.DTYPE_F32)


async def test_a_second_upstream_is_refused_and_the_first_goes_on() -> None:
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage) as two:
        await one.start()
        with pytest.raises(HandshakeError, match="already has an upstream"):
            await two.upstream()
        await one.send(*prompt(1))
        assert (await one.reply()).samples


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff" * 40, b"GET / HTTP/1.1\r\n\r\n", envelope_of(*prompt(1)), rpc.serialize(pb.RelayRequest(epoch=1))],
    ids=["empty", "noise", "http", "data first", "no handshake"],
)
async def test_a_link_that_does_not_begin_with_a_handshake_is_refused(message: bytes) -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        with pytest.raises(ProtocolError):
            await one.first_message(message, rpc.route_metadata(one.route_id, one.epoch))


@pytest.mark.parametrize("form", ["", "7", "0123456789abcdef-0000000g", "f" * 16 + "-" + "f" * 8])
async def test_a_stream_that_names_no_route_of_ours_is_refused_unread(form: str) -> None:
    """For any content: the refusal comes although nothing is ever sent."""
    async with served() as stage, Coordinator(stage) as one:
        one.call = one.channel.stream_stream(rpc.method("Relay"))(metadata=(("relayline-route", form),) if form else ())
        error = await one.refusal()
        assert isinstance(error, HandshakeError)
        spoken = f"speaks protocol {bounds.PROTOCOL_VERSION}"
        assert ("configured" if len(form) == 25 and "g" not in form else spoken) in error.message


async def test_a_handshake_for_another_route_than_the_stream_is_refused() -> None:
    async with served() as stage, Coordinator(stage) as one, Coordinator(stage, OTHER) as two:
        await one.configure()
        await two.configure()
        with pytest.raises(HandshakeError, match="another route"):
            await one.first_message(
                rpc.serialize(pb.RelayRequest(open=one.hello())), rpc.route_metadata(two.route_id, two.epoch)
            )


@pytest.mark.parametrize("sequence", [1, 3, 2**64 - 1], ids=["doubled", "one lost", "far off"])
async def test_a_lost_or_doubled_envelope_ends_its_link(sequence: int) -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await one.send(*prompt(1))
        await one.reply()
        await one.write(rows_frame(1, 3, 1, SAMPLE), sequence=sequence)
        error = await one.refusal()
        assert isinstance(error, ProtocolError)
        assert f"envelope {sequence} came instead of 2" in error.message


async def test_a_link_that_closes_before_its_handshake_is_refused() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        one.call = one.channel.stream_stream(rpc.method("Relay"))(metadata=rpc.route_metadata(one.route_id, one.epoch))
        await one.call.done_writing()
        assert isinstance(await one.refusal(), ProtocolError)


async def test_return_of_another_epoch_is_refused() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        one.epoch += 1
        with pytest.raises(StaleEpochError):
            await one.listen()


async def test_a_stage_that_stops_begins_no_epoch() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        await stage.service.close()
        await asyncio.wait_for(one.lost, 20)
        one.epoch += 1
        with pytest.raises(NotReadyError, match="stopping"):
            await one.configure()


# --- garbage ----------------------------------------------------------------------------------------------------------


def altered(position: int) -> bytes:
    message = bytearray(envelope_of(rows_frame(1, 3, 1, SAMPLE), sequence=2))
    message[position] ^= 0x41
    return bytes(message)


GARBAGE = {
    "noise": random.Random(1).randbytes(300),
    "empty": b"",
    "truncated": envelope_of(rows_frame(1, 3, 1, SAMPLE), sequence=2)[:-3],
    "altered payload": altered(-20),
    "handshake again": rpc.serialize(pb.RelayRequest(open=pb.LinkOpen(route_id=ROUTE))),
    "another width": envelope_of(rows_frame(1, 3, np.ones((1, 7), np.float32), SAMPLE), sequence=2),
    "another dtype": envelope_of(
        rows_frame(1, 3, np.ones((1, WIDTH), np.float16), SAMPLE), dtype=dtypes.DTYPE_F16, sequence=2
    ),
    "frame wider than a step": envelope_of(rows_frame(1, 3, MAX_ROWS + 1), sequence=2),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_ends_its_own_link_with_one_error_and_nobody_elses(name: str) -> None:
    async with served() as stage, Coordinator(stage) as bad, Coordinator(stage, OTHER) as good:
        await bad.start()
        await good.start()
        await bad.send(*prompt(1))
        await bad.reply()
        await good.send(*prompt(1, OTHER))
        first = (await good.reply()).samples[0]
        n_steps = len(stage.engine.steps)
        await bad.call.write(GARBAGE[name])
        error = await bad.refusal()
        assert type(error) is (ChecksumError if name == "altered payload" else ProtocolError)
        (fault,) = (await bad.reply()).faults
        assert (fault.session_id, fault.retryable) == (0, True)
        await bad.lost
        lanes_used, _ = await stage.settled()
        assert lanes_used == 1
        assert len(stage.engine.steps) == n_steps
        await good.send(rows_frame(1, 3, 1, SAMPLE, route_id=OTHER))
        second = (await good.reply()).samples[0]
        assert (first.position, second.position) == (3, 4)
        assert second.token == token_after(hidden(3, 100.0), hidden(1, 103.0))


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", random.Random(2).randbytes(2_000), b"\0" * 100],
    ids=["http", "noise", "0"],
)
async def test_noise_on_the_port_is_not_noticed(noise: bytes) -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        host, port = stage.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(noise)
        writer.write_eof()
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await one.send(*prompt(1))
        assert (await one.reply()).samples


async def test_a_faulty_session_hurts_only_itself() -> None:
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        bad_options = control(2, Flag.OPEN, options=greedy(top_p=9.0))
        await one.send(*prompt(1), bad_options, rows_frame(2, 0, 2, PREFILL | SAMPLE), rows_frame(3, 0, 1))
        reply = await one.reply()
        assert [sample.session_id for sample in reply.samples] == [1]
        assert {(fault.session_id, fault.label) for fault in reply.faults} == {
            (2, ProtocolError.label),
            (3, SessionError.label),
        }
        status = await one.client.status(with_recent=True)
        assert status is not None
        assert dict(status.faults_by_label) == {ProtocolError.label: 1, SessionError.label: 1}


@pytest.mark.parametrize("address", ["127.0.0.1:23\x1512", "127.0.0.1:65537", "127.0.0.1:3;512"])
async def test_a_neighbour_at_no_address_is_one_line(address: str, caplog: pytest.LogCaptureFixture):
    """gRPC says so; the code that then looks for the reason must not fail."""
    async with served(0, 2) as stage, Coordinator(stage) as one:
        with pytest.raises(RelaylineError, match="cannot be reached"):
            await one.configure(next_address=address)
    assert not caplog.records
