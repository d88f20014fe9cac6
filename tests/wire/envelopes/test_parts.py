"""Goal: an envelope of any size crosses a link in messages of a few MiB, and none costs its reader more than it may.

Method: the reader is pure, so parts are dropped, doubled, mixed and cut there. Memory is measured where it matters: a
stage process is sent the worst that each bound allows, and reports its peak.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from relayline.deploy.testing.paths import ROOT
from relayline.wire.common import bounds
from relayline.wire.common.errors import ChecksumError, ProtocolError, RelaylineError
from relayline.wire.common.units import MIB
from relayline.wire.envelopes.buffers import Buffer, with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_F32
from relayline.wire.envelopes.envelope import bytes_max_of, parse
from relayline.wire.envelopes.parts import PartReader, parts_of
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import new_facts
from tests.support.served_stage import Coordinator, served
from tests.support.wire_examples import EXAMPLES, canonical
from tests.wire.envelopes.test_messages import begin_peak, envelope_bombs, memory_bytes

LINK_BYTES = 1 << 20  # of a link and its route: a message of 4 MiB is three times in memory, and has none to spare
ACCEPTING = "AioServer._request_call"  # the name of a task of grpc.aio
PART = 64  # bytes, in the tests of the reader
WIDE = 16_384
PEAKS = Path("/proc/self/clear_refs")
WHOLE = canonical(EXAMPLES["guessed rows, exponents and an open"])


@pytest.fixture(name="small")
def small_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "PART_BYTES_MAX", PART)


def part(of_bytes: int, at: int, data: bytes, **fields: Any) -> bytes:
    return pb.RelayRequest(part_of_bytes=of_bytes, part_at=at, part=data, **fields).SerializeToString()


def whole_of(messages: list[bytes], reader: PartReader | None = None) -> bytes:
    """The envelope completed by the last of these; none before it may complete anything."""
    reader = reader or PartReader(len(WHOLE))
    *before, last = [reader.take(message) for message in messages]
    assert before == [None] * len(before)
    assert last is not None
    return last


# --- the reader -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_envelope_in_parts_is_the_same_envelope(name: str) -> None:
    data = canonical(EXAMPLES[name])
    messages = list(parts_of(data))
    assert len(messages) == -(-len(data) // PART)
    assert whole_of(messages, PartReader(len(data))) == data


@pytest.mark.usefixtures("small")
def test_parts_are_plain_protobuf_both_ways() -> None:
    read = [pb.RelayRequest.FromString(message) for message in parts_of(WHOLE)]
    assert b"".join(one.part for one in read) == WHOLE
    assert [one.part_at for one in read] == list(range(0, len(WHOLE), PART))
    assert {one.part_of_bytes for one in read} == {len(WHOLE)}
    assert [one.SerializeToString() for one in read][1:] == list(parts_of(WHOLE))[1:]  # a zero is left out or written
    assert whole_of([one.SerializeToString() for one in read]) == WHOLE


@pytest.mark.usefixtures("small")
def test_whole_envelopes_pass_and_may_stand_between_those_in_parts() -> None:
    reader, messages = PartReader(len(WHOLE)), list(parts_of(WHOLE))
    for _ in range(2):
        assert reader.take(WHOLE) is WHOLE
        assert whole_of(messages, reader) == WHOLE


def damaged() -> Iterator[tuple[str, list[bytes], str]]:
    """Messages whose last must be refused."""
    messages = [part(len(WHOLE), at, WHOLE[at : at + PART]) for at in range(0, len(WHOLE), PART)]
    first, second, size = messages[0], messages[1], len(WHOLE)
    yield "one is lost", [first, messages[2]], "does not fit"
    yield "one comes twice", [first, second, second], "does not fit"
    yield "the first is lost", [second], "does not fit"
    yield "another length", [first, part(size + 1, PART, WHOLE[PART : 2 * PART])], "does not fit"
    yield "beyond the end", [part(PART + 1, 0, bytes(PART)), part(PART + 1, PART, b"ab")], "does not fit"
    yield "a whole one between", [first, WHOLE], "further part"
    yield "nothing between", [first, b""], "further part"
    yield "too long a whole", [part(size + 1, 0, bytes(PART))], "over the limit"
    yield "too long a part", [part(size, 0, bytes(PART + 1))], f"not 1 to {PART}"
    yield "an empty part", [first, part(size, PART, b"")], f"not 1 to {PART}"
    yield "other fields too", [part(size, 0, bytes(PART)) + b"\x0d\5\0\0\0"], "other fields"
    yield "a field that nobody knows", [first, part(size, PART, bytes(PART)) + b"\xf0\x03\x01"], "other fields"
    yield "data twice", [first + first], "cannot be read"
    yield "cut off", [first, second[:-1]], "cannot be read"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("messages", "text"), [pytest.param(m, t, id=name) for name, m, t in damaged()])
def test_parts_that_do_not_fit_are_refused(messages: list[bytes], text: str) -> None:
    reader = PartReader(len(WHOLE))
    for message in messages[:-1]:
        assert reader.take(message) is None
    with pytest.raises(ProtocolError, match=text):
        reader.take(messages[-1])


def test_an_envelope_that_calls_itself_a_part_is_refused() -> None:
    with pytest.raises(ProtocolError, match="part of one"):
        parse(WHOLE + part(9, 0, b"x"))


# --- over a link ------------------------------------------------------------------------------------------------------


def large(n_rows: int, sequence: int, dtype: int = DTYPE_F32) -> Buffer:
    """An envelope of one frame through a wide model, for a session that was never opened."""
    buffer = Buffer(dtype, WIDE, 1, n_rows)
    buffer.payload[:] = np.arange(n_rows)[:, None] % 7 + sequence
    buffer.seal(5, sequence, 0, heads=[(9, 5, 0, n_rows, 1, 0, 0, 0, bytes(25))])
    with_extras(buffer, None, [])
    return buffer


async def test_a_link_sends_large_envelopes_in_parts_and_mixes_nothing() -> None:
    from tests.wire.links.test_relay_link import linked

    whole = [large(64, 1), large(2, 2), large(70, 3, DTYPE_F16), large(64, 4)]
    sizes = [len(buffer.message) for buffer in whole]
    assert sizes[0] > bounds.MESSAGE_BYTES_MAX > sizes[1]
    async with linked(bounds.BYTES_IN_FLIGHT_DEFAULT) as (link, receiver, _):
        link.pool.give_back = lambda buffer: None  # type: ignore[method-assign]  # these are none of the pool's
        await asyncio.gather(*(link.send(buffer, buffer.message) for buffer in whole))
        reader, arrived = PartReader(bytes_max_of(WIDE)), list[bytes]()
        while len(arrived) < len(whole):
            message = await receiver.arrived.get()
            assert len(message) <= bounds.MESSAGE_BYTES_MAX
            if (found := reader.take(message)) is not None:
                arrived.append(found)
        assert link.envelopes_sent == len(whole)
    assert arrived == [buffer.message for buffer in whole]
    assert [parse(message).sequence for message in arrived] == [1, 2, 3, 4]


async def refusal_of(one: Coordinator, *messages: bytes) -> RelaylineError:
    """Begin a route, send these over its link, and return how that ends."""
    await one.configure()
    await one.upstream()
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # refused before it had all
        for message in messages:
            await one.call.write(message)
    return await one.refusal()


async def test_a_stage_takes_rows_that_come_in_parts_and_no_more_than_its_credit() -> None:
    async with served(n_embd=WIDE) as stage:
        async with Coordinator(stage) as one:
            message = bytearray(large(64, 1).message)
            message[-20] ^= 1
            error = await refusal_of(one, *parts_of(bytes(message)))
            assert isinstance(error, ChecksumError), "it was put together, and read"
        async with Coordinator(stage, epoch=6) as one:  # frames of another epoch: it was read to the end
            assert "of another epoch" in (await refusal_of(one, *parts_of(large(64, 1).message))).message


async def test_a_sender_beyond_its_credit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting frame holds its rows, so waiting frames are bounded by bytes, whatever their sender."""
    from tests.support.fakes import MAX_ROWS, WIDTH, rows_frame

    size_bytes = MAX_ROWS * WIDTH * 4
    monkeypatch.setattr(bounds, "BYTES_IN_FLIGHT_DEFAULT", 8 * size_bytes)
    monkeypatch.setattr("relayline.stage.inbound.CREDIT_REPLY_BYTES", 2 * size_bytes)
    async with served() as stage, Coordinator(stage) as one:
        await one.start()
        stage.service.runner.push = lambda frames: []  # type: ignore[method-assign]  # a step that takes for ever
        for _ in range(8):
            await one.send(rows_frame(1, 0, MAX_ROWS))
        await one.send(rows_frame(1, 0, 1))
        error = await one.refusal()
        assert isinstance(error, ProtocolError)
        assert "over the credit" in error.message


# --- memory -----------------------------------------------------------------------------------------------------------


def serve_and_tell() -> None:
    """Serve a stage of a wide model; each line of standard input is answered with the peak since the one before."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[str] = asyncio.Queue()

        def listen() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, "")

        def calls() -> set[asyncio.Task[Any]]:
            """The tasks of this moment, without the one that waits for the next call."""
            return {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") != ACCEPTING}

        threading.Thread(target=listen, daemon=True).start()
        async with served(n_embd=WIDE) as stage:
            print(stage.address, flush=True)
            before, resting = 0, calls()
            while line := await lines.get():
                if line == "begin\n":  # earlier parts are gone, and their bytes are not used again
                    while left := calls() - resting:
                        await asyncio.wait(left)
                    gc.collect()
                print(memory_bytes("VmHWM") - before, flush=True)
                begin_peak()
                before = memory_bytes("VmRSS")

    asyncio.run(serve())


def worst() -> dict[str, tuple[list[bytes], int]]:
    """Messages that a neighbour might send, and the bytes of refused ones."""
    n_bytes = bounds.MESSAGE_BYTES_MAX - 4096
    envelope = bytearray(large(400, 1).message)
    envelope[-20] ^= 1
    most = bytes_max_of(WIDE)
    whole = {what: ([data], len(data)) for what, data in envelope_bombs(n_bytes).items()}
    return whole | {
        "an altered envelope of 25 MiB": (list(parts_of(bytes(envelope))), len(envelope)),
        "the largest, announced": ([part(most, 0, b"x"), b""], 0),
        "a message over the bound": ([bytes(32 * MIB)], 0),
    }


@pytest.mark.skipif(not PEAKS.exists(), reason="only Linux tells a process the peak of its memory anew")
async def test_a_received_envelope_costs_at_most_twice_its_size() -> None:
    code = "from tests.wire.envelopes.test_parts import serve_and_tell; serve_and_tell()"
    # Freed memory goes back at once, else later messages would be made of it unseen.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        address = (await child.stdout.readline()).decode().strip()
        stage: Any = types.SimpleNamespace(address=address, artifact=new_facts(1, 2, n_embd=WIDE).artifact)
        costs = {}
        # The first large one also costs the memory that a process allocates once, and keeps.
        unjudged = {"nothing": ([b""], 0), "the first": ([bytes(bounds.MESSAGE_BYTES_MAX - 4096)], 0)}
        for epoch, (what, (messages, size)) in enumerate((unjudged | worst()).items(), 1):
            async with Coordinator(stage, epoch=epoch) as one:
                one.channel = grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
                child.stdin.write(b"begin\n")
                await child.stdout.readline()
                with contextlib.suppress(RelaylineError):
                    await refusal_of(one, *messages)
            child.stdin.write(b"end\n")
            costs[what] = (int(await child.stdout.readline()), size)
    finally:
        child.stdin.close()
        await child.wait()
    assert costs["an altered envelope of 25 MiB"][0] > 24 * MIB, "held memory is seen"
    assert max(costs[what][0] for what in worst() if costs[what][1] == 0) <= 4 * MIB
    del costs["the first"]
    assert {what: cost for what, (cost, size) in costs.items() if cost > 2 * size + 4 * MIB + LINK_BYTES} == {}
