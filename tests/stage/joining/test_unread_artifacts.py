"""Goal: layers that only the hub has reach a stage's disk as others do, and are known again by their own hash."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relayline.coordinator.joining import artifact_reader
from relayline.coordinator.joining.artifact_reader import CHUNK_BYTES, CHUNKS_AHEAD, read_unread
from relayline.coordinator.joining.config import OpenUnread
from relayline.coordinator.model.pipeline_file import PipelineFile, StageFile
from relayline.stage.engine import place
from relayline.stage.engine.loading import Load
from relayline.stage.joining import artifact_fetch, survivors
from relayline.stage.joining.artifact_fetch import obtain
from relayline.stage.joining.artifact_store import Slot, Writer, cached
from relayline.stage.joining.client import Member, introduction
from relayline.wire.common.errors import ArtifactError, HandshakeError, InternalError, NotReadyError, RelaylineError
from relayline.wire.common.file_hash import noted_sha256
from relayline.wire.common.phase import HostState
from relayline.wire.links.security import PLAINTEXT
from tests.support.join_support import content, join_port

WAIT_S = 30
PIECE_BYTES = 100_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No waiting between attempts, and no memory of files that other tests hashed."""
    monkeypatch.setattr(artifact_fetch, "RETRY_FIRST_S", 0.0)
    monkeypatch.setattr(artifact_fetch, "RETRY_MAX_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


class FakeHub:
    """Has the content of both stages; `spoil` may raise before a piece of a fetch, by its number and offset."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.spoil: Callable[[int, int], None] = lambda n_fetch, offset: None

    def open(
        self, file: PipelineFile, stage: StageFile, offset: int, end: int, stopped: threading.Event
    ) -> Iterator[bytes | memoryview]:
        n_fetch, data = len(self.offsets), content(stage.index)
        self.offsets.append(offset)
        for start in range(offset, end, PIECE_BYTES):
            self.spoil(n_fetch, start)
            yield memoryview(data)[start : start + PIECE_BYTES]


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


async def fetched(split: Path, cache: Path, opened: OpenUnread | None, *, always_fetch: bool = True) -> Path:
    async with asyncio.timeout(WAIT_S), join_port(split, unread=True, open_unread=opened) as port:
        member = await port.join()
        try:
            return (await obtain(member, cache, Load(), always_fetch=always_fetch)).artifact
        finally:
            await member.close()


async def test_layers_are_fetched_once_and_known_by_their_own_hash(tmp_path: Path, hub: FakeHub) -> None:
    for always_fetch in (True, False):
        path = await fetched(tmp_path / "split", tmp_path / "cache", hub.open, always_fetch=always_fetch)
        assert path.read_bytes() == content(0)
        assert path.parent.parent == tmp_path / "cache", "not the file of the split, which is hollow"
        assert noted_sha256(path) == hashlib.sha256(content(0)).hexdigest() != path.parent.name
    assert hub.offsets == [0]
    assert [(entry.file, entry.is_whole) for entry in cached(tmp_path / "cache")] == [("stage-0.gguf", True)]


@pytest.mark.parametrize("damage", ["content", "length", "no hash"])
async def test_a_file_that_changed_in_the_cache_is_fetched_again(tmp_path: Path, hub: FakeHub, damage: str) -> None:
    path = await fetched(tmp_path / "split", tmp_path / "cache", hub.open)
    match damage:
        case "content":
            path.write_bytes(content(0)[:-1] + b"x")
        case "length":
            path.write_bytes(content(0)[:-1])
        case "no hash":
            path.with_name("stage-0.gguf.sha256").unlink()
    assert (await fetched(tmp_path / "split", tmp_path / "cache", hub.open)).read_bytes() == content(0)
    assert hub.offsets == [0, 0]


async def test_a_break_goes_on_where_it_was(tmp_path: Path, hub: FakeHub) -> None:
    def spoil(n_fetch: int, offset: int) -> None:
        if n_fetch < 2 and offset >= (n_fetch + 1) * 3 * CHUNK_BYTES:
            raise NotReadyError("the hub cannot be reached")

    hub.spoil = spoil
    assert (await fetched(tmp_path / "split", tmp_path / "cache", hub.open)).read_bytes() == content(0)
    assert [offset % CHUNK_BYTES for offset in hub.offsets] == [0, 0, 0]
    assert hub.offsets == sorted(set(hub.offsets))


async def test_a_hub_that_stalls_is_told_until_bytes_come(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last attempt goes on where the first one ended; in between nothing comes."""
    monkeypatch.setattr(artifact_fetch, "REPORT_EVERY_S", 0.0)
    reason = "hf://org/repo/far.gguf: the hub cannot be reached: " + ", ".join(["timed out"] * 20)

    def spoil(n_fetch: int, offset: int) -> None:
        if n_fetch < 3 and offset >= 3 * CHUNK_BYTES:
            raise NotReadyError(reason)

    hub.spoil, seen = spoil, []
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split", unread=True, open_unread=hub.open) as port:
        port.roster.on_change = lambda place: seen.append((place.state, place.done_bytes > 0, place.trouble))
        member = await port.join()
        await obtain(member, tmp_path / "cache", Load(), always_fetch=True)
        await member.close()
    of_fetch = [found for state, *found in seen if state is HostState.FETCHING]
    told = [key for key, _ in itertools.groupby(map(tuple, of_fetch))]
    assert told == [(False, ""), (True, ""), (True, reason), (True, "")]


@pytest.mark.parametrize("is_up_since", [True, False], ids=["killed", "power cut"])
async def test_only_bytes_that_survived_are_kept(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, *, is_up_since: bool
) -> None:
    monkeypatch.setattr(survivors, "SYNC_BYTES", 2 * PIECE_BYTES)
    monkeypatch.setattr(place, "BOOT_ID", tmp_path / "boot")
    (tmp_path / "boot").write_text("first\n")
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split", unread=True, open_unread=hub.open) as port:
        member = await port.join()
        slot = Slot(tmp_path / "cache", member.order.artifact)
        await member.close()
    slot.prepare(b"{}")
    writer = Writer(slot, Load())
    for start in range(0, 5 * PIECE_BYTES, PIECE_BYTES):
        writer.append(start, content(0)[start : start + PIECE_BYTES])
    writer.close()  # then it is killed, or the power fails
    if not is_up_since:
        (tmp_path / "boot").write_text("second\n")
        with slot.partial.open("r+b") as file:
            file.seek(4 * PIECE_BYTES)
            file.write(bytes(PIECE_BYTES))
    path = await fetched(tmp_path / "split", tmp_path / "cache", hub.open)
    assert path.read_bytes() == content(0)
    assert hub.offsets == [(5 if is_up_since else 4) * PIECE_BYTES]
    assert sorted(each.name for each in path.parent.iterdir() if "partial" in each.name) == []


@pytest.mark.parametrize("note", ["", "no number", None])
async def test_a_part_without_a_good_note_is_fetched_again(tmp_path: Path, hub: FakeHub, note: str | None) -> None:
    path = await fetched(tmp_path / "split", tmp_path / "cache", hub.open)
    partial = path.with_name(f"{path.name}.partial")
    path.unlink()
    partial.write_bytes(bytes(5 * PIECE_BYTES))
    if note is not None:
        partial.with_name(f"{partial.name}.synced").write_text(note)
    assert (await fetched(tmp_path / "split", tmp_path / "cache", hub.open)).read_bytes() == content(0)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ArtifactError("hf://org/repo: it is gone"), "it is gone"),
        (ValueError("a bug"), "could not read the artifact from the hub"),
    ],
)
async def test_a_refusal_of_the_hub_is_said_to_the_stage(
    tmp_path: Path, hub: FakeHub, raised: Exception, said: str
) -> None:
    def spoil(n_fetch: int, offset: int) -> None:
        raise raised

    hub.spoil = spoil
    with pytest.raises((ArtifactError, InternalError), match=said):
        await fetched(tmp_path / "split", tmp_path / "cache", hub.open)


async def test_a_coordinator_that_does_not_know_the_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="weights of this split are on the hub; give the coordinator its manifest"):
        await fetched(tmp_path / "split", tmp_path / "cache", None)


async def test_a_stage_of_an_older_version_is_refused(tmp_path: Path, hub: FakeHub) -> None:
    hello = introduction("box1", "p1")
    hello.takes_unread = False
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split", unread=True, open_unread=hub.open) as port:
        with pytest.raises(HandshakeError, match=r"box1: its version cannot fetch layers that the hub has; upgrade it"):
            await Member.join(port.address, PLAINTEXT, hello)
        member = await port.join()
        await member.close()


async def test_an_order_says_that_nobody_has_read_the_bytes(tmp_path: Path, hub: FakeHub) -> None:
    async with asyncio.timeout(WAIT_S), join_port(tmp_path / "split", unread=True, open_unread=hub.open) as port:
        member = await port.join()
        assert (member.order.artifact.unread, member.order.artifact.path) == (True, "")
        slot = Slot(tmp_path / "cache", member.order.artifact)
        assert slot.directory.name != hashlib.sha256(content(0)).hexdigest()
        await member.close()


# --- the reader alone -------------------------------------------------------------------------------------------------


async def test_a_reader_that_ends_early_is_an_error() -> None:
    chunks = read_unread(lambda stopped: iter([b"abc"]), 10, 20)
    assert await anext(chunks) == (10, b"abc")
    with pytest.raises(ArtifactError, match="ended after 13 of 20 bytes"):
        await anext(chunks)


async def test_bytes_before_an_error_arrive() -> None:
    def reader(stopped: threading.Event) -> Iterator[bytes]:
        yield bytes(CHUNK_BYTES)
        raise NotReadyError("broken")

    chunks = read_unread(reader, 0, 2 * CHUNK_BYTES)
    assert await anext(chunks) == (0, bytes(CHUNK_BYTES))
    with pytest.raises(RelaylineError, match="broken"):
        await anext(chunks)


class EndlessReader:
    """Reads chunks of zeros until it is stopped."""

    def __init__(self) -> None:
        self.n_read, self.ended = 0, threading.Event()

    def __call__(self, stopped: threading.Event) -> Iterator[bytes]:
        try:
            while not stopped.is_set():
                self.n_read += 1
                yield bytes(CHUNK_BYTES)
        finally:
            self.ended.set()


async def test_a_slow_stage_holds_few_chunks_and_one_that_leaves_ends_the_reader() -> None:
    reader = EndlessReader()
    chunks = read_unread(reader, 0, 1_000 * CHUNK_BYTES)
    for _ in range(3):
        await anext(chunks)
    while reader.n_read < 3 + CHUNKS_AHEAD:  # noqa: ASYNC110 - the reader's thread tells nobody
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert reader.n_read <= 3 + CHUNKS_AHEAD + 2
    await chunks.aclose()
    assert await asyncio.to_thread(reader.ended.wait, WAIT_S)


def test_a_coordinator_that_ends_says_nothing_of_readers_that_wait_for_room(caplog: pytest.LogCaptureFixture) -> None:
    reader = EndlessReader()

    async def main() -> None:
        await anext(chunks)
        while reader.n_read < 1 + CHUNKS_AHEAD + 1:  # noqa: ASYNC110 - the reader's thread tells nobody
            await asyncio.sleep(0)
        while len(asyncio.all_tasks()) < 2:  # noqa: ASYNC110 - its put has not begun
            await asyncio.sleep(0)

    chunks = read_unread(reader, 0, 1_000 * CHUNK_BYTES)
    asyncio.run(main())  # which cancels what runs at its end
    assert reader.ended.wait(WAIT_S)
    assert [record.message for record in caplog.records if record.name.startswith("relayline")] == []


def test_pieces_of_any_size_become_chunks() -> None:
    pieces = [b"", b"a" * 5, memoryview(b"b" * (2 * CHUNK_BYTES)), b"c"]
    found = list(artifact_reader._chunks(iter(pieces)))
    assert list(map(len, found)) == [CHUNK_BYTES, CHUNK_BYTES, 6]
    assert b"".join(found) == b"".join(map(bytes, pieces))
