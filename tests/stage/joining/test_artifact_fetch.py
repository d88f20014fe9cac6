"""Goal: an artifact gets onto the disk whole and correct or not at all, and no byte is fetched twice without need."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import hashlib
import logging
import multiprocessing
import os
import resource
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.joining import service as join_service
from relayline.coordinator.joining.artifact_reader import CHUNK_BYTES, read_chunks
from relayline.stage.engine.loading import Load
from relayline.stage.joining import artifact_fetch, artifact_store
from relayline.stage.joining.artifact_fetch import obtain
from relayline.stage.joining.artifact_store import USED, Slot, Writer, cached
from relayline.stage.joining.client import Member
from relayline.stage.joining.config import JoinConfig
from relayline.wire.common.errors import ArtifactError, ProtocolError, StageLostError, StartError
from relayline.wire.common.units import bytes_text
from relayline.wire.model_files.adapters import Adapter
from relayline.wire.model_files.eagle3 import Drafter, InnerRows
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from tests.support.join_support import content, join_port

WAIT_S = 30
Chunks = AsyncGenerator[tuple[int, bytes], None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No waiting between attempts, and no memory of files that other tests hashed."""
    monkeypatch.setattr(artifact_fetch, "RETRY_FIRST_S", 0.0)
    monkeypatch.setattr(artifact_fetch, "RETRY_MAX_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


class Reads:
    """A fake reader of the coordinator's artifacts: records every offset, and lets a test spoil a fetch."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.spoil: Callable[[int, int, bytes], bytes] = lambda n_fetch, offset, data: data

    async def __call__(self, path: Path, offset: int, size_bytes: int, end: int = 0) -> Chunks:
        n_fetch = len(self.offsets)
        self.offsets.append(offset)
        async for at, data in read_chunks(path, offset, size_bytes, end):
            yield at, self.spoil(n_fetch, at, data)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    spy = Reads()
    monkeypatch.setattr(join_service, "read_chunks", spy)
    return spy


async def fetched(split: Path, cache: Path, name: str = "box1") -> Path:
    """Join over a fresh port and obtain the artifact."""
    async with asyncio.timeout(WAIT_S), join_port(split) as port:
        member = await port.join(name, name)
        try:
            return (await obtain(member, cache, Load(), always_fetch=True)).artifact
        finally:
            await member.close()


async def test_an_empty_cache_is_filled_once(tmp_path: Path, reads: Reads) -> None:
    for _ in range(2):
        path = await fetched(tmp_path / "split", tmp_path / "cache")
        assert path.read_bytes() == content(0)
        assert (path.parent / "pipeline.json").read_bytes() == (tmp_path / "split" / "pipeline.json").read_bytes()
        assert not list(path.parent.glob("*.partial"))
    assert reads.offsets == [0]


async def test_two_stages_fetch_at_once_into_one_cache(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split") as port:
        members = [await port.join(name, name) for name in ("box1", "box2")]
        found = await asyncio.gather(
            *(obtain(member, tmp_path / "cache", Load(), always_fetch=True) for member in members)
        )
        assert [files.artifact.read_bytes() for files in found] == [content(0), content(1)]
        for member in members:
            await member.close()


async def test_a_cut_in_the_middle_goes_on_where_it_was(tmp_path: Path, reads: Reads) -> None:
    def cut(n_fetch: int, offset: int, data: bytes) -> bytes:
        if n_fetch < 2 and offset >= (n_fetch + 1) * 4 * CHUNK_BYTES:
            raise StageLostError("placed fault")
        return data

    reads.spoil = cut
    path = await fetched(tmp_path / "split", tmp_path / "cache")
    assert path.read_bytes() == content(0)
    assert reads.offsets == [0, 4 * CHUNK_BYTES, 8 * CHUNK_BYTES]


async def test_a_new_process_goes_on_where_the_old_one_was(tmp_path: Path, reads: Reads) -> None:
    order = (await _order(tmp_path / "split")).artifact
    slot = Slot(tmp_path / "cache", order)
    slot.prepare(b"{}")
    slot.partial.write_bytes(content(0)[:1_500_000])
    path = await fetched(tmp_path / "split", tmp_path / "cache")
    assert path.read_bytes() == content(0)
    assert reads.offsets == [1_500_000]


async def _order(split: Path) -> pb.JoinResponse:
    async with join_port(split) as port:
        member = await port.join()
        await member.close()
        return member.order


async def test_damaged_bytes_are_refused_and_fetched_again(
    tmp_path: Path, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    reads.spoil = lambda n_fetch, offset, data: bytes(len(data)) if n_fetch == 0 and offset else data
    path = await fetched(tmp_path / "split", tmp_path / "cache")
    assert path.read_bytes() == content(0)
    assert reads.offsets == [0, 0], "damaged bytes are not built upon"
    assert "came damaged" in caplog.text


async def test_a_damaged_partial_file_costs_one_fetch(tmp_path: Path, reads: Reads) -> None:
    slot = Slot(tmp_path / "cache", (await _order(tmp_path / "split")).artifact)
    slot.prepare(b"{}")
    slot.partial.write_bytes(bytes(1_000))
    path = await fetched(tmp_path / "split", tmp_path / "cache")
    assert path.read_bytes() == content(0)
    assert reads.offsets == [1_000, 0]


async def test_a_partial_file_that_is_too_long_begins_again(tmp_path: Path, reads: Reads) -> None:
    slot = Slot(tmp_path / "cache", (await _order(tmp_path / "split")).artifact)
    slot.prepare(b"{}")
    slot.partial.write_bytes(content(0) + b"more")
    assert (await fetched(tmp_path / "split", tmp_path / "cache")).read_bytes() == content(0)
    assert reads.offsets == [0]


async def test_a_full_disk_keeps_no_stage_out_that_has_its_artifact(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await fetched(tmp_path / "split", tmp_path / "cache")

    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(artifact_store, "write_again", full)
    os.utime(path.parent / "pipeline.json", (0, 0))
    assert await fetched(tmp_path / "split", tmp_path / "cache") == path
    assert (path.parent / "pipeline.json").stat().st_mtime > 0, "it was used now"
    assert reads.offsets == [0]
    (path.parent / "pipeline.json").write_text("{}")
    with pytest.raises(StartError, match="cannot be written: No space left on device"):
        await fetched(tmp_path / "split", tmp_path / "cache")


async def test_a_read_only_disk_keeps_no_stage_out_that_has_its_artifact(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    path = await fetched(tmp_path / "split", cache)
    adapter = Slot(cache, (await _order(tmp_path / "split")).artifact)
    adapter.prepare()
    open_handle, open_file = os.open, Path.open

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def opened_handle(name: Any, flags: int, *mode: int) -> int:
        if Path(name).is_relative_to(cache) and flags & os.O_RDWR:
            refuse()
        return open_handle(name, flags, *mode)

    def opened(name: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return refuse() if name.is_relative_to(cache) and mode == "a+b" else open_file(name, mode, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", opened_handle)
        patched.setattr(Path, "open", opened)
        patched.setattr(Path, "touch", refuse)
        patched.setattr(os, "utime", refuse)
        assert await fetched(tmp_path / "split", cache) == path
        adapter.prepare()
        path.unlink()
        with pytest.raises(StartError) as refused:
            await fetched(tmp_path / "split", cache)
    assert refused.value.message == (
        f"{cache}: Read-only file system; stage-0.gguf cannot be put there; give another directory with --cache"
    )
    assert reads.offsets == [0]


async def test_a_cache_of_another_user_is_one_line_that_asks_for_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root leaves it: what is there can be read, and its lock cannot be written."""
    cache, open_handle = tmp_path / "cache", os.open
    path = await fetched(tmp_path / "split", cache)

    def opened(name: Any, flags: int, *mode: int) -> int:
        if Path(name) == path.parent / "lock":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return open_handle(name, flags, *mode)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(StartError) as refused:
        await fetched(tmp_path / "split", cache)
    assert refused.value.message == (
        f"{cache}: Permission denied; stage-0.gguf cannot be put there; give another directory with --cache"
    )


async def test_a_disk_that_fills_up_meanwhile_is_one_line_and_keeps_what_came(tmp_path: Path, reads: Reads) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(n_fetch: int, offset: int, data: bytes) -> bytes:
        if n_fetch == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK_BYTES, limit[1]))
        return data

    reads.spoil = fill
    try:
        with pytest.raises(StartError) as refused:
            await fetched(tmp_path / "split", tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    missing = bytes_text(len(content(0)) - 2 * CHUNK_BYTES)
    assert refused.value.message.startswith(f"{tmp_path}/cache: File too large; stage-0.gguf needs {missing} more; ")
    assert (await fetched(tmp_path / "split", tmp_path / "cache")).read_bytes() == content(0)
    assert reads.offsets == [0, 2 * CHUNK_BYTES]


async def test_a_file_altered_in_the_cache_is_fetched_again(tmp_path: Path, reads: Reads) -> None:
    path = await fetched(tmp_path / "split", tmp_path / "cache")
    damaged = bytearray(content(0))
    damaged[1_000] ^= 1
    path.write_bytes(damaged)
    assert (await fetched(tmp_path / "split", tmp_path / "cache")).read_bytes() == content(0)
    assert reads.offsets == [0, 0]


async def test_an_artifact_that_always_comes_damaged_is_given_up(tmp_path: Path, reads: Reads) -> None:
    reads.spoil = lambda n_fetch, offset, data: bytes(len(data))
    with pytest.raises(ArtifactError, match="came damaged"):
        await fetched(tmp_path / "split", tmp_path / "cache")
    assert reads.offsets == [0] * artifact_fetch.DAMAGED_MAX
    assert not list((tmp_path / "cache").rglob("*.partial"))
    assert not list((tmp_path / "cache").rglob("*.gguf"))


async def test_a_fetch_that_brings_nothing_is_given_up(tmp_path: Path, reads: Reads) -> None:
    def never(n_fetch: int, offset: int, data: bytes) -> bytes:
        raise StageLostError("placed fault")

    reads.spoil = never
    with pytest.raises(StageLostError, match="placed fault"):
        await fetched(tmp_path / "split", tmp_path / "cache")
    assert len(reads.offsets) == artifact_fetch.FRUITLESS_ATTEMPTS_MAX


async def test_bytes_for_another_place_are_refused(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "cache", (await _order(tmp_path / "split")).artifact)
    slot.prepare(b"{}")
    writer = Writer(slot, Load())
    writer.append(0, b"abc")
    for offset, data in ((0, b"x"), (4, b"x"), (3, bytes(slot.artifact.size_bytes))):
        with pytest.raises(ProtocolError, match="was next"):
            writer.append(offset, data)
    writer.close()
    assert slot.partial.read_bytes() == b"abc"


async def test_a_full_disk_is_said_before_a_byte_is_fetched(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    needs = r"needs \d+\.\d [KM]iB more and 64\.0 MiB to spare; free space there or give another .* --cache"
    with pytest.raises(StartError, match=rf" has 976\.6 KiB free, and \S+ {needs}$"):
        await fetched(tmp_path / "split", tmp_path / "cache")
    assert reads.offsets == []


async def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(StartError, match="give another with --cache"):
        await fetched(tmp_path / "split", tmp_path / "cache")


async def test_the_coordinators_own_file_is_used_where_it_is_seen(tmp_path: Path, reads: Reads) -> None:
    split = tmp_path / "split"
    async with asyncio.timeout(WAIT_S), join_port(split) as port:
        member = await port.join()
        path = (await obtain(member, tmp_path / "cache", Load(), always_fetch=False)).artifact
        assert path == split.resolve() / "stage-0.gguf"
        assert reads.offsets == []
        path.write_bytes(bytes(path.stat().st_size))  # another file under that path, of the same size
        member.order.artifact.path = str(path)
        with pytest.raises(ArtifactError, match="came damaged"):
            await obtain(member, tmp_path / "cache", Load(), always_fetch=False)
        assert len(reads.offsets) == artifact_fetch.DAMAGED_MAX, "a file that is not the right one is not used"
        await member.close()


@pytest.mark.parametrize(
    ("file", "sha256"),
    [("../stage.gguf", "0" * 64), ("", "0" * 64), (".hidden", "0" * 64), ("a/b", "0" * 64), ("stage.gguf", "../" * 21),
     ("stage.gguf", "F" * 64), ("stage.gguf", "")],
)  # fmt: skip
def test_an_order_cannot_lead_out_of_the_cache(tmp_path: Path, file: str, sha256: str) -> None:
    with pytest.raises(ProtocolError, match="not a valid name"):
        Slot(tmp_path, pb.ArtifactFile(file=file, sha256=sha256))


def _hold(cache: Path, artifact: bytes, held: object, let_go: object) -> None:
    slot = Slot(cache, pb.ArtifactFile.FromString(artifact))
    assert slot.try_lock()
    held.set()  # type: ignore[attr-defined]
    let_go.wait(WAIT_S)  # type: ignore[attr-defined]


async def test_two_processes_do_not_write_one_file(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(artifact_fetch, "LOCK_LOOK_S", 0.01)
    artifact = (await _order(tmp_path / "split")).artifact
    Slot(tmp_path / "cache", artifact).prepare(b"{}")
    context = multiprocessing.get_context("spawn")
    held, let_go = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "cache", artifact.SerializeToString(), held, let_go))
    other.start()
    await asyncio.to_thread(held.wait, WAIT_S)
    waiting = asyncio.create_task(fetched(tmp_path / "split", tmp_path / "cache"))
    async with asyncio.timeout(WAIT_S):
        while "another process already fetches" not in caplog.text:  # noqa: ASYNC110 - its log line is the event
            await asyncio.sleep(0)
    assert reads.offsets == []
    let_go.set()
    assert (await waiting).read_bytes() == content(0)
    await asyncio.to_thread(other.join, WAIT_S)
    assert other.exitcode == 0


async def test_the_end_of_the_membership_ends_the_fetch_and_keeps_the_bytes(tmp_path: Path, reads: Reads) -> None:
    stuck = asyncio.Event()

    async def hold(path: Path, offset: int, size_bytes: int, end: int = 0) -> Chunks:
        async for piece in read_chunks(path, offset, size_bytes, end):
            yield piece
            stuck.set()
            await asyncio.Event().wait()

    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split") as port:
        member: Member = await port.join()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(join_service, "read_chunks", hold)
            getting = asyncio.create_task(obtain(member, tmp_path / "cache", Load(), always_fetch=True))
            await stuck.wait()
            slot = Slot(tmp_path / "cache", member.order.artifact)
            second = await port.join()  # the same process, so the first membership ends
            await member.lost
        getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)
        assert slot.partial_bytes() <= CHUNK_BYTES
        files = await obtain(second, tmp_path / "cache", Load(), always_fetch=True)
        assert files.artifact.read_bytes() == content(0)
        await member.close()
        await second.close()


async def test_adapters_of_the_order_are_fetched_too_and_once(tmp_path: Path, reads: Reads) -> None:
    path = tmp_path / "lora.gguf"
    path.write_bytes(content(7))
    adapter = Adapter("sql", path, 0.1, hashlib.sha256(content(7)).hexdigest(), path.stat().st_size)
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split", adapters=(adapter,)) as port:
        for always_fetch, is_cached in ((True, True), (True, True), (False, False)):
            member = await port.join()
            files = await obtain(member, tmp_path / "cache", Load(), always_fetch=always_fetch)
            (found,) = files.adapters
            assert (found.path == path) is not is_cached, "the coordinator's own file is used where it is seen"
            assert found.path.read_bytes() == content(7)
            assert dataclasses.replace(found, path=path) == adapter
            await member.close()
    assert reads.offsets == [0, 0], "the artifact and the adapter, each once"
    assert {entry.file for entry in cached(tmp_path / "cache")} == {"stage-0.gguf", "lora.gguf"}
    asked, used = (tmp_path / "cache" / adapter.sha256 / name for name in ("lora.gguf", USED))
    assert used.stat().st_mtime_ns > asked.stat().st_mtime_ns, "the file's own time says when it was fetched"


async def test_the_last_stages_draft_model_is_fetched_too(tmp_path: Path) -> None:
    path = tmp_path / "eagle.gguf"
    path.write_bytes(content(7))
    drafter = Drafter(path, (1, 2, 4), path.stat().st_size, hashlib.sha256(content(7)).hexdigest())
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split", drafter=drafter) as port:
        for name, fetched in (("box1", None), ("box2", content(7))):
            member = await port.join(name)
            files = await obtain(member, tmp_path / "cache", Load(), always_fetch=True)
            assert (files.drafter and files.drafter.read_bytes()) == fetched
            joining = JoinConfig(port.address, name, tmp_path / "cache")
            config = joining.ordered(member.order, files.artifact, (), "127.0.0.1", drafter=files.drafter)
            assert config.inner == InnerRows((1, 2, 4), files.drafter)
            await member.close()


async def test_an_adapter_that_arrives_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lora.gguf"
    path.write_bytes(content(7))
    adapter = Adapter("sql", path, 1.0, "0" * 64, path.stat().st_size)
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split", adapters=(adapter,)) as port:
        member = await port.join()
        with pytest.raises(ArtifactError, match=r"lora.gguf came damaged"):
            await obtain(member, tmp_path / "cache", Load(), always_fetch=True)
        await member.close()
