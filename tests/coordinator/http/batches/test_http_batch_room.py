"""What uploads and batches may take: nothing of a broken upload stays, and no key shuts the others out."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from relayline.coordinator.batches.lines import SERVED_URLS
from relayline.coordinator.batches.store import BatchStore, Status, StoredBatch, StoredFile, new_id
from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.batches import uploads
from relayline.coordinator.http.batches.room import Room, keep_new, share_of
from relayline.coordinator.http.batches.shapes import file_shape, page_of
from relayline.coordinator.http.edge.errors import HttpRefusal
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.settings.table import ServingSettings
from tests.support.batch_world import Held, begun, ended, request_lines, running, serving_batches
from tests.support.http_support import CREATED, MODEL, WAIT_S, FakeGenerator
from tests.support.openai_client import openai_client
from tests.support.polling import pause

ALICE, BOB = "alice-key-0123456789", "bob-key-012345678901"
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
HEAD = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; '
BODY = HEAD + b'name="file"; filename="a\xff.jsonl"\r\n\r\nhi\r\n--b--\r\n'
FULL = OSError(28, "No space left on device")


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call


async def post(url: str, body: bytes = BODY) -> tuple[int, str]:
    async with aiohttp.ClientSession(headers=FORM) as session, session.post(f"{url}/v1/files", data=body) as response:
        return response.status, await response.text()


async def test_an_upload_that_is_not_kept_leaves_nothing(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_batches(tokenizer, tmp_path) as (url, keeper):
        for error, status, says in ((FULL, 507, "No space left on device"), (RuntimeError("x"), 500, "internal")):
            with monkeypatch.context() as patch:
                patch.setattr(keeper.store, "keep_file", raising(error))
                found, text = await post(url)
            assert (found, says in text) == (status, True), text
            assert (list((tmp_path / "files").iterdir()), keeper.store.n_bytes) == ([], 0)
        status, text = await post(url)
        assert (status, '"filename":"a?.jsonl"' in text) == (200, True), text


async def test_an_upload_whose_client_leaves_leaves_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_batches(tokenizer, tmp_path) as (url, keeper):
        go_on = threading.Event()
        keeper._io.submit(go_on.wait, WAIT_S)
        sending = asyncio.create_task(post(url))
        async with asyncio.timeout(WAIT_S):
            while not keeper._io._work_queue.qsize():
                await pause()
            sending.cancel()
            while keeper._io._work_queue.qsize() < 2:  # what takes it away stands in line too
                await pause()
            go_on.set()
            while list((tmp_path / "files").iterdir()):
                await pause()
        assert keeper.store.files == {}


class Scarce(io.FileIO):
    """Takes a part of what is written, as a disk that is nearly full does, and may have no space at all."""

    is_full = False

    def write(self, data: Any) -> int:
        if self.is_full:
            raise FULL
        return super().write(memoryview(data)[:1_000])


async def test_a_disk_that_is_nearly_full_tears_no_upload(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_create", lambda path: Scarce(path, "xb"))
    async with serving_batches(tokenizer, tmp_path) as (url, keeper), openai_client(url) as client:
        file = await client.files.create(file=("in", b"x" * 4_321), purpose="batch")
        assert (await client.files.content(file.id)).content == b"x" * 4_321
        monkeypatch.setattr(Scarce, "is_full", True)
        assert await post(url) == (507, (await post(url))[1])
        monkeypatch.setattr(keeper.store, "keep_batch", raising(FULL))
        with pytest.raises(openai.APIStatusError, match="No space left on device") as found:
            await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert found.value.status_code == 507
        monkeypatch.setattr(keeper.store, "delete_file", raising(FULL))
        with pytest.raises(openai.APIStatusError, match="No space left on device"):
            await client.files.delete(file.id)


def test_uploads_that_are_under_way_count(tmp_path: Path) -> None:
    store, room, limits = BatchStore(tmp_path), Room(), ServingSettings(batch_disk_bytes=1_000, batch_files=20)
    with room.taking(store, limits, "", 900) as first, room.taking(store, limits, "", None) as second:
        assert (first, second) == (1_000, 100)
        with (
            pytest.raises(InvalidRequestError, match="on their way have 1000 bytes"),
            room.taking(store, limits, "", 1),
        ):
            pass
    with room.taking(store, limits, "", None) as again:
        assert again == 1_000
    taken = [room.taking(store, limits, "", 1) for _ in range(8)]
    for each in taken:
        each.__enter__()
    with pytest.raises(HttpRefusal, match="8 files are being received"), room.taking(store, limits, "", 1):
        pass
    store.close()


def test_there_is_always_room_for_one_more_key() -> None:
    n_left = 1_000
    for _ in range(5):
        n_left -= share_of(1_000, 1_000 - n_left, "a key")
    assert n_left > 30
    assert (share_of(1, 0, "a key"), share_of(10, 4, "")) == (1, 6)


async def test_no_key_takes_the_place_of_anothers_files_and_batches(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {ALICE}\nbob: {BOB}\n")
    keys.chmod(0o600)
    generator = FakeGenerator()
    settings = {"batch_files": 8, "batch_disk_bytes": 4_000}
    async with (
        serving_batches(tokenizer, tmp_path / "kept", generator, keys=keys, **settings) as (url, _),
        openai_client(url, ALICE) as alice,
        openai_client(url, BOB) as bob,
    ):
        theirs = await ended(bob, (await begun(bob, request_lines("z", model="none"))).id)
        with pytest.raises(openai.APIStatusError) as found:
            await alice.files.create(file=("in", b"x" * 2_000), purpose="batch")
        assert found.value.status_code == 413, "half of what is left"
        file = await alice.files.create(file=("in", request_lines("a", model=MODEL)), purpose="batch")
        wanted: dict[str, Any] = {
            "input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"
        }  # fmt: skip
        made = []
        for _ in range(5):
            made.append((await alice.batches.create(**wanted)).id)
            await ended(alice, made[-1])
            await alice.files.delete((await alice.batches.retrieve(made[-1])).output_file_id)
        assert [each.id async for each in alice.batches.list()] == made[:1:-1]
        assert [each.id async for each in bob.batches.list()] == [theirs.id]
        for _ in range(2):
            await alice.files.create(file=("in", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="3 files are kept, as many as may of one key"):
            await alice.files.create(file=("in", b"x"), purpose="batch")
        await bob.files.delete(theirs.error_file_id)
        await bob.files.create(file=("in", b"x"), purpose="batch")


async def test_a_key_with_batches_that_wait_gets_no_more(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = Held()
    async with (
        serving_batches(tokenizer, tmp_path, generator, batch_files=2) as (url, _),
        openai_client(url) as client,
    ):
        batch = await begun(client, request_lines("a"))
        await running(client, batch.id)
        wanted: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
        await client.batches.create(input_file_id=batch.input_file_id, **wanted)
        with pytest.raises(openai.BadRequestError, match="2 batches wait or run, as many as may; cancel some"):
            await client.batches.create(input_file_id=batch.input_file_id, **wanted)
        generator.gate.opened.set()


def test_a_batch_may_ask_what_is_served_here(tokenizer: Tokenizer) -> None:
    chat = ChatTemplate(CHATML, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    app = make_app(FakeGenerator(), ServedModel(MODEL, CREATED, tokenizer, chat), HttpLimits())
    posted = {route.resource.canonical for route in app.router.routes() if route.method == "POST" and route.resource}
    assert set(SERVED_URLS) <= posted
    page = (Path(__file__).parents[4] / "docs/reference/http-api.md").read_text()
    part = page[page.index("## Batches") :]
    assert [url for url in SERVED_URLS if f"`{url}`" not in part] == []


def test_a_page_makes_the_shapes_that_it_shows() -> None:
    files = [
        StoredFile(id=new_id("file-"), owner="", filename="x", purpose="batch", n_bytes=1, created_at=1)
        for _ in range(9)
    ]
    made = []

    def shape(file: StoredFile) -> dict[str, Any]:
        made.append(file.id)
        return file_shape(file)

    page = page_of(files, shape, files[3].id, 2)
    assert (made, page["has_more"]) == ([files[4].id, files[5].id], True)
    assert page_of(files, shape, files[8].id, 2)["data"] == []


def batch_of(owner: str, status: Status) -> StoredBatch:
    return StoredBatch(
        id=new_id("batch_"), owner=owner, client="", models=(), endpoint="/v1/completions", input_id=new_id("file-"),
        output_id=new_id("file-"), error_id=new_id("file-"), window="24h", metadata=None, status=status,
        created_at=1, expires_at=2,
    )  # fmt: skip


def test_a_new_batch_takes_one_place_though_the_share_has_shrunk(tmp_path: Path) -> None:
    store, limits = BatchStore(tmp_path), ServingSettings(batch_files=20)
    ours = [batch_of("alice", status) for status in ["completed"] * 2 + ["in_progress"] * 4]
    for batch in [*ours, *(batch_of(f"other {number}", "completed") for number in range(12))]:
        store.keep_batch(batch)
    made = [batch_of("alice", "validating") for _ in range(3)]
    keep_new(store, limits, made[0])
    keep_new(store, limits, made[1])
    before = dict(store.batches)
    with pytest.raises(InvalidRequestError, match="6 batches wait or run"):
        keep_new(store, limits, made[2])
    assert store.batches == before
    assert list(store.batches_of["alice"]) == [batch.id for batch in [*ours[2:], *made[:2]]]
    assert len(store.batches) == 18
    store.close()


@pytest.mark.parametrize("what", ["keep_batch", "delete_batch"])
def test_a_disk_that_refuses_a_new_batch_takes_no_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store, old, new = BatchStore(tmp_path), batch_of("", "completed"), batch_of("", "validating")
    store.keep_batch(old)
    delete = store.delete_batch
    monkeypatch.setattr(
        store,
        what,
        raising(FULL) if what == "keep_batch" else lambda id: raising(FULL)() if id == old.id else delete(id),
    )
    with pytest.raises(OSError, match="No space left"):
        keep_new(store, ServingSettings(batch_files=1), new)
    store.close()
    again = BatchStore(tmp_path)
    assert list(again.batches) == list(store.batches) == [old.id]
    again.close()
