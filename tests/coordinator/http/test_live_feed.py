"""The page's feed over real stages: every native step once and by number, memory, round trips, a lost stage."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http import live
from relayline.coordinator.http.live import LiveFeed
from relayline.coordinator.observe.observer import Observer
from relayline.wire.telemetry.telemetry import own_offset_ns
from tests.support.fleet import Artifacts, Fleet, artifacts_fixture, fleet, prompt_of, request, tokens_of

FIXTURES = (artifacts_fixture,)  # pytest finds it in the modules that name it
N_TOKENS = 9
HOURS_NS = 8 * 3_600 * 1_000_000_000


async def look(feed: LiveFeed, after: int = 0) -> dict[str, Any]:
    answer = await feed.live(make_mocked_request("GET", f"/v1/pipeline/live?after={after}"))
    assert isinstance(answer, web.Response)
    found = json.loads(bytes(answer.body))  # type: ignore[arg-type]
    assert isinstance(found, dict)
    return found


async def run(running: Fleet) -> None:
    """Run a stream to its end, and until no stage has anything of it."""
    await tokens_of(running.pipeline.open(request(prompt_of(0, 5), N_TOKENS)))
    await running.until_free()


async def test_every_step_of_every_stage_is_shown_once(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_EVERY_S", 0.0)
    async with fleet(artifacts([2])) as running:
        pipeline = running.pipeline
        feed = LiveFeed(pipeline, TelemetryControl(Observer(), lambda: pipeline.stages), {})
        seen = (await look(feed))["look"]
        steps: list[tuple[int, int]] = []
        for _ in range(2):
            await run(running)
            found = await look(feed, seen)
            seen = found["look"]
            steps += [(step[0], step[1]) for each in found["looks"] for step in each[4]]
            assert not any(each[3] for each in found["looks"]), "nothing is skipped while so little happens"
        stages = found["state"]["stages"]
        assert sorted(steps) == [(at, step) for at in (0, 1) for step in range(1, stages[at]["steps"] + 1)]
        for stage in stages:
            assert 0 < stage["resident_bytes"] < stage["memory_bytes"]
            assert stage["round_trip_ms"] > 0
            assert stage["rows_per_step"] >= 1
        assert stages[1]["hop_ms"] is not None
        described = await pipeline.describe(with_recent=False)
        assert described["overlap"] == {}
        await feed.close()


async def test_a_stage_that_is_lost_and_comes_back(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_EVERY_S", 0.0)
    async with fleet(artifacts([2])) as running:
        pipeline = running.pipeline
        feed = LiveFeed(pipeline, TelemetryControl(pipeline._observer, lambda: pipeline.stages), {})
        await run(running)
        await look(feed)
        await running.lose(1)
        lost = await look(feed)
        assert lost["state"]["loss"]["stage"] == 1
        assert lost["state"]["phase"] == "recovering"
        await running.start(1)
        async with asyncio.timeout(60):
            await pipeline.ready.wait()
        await run(running)
        back = await look(feed, lost["look"])
        assert back["state"]["loss"] is None
        assert {step[0] for each in back["looks"] for step in each[4]} == {0, 1}
        assert min(step[1] for each in back["looks"] for step in each[4] if step[0] == 1) == 1, (
            "its counters start again"
        )
        monkeypatch.setattr(live, "own_offset_ns", lambda: own_offset_ns() + HOURS_NS)
        found = await look(feed)
        assert abs(found["zero_unix_ms"] - back["zero_unix_ms"] - HOURS_NS / 1e6) < 2_000, "the clock was set meanwhile"
        await feed.close()
