"""Goal: the join port admits the right stages, gives each its own order, and serves only that stage's file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining import service as join_service
from relayline.coordinator.joining.artifact_reader import read_chunks
from relayline.coordinator.joining.config import engine_message
from relayline.coordinator.relay.child import RelayChild
from relayline.stage.joining.client import FETCH, JOIN, Member
from relayline.wire.common.errors import (
    ArtifactError,
    NotReadyError,
    PlaceTakenError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    StaleEpochError,
    UsageError,
    VersionError,
)
from relayline.wire.links import rpc
from relayline.wire.model_files.eagle3 import Drafter
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.settings.table import EngineSettings
from tests.support.join_support import JoinPort, content, join_port

WAIT_S = 60


@pytest_asyncio.fixture
async def port(tmp_path: Path) -> AsyncIterator[JoinPort]:
    async with join_port(tmp_path / "split") as running:
        yield running


async def read_all(member: Member, offset: int = 0) -> bytes:
    return b"".join([chunk.data async for chunk in member.fetch(offset)])


async def until_missing(roster: JoinedRoster, names: list[str]) -> None:
    """Wait until exactly these are missing; every turn lets the port's own tasks run."""
    async with asyncio.timeout(WAIT_S):
        while roster.missing() != names:  # noqa: ASYNC110 - the roster tells nobody but the pipeline
            await asyncio.sleep(0)


async def test_a_stages_order_has_all_it_needs(port: JoinPort, tmp_path: Path) -> None:
    member = await port.join("box2")
    order = member.order
    assert (order.stage_index, order.stage_count, order.pipeline_id) == (1, 2, "a-pipeline")
    assert (order.artifact.file, order.artifact.size_bytes) == ("stage-1.gguf", len(content(1)))
    assert Path(order.artifact.path) == (tmp_path / "split" / "stage-1.gguf").resolve()
    assert order.pipeline_json == (tmp_path / "split" / "pipeline.json").read_bytes()
    assert order.engine == engine_message(port.config.stages[1].engine)
    await member.close()


async def test_only_the_last_stage_hears_of_prediction_layers(tmp_path: Path) -> None:
    """Releases without the setting refuse an order that has it."""
    async with asyncio.timeout(60), join_port(tmp_path / "split", EngineSettings(mtp_drafts=2)) as port:
        members = [await port.join(name, name) for name in ("box1", "box2")]
        assert [member.order.engine.more.get("mtp_drafts", "") for member in members] == ["", "2"]
        for member in members:
            await member.close()


async def test_all_stages_hear_of_inner_rows_and_the_last_one_gets_the_draft_model(tmp_path: Path) -> None:
    path = tmp_path / "eagle.gguf"
    path.write_bytes(content(7))
    drafter = Drafter(path, (1, 2, 4), len(content(7)), "7" * 64)
    async with asyncio.timeout(60), join_port(tmp_path / "split", drafter=drafter) as port:
        members = [await port.join(name, name) for name in ("box1", "box2")]
        assert [list(member.order.drafter.layers) for member in members] == [[1, 2, 4]] * 2
        assert [member.order.drafter.file.path for member in members] == ["", str(path)]
        chunks = [chunk.data async for chunk in members[1].fetch(0, "7" * 64)]
        assert b"".join(chunks) == content(7)
        for member in members:
            await member.close()


async def test_the_pipeline_is_whole_when_all_have_reported(port: JoinPort) -> None:
    whole = asyncio.create_task(port.roster.present())
    members = [await port.join(name, name) for name in ("box1", "box2")]
    for index, member in enumerate(members):
        assert not whole.done()
        host = "" if index else "box1.example"
        await member.report(serving=pb.StageServing(host=host, port=5_000 + index, instance_id=f"engine-{index}"))
    async with asyncio.timeout(WAIT_S):
        assert await whole == ("box1.example:5000", "127.0.0.1:5001")
    assert port.roster.missing() == []
    for member in members:
        await member.close()


@pytest.mark.parametrize(("failure", "kind"), [("", NotReadyError), ("no memory", StageLostError)])
async def test_a_member_that_leaves_ends_the_epoch_and_accuses_nobody_unless_it_failed(
    port: JoinPort, failure: str, kind: type[RelaylineError]
) -> None:
    lost: asyncio.Queue[RelaylineError] = asyncio.Queue()
    port.roster.watch(lost.put_nowait)
    member = await port.join()
    await member.report(serving=pb.StageServing(port=5_000, instance_id="engine"))
    await until_missing(port.roster, ["box2"])
    assert lost.empty()
    if failure:
        await member.report(failure=pb.StageFailure(message=failure))
    await member.close()
    async with asyncio.timeout(WAIT_S):
        error = await lost.get()
    assert type(error) is kind
    assert error.retryable
    assert "box1 left" in error.message
    assert port.roster.missing() == ["box1", "box2"]


async def test_another_engine_at_the_same_member_ends_the_epoch_and_the_same_one_does_not(port: JoinPort) -> None:
    lost: asyncio.Queue[RelaylineError] = asyncio.Queue()
    port.roster.watch(lost.put_nowait)
    member = await port.join()
    for instance in ("engine-1", "engine-1", "engine-2"):
        await member.report(serving=pb.StageServing(port=5_000, instance_id=instance))
    async with asyncio.timeout(WAIT_S):
        assert "serves at another address" in (await lost.get()).message
    assert lost.empty()
    await member.close()


async def test_a_stage_that_loads_again_is_missing_meanwhile(port: JoinPort) -> None:
    member = await port.join()
    await member.report(serving=pb.StageServing(port=5_000, instance_id="engine"))
    await until_missing(port.roster, ["box2"])
    await member.report_progress(pb.ARTIFACT_PHASE_LOADING, 1, 1)
    await until_missing(port.roster, ["box1", "box2"])
    await member.report(serving=pb.StageServing(port=5_000, instance_id="engine"))
    await until_missing(port.roster, ["box2"])
    await member.close()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"name": "box9"}, UsageError, "its stages are box1, box2"),
        ({"protocol_version": 99, "software_version": "9.9"}, VersionError, r"relayline 9\.9\) speaks protocol 99"),
    ],
)
async def test_a_misfit_is_refused_in_words(
    port: JoinPort, changes: dict[str, object], error: type[RelaylineError], words: str
) -> None:
    with pytest.raises(error, match=words):
        await port.join(**changes)  # type: ignore[arg-type]


async def test_a_place_is_given_to_another_process_only_once_it_is_free(port: JoinPort) -> None:
    first = await port.join(process_id="first")
    with pytest.raises(PlaceTakenError, match="already here"):
        await port.join(process_id="second")
    await first.close()
    second = await port.join(process_id="second")
    await second.close()


async def test_a_process_that_comes_again_replaces_its_older_membership(port: JoinPort) -> None:
    first = await port.join()
    second = await port.join()
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await first.lost, StaleEpochError)
    with pytest.raises(StaleEpochError, match="ticket"):
        await read_all(first)
    assert await read_all(second) == content(0)
    await first.close()
    await second.close()


async def test_members_are_notified_when_the_coordinator_ends(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        async with join_port(tmp_path / "split") as port:
            member = await port.join()
        assert isinstance(await member.lost, NotReadyError)
        await member.close()


# --- artifacts --------------------------------------------------------------------------------------------------------


async def test_each_stage_gets_its_own_file_from_any_offset(port: JoinPort) -> None:
    members = [await port.join(name, name) for name in ("box1", "box2")]
    assert await asyncio.gather(*(read_all(member) for member in members)) == [content(0), content(1)]
    assert await read_all(members[1], 1_234_567) == content(1)[1_234_567:]
    assert await read_all(members[1], len(content(1))) == b""
    with pytest.raises(ArtifactError, match="beyond"):
        await read_all(members[1], len(content(1)) + 1)
    for member in members:
        await member.close()


async def test_a_non_member_is_served_nothing(port: JoinPort) -> None:
    member = await port.join()
    for ticket in (b"", b"x" * 16, member.order.ticket[:-1], b"../../stage-1.gguf"):
        member.order.ticket, ticket = ticket, member.order.ticket
        with pytest.raises(StaleEpochError, match="no member"):
            await read_all(member)
        member.order.ticket = ticket
    await member.close()
    again = await port.join(process_id="p2")
    again.order.ticket = member.order.ticket
    with pytest.raises(StaleEpochError, match="no member"):
        await read_all(again)
    await again.close()


async def test_a_member_fetches_once_at_a_time_and_all_together_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    go_on = asyncio.Event()

    async def held(path: Path, offset: int, size_bytes: int, end: int = 0) -> AsyncGenerator[tuple[int, bytes], None]:
        opened.append(path.name)
        async for piece in read_chunks(path, offset, size_bytes, end):
            yield piece
            await go_on.wait()

    monkeypatch.setattr(join_service, "read_chunks", held)
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split", fetches_max=1) as port:
        one, other = await port.join("box1", "a"), await port.join("box2", "b")
        slow = one.fetch(0)
        first = await anext(slow)
        with pytest.raises(NotReadyError, match="already being sent"):
            await read_all(one)
        both = {asyncio.create_task(read_all(other)) for _ in range(2)}
        (refused,), (waiting,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(refused.exception(), NotReadyError)  # so the other one is in line by now
        assert opened == ["stage-0.gguf"]
        go_on.set()
        assert first.data + b"".join([chunk.data async for chunk in slow]) == content(0)
        assert await waiting == content(1)
        assert opened == ["stage-0.gguf", "stage-1.gguf"]
        await one.close()
        await other.close()


@pytest.mark.parametrize("damage", ["missing", "longer"])
async def test_a_file_that_changed_behind_the_coordinator_is_not_sent(
    port: JoinPort, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "split" / "stage-0.gguf"
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes() + b"x")
    member = await port.join()
    with pytest.raises(ArtifactError, match=r"stage-0\.gguf"):
        await read_all(member)
    await member.close()


# --- requests that no stage of ours would send ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([b"\xff\xff"], "cannot be read"),
        ([b""], "must be an introduction"),
        ([pb.JoinRequest(serving=pb.StageServing(port=1)).SerializeToString()], "must be an introduction"),
    ],
)
async def test_nonsense_ends_one_call_only(port: JoinPort, messages: list[bytes], words: str) -> None:
    async with rpc.open_channel(port.address) as channel:
        call = channel.stream_stream(JOIN, request_serializer=None, response_deserializer=None)()
        for message in messages:
            await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        error = rpc.typed(failure.value, "x")
        assert isinstance(error, ProtocolError)
        assert words in error.message
    member = await port.join()
    await member.close()


@pytest.mark.parametrize(
    "report",
    [
        pb.JoinRequest(),
        pb.JoinRequest(hello=pb.StageHello(name="box1")),
        pb.JoinRequest(serving=pb.StageServing(port=0)),
        pb.JoinRequest(serving=pb.StageServing(port=70_000)),
        pb.JoinRequest(progress=pb.ArtifactProgress()),
    ],
)
async def test_a_member_that_reports_nonsense_loses_its_place(port: JoinPort, report: pb.JoinRequest) -> None:
    member = await port.join()
    await member._call.write(report.SerializeToString())
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await member.lost, ProtocolError)
    await member.close()
    assert port.roster.missing() == ["box1", "box2"]


async def test_fetch_needs_a_ticket_and_takes_no_names(port: JoinPort) -> None:
    assert [field.name for field in pb.FetchRequest.DESCRIPTOR.fields] == ["ticket", "offset", "sha256", "end"]
    async with rpc.open_channel(port.address) as channel:
        call = channel.unary_stream(FETCH)(pb.FetchRequest().SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
        assert isinstance(rpc.typed(failure.value, "x"), StaleEpochError)


async def test_a_relayed_stage_is_not_believed_where_it_is_reached(
    port: JoinPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tunnels_end(self: RelayChild) -> int:
        return 7_000

    monkeypatch.setattr(RelayChild, "port", tunnels_end)
    monkeypatch.setattr(RelayChild, "figures", lambda self: {"box1": {"port": 5_000}})
    monkeypatch.setattr("relayline.coordinator.relay.child.FIGURES_S", 0.05)
    member = await port.join(is_relayed=True)
    await member.report(serving=pb.StageServing(host="127.0.0.1", port=6_000, instance_id="engine"))
    async with asyncio.timeout(WAIT_S):
        assert "reached at port 6000, but the relay has port 5000" in (await member.lost).message
    assert port.roster.missing() == ["box1", "box2"]
    await member.close()
