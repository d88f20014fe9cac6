"""Conversations as files: what is added is appended, a torn end was never there, and files of before are read."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from relayline.coordinator.http.conversations import files as conversation_files
from relayline.coordinator.http.conversations.files import SLACK_BYTES, SLACK_SHARE, ConversationFiles
from relayline.coordinator.http.conversations.store import Conversation
from relayline.coordinator.http.responses import kept_files
from relayline.coordinator.http.responses.items import KeptItem
from relayline.coordinator.http.responses.kept_files import LONG_BYTES, in_pieces, write

ID = f"conv_{1:048x}"


@pytest.fixture(autouse=True)
def written_whole(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files that are written whole, as they come."""
    found: list[Path] = []

    def noted(path: Path, pieces: Iterable[bytes]) -> None:
        found.append(path)
        write(path, pieces)

    monkeypatch.setattr(conversation_files, "write", noted)
    return found


def item(number: int, n_bytes: int = 100) -> KeptItem:
    return f"msg_{number:048x}", b"x" * n_bytes


def conversation(n_items: int = 2, metadata: bytes = b"{}") -> Conversation:
    return Conversation.of(ID, "me", 7, metadata, map(item, range(n_items)))


def kept(path: Path) -> Conversation:
    (found,) = ConversationFiles(path).load()
    return found


def test_what_is_added_is_appended_however_long_the_conversation_is(tmp_path: Path, written_whole: list[Path]) -> None:
    files, found = ConversationFiles(tmp_path), conversation(1_000)
    files.put(found)
    for number in range(1_000, 1_050):
        before = (tmp_path / ID).stat().st_size
        found = found.with_items([item(number)])
        files.put(found)
        assert (tmp_path / ID).stat().st_size - before < 2 * len(found.items[item(number)[0]])
    assert len(written_whole) == 1
    assert kept(tmp_path) == found
    files.put(found)
    assert (len(written_whole), kept(tmp_path)) == (1, found), "one that has not changed stays as it is"


def test_after_a_restart_the_first_change_is_written_whole(tmp_path: Path, written_whole: list[Path]) -> None:
    ConversationFiles(tmp_path).put(conversation())
    files = ConversationFiles(tmp_path)
    (found,) = files.load()
    for number in (8, 9):
        found = found.with_items([item(number)])
        files.put(found)
    assert (len(written_whole), kept(tmp_path)) == (2, found)


@pytest.mark.parametrize("n_bytes", [100, LONG_BYTES])
def test_an_addition_that_was_torn_was_never_there(tmp_path: Path, n_bytes: int) -> None:
    files, before = ConversationFiles(tmp_path), conversation()
    files.put(before)
    path = tmp_path / ID
    n_before = path.stat().st_size
    after = before.with_items([item(8, n_bytes), item(9)])
    files.put(after)
    whole = path.read_bytes()
    for n_bytes_left in {*range(n_before, min(n_before + 300, len(whole))), len(whole) - 1}:
        path.write_bytes(whole[:n_bytes_left])
        assert kept(tmp_path) == before
    path.write_bytes(whole[:-3] + bytes(3))  # as a file system may leave it that has its length, but not its contents
    assert kept(tmp_path) == before
    path.write_bytes(whole)
    assert kept(tmp_path) == after


def test_one_whose_first_part_is_damaged_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ConversationFiles(tmp_path).put(conversation())
    whole = (tmp_path / ID).read_bytes()
    for at in range(len(whole)):
        (tmp_path / ID).write_bytes(whole[:at])
        assert ConversationFiles(tmp_path).load() == []
        (tmp_path / ID).write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        assert ConversationFiles(tmp_path).load() == []
    assert len(caplog.records) == 2 * len(whole)
    assert "it has 0 items of 2" in caplog.text


def test_a_file_of_before_is_read_and_goes_on(tmp_path: Path) -> None:
    for found in (conversation(), conversation(0), conversation(100).with_items([item(200, LONG_BYTES)])):
        items = [*found.items.items()]
        old = conversation_files._ConversationFile(
            id=found.id, owner=found.owner, created=found.created, metadata=found.metadata, items=items
        )
        write(tmp_path / ID, in_pieces(old))
        files = ConversationFiles(tmp_path)
        assert files.load() == [found]
        files.put(more := found.with_items([item(300)]))
        assert kept(tmp_path) == more


def test_metadata_that_changes_often_leaves_no_long_file(tmp_path: Path, written_whole: list[Path]) -> None:
    files, found = ConversationFiles(tmp_path), conversation(20)
    for number in range(1_000):
        found = Conversation(
            found.id, found.owner, 7, b"%d" % number * 50, found.items, found.items_bytes, found.lineage
        )
        files.put(found)
        n_bytes_max = found.n_bytes + found.n_bytes // SLACK_SHARE + SLACK_BYTES
        assert (tmp_path / ID).stat().st_size <= n_bytes_max
    assert kept(tmp_path) == found
    assert 2 <= len(written_whole) <= 30


def test_a_file_that_cannot_be_added_to_stays_and_is_written_whole_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_whole: list[Path]
) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files, before = ConversationFiles(tmp_path), conversation()
    files.put(before)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            files.put(before.with_items([item(8)]))
    assert kept(tmp_path) == before
    files.put(after := before.with_items([item(8), item(9)]))
    assert (len(written_whole), kept(tmp_path)) == (2, after)
    (tmp_path / ID).unlink()
    files.put(after := after.with_items([item(10)]))
    assert kept(tmp_path) == after, "somebody has removed the file"
    files.drop(ID)
    assert ConversationFiles(tmp_path).load() == []
    assert files._written == {}


def test_any_changes_are_there_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a conversation as it was before an item was removed that then stayed."""
    monkeypatch.setattr(kept_files, "LONG_BYTES", 50)
    rng = random.Random(7)
    files, found = ConversationFiles(tmp_path), conversation(3)
    for number in range(10, 300):
        changed = found
        for kind in rng.choices(("add", "remove", "metadata"), (6, 1, 2), k=rng.randint(1, 3)):
            if kind == "add":
                changed = changed.with_items([item(1_000 * number + each, rng.randint(0, 99)) for each in _some(rng)])
            elif kind == "remove" and changed.items:
                changed = changed.without_item(rng.choice([*changed.items]))
            else:
                changed = Conversation(
                    changed.id, changed.owner, 7, b"%d" % number, changed.items, changed.items_bytes, changed.lineage
                )
        files.put(changed)
        assert kept(tmp_path) == changed
        found = changed if changed.lineage is found.lineage or rng.random() < 0.8 else found


def _some(rng: random.Random) -> Iterator[int]:
    yield from range(rng.randint(1, 4))
