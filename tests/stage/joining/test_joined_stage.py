"""Goal: a joining stage loads its ordered layers once, keeps them while the order stays, and reports why if it cannot.

The engine is a fake; tests/end_to_end/test_join.py has real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relayline.coordinator.engine.membership import Introduction
from relayline.coordinator.joining import service as join_service
from relayline.coordinator.joining.config import JoinConfig, JoiningStage
from relayline.coordinator.joining.port import make_roster, serve_joining
from relayline.deploy.machine.ports import free_port
from relayline.stage.config import StageConfig
from relayline.stage.engine.loading import TELL_EVERY_S, WEIGHTS, Load
from relayline.stage.joining import artifact_fetch, attempts, join
from relayline.stage.joining import config as stage_config
from relayline.stage.joining.artifact_fetch import Files
from relayline.stage.joining.client import introduction
from relayline.stage.joining.config import JoinConfig as StageJoinConfig
from relayline.stage.joining.config import facing
from relayline.stage.joining.join import JoinedStage
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    ArtifactError,
    NativeError,
    PlaceTakenError,
    StageLostError,
    StaleEpochError,
    StartError,
    UsageError,
)
from relayline.wire.common.process import first_of
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.settings.table import EngineSettings
from tests.support.join_support import NAMES, JoinPort, content, join_port, write_split
from tests.support.polling import pause

WAIT_S = 20


async def _nothing_to_drop() -> None:
    """No slice was prepared."""


class _Served(SimpleNamespace):
    """The handle of a port; a cycle of references, as a real one with its engine is."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts, service=self)


class Engines:
    """A fake stage.process.serve_changing: records loads, and can crash."""

    def __init__(self) -> None:
        self.loaded: list[StageConfig] = []
        self.like: list[Any] = []  # the curves that each was to begin with
        self.is_used = False  # by another coordinator
        self.on_look: Callable[[], None] = lambda: None  # called when the stage looks whether it is
        self.handle: weakref.ref[_Served] | None = None  # the latest
        self.serving = asyncio.Event()
        self.ended = asyncio.Event()
        self.pipeline_id = "a-pipeline"
        self.load: Callable[[Load], None] = lambda load: None
        self.crashed: asyncio.Future[None]

    def _is_used_beside(self, route_id: int) -> bool:
        self.on_look()
        return self.is_used

    @contextlib.asynccontextmanager
    async def serve_changing(self, config: StageConfig, load: Load, like: Any = None) -> AsyncIterator[Any]:
        self.loaded.append(config)
        self.like.append(like)
        self.crashed = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(self.load, load)
        index = int(config.artifact.stem.split("-")[1])
        artifact = SimpleNamespace(pipeline_id=self.pipeline_id, stage_index=index)
        self.serving.set()
        try:
            made = _Served(
                address=f"127.0.0.1:{6_000 + index}",
                facts=SimpleNamespace(artifact=artifact, instance_id=f"e{len(self.loaded)}", curves="learned"),
                is_used_beside=self._is_used_beside,
                crashed=self.crashed,
                drop=_nothing_to_drop,
            )
            self.handle = weakref.ref(made)
            yield made
        finally:
            self.serving.clear()
            self.ended.set()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engines:
    made = Engines()
    monkeypatch.setattr(join, "serve_changing", made.serve_changing)
    monkeypatch.setattr(attempts, "REJOIN_FIRST_S", 0.01)
    monkeypatch.setattr(attempts, "REJOIN_MAX_S", 0.05)
    monkeypatch.setattr(artifact_fetch, "RETRY_FIRST_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    return made


def config(address: str, tmp_path: Path, **more: Any) -> StageJoinConfig:
    return StageJoinConfig(address, "box1", tmp_path / "cache", **more)


class Living:
    """One joined stage running as a task."""

    def __init__(self, address: str, tmp_path: Path, **more: Any) -> None:
        self.stopping = asyncio.Event()
        self.ready: list[str] = []
        stage = JoinedStage(config(address, tmp_path, **more), lambda address, facts: self.ready.append(address))
        self.task = asyncio.create_task(stage.run(self.stopping))

    async def stop(self) -> None:
        self.stopping.set()
        await self.task


@contextlib.asynccontextmanager
async def coordinator(split: Path, engine: EngineSettings, port: int = 0) -> AsyncIterator[JoinPort]:
    """A join port whose order says this engine; another one may follow at its port."""
    settings = JoinConfig(tuple(JoiningStage(name, engine) for name in NAMES), port=port or free_port())
    roster = make_roster(settings)
    async with serve_joining(settings, split, write_split(split), roster, PLAINTEXT) as (address, _):
        yield JoinPort(address, roster, settings)


async def serves(port: JoinPort, engines: Engines) -> None:
    """Wait until the coordinator knows that box1 serves."""
    await engines.serving.wait()
    while "box1" in port.roster.missing():  # noqa: ASYNC110 - the roster tells nobody but the pipeline
        await asyncio.sleep(0)


async def test_the_order_becomes_the_engine(tmp_path: Path, engines: Engines) -> None:
    order = EngineSettings(ctx_tokens=64, n_lanes=3, n_threads=2, gpu_layers=-1, max_rows=32, prefill_rows=16,
                        kv_type="q8_0", kv_layout="per-lane", policy="drain", calibrate=False)  # fmt: skip
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", order) as port:
        stage = Living(port.address, tmp_path)
        await serves(port, engines)
        (loaded,) = engines.loaded
        assert loaded.engine == order
        assert loaded.artifact == (tmp_path / "split" / "stage-0.gguf").resolve(), "the shared path was seen"
        assert stage.ready == ["127.0.0.1:6000"]
        await stage.stop()
    assert engines.ended.is_set()


async def test_a_stage_that_loads_says_how_far_it_is_and_can_be_stopped(tmp_path: Path, engines: Engines) -> None:
    now_s = itertools.count(step=TELL_EVERY_S)

    def endless(load: Load) -> None:
        load._clock_s = lambda: next(now_s)
        while True:
            load.at(WEIGHTS, 0.5)

    engines.load = endless
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", EngineSettings()) as port:
        stage = Living(port.address, tmp_path)
        while not (entry := port.roster.describe()[0]).get("loaded_bytes"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (entry["state"], entry["load_total_bytes"]) == ("loading", len(content(0)))
        assert entry["loaded_bytes"] == len(content(0)) // 2
        await stage.stop()
        while port.roster.describe()[0]["state"] != "lost":  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert stage.ready == []


async def test_threads_of_this_host_win_over_the_order(tmp_path: Path, engines: Engines) -> None:
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", EngineSettings(n_threads=7)) as port:
        stage = Living(port.address, tmp_path, own_settings={"n_threads": 1})
        await serves(port, engines)
        assert engines.loaded[0].engine.n_threads == 1
        await stage.stop()


async def test_a_restarted_coordinator_with_the_same_order_loads_nothing_again(
    tmp_path: Path, engines: Engines
) -> None:
    async with asyncio.timeout(WAIT_S):
        async with coordinator(tmp_path / "split", EngineSettings(ctx_tokens=64)) as port:
            stage = Living(port.address, tmp_path)
            await serves(port, engines)
            number = int(port.address.rpartition(":")[2])
        async with coordinator(tmp_path / "split", EngineSettings(ctx_tokens=64), number) as port:
            await serves(port, engines)
            assert len(engines.loaded) == 1
        async with coordinator(tmp_path / "split", EngineSettings(ctx_tokens=128), number) as port:
            await engines.ended.wait()
            await serves(port, engines)
            assert [loaded.engine.ctx_tokens for loaded in engines.loaded] == [64, 128]
            await stage.stop()


async def test_a_coordinator_that_stops_in_order_costs_one_line_and_no_warning(
    tmp_path: Path, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with asyncio.timeout(WAIT_S):
        async with coordinator(tmp_path / "split", EngineSettings()) as port:
            stage = Living(port.address, tmp_path)
            await serves(port, engines)
        lines = ("membership ended", "cannot join yet", "stage left")
        while not all(line in caplog.text for line in lines):  # noqa: ASYNC110 - its log lines are the events
            await asyncio.sleep(0)
        shown = [each.message for each in caplog.records if each.levelno >= logging.INFO]
        assert [line for line in shown if line.startswith(lines)] == [
            "membership ended: the coordinator is shutting down; joining again once it is back"
        ]
        assert [each.message for each in caplog.records if each.levelno > logging.INFO] == []
        await stage.stop()


@pytest.mark.parametrize(
    ("error", "message"),
    [(NativeError("the GPU fell off the bus"), "the GPU fell off the bus"), (KeyError("a bug"), "KeyError: 'a bug'")],
)
async def test_a_crash_is_reported_and_ends_the_stage(
    error: Exception, message: str, tmp_path: Path, engines: Engines
) -> None:
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", EngineSettings()) as port:
        stage = Living(port.address, tmp_path)
        await serves(port, engines)
        engines.crashed.set_exception(error)
        with pytest.raises(type(error)):
            await stage.task
        while "failure" not in (entry := port.roster.describe()[0]):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert entry["failure"] == message


async def test_an_artifact_of_another_split_is_not_served(tmp_path: Path, engines: Engines) -> None:
    engines.pipeline_id = "another"
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", EngineSettings()) as port:
        stage = Living(port.address, tmp_path)
        with pytest.raises(ArtifactError, match="not the artifact"):
            await stage.task
        assert "box1" in port.roster.missing()


async def test_an_order_that_no_stage_can_follow_is_refused(tmp_path: Path, engines: Engines) -> None:
    order = EngineSettings()
    object.__setattr__(order, "kv_type", "q3")  # as of a coordinator with another table
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", order) as port:
        stage = Living(port.address, tmp_path)
        with pytest.raises(UsageError, match="q3"):
            await stage.task
        assert engines.loaded == []


async def test_a_place_that_stays_taken_is_given_up(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempts, "PLACE_TAKEN_MAX_S", 0.1)
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split") as port:
        holder = await port.join()
        with pytest.raises(PlaceTakenError, match="already here"):
            await Living(port.address, tmp_path).task
        assert caplog.text.count("cannot join yet") == 1, "the same reason is logged once"
        await holder.close()


@pytest.mark.parametrize("newer", [1, -1], ids=["older stage", "newer stage"])
async def test_a_stage_of_another_protocol_waits_says_so_once_on_both_sides_and_then_joins(
    newer: int, tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempts, "REJOIN_MAX_S", 0.02)
    hello = introduction("box1", "p1")
    monkeypatch.setattr(join, "introduction", lambda *_, **__: hello)  # its process keeps the version that it has
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split") as port:
        check, n_asked = port.roster.check, itertools.count(1)
        asked_again = asyncio.Event()

        def checked(who: Introduction) -> Any:
            if next(n_asked) == 4:
                asked_again.set()
            return check(who)

        monkeypatch.setattr(port.roster, "check", checked)
        with monkeypatch.context() as other:
            other.setattr(bounds, "PROTOCOL_VERSION", bounds.PROTOCOL_VERSION + newer)  # of the coordinator
            stage = Living(port.address, tmp_path)
            await asked_again.wait()
            for words in ("cannot join yet", "stage refused"):
                logged = [each for each in caplog.records if words in each.getMessage()]
                assert sum(each.levelno >= logging.WARNING for each in logged) == 1, words
        await serves(port, engines)  # the coordinator has been replaced by one of the stage's protocol
        await stage.stop()


async def test_a_place_that_becomes_free_is_taken(
    tmp_path: Path, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split") as port:
        holder = await port.join()
        stage = Living(port.address, tmp_path)
        while "cannot join yet" not in caplog.text:  # noqa: ASYNC110 - its log line is the event
            await asyncio.sleep(0)
        await holder.close()
        await serves(port, engines)
        await stage.stop()


async def test_a_stage_that_waits_for_its_coordinator_can_be_stopped(tmp_path: Path, engines: Engines) -> None:
    async with asyncio.timeout(WAIT_S):
        stage = Living("127.0.0.1:1", tmp_path)
        await asyncio.sleep(0)
        await stage.stop()


async def test_a_cut_while_fetching_goes_on_after_rejoining(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, offsets, cut = join_service.read_chunks, [], asyncio.Event()

    async def held(path: Path, offset: int, size_bytes: int, end: int = 0) -> Any:
        offsets.append(offset)
        async for at, data in real(path, offset, size_bytes):
            if len(offsets) == 1 and at >= 1_000_000:
                cut.set()
                await asyncio.Event().wait()
            yield at, data

    monkeypatch.setattr(join_service, "read_chunks", held)
    async with asyncio.timeout(WAIT_S):
        async with coordinator(tmp_path / "split", EngineSettings()) as port:
            stage = Living(port.address, tmp_path, always_fetch=True)
            await cut.wait()
            partial = tmp_path / "cache"
            while not sum(path.stat().st_size for path in partial.rglob("*.partial")):  # noqa: ASYNC110
                await asyncio.sleep(0)
            number = int(port.address.rpartition(":")[2])
        async with coordinator(tmp_path / "split", EngineSettings(), number) as port:
            await serves(port, engines)
            await stage.stop()
    assert offsets[0] == 0
    assert offsets[1] > 0


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "listens", "reported"),
    [
        ({}, "127.0.0.1", ""),
        ({"host": "127.0.0.7"}, "127.0.0.7", "127.0.0.7"),
        ({"host": "0.0.0.0"}, "0.0.0.0", ""),
        ({"host": "0.0.0.0", "advertise": "box1.example"}, "0.0.0.0", "box1.example"),
        ({"advertise": "fd00::7"}, "127.0.0.1", "fd00::7"),
    ],
)
def test_a_stage_listens_and_reports_as_its_flags_say(
    tmp_path: Path, given: dict[str, str], listens: str, reported: str
) -> None:
    made = config("127.0.0.1:7000", tmp_path, **given)
    assert (made.listen_host(), made.reported_host()) == (listens, reported)


def test_the_side_that_faces_the_coordinator() -> None:
    assert facing("localhost:1") == "127.0.0.1"
    assert facing("127.0.0.9:1") == "127.0.0.1"
    with pytest.raises(StageLostError, match="cannot be found"):
        facing("no-such-host.invalid:1")


async def test_plaintext_beyond_this_machine_is_refused_before_anything_is_fetched(
    tmp_path: Path, engines: Engines
) -> None:
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split") as port:
        with pytest.raises(UsageError, match="TLS"):
            await Living(port.address, tmp_path, host="0.0.0.0").task
        assert port.roster.describe()[0]["state"] == "waiting"
        allowed = Living(port.address, tmp_path, host="0.0.0.0", security=LinkSecurity(insecure=True))
        await serves(port, engines)
        assert port.roster.addresses()[0].startswith("127.0.0.1:"), "a wildcard is reported as the address that is seen"
        await allowed.stop()


@pytest.mark.parametrize("flag", ["--listen", "--metrics"])
async def test_a_taken_port_is_refused_before_anything_is_fetched(
    flag: str, tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metrics port is most often the order's, so that the command line cannot be checked for it."""

    async def obtain(*_: object, **__: object) -> Files:
        raise AssertionError("it fetches")

    monkeypatch.setattr(join, "obtain", obtain)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()
        more = {"host": taken[0], "port": taken[1]} if flag == "--listen" else {}
        metrics = taken if flag == "--metrics" else None

        def adapt(stage: StageConfig, _: object) -> StageConfig:
            return dataclasses.replace(stage, metrics=metrics)

        async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", EngineSettings()) as port:
            joining = config(port.address, tmp_path, always_fetch=True, **more)
            with pytest.raises(
                StartError, match=rf"^{flag}: {taken[0]}:{taken[1]} is taken by another process; end it"
            ):
                await JoinedStage(joining, lambda *_: None, adapt).run(asyncio.Event())
            assert "is taken by another process" in str(port.roster.describe()[0]["failure"])
    assert engines.loaded == []


async def test_the_usual_port_is_looked_for_once_the_layers_are_here(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this stage fetches, for an hour perhaps, another one of its host may take the port and serve."""
    began, port = asyncio.Event(), free_port()
    real = join.obtain

    async def obtain(*arguments: Any, **more: Any) -> Files:
        began.set()
        return await real(*arguments, **more)

    def usual(host: str) -> int:
        assert began.is_set(), "it looks for a port before it fetches"
        return port

    monkeypatch.setattr(join, "obtain", obtain)
    monkeypatch.setattr(stage_config, "usual_port", usual)
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", EngineSettings()) as joins:
        stage = Living(joins.address, tmp_path)
        await first_of(stage.task, serving := asyncio.ensure_future(serves(joins, engines)))
        assert serving.done()
        assert [each.port for each in engines.loaded] == [port]
        await stage.stop()


async def test_a_name_that_cannot_be_resolved_for_a_moment_leads_to_joining_again(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_asked = 0

    def not_at_first(_: str) -> str:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 1:
            raise StageLostError("the coordinator cannot be found")
        return "127.0.0.1"

    monkeypatch.setattr("relayline.stage.joining.config.facing", not_at_first)
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", EngineSettings()) as port:
        stage = Living(port.address, tmp_path)
        await serves(port, engines)
        assert n_asked == 2
        await stage.stop()


async def test_a_stage_whose_host_has_another_address_now_serves_there(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, renewed_at = "127.0.0.1", list[str]()
    monkeypatch.setattr("relayline.stage.joining.config.facing", lambda _: here)
    async with asyncio.timeout(WAIT_S):
        async with coordinator(tmp_path / "split", EngineSettings()) as port:
            stage = Living(port.address, tmp_path, renew=lambda: renewed_at.append(here))
            await serves(port, engines)
            number = int(port.address.rpartition(":")[2])
        here = "127.0.0.2"
        async with coordinator(tmp_path / "split", EngineSettings(), number) as port:
            await engines.ended.wait()
            await serves(port, engines)
            assert [loaded.host for loaded in engines.loaded] == ["127.0.0.1", "127.0.0.2"]
            assert renewed_at == ["127.0.0.1", "127.0.0.2"], "before others connect to it there"
            assert "this machine's address has changed to 127.0.0.2 (it was 127.0.0.1)" in caplog.text
            await stage.stop()


async def test_a_stage_that_runs_for_long_has_its_certificate_renewed(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    def renew() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise StageLostError("the coordinator cannot be reached")

    monkeypatch.setattr(join, "RENEW_LOOK_S", 0.0)
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", EngineSettings()) as port:
        stage = Living(port.address, tmp_path, renew=renew)
        await serves(port, engines)
        while looks < 4:
            await pause()
        assert "cannot be renewed: the coordinator cannot be reached" in caplog.text
        assert len(engines.loaded) == 1, "it serves all the while"
        await stage.stop()


async def test_a_ticket_that_is_void_leads_to_joining_again(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, n_asked = join_service.JoinService._member_of, 0

    def void_once(service: join_service.JoinService, request: Any) -> Any:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 1:
            raise StaleEpochError("the ticket belongs to no member")
        return real(service, request)

    monkeypatch.setattr(join_service.JoinService, "_member_of", void_once)
    async with asyncio.timeout(WAIT_S), coordinator(tmp_path / "split", EngineSettings()) as port:
        stage = Living(port.address, tmp_path, always_fetch=True)
        await serves(port, engines)
        assert n_asked == 2
        await stage.stop()
