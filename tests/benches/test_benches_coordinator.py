"""The coordinator's bench: its results from the client's figures, and what counts as an answer."""

from __future__ import annotations

import os

import pytest

from benches import coordinator, coordinator_parts, sse_client
from benches.coordinator import LABELS, LABELS_BY_STAGES, Run
from benches.origin import origin
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.paths import DEMO_MODEL

CALLS_MAX = 90  # of Python functions, from a stage's answer to what leaves next; 80 at the time of writing


def test_a_token_costs_what_a_longer_answer_takes_beyond_a_short_one() -> None:
    def wave(last_ms: float) -> list[dict[str, float]]:
        return [{"first_ms": 10.0 + stream, "last_ms": last_ms, "pieces": 3} for stream in range(2)]

    prompt = [(4, 8_000_000)]  # steps of two waves, and their time
    short = [
        Run([wave(11.0), wave(12.0)], 4_000_000, 400_000, steps=prompt),
        Run([wave(11.0), wave(12.0)], 8_000_000, 800_000, steps=prompt),
        Run([wave(11.0), wave(12.0)], 8_000_000, 800_000, steps=prompt),
    ]
    long = [
        Run([wave(30.0)], 4_000_000, 0, stages_ns=44_000_000, steps=[(12, 14_000_000)]),
        Run([wave(50.0)], 9_000_000, 0, stages_ns=22_000_000, steps=[(12, 19_000_000)]),
        Run([wave(40.0)], 9_000_000, 0, stages_ns=33_000_000, steps=[(12, 19_000_000)]),
    ]
    found = coordinator.figures(short, long, 11)
    assert (found["request_us"], found["worker_us"], found["token_us"]) == (1_000, 100, 100), "the least of the runs"
    assert found["step_ms"] == pytest.approx(1.95 - 1.0), "the least of the runs, over both streams"
    assert found["step_mid_ms"] == pytest.approx(2.95 - 1.5), "and the median"
    assert found["stages_us"] == 1_000
    assert (found["tok_s"], found["started_ms"]) == (550, 11)


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


def test_each_figure_of_another_checkout_stands_below_its_own() -> None:
    figures = dict.fromkeys(LABELS, 1.25)
    table = coordinator.table_of({1: [{1: figures, 8: figures}, {1: figures, 8: figures}]}, 96)
    ids = [row["id"] for row in table["rows"]]
    assert ids[:2] == ["token_us", "token_us_before"]
    assert len(ids) == 2 * len(LABELS)
    assert table["columns"] == ["1", "8"]


def test_several_numbers_of_stages_stand_below_each_other() -> None:
    figures = dict.fromkeys(LABELS_BY_STAGES, 1.25)
    table = coordinator.table_of({1: [{1: figures}], 2: [{1: figures}]}, 96)
    ids = [row["id"] for row in table["rows"]]
    assert ids == [f"{name}_{n_stages}" for n_stages in (1, 2) for name in LABELS_BY_STAGES]
    assert table["rows"][0]["label"].startswith("1 stage: ")
    assert table["rows"][-1]["label"].startswith("2 stages: ")
    goals = {row["id"]: row["goal"] for row in table["rows"] if "goal" in row}
    assert goals == {"step_ms_1": "0.8 at one stream", "step_ms_2": "1.3 at one stream"}


def test_a_result_names_the_command_that_another_machine_can_repeat() -> None:
    measured = ["--stages", "1,2", "--beside", "elsewhere", "--flags", "--draft off"]
    given = [*measured, "--out=found.json", "--machine", "busy"]
    head = origin("benches.coordinator", "busy", given)
    assert head["command"] == "python -m benches.coordinator --stages 1,2 --beside CHECKOUT --flags '--draft off'"
    assert head["machine"] == "busy"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    directory = split_for(DEMO_MODEL, 1, None, None)
    return Tokenizer.load(directory / load_pipeline(directory).tokenizer.file)


@pytest.mark.parametrize("part", coordinator_parts.PARTS)
def test_each_part_gives_every_stream_a_token_a_step(part: str, tokenizer: Tokenizer) -> None:
    loop = coordinator_parts.Loop(3, part, tokenizer, tokenizer.n_vocab)
    assert [loop.take(loop.answer()) for _ in range(6)][2:] == [3] * 4
    assert bool(loop.readers.n_bytes) is (part == "written")
    assert bool(loop.observer.n_tokens) is (part in ("observed", "written"))


def test_the_best_steps_in_a_row_count(tokenizer: Tokenizer) -> None:
    loop = coordinator_parts.Loop(2, "decided", tokenizer, tokenizer.n_vocab)
    ticks = iter([at * 1_000 for at in range(20)] + [20_000 + at * 5_000 for at in range(20)])
    assert coordinator_parts.token_us(loop, 20, lambda: next(ticks)) == pytest.approx(0.5)


def test_a_token_of_one_stream_takes_few_calls_of_functions(tokenizer: Tokenizer) -> None:
    loop = coordinator_parts.Loop(1, "decided", tokenizer, tokenizer.n_vocab)
    coordinator_parts.stand(loop)
    assert coordinator_parts.calls(loop, 8) <= CALLS_MAX, "what a token needs not ask for costs 1 to 2 us a call, cold"
