"""The benches' own parts: models, the load generator's figures, the judge of answers, the delaying proxy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from gguf import GGMLQuantizationType, quants

from benches import grammars, hop, hop_floor, machine, parts, peers, report
from benches.blocks import FILLS, random_rows
from benches.compare import Bench, Plan, Run
from benches.hop import PARTS, parts_us
from benches.hop_floor import one_way_us
from benches.hop_stage import Stamps
from benches.models import SHAPES, Shape, vocabulary, write_model
from benches.proxy import delayed
from benches.quantisation import crossings
from benches.reference import gaps_of, greedy_batch, judge, near_tie, prompts_for
from coordinator.split import split_model
from coordinator.tokenizer import Tokenizer
from deploy import load
from deploy.load import Request, Summary, Target

TINY = Shape("tiny", "llama", 256, 2, 4, 2, 64, 256, 400)
TINY_QWEN = Shape("tiny-qwen", "qwen3", 256, 2, 2, 1, 128, 256, 400)


# --- grammars ---------------------------------------------------------------------------------------------------------


def test_grammars_of_every_kind_are_timed() -> None:
    table = grammars.measure(1_024, 3)
    assert [column.header for column in table.columns][1:3] == ["check ms", "start ms"]
    for column in table.columns[1:]:
        assert all(float(str(cell)) >= 0 for cell in column.cells)
    assert table.row_count == len(grammars.SHAPES)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILLS, ids=lambda kind: kind.name)
def test_random_blocks_have_zero_mean_and_the_wanted_deviation(kind: GGMLQuantizationType) -> None:
    wanted = np.linspace(0.01, 0.03, 128, dtype=np.float32)
    raw = random_rows(np.random.default_rng(1), kind, wanted, 2048)
    numbers = {"F32": np.float32, "F16": np.float16}
    rows = quants.dequantize(raw.view(numbers.get(kind.name, np.uint8)), kind)
    assert rows.shape == (128, 2048)
    assert abs(rows.mean()) < 5 * rows.std() / np.sqrt(rows.size)
    # A power of two as scale, scales near the end of their range, random scales within a block.
    coarse = {"MXFP4": 0.45, "NVFP4": 0.25, "IQ2_XXS": 0.2}
    assert np.abs(rows.std(axis=1) / wanted - 1).max() < coarse.get(kind.name, 0.1)


def test_the_same_model_has_the_same_bytes_and_another_seed_has_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, TINY, "q4_0", seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("mix", ["q4_0", "q4_k_m", "nvfp4"])
@pytest.mark.parametrize("shape", [TINY, TINY_QWEN], ids=lambda shape: shape.architecture)
def test_answers_of_a_model_vary_and_hold_no_byte_or_end_token(tmp_path: Path, shape: Shape, mix: str) -> None:
    write_model(tmp_path / "m.gguf", shape, mix)
    prompts = prompts_for(4, 8, shape.n_vocab)
    answers = greedy_batch(tmp_path / "m.gguf", prompts, 12, 1)
    tokens = [token for answer in answers for token in answer]
    assert len(set(tokens)) > 12
    assert len({tuple(answer) for answer in answers}) == 4
    assert all(256 <= token < shape.n_vocab - 1 for token in tokens)
    gaps = gaps_of(tmp_path / "m.gguf", [(prompts[0], tuple(answers[0]))], 1)[0]
    assert max(gaps) <= near_tie(mix)  # the answers are the model's own, decoded or read as a prompt
    strange = (*answers[0][:5], (answers[0][5] + 1 - 256) % 100 + 256, *answers[0][6:])
    assert gaps_of(tmp_path / "m.gguf", [(prompts[0], strange)], 1)[0][5] > near_tie(mix)


def test_vocabulary_is_accepted_and_every_token_reads_differently(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", TINY, "q4_0")
    split_model(tmp_path / "m.gguf", tmp_path / "split", n_stages=2)
    tokenizer = Tokenizer.load(tmp_path / "split" / "tokenizer.gguf")
    assert tokenizer.n_vocab == TINY.n_vocab == len(set(vocabulary(TINY.n_vocab)[0]))
    assert len({tokenizer.piece(token) for token in range(TINY.n_vocab - 1)}) == TINY.n_vocab - 1
    assert tokenizer.is_end(TINY.n_vocab - 1)
    tokenizer.close()


def test_shapes_are_those_of_the_models_they_are_named_after() -> None:
    assert SHAPES["llama-1b"].n_vocab == 128_256
    assert SHAPES["qwen3-0.6b"].n_heads * SHAPES["qwen3-0.6b"].head_dim == 2_048
    assert all(shape.n_embd % 256 == 0 and shape.n_ff % 256 == 0 for shape in SHAPES.values())
    assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType.Q4_K][0] == 256


# --- the load generator -----------------------------------------------------------------------------------------------


def answered(due_ms: float, *token_ms: float, wanted: int | None = None) -> Request:
    n_tokens = len(token_ms) if wanted is None else wanted
    times = [int(ms * 1e6) for ms in token_ms]
    return Request(0, n_tokens, int(due_ms * 1e6), list(range(len(token_ms))), times)


def test_percentiles_interpolate_between_neighbours() -> None:
    assert load.percentile([3.0], 0.99) == 3.0
    assert load.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert load.percentile(list(map(float, range(101))), 0.95) == 95.0
    assert np.isnan(load.percentile([], 0.5))


def test_summary_counts_tokens_times_and_intervals() -> None:
    summary = load.summarise([answered(0, 100, 200, 400), answered(50, 300, 500, 600)])
    assert (summary.n_requests, summary.n_complete, summary.n_tokens) == (2, 2, 6)
    assert summary.wall_s == pytest.approx(0.6)
    assert summary.tok_s == pytest.approx(10.0)
    assert summary.decode_tok_s == pytest.approx(4 / 0.5)
    assert summary.ttft_ms["p50"] == pytest.approx(175)  # 100 and 250
    assert summary.itl_ms["p50"] == pytest.approx(150)  # 100, 200, 200, 100


def test_summary_of_nothing_and_of_failures_names_the_error() -> None:
    failed = Request(3, 5, 0, error="HTTP 500: no")
    short = answered(0, 10, 20, wanted=3)
    summary = load.summarise([failed, short])
    assert (summary.n_complete, summary.error) == (0, "HTTP 500: no")
    assert not short.is_complete
    assert load.summarise([]).tok_s == 0.0


def test_arrivals_are_seeded_and_have_the_asked_rate() -> None:
    times_s = load.arrivals_s(5.0, 2_000, seed=3)
    assert times_s == load.arrivals_s(5.0, 2_000, seed=3) != load.arrivals_s(5.0, 2_000, seed=4)
    assert times_s[0] == 0.0
    assert times_s == sorted(times_s)
    assert 2_000 / times_s[-1] == pytest.approx(5.0, rel=0.1)


class FakeServer:
    """Answers both dialects with the tokens 1000 + prompt[0] + n; cuts the answer short or refuses when told."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.drop_last = False
        self.status = 200

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="not now")
        n_tokens = body.get("max_tokens") or body["n_predict"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(n_tokens - self.drop_last):
            token = 1000 + body["prompt"][0] + index
            event = {"tokens": [token], "stop": False} if "n_predict" in body else {"choices": [{"token_ids": [token]}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        last = b'{"tokens": [7], "stop": true}' if "n_predict" in body else b"[DONE]"
        await response.write(b"data: " + last + b"\n\n")
        return response


@pytest.fixture
async def fake_server():
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/completion", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield server, f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.mark.parametrize("dialect", ["openai", "llama"])
async def test_closed_loop_asks_every_prompt_in_its_stream_and_reads_token_ids(fake_server, dialect: str) -> None:
    server, url = fake_server
    prompts = [(10 * index, 1) for index in range(4)]
    async with load.client() as session:
        found = await load.closed_loop(
            session, Target(url, dialect, "m"), prompts, n_streams=2, n_tokens=3, requests_per_stream=2
        )
    assert sorted(request.prompt_index for request in found) == [0, 1, 2, 3]
    for request in found:
        first = 1000 + 10 * request.prompt_index
        assert request.tokens == [first, first + 1, first + 2]
        assert len(request.token_ns) == 3
        assert request.is_complete
    assert {tuple(body["prompt"]) for body in server.bodies} == set(prompts)


async def test_open_loop_counts_from_the_intended_arrival(fake_server) -> None:
    _, url = fake_server
    async with load.client() as session:
        found = await load.open_loop(
            session, Target(url, "openai", "m"), [(1,), (2,), (3,)], rate_per_s=200.0, n_tokens=2, seed=1
        )
    gaps_s = [(request.due_ns - found[0].due_ns) / 1e9 for request in found]
    assert gaps_s == pytest.approx(load.arrivals_s(200.0, 3, seed=1), abs=1e-6)
    assert all(request.token_ns[0] >= request.due_ns for request in found)


async def test_short_answers_refusals_and_lost_servers_are_not_complete(fake_server) -> None:
    server, url = fake_server
    async with load.client() as session:
        server.drop_last = True
        short = await load.complete(session, Target(url, "llama"), (1,), Request(0, 3, 0))
        server.status = 503
        refused = await load.complete(session, Target(url, "openai", "m"), (1,), Request(0, 3, 0))
        lost = await load.complete(session, Target("http://127.0.0.1:1", "openai"), (1,), Request(0, 3, 0))
    assert (len(short.tokens), short.is_complete) == (2, False)
    assert refused.error == "HTTP 503: not now"
    assert "Connect" in lost.error


# --- judging and reporting --------------------------------------------------------------------------------------------


def test_judge_takes_exact_answers_and_near_ties_and_nothing_else() -> None:
    assert judge((1, 2, 3), (1, 2, 3), None, 0.2).agrees
    assert not judge((1, 2), (1, 2, 3), None, 0.2).agrees
    assert not judge((1, 9, 3), (1, 2, 3), None, 0.2).agrees  # nobody weighed it
    near = judge((1, 9, 4), (1, 2, 3), (0.0, 0.1, 0.0), 0.2)
    assert (near.agrees, near.n_exact, near.worst_gap) == (True, 1, 0.1)
    assert not judge((1, 9, 4), (1, 2, 3), (0.0, 0.1, 0.0), 0.05).agrees
    # A near-tie excuses only itself: what follows must still be the best after it.
    far = judge((1, 9, 4), (1, 2, 3), (0.0, 0.1, 3.0), 0.2)
    assert (far.agrees, far.worst_gap) == (False, 3.0)


def test_prompts_are_different_seeded_and_free_of_special_tokens() -> None:
    prompts = prompts_for(50, 16, 400)
    assert len(set(prompts)) == 50
    assert prompts == prompts_for(50, 16, 400)
    assert all(256 <= token < 399 for prompt in prompts for token in prompt)


def plan_of_tiny() -> Plan:
    return Plan(
        TINY, "q4_0", (1, 8), 1, 0, 4, 4, 1, 2, "unified", 0, (0, 1), ("auto", "rpc"), (), (), 0, 0.0, 0, sweep=False
    )


def run_of(
    system: str, n_streams: int, tok_s: float, *, repeat: int = 0, fault: str = "", part: str = "streams"
) -> Run:
    p95 = {"p50": 10.0, "p95": 20.0}
    summary = Summary(n_streams, n_streams, 10, 1.0, tok_s, tok_s, p95, {**p95, "p99": 30.0}, "")
    return Run(part, system, n_streams, repeat, summary, {}, [], fault=fault)


def test_points_are_medians_of_the_runs_that_count_and_goals_are_ratios_of_them() -> None:
    runs = [
        run_of("auto", 8, 30.0),
        run_of("auto", 8, 20.0, repeat=1),
        run_of("auto", 8, 1_000.0, repeat=2, fault="short"),
        run_of("rpc", 8, 10.0),
        run_of("unsplit", 8, 50.0),
    ]
    points = report.points_of(runs)
    mine = next(point for point in points if point["system"] == "auto")
    assert mine["median"]["tok_s"] == 25.0
    assert mine["spread"]["tok_s"] == [20.0, 30.0]
    assert (mine["n_runs"], mine["n_counted"], mine["faults"]) == (3, 2, ["short"])
    goals = {goal["what"]: goal for goal in report.goals_of(points, [8])}
    rpc = goals["against llama.cpp RPC, decode"]
    assert (rpc["value"], rpc["goal"], rpc["met"]) == (2.5, 2.8, False)
    assert goals["against unsplit llama-server"]["met"] is False
    assert all(goal["met"] is None for goal in report.goals_of(points, [8], has_goals=False))
    assert goals["TTFT p50 against llama.cpp RPC"]["met"] is False  # 1.0 where 0.5 is the most


def test_automatic_is_held_against_the_best_by_hand() -> None:
    """Each by hand beside the automatic run next to it, however quick the machine was just then."""
    runs = []
    for by_hand, tok_s, automatic in (("1x4", 90.0, 100.0), ("2x2", 50.0, 47.5)):
        runs += [run_of("auto", 4, automatic, part="sweep"), run_of(by_hand, 4, tok_s, part="sweep")]
        runs[-1].extra["against_auto"] = tok_s / automatic
    goal = report.goals_of(report.points_of(runs), [4])[0]
    assert (goal["what"], goal["value"]) == ("automatic against best by hand", pytest.approx(0.95))
    assert goal["met"] is (goal["value"] >= 0.95)


def tokens_at(*token_ms: float, error: str = "") -> Request:
    return Request(0, 1_500, 0, list(range(len(token_ms))), [round(ms * 1e6) for ms in token_ms], error)


def test_quiet_begins_when_every_stream_has_its_first_token() -> None:
    # The second stream's prompt is read until 50 ms, and the first one's tokens come slowly meanwhile.
    running = [tokens_at(10, 40, 60, 65, 70, 90), tokens_at(50, 56, 62, 68, 88, 94, 99)]
    quiet, beside = parts.quiet_and_beside_ms(running, due_ns=72_000_000, ended_ns=90_000_000)
    assert quiet == [5, 5, 6, 6, 6]  # not the 30 ms of the first, nor its 20 ms, which began before 50
    assert beside == [20, 20, 6]  # the last one began at 88, while the prompt was read
    assert parts.quiet_and_beside_ms([tokens_at(1, 2, 3), tokens_at()], 72_000_000, 90_000_000) == ([], [])


def prefill_run(running: list[Request]) -> Run:
    bench: Any = SimpleNamespace(plan=SimpleNamespace(prefill_tokens=256), runs=[])
    long = Request(parts.LONG_PROMPT, 1, 2_000_000_000, [0], [2_100_000_000])
    parts.keep_long_prompt(bench, "auto", 0, running, long)
    run: Run = bench.runs[0]
    return run


def test_the_goal_beside_a_long_prompt_is_held_against_quiet_and_the_medians_stand_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A slow start of 400 ms, 100 tokens 10 ms apart, then 25, 25 and 50 ms beside the prompt.
    times_ms = [100, 500, *(1_000 + 10 * n for n in range(100)), 2_015, 2_040, 2_090]
    run = prefill_run([tokens_at(*times_ms), tokens_at(1_000, *times_ms[3:])])
    assert (run.extra["quiet_itl_p99_ms"], run.extra["n_quiet"], run.extra["n_beside"]) == (10, 198, 6)
    points = report.points_of([run])
    goals = {goal["what"]: goal for goal in report.goals_of(points, [])}
    p99 = goals["ITL p99 beside a long prompt, auto"]
    assert (p99["value"], p99["goal"], p99["met"]) == (pytest.approx(5.0), 2.0, False)
    p50 = goals["ITL p50 beside a long prompt, auto"]
    assert (p50["value"], p50["goal"], p50["met"]) == (pytest.approx(2.5), None, None)
    found = report.results(plan_of_tiny(), [run], {"cpu": "x", "load_average": [0.0]}, [])
    assert json.loads(json.dumps(found))["runs"][0]["extra"]["itl_p50_ratio"] == pytest.approx(2.5)
    report.show(found, {})
    row = next(line for line in capsys.readouterr().out.splitlines() if "auto" in line and "25.0" in line)
    assert re.findall(r"\d\.\d\d\b", row) == ["2.50", "5.00"]


async def test_a_running_stream_that_fails_late_keeps_the_run_from_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one that says something else than the unsplit model would, in whatever it says beside the prompt."""
    times_ms = [1_000 + 10 * n for n in range(103)]
    cancelled, failed = tokens_at(*times_ms), tokens_at(*times_ms, error="HTTP 500: lost")
    wrong = dataclasses.replace(cancelled, tokens=[*cancelled.tokens[:-1], 7])
    runs = [prefill_run([cancelled]), prefill_run([cancelled, failed]), prefill_run([cancelled, wrong])]
    bench = Bench.__new__(Bench)
    bench.plan, bench.path, bench.runs = plan_of_tiny(), tmp_path, runs
    bench.answers, bench.prompts, bench.more_prompts = [(0, 1, 2, 3)], [(9,)], {parts.LONG_PROMPT: (8,)}

    async def score(
        _: Path, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]], __: int, libraries: Path | None
    ) -> list[list[float]]:
        assert libraries is None
        assert {prompt for prompt, _ in pairs} == {(9,), (8,)}, "the long prompt's own token as well"
        return [[0.0 if token == at else 5.0 for at, token in enumerate(answer)] for _, answer in pairs]

    monkeypatch.setattr("benches.compare.score", score)
    await bench.judge_all()
    assert [run.fault for run in runs] == [
        "", "prompt 0: HTTP 500: lost", "prompt 0 differs from token 102 on, 5.00 deviations below the best"
    ]  # fmt: skip


def test_pipeline_figures_are_what_happened_in_between() -> None:
    def stage(rows: dict[str, int], sessions: dict[str, int], busy_ns: int) -> dict[str, object]:
        return {"steps_by_rows": rows, "steps_by_sessions": sessions, "busy_ns": busy_ns, "close_reasons": {}}

    before = {
        "now_ns": 1_000_000_000,
        "stages": [stage({"1": 5}, {"1": 5}, 0), stage({}, {}, 100)],
        "overlap": {"1": 0.9, "2": 0.1, "2+": 0.1},
    }
    stages = [
        stage({"1": 6, "4": 2, "16": 1}, {"1": 7, "4": 2}, 600_000_000),
        stage({"4": 2}, {"4": 2}, 900_000_100),
    ]
    since = {"overlap_since_ns": 1_500_000_000, "overlap": {"1": 0.25, "2": 0.75, "2+": 0.75}}
    after = {"now_ns": 2_000_000_000, "stages": stages} | since
    figures = parts.pipeline_figures(before, after, wall_s=1.0)
    assert figures["stages"][0]["steps_by_rows"] == {"1": 1, "4": 2, "16": 1}
    assert figures["stages"][0]["batch_mean"] == pytest.approx((2 * 1 + 2 * 16) / 10)
    assert figures["computing_mean"] == pytest.approx(1.5)
    assert figures["overlap"] == pytest.approx(0.75)
    assert figures["overlap_covers"] == pytest.approx(0.5)  # the first half of the steps has been forgotten
    assert parts.pipeline_figures({}, {}, 1.0) == {}  # a server that says nothing of itself
    # Nor is a figure of the run what covers what came before it, or nobody knows what, or nothing.
    for wrong in ({"overlap_since_ns": 999_999_999}, {"overlap_since_ns": None}, {"overlap": {}}):
        assert "overlap" not in parts.pipeline_figures(before, after | wrong, 1.0)


async def test_a_measured_point_asks_for_the_overlap_since_its_first_look() -> None:
    asked: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        since = {"overlap_since_ns": 17} if "since_ns" in request.query else {}
        return web.json_response({"now_ns": 16 + len(asked), "stages": [{}], "overlap": {"1": 0.5, "2+": 0.5}} | since)

    async def nothing_to_ask() -> list[Request]:
        return []

    bench = Bench.__new__(Bench)
    bench.runs = []

    app = web.Application()
    app.router.add_get("/v1/pipeline", answer)
    async with TestServer(app) as server, load.client() as session:
        target = Target(f"http://127.0.0.1:{server.port}", "openai")
        run = await bench.measure(session, "streams", "auto", target, 1, 0, nothing_to_ask)
        assert await parts.pipeline_status(session, Target(target.url, "llama"), {}) == {}
    assert asked == [{}, {"since_ns": "17"}]
    assert (run.pipeline["overlap"], run.pipeline["overlap_covers"]) == (0.5, 1.0)


def test_results_are_json_and_the_tables_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of_tiny()
    delayed_run = run_of("4 stages", 8, 7.0, part="delay")
    delayed_run.extra = {"delay_ms": 1.0, "delay_measured_ms": 1.5}
    runs = [run_of("auto", 1, 12.0), run_of("rpc", 1, 10.0, fault="prompt 0: 3 of 4 tokens"), delayed_run]
    found = report.results(plan, runs, {"cpu": "x", "load_average": [0.0]}, ["a note"])
    assert json.loads(json.dumps(found))["plan"]["shape"]["name"] == "tiny"
    report.show(found, {"auto": "ours"})
    shown = capsys.readouterr().out
    assert "ours" in shown
    assert "1 ms (1.50)" in shown
    assert "3 of 4 tokens" in shown


def test_figures_of_a_run_without_an_answer_are_null_and_not_what_json_does_not_know(tmp_path: Path) -> None:
    failed = Run("streams", "rpc", 1, 0, load.summarise([Request(0, 4, 0, error="HTTP 500: no")]), {}, [])
    failed.fault, failed.worst_gap = "prompt 0: HTTP 500: no", float("inf")
    found = report.results(plan_of_tiny(), [failed], {"cpu": "x", "load_average": [0.0]}, [])
    machine.write_json(tmp_path / "found" / "compare.json", found)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (run,) = json.loads((tmp_path / "found" / "compare.json").read_text(), parse_constant=refuse)["runs"]
    assert (run["summary"]["ttft_ms"], run["worst_gap"]) == ({"p50": None, "p95": None}, None)
    assert run["summary"]["tok_s"] == 0.0


def test_crossings_name_who_is_quicker_from_where_on() -> None:
    assert crossings((1, 2, 4, 8), (1, 2, 4, 8), (2, 3, 4.01, 6)) == [(1, "first"), (8, "second")]
    assert crossings((1, 2), (1.0, 1.0), (1.01, 0.99)) == []
    # A lead of five percent counts where the next clear one confirms it, and noise in between does not cross twice.
    assert crossings((1, 2, 4, 8), (1, 2, 4, 8), (1.2, 1.9, 4.01, 9.6)) == [(1, "first")]
    assert crossings((1, 2, 4, 8), (1, 2, 4, 8), (1.2, 1.9, 4.01, 7.6)) == [(1, "first"), (2, "second")]


def test_parts_of_a_hop_add_up_to_the_hop() -> None:
    sender = Stamps(8, ready_ns=1_000, sealed_ns=3_000, send_ns=4_000)
    receiver = Stamps(8, parsed_ns=9_000, pushed_ns=11_000, taken_ns=12_500, begin_ns=14_000)
    found = parts_us(sender, receiver)
    assert tuple(found) == PARTS
    assert list(found.values()) == [2.0, 1.0, 5.0, 2.0, 1.5, 1.5]
    assert sum(found.values()) == (receiver.begin_ns - sender.ready_ns) / 1e3


class Answering:
    """A call whose messages take 5 us, answers 100 us, by a clock of its own."""

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


# --- processes --------------------------------------------------------------------------------------------------------


async def test_proxy_holds_bytes_back_in_both_directions_without_throttling() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        writer.close()

    delay_s, n_messages = 0.05, 20
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, delayed([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"], delay_s) as (proxy,):
        host, _, port = proxy.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent_s = loop.time()
        for index in range(n_messages):  # all under way at once: the whole takes one round trip, not twenty
            writer.write(index.to_bytes(4, "big"))
            await writer.drain()
        answer = await reader.readexactly(4 * n_messages)
        took_s = loop.time() - sent_s
        assert answer == b"".join(index.to_bytes(4, "big") for index in range(n_messages))
        assert 2 * delay_s <= took_s < n_messages * delay_s
        assert proxy.mean_delay_s >= delay_s
        writer.write_eof()
        assert await reader.read() == b""  # the end of a stream passes too
        writer.close()
        await writer.wait_closed()


async def test_proxy_before_a_server_that_is_gone_closes_the_connection() -> None:
    async with delayed(["127.0.0.1:1"], 0.0) as (proxy,):
        host, _, port = proxy.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


def test_peers_say_in_one_line_why_they_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert peers.find_peers() is None
    with pytest.raises(peers.PeersUnavailableError, match="cmake was not found"):
        peers.build_peers(1)
    (tmp_path / "relayline" / f"peers-{peers.pinned_version()}" / "bin").mkdir(parents=True)
    assert peers.find_peers() is None  # a directory without the programs is no build


def test_where_peers_cannot_be_built_a_smoke_run_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["peers", "--if-possible"])
    peers.main()
    assert capsys.readouterr() == (
        "",
        "note: peers: cmake was not found; install cmake to build llama.cpp's programs\n",
    )
    monkeypatch.setattr(sys, "argv", ["peers"])
    with pytest.raises(SystemExit, match="peers: cmake was not found"):
        peers.main()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (("benches.hop", "--quick", "--steps", "20", "--width", "64"), "hop.json"),
        (("benches.contexts", "--quick", "--contexts", "16", "--lanes", "2"), "contexts.json"),
        (("benches.quantisation", "--quick", "--steps", "1", "--types", "q4_0,nvfp4"), "quantisation.json"),
        (("benches.pauses", "--quick", "--prompt", "20"), "pauses.json"),
        (("benches.pauses", "--quick", "--prompt", "20", "--cut-link"), "pauses.json"),
        (("benches.chats", "--quick", "--system", "40", "--prompt", "20", "--turns", "2"), "chats.json"),
        (("benches.drafts", "--quick"), "drafts.json"),
    ],  # compare runs as a whole in CI's smoke run, and below until it is interrupted
    ids=["hop", "contexts", "quantisation", "pauses", "pauses-link", "chats", "drafts"],
)
def test_quick_benches_run_and_leave_their_results(tmp_path: Path, arguments: tuple[str, ...], written: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", *arguments, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / written).read_text())
    assert results["machine"]["cores"] >= 1
    if written == "hop.json":
        for figures in (results["figures"], results["figures_cold"]):
            assert [entry["rows"] for entry in figures] == [1, 8, 32]
        for entry in (*results["figures"], *results["figures_cold"]):
            assert all(entry["p50_us"][part] >= 0 for part in PARTS)
            assert entry["message_bytes"] > entry["payload_bytes"] == 2 * 64 * entry["rows"]
    if written == "chats.json":
        assert [(turn["prefix_lanes"], turn["turn"]) for turn in results["turns"]].count((2, 1)) == 2
    if written == "drafts.json":
        assert [(run["draft"], run["share"]) for run in results["runs"][:2]] == [("off", 1.0), ("auto", 1.0)]
        assert [run["accepted"] > 0 for run in results["runs"][:2]] == [False, True]
    if written == "pauses.json":
        assert [(loss["policy"], loss["n_streams"]) for loss in results["losses"]] == [("auto", 3), ("drain", 3)]
        assert all(loss["n_paused"] and loss["ready_s"] > 0 and min(loss["pauses_s"]) > 0 for loss in results["losses"])


@pytest.mark.slow
def test_an_interrupted_comparison_leaves_no_process(tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "benches.compare", "--quick", "--systems", "auto", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert bench.stderr is not None
    with bench.stderr:
        line = next(line for line in bench.stderr if line.startswith("streams auto"))  # its servers are up
        assert "tok/s" in line
        bench.send_signal(signal.SIGINT)
        bench.send_signal(signal.SIGINT)  # impatience changes nothing
        assert bench.wait(120) == 130
    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(path)]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
