"""Conversations with a directory: on the disk before their clients see them, and there after a restart."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from relayline.coordinator.http.conversations import files as conversation_files
from relayline.coordinator.http.conversations import keeper as keepers
from relayline.coordinator.http.conversations.files import ConversationFiles
from relayline.coordinator.http.conversations.store import Conversation
from relayline.coordinator.http.responses.directory import CONVERSATIONS, STORED, UNFINISHED, ResponseDirectory
from relayline.coordinator.http.responses.orders import OrderFiles
from relayline.coordinator.text.tokenizer import Tokenizer
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator, says
from tests.support.kept_responses import Speaker, left_by_a_kill, serving_kept
from tests.support.openai_client import openai_client
from tests.support.polling import pause

LOOKS = 15  # in which nothing comes, before it counts as held back


def full(_handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def said(text: str) -> Any:
    return {"role": "user", "content": text}


async def texts_in(client: openai.AsyncOpenAI, id: str) -> list[str]:
    items = [item async for item in client.conversations.items.list(id, order="asc")]
    return [item.content[0].text for item in items]  # type: ignore[union-attr]


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            await pause()
    return found


async def test_a_restarted_coordinator_has_them_as_they_were(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        begun = await client.conversations.create(items=[said("one"), said("two")], metadata={"a": "b"})
        first = (await client.conversations.items.list(begun.id, order="asc")).data[0]
        await client.conversations.items.delete(str(first.id), conversation_id=begun.id)
        await client.conversations.items.create(begun.id, items=[said("three")])
        updated = await client.conversations.update(begun.id, metadata={"a": "c"})
        await client.responses.create(model=MODEL, input="four", conversation=begun.id)
        listed = (await client.conversations.items.list(begun.id)).data
        gone = await client.conversations.create()
        await client.conversations.delete(gone.id)
    async with serving_kept(tokenizer, tmp_path, FakeGenerator(says(b"again"))) as url, openai_client(url) as client:
        assert await client.conversations.retrieve(begun.id) == updated
        assert (await client.conversations.items.list(begun.id)).data == listed
        await client.responses.create(model=MODEL, input="five", conversation=begun.id)
        assert await texts_in(client, begun.id) == ["two", "three", "four", "hello", "five", "again"]
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(gone.id)


async def test_a_key_finds_its_own_after_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys, kept = tmp_path / "keys", tmp_path / "kept"
    keys.write_text("alice: alice-key-0123456789\nbob: bob-key-012345678901\n")
    keys.chmod(0o600)
    async with serving_kept(tokenizer, kept, keys=keys) as url, openai_client(url, "alice-key-0123456789") as alice:
        begun = await alice.conversations.create()
    async with serving_kept(tokenizer, kept, keys=keys) as url:
        async with openai_client(url, "bob-key-012345678901") as bob:
            with pytest.raises(openai.NotFoundError):
                await bob.conversations.retrieve(begun.id)
        async with openai_client(url, "alice-key-0123456789") as alice:
            assert await alice.conversations.retrieve(begun.id) == begun


class HeldDisk:
    """Holds conversations that are being written, until it may go on. `is_written`: with their files in place."""

    def __init__(self, *, is_written: bool = False) -> None:
        self._is_written, self._put = is_written, ConversationFiles.put
        self._may_go_on, self._holds = threading.Event(), threading.Event()

    @property
    def put(self) -> Callable[[ConversationFiles, Conversation], None]:
        """What takes the place of the method."""

        def held(files: ConversationFiles, conversation: Conversation) -> None:
            if self._is_written:
                self._put(files, conversation)
            self._holds.set()
            assert self._may_go_on.wait(WAIT_S)
            if not self._is_written:
                self._put(files, conversation)

        return held

    async def held(self) -> None:
        """Wait until one is held."""
        async with asyncio.timeout(WAIT_S):
            while not self._holds.is_set():
                await pause()

    def go_on(self) -> None:
        """Hold no more."""
        self._may_go_on.set()


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True, "stream": True}])
async def test_a_client_sees_the_end_of_an_answer_once_it_is_on_the_disk(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    disk = HeldDisk()
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        begun = await client.conversations.create()
        monkeypatch.setattr(ConversationFiles, "put", disk.put)

        async def ask() -> None:
            reply = await client.responses.create(model=MODEL, input="one", conversation=begun.id, **more)
            if more:
                async for _ in reply:
                    pass

        asking = asyncio.create_task(ask())
        try:
            await disk.held()
            for _ in range(LOOKS):
                await pause()
            assert not asking.done()
        finally:
            disk.go_on()
        await asking
        left_by_a_kill(tmp_path, tmp_path / "killed", "killed")
    async with serving_kept(tokenizer, tmp_path / "killed") as url, openai_client(url) as client:
        assert await texts_in(client, begun.id) == ["one", "hello"]


async def test_one_whose_answer_is_being_written_cannot_be_cancelled_any_more(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items would be in the conversation, and it would say that it was cancelled."""
    disk = HeldDisk()
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        begun = await client.conversations.create()
        monkeypatch.setattr(ConversationFiles, "put", disk.put)
        response = await client.responses.create(model=MODEL, input="one", conversation=begun.id, background=True)
        try:
            await disk.held()
            cancelling = asyncio.create_task(client.responses.cancel(response.id))
            for _ in range(LOOKS):
                await pause()
        finally:
            disk.go_on()
        assert (await cancelling).status == "completed"
        assert await texts_in(client, begun.id) == ["one", "hello"]


async def test_the_next_response_waits_until_the_one_before_is_written(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill the one before would be asked for again, with the turn, and the next one would add nothing."""
    disk = HeldDisk(is_written=True)
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        begun = await client.conversations.create()
        monkeypatch.setattr(ConversationFiles, "put", disk.put)
        asked: dict[str, Any] = {"model": MODEL, "conversation": begun.id, "background": True}
        response = await client.responses.create(input="one", **asked)
        try:
            await disk.held()
            with pytest.raises(openai.BadRequestError, match="another response goes on with it"):
                await client.responses.create(input="two", **asked)
        finally:
            disk.go_on()
        await ended(client, response.id)
        second = await client.responses.create(input="two", **asked)
        await ended(client, second.id)
        assert await texts_in(client, begun.id) == ["one", "hello", "two", "hello"]


async def test_a_disk_that_hangs_holds_up_no_client_for_good(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, put = threading.Event(), ConversationFiles.put

    def hung(files: ConversationFiles, conversation: Conversation) -> None:
        answers.wait()
        put(files, conversation)

    monkeypatch.setattr(ConversationFiles, "put", hung)
    monkeypatch.setattr(keepers, "WRITE_WAIT_S", 0.0)
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        begun = await client.conversations.create(items=[said("one")])
        assert await texts_in(client, begun.id) == ["one"]
        answers.set()
    assert "the disk with the conversations is slow" in caplog.text


async def test_on_a_full_disk_they_go_on_in_memory(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        kept = await client.conversations.create(items=[said("one")])
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            begun = await client.conversations.create(items=[said("one")])
            await client.responses.create(model=MODEL, input="two", conversation=begun.id)
            await client.responses.create(model=MODEL, input="two", conversation=kept.id)
            assert await texts_in(client, begun.id) == await texts_in(client, kept.id) == ["one", "two", "hello"]
        (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert "are in memory only: No space left on device" in warning
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        assert await texts_in(client, kept.id) == ["one"]
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(begun.id)


async def test_what_cannot_be_deleted_from_the_disk_is_still_there(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        begun = await client.conversations.create(items=[said("one")])
        item = (await client.conversations.items.list(begun.id)).data[0]
        for where, name, fault, deleting in (
            (Path, "unlink", read_only, client.conversations.delete(begun.id)),
            (os, "fsync", full, client.conversations.items.delete(str(item.id), conversation_id=begun.id)),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(where, name, fault)
                with pytest.raises(openai.APIStatusError, match="cannot be used now: ") as refused:
                    await deleting
            assert refused.value.status_code == 507
        assert await texts_in(client, begun.id) == ["one"]
        await client.conversations.items.delete(str(item.id), conversation_id=begun.id)
        assert await texts_in(client, begun.id) == []
        await client.conversations.delete(begun.id)
    assert [*(tmp_path / CONVERSATIONS).iterdir()] == []


async def test_items_that_are_deleted_at_once_all_go(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        begun = await client.conversations.create(items=[said(str(number)) for number in range(5)])
        items = (await client.conversations.items.list(begun.id, order="asc")).data
        ids = [str(item.id) for item in (*items[:4], items[0])]
        deleting = [client.conversations.items.delete(id, conversation_id=begun.id) for id in ids]
        ends = await asyncio.gather(*deleting, return_exceptions=True)
        assert sorted(type(end).__name__ for end in ends) == [*["Conversation"] * 4, "NotFoundError"]
        assert await texts_in(client, begun.id) == ["4"]
    async with serving_kept(tokenizer, tmp_path) as url, openai_client(url) as client:
        assert await texts_in(client, begun.id) == ["4"]


async def test_a_background_response_keeps_its_turn_over_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": MODEL, "background": True}
    async with serving_kept(tokenizer, tmp_path, Speaker(n_free=2)) as url, openai_client(url) as client:
        begun = await client.conversations.create(items=[said("one")])
        gone = await client.conversations.create()
        response = await client.responses.create(input="two", conversation=begun.id, **asked)
        other = await client.responses.create(input="two", conversation=gone.id, **asked)
        (item,) = (await client.responses.input_items.list(response.id)).data
        async with asyncio.timeout(WAIT_S):
            while len(OrderFiles(tmp_path / UNFINISHED).said(other.id)) < 2:
                await pause()
    second = Speaker(n_free=3)
    async with serving_kept(tokenizer, tmp_path, second) as url, openai_client(url) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="three", conversation=begun.id)
        assert refused.value.code == "conversation_locked"
        assert await texts_in(client, begun.id) == ["one"]
        await client.conversations.delete(gone.id)
        second.gate.opened.set()
        whole = await ended(client, response.id)
        assert (whole.status, whole.conversation.id) == ("completed", begun.id)
        assert (await ended(client, other.id)).status == "completed"
        assert await texts_in(client, begun.id) == ["one", "two", "hello"]
        items = (await client.conversations.items.list(begun.id, order="asc")).data
        assert items[1].id == item.id, "its input is what its clients were shown before"
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(gone.id)
        await client.responses.create(model=MODEL, input="three", conversation=begun.id)


async def test_one_that_waits_and_is_cancelled_lets_the_next_one_begin(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_kept(tokenizer, tmp_path, Speaker(n_free=2)) as url, openai_client(url) as client:
        begun = await client.conversations.create()
        response = await client.responses.create(model=MODEL, input="one", conversation=begun.id, background=True)
    generator = FakeGenerator()
    generator.ready = False
    async with serving_kept(tokenizer, tmp_path, generator) as url, openai_client(url) as client:
        assert (await client.responses.cancel(response.id)).status == "cancelled"
        generator.ready = True
        await client.responses.create(model=MODEL, input="two", conversation=begun.id)
        assert await texts_in(client, begun.id) == ["two", "hello"]


async def test_a_kill_between_an_answer_and_its_response_adds_nothing_twice(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The conversation is written first; the next coordinator ends the response once more."""
    kept, killed = tmp_path / "kept", tmp_path / "killed"
    first = Speaker(n_free=2)
    async with serving_kept(tokenizer, kept, first) as url, openai_client(url) as client:
        begun = await client.conversations.create()
        response = await client.responses.create(model=MODEL, input="one", conversation=begun.id, background=True)
        async with asyncio.timeout(WAIT_S):
            await first.gate.reached.wait()
            while len(OrderFiles(kept / UNFINISHED).said(response.id)) < 2:
                await pause()
        left_by_a_kill(kept, killed)
        first.gate.opened.set()
        await ended(client, response.id)
        listed = (await client.conversations.items.list(begun.id)).data
    shutil.copyfile(kept / CONVERSATIONS / begun.id, killed / CONVERSATIONS / begun.id)
    async with serving_kept(tokenizer, killed, Speaker()) as url, openai_client(url) as client:
        assert (await ended(client, response.id)).status == "completed"
        assert (await client.conversations.items.list(begun.id)).data == listed
        assert len(listed) == 2


def id_of(number: int) -> str:
    return f"conv_{number:048x}"


def conversation(number: int) -> Conversation:
    return Conversation.of(id_of(number), "", number, b"{}", [("msg_1", b"{}")])


def put(path: Path, *numbers: int) -> None:
    directory = ResponseDirectory(path)
    for number in numbers:
        directory.conversations.put(conversation(number))
        os.utime(path / CONVERSATIONS / id_of(number), (number, number))
    directory.close()


def loaded(path: Path) -> list[Conversation]:
    directory = ResponseDirectory(path)
    try:
        return directory.load_conversations()
    finally:
        directory.close()


def test_the_oldest_ones_beyond_the_bounds_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1, 2, 3)
    assert loaded(tmp_path) == [conversation(1), conversation(2), conversation(3)]
    monkeypatch.setattr(conversation_files, "CONVERSATIONS_MAX", 2)
    assert loaded(tmp_path) == [conversation(2), conversation(3)]
    assert not (tmp_path / CONVERSATIONS / id_of(1)).exists()
    monkeypatch.setattr(conversation_files, "CONVERSATIONS_BYTES_MAX", conversation(3).n_bytes)
    assert loaded(tmp_path) == [conversation(3)]


def test_torn_files_are_left_out_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, 1, 2, 3)
    kept = tmp_path / CONVERSATIONS
    whole = (kept / id_of(1)).read_bytes()
    (kept / id_of(2)).write_bytes(whole[: len(whole) // 2])
    (kept / id_of(3)).write_bytes(whole)  # under another's name
    (kept / f".{id_of(4)}.0123abcd").write_bytes(whole[:9])  # of a writer that was killed
    assert loaded(tmp_path) == [conversation(1)]
    (line,) = (record.message for record in caplog.records)
    assert line.startswith("2 conversations cannot be read and are left out, the first is")
    assert {path.name for path in kept.iterdir()} == {id_of(1), id_of(2), id_of(3)}


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    put(tmp_path, 1)
    assert (tmp_path / CONVERSATIONS).stat().st_mode & 0o777 == 0o700
    assert (tmp_path / CONVERSATIONS / id_of(1)).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / STORED).exists()
