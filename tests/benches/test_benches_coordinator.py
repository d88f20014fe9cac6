"""The coordinator's bench: its results from the client's figures, and what counts as an answer."""

from __future__ import annotations

import os

import pytest

from benches import coordinator, sse_client
from benches.coordinator import Run


def test_a_token_costs_what_a_longer_answer_takes_beyond_a_short_one() -> None:
    def wave(last_ms: float) -> list[dict[str, float]]:
        return [{"first_ms": 10.0 + stream, "last_ms": last_ms, "pieces": 3} for stream in range(2)]

    short = [Run([wave(11.0), wave(12.0)], 4_000_000, 400_000), Run([wave(11.0), wave(12.0)], 8_000_000, 800_000)]
    long = [Run([wave(30.0)], 4_000_000, 0), Run([wave(50.0)], 9_000_000, 0), Run([wave(40.0)], 9_000_000, 0)]
    found = coordinator.figures(short, long, 11, 1.5)
    assert (found["request_us"], found["worker_us"], found["token_us"]) == (1_000, 100, 100), "the least of the runs"
    assert found["step_ms"] == pytest.approx(2.95 - 1.5), "the median of the runs, over both streams"
    assert (found["tok_s"], found["started_ms"]) == (550, 11)


@pytest.mark.parametrize(("rows", "wanted_ms"), [(1, 3.1), (8, 6.3), (20, 8.65), (64, 14.0), (96, 17.0)])
def test_a_step_sleeps_as_long_as_the_slowed_stage_does(rows: int, wanted_ms: float) -> None:
    assert coordinator.sleep_ms(coordinator.STEPS_MS, rows) == pytest.approx(wanted_ms)


def test_processor_time_is_counted_and_processes_are_found() -> None:
    before_ns = coordinator.cpu_ns(os.getpid())
    sum(range(2_000_000))
    assert coordinator.cpu_ns(os.getpid()) > before_ns
    assert os.getpid() in coordinator.descendants(os.getppid())


def test_the_client_refuses_an_answer_without_its_end() -> None:
    answer = sse_client.Answer()
    answer.take(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", 2_000_000)
    with pytest.raises(RuntimeError, match="incomplete"):
        answer.described(0)
    answer.take(b"data: [DO", 3_000_000)
    answer.take(b"NE]\n\n", 4_000_000)
    assert answer.described(1_000_000) == {"first_ms": 1.0, "last_ms": 3.0, "pieces": 3}
