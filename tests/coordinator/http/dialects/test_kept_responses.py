"""Stored responses with a directory: a coordinator that comes after has them, each for its owner."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import openai
import pytest

from relayline.coordinator.http.edge.errors import HttpRefusal
from relayline.coordinator.http.responses import keeper as keepers
from relayline.coordinator.http.responses.directory import STORED, UNFINISHED, ResponseDirectory
from relayline.coordinator.http.responses.keeper import ResponseKeeper
from relayline.coordinator.http.responses.orders import Order, OrderFiles, Sent
from relayline.coordinator.http.responses.store import ResponseStore, Stored
from relayline.coordinator.sessions.generation import TokenEvent
from relayline.coordinator.text.tokenizer import Tokenizer
from tests.support.http_support import MODEL, FakeGenerator, says
from tests.support.kept_responses import serving_kept
from tests.support.openai_client import openai_client
from tests.support.polling import pause
from tests.support.read_only_disk import make_read_only

KEYS = "alice: alice-key-0123456789\nbob: bob-key-012345678901\n"


async def test_a_chain_goes_on_after_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        first = await client.responses.create(model=MODEL, input="one", metadata={"a": "b"})
        second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        gone = await client.responses.create(model=MODEL, input="three")
        await client.responses.delete(gone.id)
    generator = FakeGenerator(says(b"again"))
    async with serving_kept(tokenizer, tmp_path, generator) as url, openai_client(url) as client:
        assert await client.responses.retrieve(first.id) == first
        assert (await client.responses.input_items.list(second.id)).data[0].content[0].text == "two"  # type: ignore[union-attr]
        third = await client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
        assert third.output_text == "again"
        prompt = tokenizer.decode(generator.requests[0].prompt_tokens)
        assert [prompt.find(word) >= 0 for word in ("one", "hello", "two", "three")] == [True] * 4
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone.id)


async def test_a_key_finds_its_own_after_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys, kept = tmp_path / "keys", tmp_path / "kept"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    async with serving_kept(tokenizer, kept, keys=keys) as url, openai_client(url, "alice-key-0123456789") as client:
        found = await client.responses.create(model=MODEL, input="hi")
    async with serving_kept(tokenizer, kept, keys=keys) as url:
        async with openai_client(url, "bob-key-012345678901") as bob:
            with pytest.raises(openai.NotFoundError):
                await bob.responses.retrieve(found.id)
            with pytest.raises(openai.NotFoundError):
                await bob.responses.create(model=MODEL, input="and?", previous_response_id=found.id)
            with pytest.raises(openai.NotFoundError):
                await bob.responses.delete(found.id)
        async with openai_client(url, "alice-key-0123456789") as alice:
            assert (await alice.responses.retrieve(found.id)).id == found.id
    async with serving_kept(tokenizer, kept) as url, openai_client(url) as anyone:
        with pytest.raises(openai.NotFoundError):
            await anyone.responses.retrieve(found.id)


async def test_on_a_full_disk_answers_go_on_and_are_in_memory(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            found = [await client.responses.create(model=MODEL, input="hi") for _ in range(3)]
            for each in found:
                assert (await client.responses.retrieve(each.id)).output_text == "hello"
            await client.responses.delete(found.pop().id)  # which waits for what was to be written before
        (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert "are in memory only: No space left on device" in warning
        kept = await client.responses.create(model=MODEL, input="hi")
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        assert (await client.responses.retrieve(kept.id)).id == kept.id
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(found[0].id)


async def test_a_full_disk_is_said_once_though_files_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level("INFO")
    store = ResponseStore(n_max=1)
    store.mirror = keeper = ResponseKeeper(ResponseDirectory(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for number in range(3):
            store.put(Stored(f"resp_{number:048x}", "", b"{}", [], [], None))
        await keeper.settled()
        await asyncio.sleep(0)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    store.put(Stored(f"resp_{3:048x}", "", b"{}", [], [], None))
    await keeper.close()
    await asyncio.sleep(0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_writes_that_are_done_make_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    response = [Stored(f"resp_{number:048x}", "", b"{}", [], [], None) for number in range(5)]
    monkeypatch.setattr(keepers, "WRITES_WAITING_MAX", 1)
    monkeypatch.setattr(keepers, "WRITES_WAITING_BYTES_MAX", response[0].n_bytes)
    keeper = ResponseKeeper(ResponseDirectory(tmp_path))
    for each in response:
        keeper.put(each)
        while keeper._n_waiting:
            await pause()
    assert keeper._bytes_waiting == 0
    await keeper.close()
    assert {path.name for path in (tmp_path / STORED).iterdir()} == {each.id for each in response}


async def test_an_answer_with_a_gap_is_written_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, id = ResponseKeeper(ResponseDirectory(tmp_path)), f"resp_{1:048x}"
    orders, said = keeper.directory.orders, [TokenEvent(1, None, ())]
    await keeper.add(id, said)
    with monkeypatch.context() as patched:
        patched.setattr(orders, "add", broken)
        await keeper.add(id, said)
    await keeper.add(id, said)
    assert len(orders.said(id)) == 1, "what comes behind a gap would be another answer"
    await keeper.close()


def broken(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_what_cannot_be_deleted_from_the_disk_is_still_there(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        found = await client.responses.create(model=MODEL, input="hi")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", read_only)
            with pytest.raises(openai.APIStatusError, match="cannot be used now: Read-only") as refused:
                await client.responses.delete(found.id)
        assert refused.value.status_code == 507
        assert await client.responses.retrieve(found.id) == found
        await client.responses.delete(found.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(found.id)


async def test_what_is_on_a_read_only_disk_is_there_after_a_restart(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process before has left half done stays until it can be removed."""
    kept = tmp_path / "kept"
    async with serving_kept(tokenizer, kept) as url, openai_client(url) as client:
        found = await client.responses.create(model=MODEL, input="hi")
    torn, both = kept / STORED / f".resp_{1:048x}.01234567", kept / UNFINISHED / found.id
    torn.touch()
    files = OrderFiles(kept / UNFINISHED)
    files.begin(order(found.id))
    files.begin(order(f"resp_{2:048x}"))
    tokens = kept / UNFINISHED / f"resp_{2:048x}.tokens"
    files.add(f"resp_{2:048x}", [TokenEvent(1, None, ())])
    tokens.write_bytes(tokens.read_bytes() + b"torn")
    before = tokens.read_bytes()
    make_read_only(monkeypatch)
    directory = ResponseDirectory(kept)
    stored, unfinished = directory.load()
    assert ([each.id for each in stored], [each.order.id for each in unfinished]) == ([found.id], [f"resp_{2:048x}"])
    assert directory.load_conversations() == []
    directory.close()
    monkeypatch.undo()
    assert (torn.exists(), both.exists(), tokens.read_bytes()) == (True, True, before)
    directory = ResponseDirectory(kept)
    directory.load()
    assert (torn.exists(), both.exists()) == (False, False)
    assert len(directory.orders.said(f"resp_{2:048x}")) == 1
    assert tokens.read_bytes() == before.removesuffix(b"torn")
    directory.close()


async def test_a_disk_that_hangs_holds_no_more_than_some_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, put = threading.Event(), ResponseDirectory.put

    def hung_put(directory: ResponseDirectory, stored: Stored) -> None:
        answers.wait()
        put(directory, stored)

    monkeypatch.setattr(ResponseDirectory, "put", hung_put)
    monkeypatch.setattr(keepers, "WRITES_WAITING_BYTES_MAX", 25)
    keeper = ResponseKeeper(ResponseDirectory(tmp_path))
    for number in range(3):
        keeper.put(Stored(f"resp_{number:048x}", "", b"{" + b" " * 8 + b"}", [], [], None))
    assert "are in memory only: the disk is slow" in caplog.text
    answers.set()
    await keeper.close()
    assert len([*(tmp_path / "stored").iterdir()]) == 2


async def test_a_disk_that_hangs_has_no_endless_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    done: list[str] = []
    for name in ("used", "drop"):
        monkeypatch.setattr(ResponseDirectory, name, lambda _, what, name=name: done.append(f"{name} {what}"))
    monkeypatch.setattr(keepers, "WRITES_WAITING_MAX", 3)
    monkeypatch.setattr(keepers, "DROPS_WAITING_MAX", 5)
    keeper = ResponseKeeper(ResponseDirectory(tmp_path))
    hangs = asyncio.ensure_future(keeper.call(answers.wait))
    await pause()
    left = asyncio.ensure_future(keeper.forget("left"))
    await pause()
    left.cancel()  # its client has gone, but it stands in the line all the same
    for number in range(9):
        keeper.used([f"{number}"])
    for number in range(9):
        keeper.drop(f"{number}")
    assert keeper._n_waiting == 5
    for asks in (keeper.forget("late"), keeper.promise(order("late"))):
        with pytest.raises(HttpRefusal, match="cannot be used now: it is slow, and too much waits for it") as refused:
            await asks
        assert refused.value.status == 507
    with pytest.raises(TimeoutError):  # which a conversation's client does not wait for any longer
        await keeper.settled()
    answers.set()
    assert await hangs
    await keeper.close()
    assert done == ["drop left", "used ['0']", "drop 0", "drop 1"]
    assert keeper._n_waiting == 0


async def test_requests_that_wait_for_a_disk_have_bounded_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(keepers, "WRITES_WAITING_BYTES_MAX", 1_500)
    keeper = ResponseKeeper(ResponseDirectory(tmp_path))
    hangs = asyncio.ensure_future(keeper.call(answers.wait))
    first = asyncio.ensure_future(keeper.promise(order(f"resp_{1:048x}", n_bytes=1_000)))
    await pause()
    with pytest.raises(HttpRefusal, match="too much waits for it"):
        await keeper.promise(order(f"resp_{2:048x}", n_bytes=1_000))
    answers.set()
    await hangs
    await first
    await keeper.promise(order(f"resp_{3:048x}", n_bytes=1_000))
    await keeper.close()
    assert {path.name for path in (tmp_path / UNFINISHED).iterdir()} == {f"resp_{number:048x}" for number in (1, 3)}


def order(id: str, n_bytes: int = 0) -> Order:
    return Order(
        id=id, owner="", payer="", behalf="", created=0, sent=Sent(b" " * n_bytes, 0, 0), model_id=MODEL, n_vocab=1,
        queued=b"{}", input_items=[], previous_id=None, is_stream=False,
    )  # fmt: skip


async def test_a_response_that_is_not_stored_is_not_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        await client.responses.create(model=MODEL, input="hi", store=False)
    assert [*(tmp_path / "stored").iterdir()] == []
