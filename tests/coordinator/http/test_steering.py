"""Routes that change a running pipeline: a request is cancelled, a trace level holds for a while, layers are tried."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.engine.telemetry_control import LEVEL_FOR_S_MAX, TelemetryControl
from relayline.coordinator.http import live
from relayline.coordinator.http.edge.steering import is_steering
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.planner.running_plan import RunningPlan, running_plan
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.sessions.request_log import RequestRecord, SessionRecord, StreamRecord
from relayline.coordinator.sessions.streams import SessionStream
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common import bounds, logs
from relayline.wire.common.errors import InternalError, RequestCancelledError
from relayline.wire.common.logs import LogLine
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.config import Level
from tests.coordinator.http.test_http_traces import FakeStage
from tests.support.http_support import WAIT_S, FakeGenerator, FakeStream, Gate, serving
from tests.support.page_support import FakeStage as PageStage
from tests.support.page_support import served

# --- one request ------------------------------------------------------------------------------------------------------


class _Waiting(FakeGenerator):
    """Streams that give nothing until they are stopped, with their records as a pipeline keeps them."""

    def open(self, request: GenerationRequest, record: RequestRecord | None = None) -> FakeStream:
        assert record is not None
        kept = StreamRecord(request.request_id, SessionRecord(), 0, request=record)
        stream = SessionStream(lambda _: setattr(kept, "stop", None))
        kept.stop = stream.stop
        record.streams.append(kept)
        self.streams_opened.set()
        return stream  # type: ignore[return-value]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_cancelled_request_ends_with_an_error_of_its_own(tokenizer: Tokenizer, is_streamed: bool) -> None:
    generator = _Waiting()
    async with serving(tokenizer, generator) as server, aiohttp.ClientSession(server.url) as session:

        async def ask() -> tuple[int, str]:
            body = {"prompt": "x", "n": 2, "stream": is_streamed}
            async with session.post("/v1/completions", json=body, headers={"x-request-id": "mine"}) as reply:
                return reply.status, await reply.text()

        asking = asyncio.create_task(ask())
        async with asyncio.timeout(WAIT_S):
            await generator.streams_opened.wait()
            async with session.post("/v1/requests/mine/cancel") as reply:
                found = await reply.json()
            status, text = await asking
        assert (reply.status, found["cancelled_choices"]) == (200, 2)
        assert found["id"].startswith("cmpl-")
        assert RequestCancelledError.label in text
        assert status == 499, "no token has been sent"
        async with session.post(f"/v1/requests/{found['id']}/cancel") as reply:
            assert reply.status == 409
            assert "has ended" in (await reply.json())["error"]["message"]
        async with session.post("/v1/requests/unknown/cancel") as reply:
            assert reply.status == 404


# --- trace level ------------------------------------------------------------------------------------------------------


class _Clock:
    """Keeps what was to be called later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def call_later(after_s: float, call: Callable[[], None], *more: object) -> asyncio.TimerHandle:
            self.calls.append((after_s, call))
            return later(3_600, lambda: None)

        monkeypatch.setattr(loop, "call_later", call_later)


async def test_a_level_for_a_while_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [FakeStage(), FakeStage()]
    control = TelemetryControl(Observer(), lambda: stages)
    control.observer.telemetry.level = Level.SUMMARY
    clock = _Clock(monkeypatch)
    found = await control.change("frames", None, 60.0)
    assert (found["level"], found["back_to"]) == ("frames", "summary")
    assert 59 < found["back_in_s"] <= 60  # type: ignore[operator]
    assert [stage.level for stage in stages] == [Level.FRAMES] * 2
    await control.change("batches", None, 600.0)  # again for a while: the first level comes back all the same
    ((_, _), (after_s, give_back)) = clock.calls
    assert after_s == 600.0
    give_back()
    assert control.observer.telemetry.level is Level.SUMMARY
    found = await control.describe()
    assert (found["level"], found["back_to"], found["back_in_s"]) == ("summary", None, None)
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
    assert [stage.level for stage in stages] == [Level.SUMMARY] * 2
    await control.change("frames", None, 60.0)
    await control.change("batches", None)  # for good
    assert (await control.describe())["back_to"] is None
    await control.close()


class _SlowStage(FakeStage):
    """Takes the first level late."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Gate | None = Gate()

    async def set_telemetry(self, wanted: pb.SetTelemetryRequest) -> pb.SetTelemetryResponse | None:
        gate, self.gate = self.gate, None
        if gate is not None:
            await gate.pass_through()
        return await super().set_telemetry(wanted)


async def test_a_stage_ends_with_the_last_level(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = _SlowStage()
    control = TelemetryControl(Observer(), lambda: [stage])
    control.observer.telemetry.level = Level.SUMMARY
    clock, gate = _Clock(monkeypatch), stage.gate
    assert gate is not None
    changes = [asyncio.create_task(control.change("frames", None, 60.0))]
    await gate.reached.wait()
    clock.calls[0][1]()  # the time is over before the stage has answered
    changes.append(asyncio.create_task(control.change("batches", None, 60.0)))
    await asyncio.sleep(0)  # the second change has begun
    clock.calls[1][1]()  # again, while the level before it is on its way back
    for _ in range(10):  # whatever does not wait for the stage's first answer is over
        await asyncio.sleep(0)
    gate.opened.set()
    for change in changes:
        await change
    returning = control._returning
    assert returning is not None
    await returning
    assert control.observer.telemetry.level is Level.SUMMARY
    assert stage.level is Level.SUMMARY
    await control.close()


async def test_a_bad_time_for_a_level_changes_nothing(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server, aiohttp.ClientSession(server.url) as session:
        async with session.get("/v1/telemetry") as reply:
            before = await reply.json()
        for wrong in ({"level": "frames", "for_s": 0}, {"level": "frames", "for_s": LEVEL_FOR_S_MAX + 1}, {"for_s": 5}):
            async with session.put("/v1/telemetry", json=wrong) as reply:
                assert reply.status == 400
                assert (await reply.json())["error"]["param"] == "for_s"
        async with session.get("/v1/telemetry") as reply:
            assert await reply.json() == before


# --- other layers -----------------------------------------------------------------------------------------------------


async def test_other_layers_are_predicted(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PLAN_EVERY_S", 3_600.0)  # a busy host takes seconds for what follows
    async with served(tokenizer, n_stages=2) as world:
        status, _, body = await world.get("/v1/pipeline/plan?cuts=1")
        plan = json.loads(body)
        assert status == 200
        assert [each["name"] for each in plan["plans"][:2]] == ["as it runs", "these layers"]
        assert plan["plans"][1]["layers"] == [[0, 1], [1, 4]]
        assert plan["plans"][1]["tokens_per_s"][1] < plan["plans"][0]["tokens_per_s"][1], "one stage has most of it"
        for wrong in ("", "4", "0", "x", "1,2", "-1", "1234567"):
            status, _, body = await world.get(f"/v1/pipeline/plan?cuts={wrong}")
            assert (status, json.loads(body)["error"]["param"]) == (400, "cuts"), wrong
        assert world.generator.n_asked == 1, "planned once for some seconds"


async def test_a_plan_that_was_not_finished_is_made_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()

    def counted(*given: Any, **more: Any) -> RunningPlan:
        calls.append("all")
        if len(calls) == 1:
            raise InternalError("placed by the test")
        return running_plan(*given, **more)

    monkeypatch.setattr(live, "running_plan", counted)
    async with served(tokenizer, n_stages=2) as world:
        assert (await world.get("/v1/pipeline/plan"))[0] == 500
        status, _, body = await world.get("/v1/pipeline/plan")
        assert (status, json.loads(body)["is_known"]) == (200, True)
        plan = json.loads((await world.get("/v1/pipeline/plan?cuts=1"))[2])
        del plan["plans"][1]
        assert plan == json.loads(body)
        assert len(calls) == 2, "only the plan that was asked for is computed beside the kept ones"


# --- logs -------------------------------------------------------------------------------------------------------------


async def test_logs_of_the_coordinator_and_of_stages(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Logging(PageStage):
        async def logs(self, limit: int) -> list[LogLine] | None:
            return [LogLine(1_000, "warning", "a stage speaks")] if self.n_steps else None

    monkeypatch.setattr(logs, "_RECENT", logs._Recent())
    record = logging.LogRecord("x", logging.WARNING, "", 1, "the link\nbroke", (), None)
    record.fields = {"stage": "desk"}
    logs._RECENT.emit(record)
    for _ in range(2 * bounds.LOG_LINES_KEPT):
        logs._RECENT.emit(logging.LogRecord("x", logging.INFO, "", 1, "y" * 10_000, (), None))
    assert len(logs.recent_lines()) == bounds.LOG_LINES_KEPT
    assert len(logs.recent_lines()[-1].text) == bounds.LOG_LINE_CHARS_MAX
    logs._RECENT.lines.clear()
    logs._RECENT.emit(record)
    async with served(tokenizer, stage=Logging()) as world:
        status, headers, body = await world.get("/v1/pipeline/logs")
        (line,) = json.loads(body)["lines"]
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert (line["level"], line["text"]) == ("warning", "the link\\nbroke stage=desk")
        assert json.loads((await world.get("/v1/pipeline/logs?stage=0"))[2])["lines"][0]["text"] == "a stage speaks"
        status, _, body = await world.get("/v1/pipeline/logs?stage=1")
        assert (status, "stage 1 is not connected now" in json.loads(body)["error"]["message"]) == (503, True)
        for wrong in ("-1", "x", "", "0000"):
            assert (await world.get(f"/v1/pipeline/logs?stage={wrong}"))[0] == 400, wrong
        world.stage.n_steps = 0
        status, _, body = await world.get("/v1/pipeline/logs?stage=0")
        assert (status, "does not answer" in json.loads(body)["error"]["message"]) == (503, True)


async def test_a_key_that_does_not_steer_asks_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("guest: a-key-of-sixteen-chars steers=no\nowner: another-key-of-many-chars\n")
    keys.chmod(0o600)
    steering = [("/v1/pipeline/logs", "GET"), ("/v1/telemetry", "PUT"), ("/v1/requests/x/cancel", "POST")]
    async with served(tokenizer, keys) as world:
        guest, owner = (f"Bearer {key}" for key in ("a-key-of-sixteen-chars", "another-key-of-many-chars"))
        for path, method in steering:
            for spelled in (path, f"{path}/"):
                status, _, _ = await world.get(spelled, method, Authorization=guest)
                assert status in (403, 404, 405), spelled  # never done
            assert (await world.get(path, method, Authorization=guest))[0] == 403
            assert (await world.get(path, method, Authorization=owner))[0] != 403
        for path in ("/v1/pipeline/live", "/v1/pipeline/plan"):
            assert (await world.get(path, Authorization=guest))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "is_one"),
    [
        ("PUT", "/v1/pipeline/layers", True),
        ("PUT", "//v1/pipeline//stages/x/", True),
        ("POST", "/v1/pipeline/invitations", True),
        ("POST", "/v1/requests/x/cancel", True),
        ("PUT", "/v1/telemetry", True),
        ("POST", "/sleep", True),
        ("POST", "/wake_up", True),
        ("GET", "/is_sleeping", False),
        ("GET", "/v1/pipeline/logs/", True),
        ("GET", "/v1/pipeline/live", False),
        ("GET", "/v1/telemetry", False),
        ("POST", "/v1/chat/completions", False),
        ("DELETE", "/v1/responses/x", False),
    ],
)
def test_a_gateway_knows_the_routes_that_steer(method: str, path: str, is_one: bool) -> None:
    assert is_steering(method, path) is is_one


async def test_strangers_and_those_without_a_key_change_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    changes = {"/v1/requests/x/cancel": "POST", "/v1/telemetry": "PUT", "/v1/pipeline/layers": "PUT"}
    async with served(tokenizer) as world:
        for path, method in changes.items():
            assert (await world.get(path, method, Origin="http://evil.example"))[0] == 403
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-sixteen-chars")
    keys.chmod(0o600)
    async with served(tokenizer, keys) as world:
        for path, method in changes.items():
            assert (await world.get(path, method))[0] == 401
