"""Goal: no message costs its reader more than its size allows, and the sender of one that would gets an error.

Method: for every field of every message of the contract, a message that repeats its shortest form a hundred thousand
times. Each is parsed in a child process, whose memory shows whether the weight is an upper bound. Each is also read
through `wire.envelopes.messages`, which must refuse a message that is too heavy before the library sees it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from relayline.deploy.testing.paths import ROOT
from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError
from relayline.wire.envelopes import _weigh, messages
from relayline.wire.envelopes.envelope import CHECKSUM, CHECKSUM_TAG, HEADER_BYTES, parse, rest_checksum
from relayline.wire.envelopes.frames import FRAME_BYTES
from relayline.wire.pb.relayline.v1 import join_pb2, relayline_pb2
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.wire_examples import canonical, envelope, frame, varint

BOMB_BYTES = 1 << 17
NOISE_BYTES = 300_000  # by which a process's memory moves by itself
KINDS: dict[str, type[Message]] = {
    name: getattr(module, name)
    for module in (relayline_pb2, join_pb2)
    for name in module.DESCRIPTOR.message_types_by_name
}


def _tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def _long(number: int, body: bytes) -> bytes:
    return _tag(number, 2) + varint(len(body)) + body


def shortest(descriptor: Descriptor, depth: int = 0) -> Iterator[tuple[str, bytes]]:
    """The shortest encodings of each field type, by kind."""
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            yield f"{field.name}: empty", _long(field.number, b"")
            if depth < 3:
                for name, body in shortest(field.message_type, depth + 1):
                    yield f"{field.name}.{name}", _long(field.number, body)
                    if not depth and len(body) < 50:
                        yield f"{field.name}.{name}, a thousand in each", _long(field.number, body * 1_000)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield f"{field.name}: empty", _long(field.number, b"")
            yield f"{field.name}: one byte", _long(field.number, b"a")
        else:
            how = messages._FORMS[field.type][1]
            yield f"{field.name}: one", _tag(field.number, {0: 0, 4: 5, 8: 1}[how]) + bytes(how or 1)
            yield f"{field.name}: of another type", _tag(field.number, 0 if how else 5) + bytes(1 if how else 4)
            if field.is_repeated:
                yield f"{field.name}: many", _long(field.number, (b"\1" if how == 0 else bytes(how)) * 1_000)
    yield "unknown", _tag(62, 0) + b"\1"
    yield "unknown, of a high number", _tag(1 << 20, 2) + b"\0"


def weighed(kind: type[Message], data: bytes) -> int:
    table, root = messages._table(kind.DESCRIPTOR)
    return _weigh.weigh(data, table, root, 1 << 60, 1 << 60)


def memory_bytes(what: str) -> int:
    """VmRSS, what this process holds, or VmHWM, its peak since `begin_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def begin_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured() -> dict[str, dict[str, tuple[int, int]]]:
    """The memory that parsing each bomb takes in this process, and its weight."""

    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, kind in KINDS.items():
        for what, body in shortest(kind.DESCRIPTOR):
            data = body * (BOMB_BYTES // len(body))
            begin_peak()
            before = memory_bytes("VmRSS")
            parsed = kind.FromString(data)
            took = memory_bytes("VmHWM") - before
            del parsed
            found.setdefault(name, {})[what] = (took, weighed(kind, data))
    return found


def envelope_bombs(n_bytes: int) -> dict[str, bytes]:
    """Messages of a link, of this many bytes, made of as many parts as fit."""
    head = canonical(envelope(1, np.zeros((0, 1), "<i4"), [frame(0, flags=32)]))[: HEADER_BYTES + FRAME_BYTES]
    tails = {
        "options": b"\x5a\x00",
        "drafts": b"\x6d\x01\x00\x00\x00",
        "empty drafts": b"\x6a\x00",
        "unknown": b"\xf0\x03\x01",
    }
    bombs = {
        what: part * (n_bytes // len(part))
        for what, part in {"frames": b"\x42\x00", "open": b"\x7a\x00", **tails}.items()
    }
    bombs["options in options"] = (b"\x5a\x40" + b"\x5a\x00" * 32) * (n_bytes // 66)
    for what, part in tails.items():
        tail = part * (n_bytes // len(part))
        total = rest_checksum(head, tail)
        bombs[f"{what}, in the canonical layout"] = head + b"\x4a\x00" + tail + CHECKSUM.pack(CHECKSUM_TAG, total)
    bombs["payload twice"] = (b"\x4a" + varint(n_bytes // 2) + bytes(n_bytes // 2)) * 2
    bombs["payload of nothing"] = b"\x4a" + varint(n_bytes) + bytes(n_bytes)
    bombs["exponents of nothing"] = b"\x52" + varint(n_bytes) + bytes(n_bytes)
    return bombs


def peaks_of_envelopes(n_bytes: int) -> dict[str, int]:
    """The memory that refusing each of these takes in this process, in addition to the message itself."""
    found = {}
    for what, data in envelope_bombs(n_bytes).items():
        begin_peak()
        before = memory_bytes("VmRSS")
        with pytest.raises(ProtocolError):
            parse(data)
        found[what] = memory_bytes("VmHWM") - before
    return found


def test_an_envelope_of_many_parts_is_refused_for_less_memory_than_its_size() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells a process the peak of its memory anew")
    n_bytes = 16 << 20
    name = "tests.wire.envelopes.test_messages"
    code = f"import json; from {name} import *; print(json.dumps(peaks_of_envelopes({n_bytes})))"
    command, root = [sys.executable, "-c", code], ROOT
    # Freed memory goes back at once, else later messages would be made of it unseen.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250, cwd=root, env=environment)
    peaks = json.loads(done.stdout)
    assert len(peaks) > 12
    assert max(peaks.values()) >= n_bytes // 2, "copies are seen"
    assert max(peaks.values()) <= n_bytes + bounds.MESSAGE_COST_BYTES_MAX, peaks


def test_a_messages_weight_is_never_less_than_reading_takes() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells a process the peak of its memory anew")
    code = "import json; from tests.wire.envelopes.test_messages import measured; print(json.dumps(measured()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
        cwd=ROOT,
    )
    too_light = {
        f"{kind} {what}": took_and_weighed
        for kind, each in json.loads(done.stdout).items()
        for what, took_and_weighed in each.items()
        if took_and_weighed[0] > took_and_weighed[1] + NOISE_BYTES
    }
    assert not too_light
    assert sum(map(len, json.loads(done.stdout).values())) > 500


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", KINDS)
def test_no_message_costs_more_than_it_may(name: str) -> None:
    kind, n_refused = KINDS[name], 0
    for what, body in shortest(kind.DESCRIPTOR):
        data = body * (8 * BOMB_BYTES // len(body))
        too_heavy = weighed(kind, data) > len(data) + bounds.MESSAGE_COST_BYTES_MAX
        refused = ""
        try:
            messages.read(kind, data, "bomb", bytes_max=len(data))
        except ProtocolError as error:
            refused = error.message
        assert ("more fields" in refused) == too_heavy, what
        n_refused += too_heavy
    assert n_refused, "more unknown fields than any message may have"


def test_the_largest_legitimate_messages_are_read() -> None:
    top = [pb.TokenLogprob(token=2**31, logprob=-1.5)] * bounds.LOGPROBS_MAX
    samples = [pb.Sampled(session_id=2**62 + at, position=at, token=7, logprob=-1, top=top) for at in range(2_048)]
    response = pb.ReturnResponse(epoch=1, samples=samples)
    assert (
        messages.read(pb.ReturnResponse, response.SerializeToString(), "x", bytes_max=bounds.RETURN_BYTES_MAX)
        == response
    )
    waits = {"wait_ns": 2**40, "upstream_wait_ns": 2**40, "sent_ns": 2**50}
    members = [pb.BatchMember(session_id=2**62, position=9, n_rows=1, **waits)] * 16
    batches = pb.BatchesResponse(
        batches=[pb.BatchRecord(step=2**40, start_ns=2**50, taken_ns=2**50, members=members)] * 4_096
    )
    assert messages.read(pb.BatchesResponse, batches.SerializeToString(), "x", bytes_max=bounds.BATCHES_BYTES_MAX)
    status = pb.StatusResponse(
        steps_by_rows=dict.fromkeys(range(2_048), 2**50),
        steps_by_sessions=dict.fromkeys(range(2_048), 2**50),
        recent_wait_ns=[2**44] * 8_192,
        step_start_ns=[2**60] * 1_024,
        step_end_ns=[2**60] * 1_024,
    )
    assert messages.read(pb.StatusResponse, status.SerializeToString(), "x", bytes_max=bounds.STATUS_BYTES_MAX)


@pytest.mark.parametrize("data", [None, b"\xff" * 9, b"\x0b" * 20, bytes(bounds.UNARY_BYTES_MAX + 1)])
def test_malformed_messages_raise_one_error(data: Any) -> None:
    with pytest.raises(ProtocolError):
        messages.read(pb.StatusRequest, data, "request")


def test_nested_deeper_than_the_contract_goes() -> None:
    table, root = messages._table(pb.StatusRequest.DESCRIPTOR)
    loop = bytearray(table)
    loop[4:8] = (4).to_bytes(4, "little")  # field 1 is a message of the same type, without end
    deep = b"\x0a\x00"
    for _ in range(20):
        deep = _long(1, deep)
    assert _weigh.weigh(deep, bytes(loop), root, 10_000, 10_000) == 10_001


def test_the_one_field_is_found_wherever_it_stands() -> None:
    message = pb.RelayRequest(epoch=1, payload=b"rows", batch_trace=bytes(25))
    parts = [pb.RelayRequest(epoch=1), pb.RelayRequest(payload=b"rows"), pb.RelayRequest(batch_trace=bytes(25))]
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        data = b"".join(parts[at].SerializeToString() for at in order)
        found = messages.split(data, 9)
        assert found is not None
        rows, rest = found
        assert (bytes(rows), pb.RelayRequest.FromString(rest)) == (
            b"rows",
            pb.RelayRequest(epoch=1, batch_trace=bytes(25)),
        )
    data = message.SerializeToString()
    assert messages.split(data + b"\x4a\x01x", 9) is None, "twice"
    assert messages.split(data[:-1], 9) is None, "cut"
    assert messages.split(b"", 9) == (b"", b"")
    assert messages.split(b"\x48\x05", 9) == (b"", b"\x48\x05"), "of another wire type"


def test_wrong_arguments_raise_errors() -> None:
    table, root = messages._table(pb.StatusRequest.DESCRIPTOR)
    for wrong in (
        ("text", table, root, 1, 1),
        (b"", bytearray(table), root, 1, 1),
        (b"", table, root, 1),
        (b"", table, 1, 1, 1),
        (b"", table[:-1], root, 1, 1),
        (b"", table, root, 2**64 - 1, 1),
        (b"", table, root, -1, 1),
        (b"", table, root, 1, "x"),
    ):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            _weigh.weigh(*wrong)  # type: ignore[arg-type]
    for wrong_find in (("text", 9), (b"",), (b"", -1), (b"", "x")):
        with pytest.raises((TypeError, OverflowError)):
            _weigh.find(*wrong_find)  # type: ignore[arg-type]
