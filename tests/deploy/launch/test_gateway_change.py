"""A gateway's manifest compared with the running one: changes while it serves, and changes that need a restart."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from relayline.deploy.cli.top_gateway import figures_of, gateway_frame
from relayline.deploy.cli.unequal import gateway_lines
from relayline.deploy.launch.board import Board, unlike_manifest
from relayline.deploy.launch.gateway import keeper as keeper_module
from relayline.deploy.launch.gateway.change import (
    AS_BEFORE,
    OTHERS_SERVE,
    GatewayDifference,
    difference,
    join_ports,
    restarting,
)
from relayline.deploy.launch.gateway.keeper import Keeper, _Kept
from relayline.deploy.launch.gateway.plan import GatewayPlan, Started, plan_members
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.process_id import ProcessId
from relayline.deploy.launch.state import STATE_VERSION, LaunchState, ProcessRecord, StateDir
from relayline.deploy.manifest.gateway import GatewayManifest, load_gateway, write_gateway
from relayline.deploy.manifest.load import load_manifest
from relayline.deploy.manifest.model import JOIN_PORT
from relayline.wire.common.errors import StartError
from relayline.wire.common.phase import HostState, Phase

HEAD = "apiVersion: relayline.dev/v1alpha1\nkind: Gateway\nmetadata: {name: house}\nspec:\n"
PIPELINE = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: inner}
spec:
  model: {path: model.gguf}
  coordinator: {host: 10.0.0.1}
  stages: [{name: far, host: 10.0.0.2}]
"""
RUNNING = """  pipelines:
  - {name: a, manifest: inner.yaml, replicas: [{url: 'http://h:1'}]}
  - {name: b, manifest: b.yaml}
"""


def manifest(directory: Path, spec: str = RUNNING) -> GatewayManifest:
    path = directory / "house.yaml"
    path.write_text(HEAD + spec)
    for name in ("inner.yaml", "b.yaml"):
        (directory / name).write_text(PIPELINE)
    return load_gateway(path)


def shown(differs: GatewayDifference) -> tuple[str, str]:
    return differs.words, ",".join(differs.others)


@pytest.mark.parametrize(
    ("spec", "words", "others"),
    [
        (RUNNING, "another order", ""),
        (RUNNING + "  - {name: c, url: 'http://h:3'}\n", "added c", ""),
        ("  pipelines: [{name: b, manifest: b.yaml}]\n", "removed a, a-2", ""),
        (RUNNING.replace("h:1", "h:2"), "changed a-2", ""),
        (RUNNING.replace("b.yaml", "inner.yaml"), "changed b", ""),
        (RUNNING.replace("{url: 'http://h:1'}", "{stages: [{name: x}]}"), "changed a-2", ""),
        (RUNNING + "  http: {port: 81}\n  allowHosts: [x]\n", "another order", "allowHosts,http.port"),
        (RUNNING + "  awakeMax: 1\n", "another order", "awakeMax"),
        (RUNNING + "  apiKeysFile: keys\n", "another order", "apiKeysFile"),
    ],
)
def test_differences_of_two_gateway_manifests_are_found(tmp_path: Path, spec: str, words: str, others: str) -> None:
    running = manifest(tmp_path)
    differs = difference(running, manifest(tmp_path, spec))
    assert shown(differs) == (words, others)
    assert not differs.is_reordered
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    write_gateway(running, kept / "manifest.json")
    again = difference(load_gateway(kept / "manifest.json"), manifest(tmp_path, spec))
    assert shown(again) == (words, others), "paths in full mean the same from anywhere"


def test_another_order_and_a_pipeline_that_failed_before(tmp_path: Path) -> None:
    running = manifest(tmp_path)
    turned = manifest(tmp_path, "  pipelines:\n  - {name: b, manifest: b.yaml}\n" + RUNNING.splitlines(True)[1])
    assert difference(running, turned).is_reordered
    assert difference(running, turned).changes_members
    assert not difference(running, running).changes_members
    failed = difference(running, running, {"b"})
    assert [member.name for member in failed.retried] == ["b"], "`up` again tries it again"
    assert (failed.words, failed.added, failed.staying[0].name) == ("tried again b", (), "a")
    gone = difference(running, manifest(tmp_path, RUNNING.splitlines(True)[0] + RUNNING.splitlines(True)[1]), {"b"})
    assert [member.name for member in gone.removed] == ["b"], "it may serve as before, and its process is still listed"


def test_one_more_pipeline_over_hosts_gets_its_own_ports(tmp_path: Path) -> None:
    wanted, started = manifest(tmp_path), Started("house", tmp_path / "state")
    first, elsewhere, second = plan_members(wanted, started, wanted.members())
    assert elsewhere.local is None
    assert first.local is not None
    assert second.local is not None
    assert f'"coordinator.joinPort": {JOIN_PORT}' in first.local.arguments[first.local.arguments.index("--change") + 1]
    place = started.state_of("a").manifest
    place.parent.mkdir(parents=True)
    ports = {"coordinator.joinPort": JOIN_PORT, "coordinator.enrolPort": 9}
    place.write_text(
        override(load_manifest(tmp_path / "inner.yaml"), ports).model_dump_json(by_alias=True, exclude_none=True)
    )
    assert join_ports(started, ["a", "b"]) == {"a": (JOIN_PORT, 9)}, "b has not begun"
    taken = {JOIN_PORT}
    (later,) = plan_members(wanted, started, wanted.members()[2:], taken)
    assert later.local is not None
    assert f'"coordinator.joinPort": {JOIN_PORT + 100}' in "".join(later.local.arguments)
    assert str(started.state_of("b").path) in later.local.arguments


def test_one_that_starts_again_keeps_the_ports_that_other_hosts_know(tmp_path: Path) -> None:
    wanted, started = manifest(tmp_path), Started("house", tmp_path / "state")
    (again,) = plan_members(wanted, started, wanted.members()[2:], {50_150, 50_250}, {"b": (50_150, 50_149)})
    assert again.local is not None
    assert '"coordinator.joinPort": 50150, "coordinator.enrolPort": 50149' in "".join(again.local.arguments)


def test_pipelines_that_stay_and_were_started_here_are_restarted(tmp_path: Path) -> None:
    running = manifest(tmp_path)
    differs = difference(running, manifest(tmp_path, RUNNING.replace("b.yaml", "inner.yaml")))
    directory = StateDir(tmp_path)
    assert restarting(directory, differs) == []
    directory.restart.write_text('["a", "a-2", "b", "c"]')
    assert [member.name for member in restarting(directory, differs)] == ["a"]
    directory.restart.write_text("[")
    assert restarting(directory, differs) == []


def test_pipelines_that_a_roll_did_not_reach_differ_from_the_manifest() -> None:
    records = (
        ProcessRecord("house-a", "pipeline", "localhost", HostState.READY),
        ProcessRecord("house-b", "pipeline", "localhost", HostState.READY, is_behind=True),
        ProcessRecord("house-c", "pipeline", "localhost", HostState.FAILED),
    )
    state = LaunchState(STATE_VERSION, "house", "", Phase.READY, 1, 1, processes=records)
    assert unlike_manifest(state) == {"b", "c"}, "also where `up --name` gave the gateway its name"


def test_a_gateways_pipelines_are_listed() -> None:
    def one(name: str, sent: int, phase: str = "ready", problem: str = "") -> dict[str, object]:
        counts = {"running": 2, "others": 1, "lanes": 4, "work_tokens": 9, "sent": sent}
        return {"name": name, "phase": phase, "problem": problem, "models": ["m"], "url": "http://h:1", **counts}

    before = {"phase": "ready", "running": 1, "pipelines": [one("a", 10), one("b", 50)]}
    after = {"phase": "ready", "running": 3, "pipelines": [one("a", 14), one("b", 1), one("c", 7, "dead", "it is off")]}
    figures = figures_of(before, after, 2.0)
    assert [each["sent_per_s"] for each in figures["pipelines"]] == [2.0, 0, 0], "b was replaced, c has just come"
    assert gateway_lines([one("a", 1), one("bb", 1, "dead", "it is off")]) == [
        "a   ready  serves m, 3 running, http://h:1",
        "bb  dead (it is off)  serves m, 3 running, http://h:1",
    ]


async def test_reports_that_nobody_reads_end_a_start_but_no_gateway_that_serves() -> None:
    def nobody_reads(_: dict[str, Any]) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    kept: Any = SimpleNamespace(child=SimpleNamespace(name="one", pid=1), first=first, at_start=True)
    keeper: Any = SimpleNamespace(board=mock.MagicMock(), _emit=nobody_reads)
    with pytest.raises(BrokenPipeError):
        Keeper._serves(keeper, kept, {"url": "http://h:1"})
    kept.at_start = False  # it came while others serve
    Keeper._serves(keeper, kept, {"url": "http://h:1"})
    assert first.done()
    kept.at_start = True
    Keeper._serves(keeper, kept, {"url": "http://h:2"})


@pytest.mark.parametrize("awake_max", [0, 1])
async def test_a_pipeline_that_cannot_start_leaves_the_others_alone_from_the_first_start(awake_max: int) -> None:
    told: list[dict[str, Any]] = []
    one, bad = (SimpleNamespace(member=name) for name in ("one", "bad"))
    keeper: Any = Keeper.__new__(Keeper)
    keeper._emit, keeper._served, keeper._retire = told.append, mock.Mock(), mock.AsyncMock()
    config = SimpleNamespace(awake_max=awake_max, backends=("one", "bad"))
    keeper._plan = SimpleNamespace(pipelines=(bad, one), config=config)
    answers: dict[str, dict[str, Any] | StartError] = {"one": {"model": "m"}, "bad": StartError("bad: no such file")}

    async def begin(pipeline: Any, *, at_start: bool) -> dict[str, Any]:
        assert at_start
        if isinstance(found := answers[pipeline.member], StartError):
            raise found
        return found

    keeper._begin = begin
    assert await keeper._begin_all() == [{"model": "m"}]
    assert [event["message"] for event in told] == [f"bad: no such file. {OTHERS_SERVE}"]
    keeper._served.leave.assert_called_once_with("bad")
    answers["one"] = StartError("one: no such file")
    with pytest.raises(StartError, match="bad: no such file"):
        await keeper._begin_all()


@pytest.mark.parametrize("was_running", [True, False])
async def test_a_pipeline_that_starts_as_it_was_before_ends_a_roll(was_running: bool) -> None:
    keeper: Any = Keeper.__new__(Keeper)
    keeper.board, keeper._retire, keeper._kept = mock.MagicMock(), mock.AsyncMock(), {"a": 1} if was_running else {}
    served = mock.Mock(add=mock.AsyncMock(), until_ready=mock.AsyncMock(return_value=True))
    keeper._begin = mock.AsyncMock(return_value={"url": "http://h:1", "as_before": "too large"})
    planned: Any = SimpleNamespace(backend=SimpleNamespace(name="a"), local=SimpleNamespace(name="house-a"))
    assert not await keeper._renew(served, planned)
    keeper._begin.assert_awaited_once_with(planned.local, at_start=False, is_again=was_running)
    keeper._begin.return_value = {"url": "http://h:1"}
    assert await keeper._renew(served, planned)


async def test_one_that_is_tried_again_keeps_the_ports_that_other_hosts_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves as before, and its hosts have joined."""
    running, asked = manifest(tmp_path), list[tuple[list[str], dict[str, Any]]]()
    keeper: Any = Keeper.__new__(Keeper)
    keeper._plan = GatewayPlan(tmp_path, mock.Mock(), (), running, Started("house", tmp_path / "state"))
    keeper._directory, keeper._kept, keeper.board = StateDir(tmp_path), {"b": mock.Mock()}, mock.MagicMock()
    keeper.board.unlike_manifest.return_value = {"b"}
    write_gateway(running, keeper._directory.more)

    def planned(_wanted: Any, _started: Any, members: Any, _taken: Any, keep: Any) -> list[Any]:
        asked.append(([member.name for member in members], keep))
        return []

    monkeypatch.setattr(keeper_module, "plan_members", planned)
    monkeypatch.setattr(keeper_module, "join_ports", lambda *_: {"b": (50_150, 50_149)})
    await keeper._change(mock.Mock())
    assert asked == [(["b"], {"b": (50_150, 50_149)})]


async def test_what_serves_as_before_differs_from_its_manifest() -> None:
    first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    kept: Any = SimpleNamespace(child=SimpleNamespace(name="one", pid=1), first=first, at_start=False)
    keeper: Any = SimpleNamespace(board=mock.MagicMock(), _emit=mock.Mock())
    facts = {"state": HostState.READY, "address": "http://h:1"}
    Keeper._serves(keeper, kept, {"url": "http://h:1", "as_before": "too large"})
    keeper.board.set_process.assert_called_with("one", **facts, detail=f"{AS_BEFORE}too large", is_behind=True)
    Keeper._serves(keeper, kept, {"url": "http://h:1"})
    keeper.board.set_process.assert_called_with("one", **facts, detail="", is_behind=False)


async def test_the_gateway_shows_a_key_of_the_manifest_that_serves(tmp_path: Path) -> None:
    """A pipeline that could not start with another file of keys serves as before, and knows those of before alone."""
    keeper: Any = Keeper.__new__(Keeper)
    keeper.board, keeper._stopping = mock.MagicMock(), asyncio.Event()
    keeper._plan = SimpleNamespace(started=Started("house", tmp_path / "state"))
    keeper._served = mock.MagicMock()
    first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    ready.set_result({"url": "http://h:1", "as_before": "too large"})
    kept = _Kept("a", mock.MagicMock(start=mock.AsyncMock(), ready=ready), first, at_start=False)
    assert await keeper._started(kept) == ready.result(), "the manifest that serves is not there"
    keeper._served.set_key.assert_not_called()
    (tmp_path / "before").write_text("of-before\n")
    place = keeper._plan.started.state_of("a").manifest
    place.parent.mkdir(parents=True)
    (tmp_path / "inner.yaml").write_text(PIPELINE)
    serves = override(load_manifest(tmp_path / "inner.yaml"), {"coordinator.apiKeysFile": str(tmp_path / "before")})
    place.write_text(serves.model_dump_json(by_alias=True, exclude_none=True))
    assert await keeper._started(kept) == ready.result()
    keeper._served.set_key.assert_called_once_with("a", "of-before")


async def test_a_pipeline_that_dies_starts_as_it_was_if_its_manifest_has_a_mistake_by_then() -> None:
    keeper: Any = Keeper.__new__(Keeper)
    keeper.board, keeper._stopping, keeper._serves = mock.MagicMock(), asyncio.Event(), mock.Mock()
    first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    first.set_result({})
    child = mock.MagicMock(arguments=("up", "chat.yaml"), exited=asyncio.Event(), exit_code=-9)
    child.exited.set()
    kept = _Kept("one", child, first, at_start=True)
    begun: list[tuple[str, ...]] = []

    async def started(_: _Kept) -> dict[str, Any]:
        begun.append(child.arguments)
        if len(begun) == 3:
            kept.ending.set()
        return {}

    keeper._started = started
    with mock.patch("relayline.deploy.launch.gateway.keeper.RestartHistory.died", return_value=0.0):
        await keeper._keep(kept)
    assert begun == [("up", "chat.yaml"), *[("up", "chat.yaml", "--or-before")] * 2]


async def test_a_pipeline_that_waits_to_start_again_is_removed_at_once() -> None:
    """Its process has died, and would be started again in half a second or more."""
    keeper: Any = Keeper.__new__(Keeper)
    keeper.board, keeper._stopping = mock.MagicMock(), asyncio.Event()
    waits = asyncio.Event()
    keeper.board.note_end = lambda _, state, **__: waits.set() if state is HostState.RESTARTING else None
    child = mock.MagicMock(exited=asyncio.Event(), exit_code=1, stop=mock.AsyncMock())
    child.exited.set()
    child.cause_of_death.return_value = "one exited with code 1"
    first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    first.set_result({})
    kept = _Kept("one", child, first, at_start=False)
    keeper._started = mock.AsyncMock(return_value=None)
    with mock.patch("relayline.deploy.launch.gateway.keeper.RestartHistory.died", return_value=3_600.0):
        kept.task = asyncio.create_task(keeper._guarded(kept))
        async with asyncio.timeout(20):
            await waits.wait()
            await keeper._end(kept)
    assert kept.task.done()
    assert keeper._started.await_count == 1


async def test_the_gateway_ends_once_no_pipeline_is_left(tmp_path: Path) -> None:
    keeper: Any = Keeper.__new__(Keeper)
    keeper._plan = SimpleNamespace(
        manifest=manifest(tmp_path, RUNNING.replace(", replicas: [{url: 'http://h:1'}]", ""))
    )
    keeper._plan.name, keeper._failed = "house", asyncio.get_running_loop().create_future()
    records = [ProcessRecord(f"house-{name}", "pipeline", "localhost", HostState.READY) for name in "ab"]
    keeper.board = Board(StateDir(tmp_path), "house", "house.yaml", ProcessId(1, 1), tuple(records))
    for name in "ab":
        assert not keeper._failed.done(), "others serve"
        first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        first.set_result({})
        kept: Any = SimpleNamespace(child=SimpleNamespace(name=f"house-{name}"), first=first)
        Keeper._give_up(keeper, kept, StartError(f"house-{name} died 6 times in a row"))
        assert keeper.board[f"house-{name}"].detail == f"house-{name} died 6 times in a row"
    with pytest.raises(StartError, match="house-b died 6 times"):
        keeper._failed.result()


def test_names_states_and_counts_are_whole_at_40_columns() -> None:
    counts = {"running": 12, "others": 0, "lanes": 128, "work_tokens": 0, "sent": 1, "problem": "", "url": "http://h:1"}
    listed = [{"name": "replica-2", "phase": "unreachable", "models": ["m"], "waiting": 0, **counts}]
    whole = {"phase": "ready", "running": 0, "waiting": 0, "pipelines": listed}
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(gateway_frame("http://h", figures_of(whole, whole, 1.0), 40))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["pipeline", "state", "running", "lanes"] in lines
    assert ["replica-2", "unreachable", "12", "128"] in lines


def test_those_that_sleep_and_requests_that_wait_for_them_are_shown() -> None:
    counts = {"running": 0, "others": 0, "lanes": 4, "work_tokens": 0, "sent": 1, "problem": "", "url": "http://h:1"}
    listed = [
        {"name": "a", "phase": "ready", "models": ["m"], "waiting": 0, **counts},
        {"name": "b", "phase": "sleeping", "models": ["s"], "waiting": 2, **counts},
    ]
    whole = {"phase": "ready", "running": 0, "waiting": 2, "pipelines": listed}
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(gateway_frame("http://h", figures_of(whole, whole, 1.0), 140))
    assert "0 running, 2 waiting, 1 of 2 pipelines ready, 1 asleep" in console.export_text()
    assert gateway_lines(listed) == [
        "a  ready     serves m, 0 running, http://h:1",
        "b  sleeping  serves s, 0 running, 2 waiting, http://h:1",
    ]


async def test_a_full_disk_keeps_the_gateway_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = manifest(tmp_path)
    keeper: Any = Keeper.__new__(Keeper)
    plan = GatewayPlan(tmp_path, mock.Mock(), (), running, Started("house", tmp_path / "state"))
    keeper._plan, keeper._directory, keeper._kept = plan, StateDir(tmp_path), {}
    keeper.board = mock.MagicMock(unlike_manifest=lambda: frozenset())
    keeper.board.has.return_value = False
    write_gateway(manifest(tmp_path, RUNNING + "  - {name: c, manifest: b.yaml}\n"), keeper._directory.more)
    monkeypatch.setattr(keeper_module, "write_gateway", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        await keeper._change(mock.Mock())
    assert keeper._plan is plan, "the next `up` finds the same difference"
    keeper.board.add.assert_not_called()
