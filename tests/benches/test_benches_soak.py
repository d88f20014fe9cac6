"""The soak's own judgement: the faults that it causes, and the outcomes that it calls wrong."""

from __future__ import annotations

import asyncio
import collections
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benches import soak
from benches.reference import expected_answers
from benches.soak import RESTARTS, Fault, faults_of, inflict
from benches.verdicts import CANCELLED, faulty
from relayline.deploy.cli.load import Request


def test_faults_come_from_the_seed_and_no_stage_dies_so_often_that_it_is_given_up() -> None:
    faults = list(faults_of(3, 60))
    assert faults == list(faults_of(3, 60)) != list(faults_of(4, 60))
    assert {fault.kind for fault in faults} == {"kill", "end", "stop"}
    assert {fault.stage for fault in faults} == set(range(soak.N_STAGES))
    deaths_s = collections.defaultdict(list)
    for fault in faults:
        if fault.kind != "stop":
            deaths_s[fault.stage].append(fault.at_s)
    for times_s in deaths_s.values():
        for first, last in zip(times_s, times_s[RESTARTS.deaths_max - 1 :], strict=False):
            assert last - first > RESTARTS.deaths_max * RESTARTS.healthy_s, "one of its lives was long"
    assert faults[-1].at_s < 60 * 60 - soak.QUIET_S


def request_of(tokens: list[int], n_tokens: int, error: str = "") -> Request:
    return Request(0, n_tokens, 0, tokens, [0] * len(tokens), error)


def test_only_whole_answers_of_the_model_and_beginnings_of_cancelled_ones_are_right() -> None:
    answers = [(5, 6, 7, 8)]
    right = [request_of([5, 6, 7, 8], 4), request_of([5, 6], 4, CANCELLED), request_of([], 4, CANCELLED)]
    assert faulty(right, answers, {}, 0.5) == []
    wrong = [
        request_of([5, 6], 4),
        request_of([5, 6], 4, "HTTP 503: recovering"),
        request_of([5, 9], 4, CANCELLED),
        request_of([5, 9, 1, 2], 4),
    ]
    gaps = {(0, (5, 9)): [0.0, 3.0], (0, (5, 9, 1, 2)): [0.0, 0.1, 0.0, 4.0]}
    assert faulty(wrong, answers, gaps, 0.5) == [
        "prompt 0: 2 of 4 tokens",
        "prompt 0: HTTP 503: recovering",
        "prompt 0 differs from token 1 on, 3.00 deviations below the best",
        "prompt 0 differs from token 1 on, 4.00 deviations below the best",
    ]
    near = request_of([5, 9, 1, 2], 4)
    assert faulty([near], answers, {(0, (5, 9, 1, 2)): [0.0, 0.1, 0.0, 0.2]}, 0.5) == []


def test_a_stage_that_keeps_lanes_or_says_nothing_is_wrong() -> None:
    stages = [{"index": 0, "lanes_used": 0}, {"index": 1, "lanes_used": 2}, {"index": 2}]
    assert soak.kept_lanes({"stages": stages}) == ["stage 1 keeps 2 lanes", "stage 2 keeps an unknown number of lanes"]


async def test_an_answer_is_judged_under_the_adapter_that_its_request_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[list[Request], Path | None]] = []

    async def wrong(_: Path, __: str, ___: Any, requests: list[Request], adapter: Path | None) -> list[str]:
        judged.append((requests, adapter))
        return ["prompt 0: HTTP 503"] if adapter else []

    monkeypatch.setattr(soak, "wrong_answers", wrong)
    busy = soak.Soak(1, 1.0, adapters={"one": tmp_path / "one.gguf"})
    plain, chosen = request_of([5], 1), request_of([6], 1)
    chosen.fields = {"model": "one"}
    busy.requests = [plain, chosen]
    assert await soak.wrong_by_adapter(busy) == ["adapter one, prompt 0: HTTP 503"]
    assert judged == [([plain], None), ([chosen], tmp_path / "one.gguf")]


async def test_an_answer_under_another_adapter_than_the_chosen_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "relayline" / "bench-models").mkdir(parents=True)
    adapters, prompts = soak.random_adapters(tmp_path), soak.Soak(1, 1.0).prompts[:4]
    one, two = (adapters[name] for name in soak.ADAPTERS)
    answers = await expected_answers(soak.MODEL, prompts, 3, 1, adapter=one)
    requests = [Request(at, 3, 0, list(answer), [0] * 3) for at, answer in enumerate(answers)]
    for judge, n_wrong in ((one, 0), (two, 4), (None, 4)):
        assert len(await soak.wrong_answers(soak.MODEL, "q4_0", prompts, requests, judge)) == n_wrong


async def waiting_process() -> tuple[asyncio.subprocess.Process, Any]:
    """Return a process that ends with its input, and a pipeline whose only stage it is."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    child = SimpleNamespace(pid=process.pid, exited=asyncio.Event())
    return process, SimpleNamespace(stage=lambda _: child)


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("end", signal.SIGTERM)])
async def test_a_fault_reaches_the_process_of_the_moment(kind: str, number: int) -> None:
    process, pipeline = await waiting_process()
    assert await inflict(pipeline, Fault(0.0, kind, 0, 0.0))
    async with asyncio.timeout(60):
        assert await process.wait() == -number
    assert not await inflict(pipeline, Fault(0.0, kind, 0, 0.0)), "the process is gone"
    pipeline.stage(0).exited.set()
    assert not await inflict(pipeline, Fault(0.0, "stop", 0, 0.0))


async def test_a_stopped_process_goes_on() -> None:
    process, pipeline = await waiting_process()
    assert await inflict(pipeline, Fault(0.0, "stop", 0, 0.0))
    async with asyncio.timeout(60):
        await process.communicate(b"\n")
    assert process.returncode == 0
