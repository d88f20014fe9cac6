"""Judging answers, and turning runs into points, goals and tables."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benches import machine, parts, report
from benches.compare import Bench
from benches.compared import Plan, Run
from benches.models import Shape
from benches.quantisation import crossings
from benches.reference import judge, prompts_for
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Summary, Target

TINY = Shape("tiny", "llama", 256, 2, 4, 2, 64, 256, 400)


def test_judge_takes_exact_answers_and_near_ties_and_nothing_else() -> None:
    assert judge((1, 2, 3), (1, 2, 3), None, 0.2).agrees
    assert not judge((1, 2), (1, 2, 3), None, 0.2).agrees
    assert not judge((1, 9, 3), (1, 2, 3), None, 0.2).agrees  # without weights
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
    """Each value by hand is compared with the automatic run next to it, whatever the machine's speed at that time."""
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
    # The second stream's prompt is read until 50 ms; during that time the first one's tokens come slowly.
    running = [tokens_at(10, 40, 60, 65, 70, 90), tokens_at(50, 56, 62, 68, 88, 94, 99)]
    quiet, during = parts.quiet_and_prefill_ms(running, due_ns=72_000_000, ended_ns=90_000_000)
    assert quiet == [5, 5, 6, 6, 6]  # not the 30 ms of the first, nor its 20 ms, which began before 50
    assert during == [20, 20, 6]  # the last one began at 88, while the prompt was read
    assert parts.quiet_and_prefill_ms([tokens_at(1, 2, 3), tokens_at()], 72_000_000, 90_000_000) == ([], [])


def prefill_run(running: list[Request]) -> Run:
    bench: Any = SimpleNamespace(plan=SimpleNamespace(prefill_tokens=256), runs=[])
    long = Request(parts.LONG_PROMPT, 1, 2_000_000_000, [0], [2_100_000_000])
    parts.keep_long_prompt(bench, "auto", 0, running, long)
    run: Run = bench.runs[0]
    return run


def test_the_goal_during_a_long_prompt_is_compared_with_quiet_and_shown_with_medians(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A slow start of 400 ms, 100 tokens 10 ms apart, then 25, 25 and 50 ms during the prompt.
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
    """So does an answer that differs from the unsplit model's, in any text other than the prompt."""
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


def test_pipeline_figures_are_differences_of_two_readings() -> None:
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
    # Nor does a figure of the run explain times before it, or of an unknown or empty cause.
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


def test_figures_of_a_run_without_an_answer_are_null(tmp_path: Path) -> None:
    failed = Run("streams", "rpc", 1, 0, load.summarise([Request(0, 4, 0, error="HTTP 500: no")]), {}, [])
    failed.fault, failed.worst_gap = "prompt 0: HTTP 500: no", float("inf")
    found = report.results(plan_of_tiny(), [failed], {"cpu": "x", "load_average": [0.0]}, [])
    machine.write_json(tmp_path / "found" / "compare.json", found)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (run,) = json.loads((tmp_path / "found" / "compare.json").read_text(), parse_constant=refuse)["runs"]
    assert (run["summary"]["ttft_ms"], run["worst_gap"]) == ({"p50": None, "p95": None}, None)
    assert run["summary"]["tok_s"] == 0.0


def test_crossings_name_the_faster_type_and_its_first_row_count() -> None:
    assert crossings((1, 2, 4, 8), (1, 2, 4, 8), (2, 3, 4.01, 6)) == [(1, "first"), (8, "second")]
    assert crossings((1, 2), (1.0, 1.0), (1.01, 0.99)) == []
    # A lead of five percent counts where the next clear one confirms it, and noise in between does not cross twice.
    assert crossings((1, 2, 4, 8), (1, 2, 4, 8), (1.2, 1.9, 4.01, 9.6)) == [(1, "first")]
    assert crossings((1, 2, 4, 8), (1, 2, 4, 8), (1.2, 1.9, 4.01, 7.6)) == [(1, "first"), (2, "second")]
