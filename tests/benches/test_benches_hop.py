"""The hop bench's own parts, and its floor."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benches import hop, hop_floor
from benches.hop import PARTS, parts_us
from benches.hop_floor import one_way_us
from benches.hop_stage import Stamps


def test_parts_of_a_hop_add_up_to_the_hop() -> None:
    sender = Stamps(8, ready_ns=1_000, sealed_ns=3_000, send_ns=4_000)
    receiver = Stamps(8, parsed_ns=9_000, pushed_ns=11_000, taken_ns=12_500, begin_ns=14_000)
    found = parts_us(sender, receiver)
    assert tuple(found) == PARTS
    assert list(found.values()) == [2.0, 1.0, 5.0, 2.0, 1.5, 1.5]
    assert sum(found.values()) == (receiver.begin_ns - sender.ready_ns) / 1e3


class Answering:
    """A call whose messages take 5 us and answers 100 us, on its own clock."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000

    async def write(self, _message: bytes) -> None:
        self.now_ns += 5_000

    async def read(self) -> bytes:
        arrived_ns, self.now_ns = self.now_ns, self.now_ns + 100_000
        return arrived_ns.to_bytes(8, "big")

    def monotonic_ns(self) -> int:
        return self.now_ns


async def test_the_floor_of_a_hop_is_the_way_there_alone_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Answering()
    monkeypatch.setattr(hop_floor, "time", call)
    assert await hop_floor.rounds_us(call, b"x", 10) == 5.0
    assert call.now_ns == 1_000_000 + (hop_floor.WARM_ROUNDS + 10) * 105_000
    found = await asyncio.wait_for(one_way_us([8, 100_000], 5), 60)  # the other end's clock is real, and not this one
    assert list(found) == [8, 100_000]


def test_the_hop_bench_runs_under_uvloop_as_stages_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    async def report_of(*_: object) -> int:
        seen.append(type(asyncio.get_running_loop()).__module__)
        return 0

    monkeypatch.setattr(hop, "_report", report_of)
    monkeypatch.setattr(sys, "argv", ["hop", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        hop.main()
    assert seen == ["uvloop"]


def test_a_floor_above_the_wire_is_called_none() -> None:
    found = [{"rows": rows, "message_bytes": rows * 10, "p50_us": {"wire": 100.0}} for rows in (1, 8, 32)]
    assert len(hop.floor_lines(found, {10: 99.0, 80: 100.0, 320: 50.0})) == 1
    quiet, warning = hop.floor_lines(found, {10: 99.0, 80: 101.0, 320: 150.0})
    assert "101 us for 80 bytes (100)" in quiet
    assert "at 8, 32 rows" in warning
