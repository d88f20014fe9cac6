"""Batches whose end is cut short, whose key goes, and whose turn it is."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from relayline.coordinator.batches import store as stores
from relayline.coordinator.batches.lines import Outcome
from relayline.coordinator.batches.store import WORK, BatchStore, Status, StoredBatch, StoredFile, new_id
from relayline.coordinator.batches.worker import Told
from relayline.coordinator.http.batches import keeper as keepers
from relayline.coordinator.http.edge.clients import BEHALF
from relayline.coordinator.http.edge.key_file import parse_keys
from relayline.coordinator.sessions.tenants import circle_of
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import UsageError
from tests.support.batch_world import Held, begun, ended, lines_of, request_lines, running, serving_batches
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator
from tests.support.openai_client import openai_client
from tests.support.polling import pause
from tests.support.read_only_disk import make_read_only

ALICE, BOB = "alice-key-0123456789", "bob-key-012345678901"
UNNAMED, GATEWAY = "unnamed-key-01234567", "gateway-key-01234567"


def key_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def stored(**more: Any) -> StoredBatch:
    return StoredBatch(
        id=new_id("batch_"), owner="", client="", models=(), endpoint="/v1/completions", input_id=new_id("file-"),
        output_id=new_id("file-"), error_id=new_id("file-"), window="24h", metadata=None, created_at=1, expires_at=2,
        **more,
    )  # fmt: skip


def test_batches_on_a_read_only_disk_are_known_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process before has left half done stays until it can be removed."""
    store, batch = BatchStore(tmp_path), stored()
    store.keep_batch(batch)
    torn, room = store.path_of(new_id("file-")), tmp_path / WORK / f"{new_id('batch_')}.room"
    for path in (torn, room):
        path.touch()
    store.close()
    with monkeypatch.context() as patched:
        make_read_only(patched)
        store = BatchStore(tmp_path)
        store.close()
    assert list(store.batches) == [batch.id]
    assert (torn.exists(), room.exists()) == (True, True)
    BatchStore(tmp_path).close()
    assert (torn.exists(), room.exists()) == (False, False)


def test_files_of_a_batch_are_made_again_with_their_real_size(tmp_path: Path) -> None:
    store, batch, text = BatchStore(tmp_path), stored(), Outcome("a", 200, "", {}).line()
    store.work_paths(batch)[0].write_bytes(text)
    name = f"{batch.id}_output.jsonl"
    store.keep_file(
        StoredFile(id=batch.output_id, owner="", filename=name, purpose="batch_output", n_bytes=149, created_at=1)
    )
    store.publish(batch, 2)
    store.publish(batch, 3)
    assert (store.files[batch.output_id].n_bytes, store.n_bytes, batch.has_output) == (len(text), len(text), True)
    store.delete_file(batch.output_id)
    assert (store.n_bytes, store.files_of, store.bytes_of) == (0, {}, {})
    store.close()


@pytest.mark.parametrize("n_whole", [0, 2])
def test_no_half_of_a_line_becomes_a_file_of_a_batch(tmp_path: Path, n_whole: int) -> None:
    store, batch, line = BatchStore(tmp_path), stored(), Outcome("a", 200, "", {}).line()
    answers, errors = store.work_paths(batch)
    answers.write_bytes(line * n_whole + line[:-9])
    errors.write_bytes(line[:-1])
    batch.n_answered, batch.n_failed = 1, 0  # as the process that worked on it told last
    store.publish(batch, 2)
    assert (batch.has_output, batch.has_errors) == (n_whole > 0, True)
    assert (batch.n_answered, batch.n_failed) == (n_whole, 1)
    assert store.path_of(batch.error_id).read_bytes() == line
    if n_whole:
        assert store.path_of(batch.output_id).read_bytes() == line * n_whole
    assert store.n_bytes == len(line) * (n_whole + 1)
    assert not answers.exists()
    store.close()


def test_what_somebody_else_keeps_in_the_directory_stays(tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "folder").mkdir(parents=True)
    theirs = [files / "thesis.pdf", files / "file-notes", files / "list.json", files / "folder"]
    for path in theirs[:-1]:
        path.write_bytes(b"mine")
    ours = [files / new_id("file-"), files / f".{new_id('file-')}.json.0123abcd"]
    for path in ours:
        path.write_bytes(b"half")
    BatchStore(tmp_path).close()
    assert [path.exists() for path in (*theirs, *ours)] == [True] * 4 + [False] * 2
    (files / f"{new_id('file-')}.json").mkdir()
    with pytest.raises(UsageError, match="cannot be used: Is a directory"):
        BatchStore(tmp_path)


async def test_a_disk_that_is_full_at_the_end_makes_no_request_run_twice(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "SWEEP_S", 0.01)
    generator = FakeGenerator()
    async with serving_batches(tokenizer, tmp_path, generator) as (url, keeper), openai_client(url) as client:
        keep, n_left = keeper.store.keep_file, 2

        def full(file: StoredFile) -> None:
            nonlocal n_left
            if file.purpose == "batch_output" and n_left:
                n_left -= 1
                raise OSError(28, "No space left on device")
            keep(file)

        monkeypatch.setattr(keeper.store, "keep_file", full)
        done = await ended(client, (await begun(client, request_lines(*"abc"))).id)
        assert (done.status, n_left, len(generator.requests)) == ("completed", 0, 3)
        assert sorted(await lines_of(client, done.output_file_id)) == list("abc")


def fill_disk(monkeypatch: pytest.MonkeyPatch, n_blocks: int = 0) -> None:
    """Let the store find a disk with so many free blocks, besides those that a batch holds and gives back."""
    write, unlink = stores.write_file, Path.unlink

    def full(path: Path, data: bytes, mode: int) -> None:
        nonlocal n_blocks
        if n_blocks < 1:
            raise OSError(28, "No space left on device")
        n_blocks -= not path.exists()
        write(path, data, mode)

    def freeing(path: Path, missing_ok: bool = False) -> None:
        nonlocal n_blocks
        if path.suffix == ".room" and path.exists():
            n_blocks += path.stat().st_size // 4_096
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(stores, "write_file", full)
    monkeypatch.setattr(Path, "unlink", freeing)


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_a_batch_that_fills_the_disk_ends(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Status
) -> None:
    generator = Held(n_free=2)
    async with serving_batches(tokenizer, tmp_path, generator) as (url, keeper), openai_client(url) as client:
        begin = await begun(client, request_lines(*"abc"))
        batch = await running(client, begin.id, n_done=2)
        fill_disk(monkeypatch)
        told = keeper._told

        async def full(batch: StoredBatch, work: keepers._Work, mark: str = "") -> Told | None:
            last = await told(batch, work, mark)
            return last if batch.status == "cancelling" else Told(ended="x.out: No space left on device")

        if how == "cancelled":
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
        else:
            monkeypatch.setattr(keeper, "_told", full)
            working = keeper._working[batch.id]
            assert working.task is not None
            working.task.cancel()  # and begun anew
            generator.gate.opened.set()
        done = await ended(client, batch.id)
        assert (done.status, bool(done.errors)) == (how, how == "failed")
        names = sorted(await lines_of(client, done.output_file_id))
        assert names == (list("ab") if how == "cancelled" else list("abc"))
        assert list((tmp_path / "work").iterdir()) == []


async def test_a_batch_whose_end_finds_no_disk_leaves_its_input_to_be_deleted(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keepers, "SWEEP_S", 0.01)
    generator = Held(n_free=1)
    async with serving_batches(tokenizer, tmp_path, generator) as (url, keeper), openai_client(url) as client:
        begin = await begun(client, request_lines(*"ab"))
        batch = await running(client, begin.id, n_done=1)
        with pytest.raises(openai.BadRequestError, match="still reads this file"):
            await client.files.delete(batch.input_file_id)
        with monkeypatch.context() as patch:
            (tmp_path / "work" / f"{batch.id}.room").write_bytes(b"")  # others have taken it
            fill_disk(patch)
            generator.gate.opened.set()
            async with asyncio.timeout(3 * WAIT_S):
                while keeper.store.batches[batch.id].ending is None:
                    await pause()
            assert (await client.files.delete(batch.input_file_id)).deleted
        done = await ended(client, batch.id)
        assert (done.status, len(generator.requests)) == ("completed", 2)
        assert sorted(await lines_of(client, done.output_file_id)) == list("ab")
    assert f"{batch.id} is tried again: " in caplog.text
    assert "Errno" not in caplog.text


async def test_a_coordinator_that_drains_refuses_what_its_disk_takes_no_more(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with serving_batches(tokenizer, tmp_path, Held()) as (url, keeper), openai_client(url) as client:
        batch = await running(client, (await begun(client, request_lines("a"))).id)
        await keeper.close()  # as at SIGTERM, while answers still run
        for asked in (
            client.files.create(file=("in.jsonl", b"{}"), purpose="batch"),
            client.batches.cancel(batch.id),
            client.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.InternalServerError, match="the coordinator ends") as caught:
                await asked
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"]
        assert [file.id async for file in client.files.list()] == [batch.input_file_id]


def test_room_is_held_by_batches_that_are_not_ended(tmp_path: Path) -> None:
    store, batch, gone = BatchStore(tmp_path), stored(), stored()
    store.keep_new_batch(batch)
    room = tmp_path / "work" / f"{batch.id}.room"
    assert room.stat().st_size == stores.ROOM_BYTES
    torn = [room.with_name(f"{gone.id}.room"), room.with_name(f".{gone.id}.room.0123abcd")]
    for path in torn:
        path.write_bytes(b"as if the coordinator had died here")
    store.close()
    store = BatchStore(tmp_path)
    assert [path.exists() for path in (room, *torn)] == [True, False, False]
    store.delete_batch(batch.id)
    assert not room.exists()
    store.close()


def test_no_batch_begins_without_room_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path)
    for n_blocks in (0, 1):  # none for the room, and none for the batch
        with monkeypatch.context() as patch:
            fill_disk(patch, n_blocks)
            with pytest.raises(OSError, match="No space"):
                store.keep_new_batch(stored())
        assert (list((tmp_path / "work").iterdir()), store.batches) == ([], {})
    store.close()


@pytest.mark.parametrize("status", ["completed", "expired"])
async def test_a_coordinator_that_dies_at_the_end_of_a_batch_only_ends_it_again(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    first = Held(n_free=2 if status == "expired" else 3)
    async with serving_batches(tokenizer, tmp_path, first) as (url, keeper), openai_client(url) as client:
        keep, died = keeper.store.keep_batch, asyncio.Event()
        loop = asyncio.get_running_loop()

        def cut_short(batch: StoredBatch) -> None:
            if batch.is_ended:
                loop.call_soon_threadsafe(died.set)
                raise OSError(5, "as if it had died here")
            keep(batch)

        monkeypatch.setattr(keeper.store, "keep_batch", cut_short)
        batch = await begun(client, request_lines(*"abc"))
        if status == "expired":
            await running(client, batch.id, n_done=2)
            kept = keeper.store.batches[batch.id]
            kept.expires_at = kept.created_at
            monkeypatch.setattr(keepers, "DEATH_PAUSE_S", 0.0)
            working = keeper._working[batch.id]
            assert working.task is not None
            working.task.cancel()  # and begun anew, in its last moment
        async with asyncio.timeout(3 * WAIT_S):
            await died.wait()
    second = FakeGenerator()
    async with serving_batches(tokenizer, tmp_path, second) as (url, _), openai_client(url) as client:
        done = await ended(client, batch.id)
        assert (done.status, second.requests) == (status, [])
        names = sorted(await lines_of(client, done.output_file_id))
        assert names == (list("abc") if status == "completed" else list("ab"))
        if status == "expired":
            assert sorted(await lines_of(client, done.error_file_id)) == ["c"]


async def test_a_batch_ends_when_its_key_is_removed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = Held(n_free=1)
    keys = key_file(tmp_path, f"alice: {ALICE}\nbob: {BOB}\n")
    async with (
        serving_batches(tokenizer, tmp_path / "kept", generator, keys=keys) as (url, keeper),
        openai_client(url, ALICE) as alice,
    ):
        batch = await begun(alice, request_lines(*"abcdef", model=MODEL))
        await running(alice, batch.id, n_done=1)
        keys.write_text(f"bob: {BOB}\n")
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await alice.models.list()
                except openai.AuthenticationError:
                    break
                await pause()
        generator.gate.opened.set()
        kept = keeper.store.batches[batch.id]
        async with asyncio.timeout(3 * WAIT_S):
            while not kept.is_ended:
                await pause()
        assert kept.status == "failed"
        assert "the key that asked for this is not known any more" in kept.problems[0].message


@pytest.mark.parametrize("who", ["unnamed", "gateway"])
async def test_a_batch_heeds_bound_and_prefixes_of_its_key(tokenizer: Tokenizer, tmp_path: Path, who: str) -> None:
    options = "tokens-per-minute=900 prefixes=own"
    keys = key_file(tmp_path, f"{UNNAMED} {options}\ngw: {GATEWAY} gateway=yes\n")
    theirs = parse_keys(f"alice: {ALICE} {options}", keys)["alice"]
    headers = {BEHALF: theirs.behalf} if who == "gateway" else {}
    generator = FakeGenerator()
    async with (
        serving_batches(tokenizer, tmp_path / "kept", generator, keys=keys) as (url, _),
        openai_client(url, GATEWAY if who == "gateway" else UNNAMED) as plain,
    ):
        client = plain.with_options(default_headers=headers)
        batch = await begun(client, request_lines(*"abc", model=MODEL, prompt="x" * 200))
        assert (await ended(client, batch.id)).request_counts.completed == 3
        answer = await client.models.with_raw_response.list()
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 800
        usage = await client.get("/usage", cast_to=dict[str, Any])
        (name,) = (each["name"] for each in usage["data"] if each["requests"])
        assert name == ("gw/alice" if who == "gateway" else "line 1")
    own = parse_keys(keys.read_text(), keys)
    tenant = own["gw"].of_behalf(theirs.behalf).tenant if who == "gateway" else own["line 1"].tenant
    assert {request.circle for request in generator.requests} == {circle_of(tenant, "")}


async def test_the_next_batch_is_of_the_key_that_has_waited_longest(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = Held()
    keys = key_file(tmp_path, f"alice: {ALICE}\nbob: {BOB}\n")
    async with (
        serving_batches(tokenizer, tmp_path / "kept", generator, keys=keys, batches=1) as (url, _),
        openai_client(url, ALICE) as alice,
        openai_client(url, BOB) as bob,
    ):
        batches = [(alice, await begun(alice, request_lines(name, model=MODEL))) for name in "ab"]
        batches.append((bob, await begun(bob, request_lines("z", model=MODEL))))
        generator.gate.opened.set()
        for client, batch in batches:
            assert (await ended(client, batch.id)).status == "completed"
        names = [request.tenant.name.removeprefix("(batch) ") for request in generator.requests]
        assert names == ["alice", "bob", "alice"]


async def test_no_batch_begins_for_a_key_that_has_no_lane(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = Held()
    keys = key_file(tmp_path, f"alice: {ALICE}\nbob: {BOB}\n")
    async with (
        serving_batches(tokenizer, tmp_path / "kept", generator, keys=keys, batch_lanes=1) as (url, keeper),
        openai_client(url, ALICE) as alice,
        openai_client(url, BOB) as bob,
    ):
        first = await begun(alice, request_lines("a", model=MODEL))
        second = await begun(bob, request_lines("z", model=MODEL))
        await alice.models.list()  # the keeper has had its turn
        assert keeper.figures()["running"] == 1
        assert (await bob.batches.cancel(second.id)).status == "cancelling"
        assert (await ended(bob, second.id)).status == "cancelled", "which needs no lane"
        generator.gate.opened.set()
        assert (await ended(alice, first.id)).status == "completed"


async def test_an_expired_file_that_cannot_be_deleted_stops_no_batch(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = BatchStore(tmp_path)
    file = StoredFile(
        id=new_id("file-"), owner="", filename="x", purpose="batch", n_bytes=1, created_at=1, expires_at=2
    )  # fmt: skip
    store.path_of(file.id).write_bytes(b"x")
    store.keep_file(file)
    store.close()

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(BatchStore, "delete_file", refuse)
    async with serving_batches(tokenizer, tmp_path) as (url, _), openai_client(url) as client:
        assert (await ended(client, (await begun(client, request_lines("a"))).id)).status == "completed"
    assert f"{file.id} has expired and cannot be deleted" in caplog.text


async def test_a_look_that_fails_is_told_and_followed_by_others(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults, look = [ZeroDivisionError("a bug of ours")], keepers.Keeper._forget_expired

    async def fails_once(keeper: keepers.Keeper) -> None:
        if faults:
            raise faults.pop()
        await look(keeper)

    monkeypatch.setattr(keepers, "SWEEP_S", 0.05)
    monkeypatch.setattr(keepers.Keeper, "_forget_expired", fails_once)
    async with serving_batches(tokenizer, tmp_path) as (url, _), openai_client(url) as client:
        assert (await ended(client, (await begun(client, request_lines("a"))).id)).status == "completed"
    assert [each.message for each in caplog.records if each.exc_info] == ["batches that wait are looked at again"]


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_a_batch_that_waits_ends_without_a_place(tokenizer: Tokenizer, tmp_path: Path, how: str) -> None:
    generator = Held()
    async with (
        serving_batches(tokenizer, tmp_path, generator, batches=1) as (url, keeper),
        openai_client(url) as client,
    ):
        first = await begun(client, request_lines("a"))
        await running(client, first.id)
        second, third = [await begun(client, request_lines(name)) for name in "bc"]
        if how == "cancelled":
            assert (await client.batches.cancel(second.id)).status == "cancelling"
        else:
            keeper.store.batches[second.id].expires_at = 1
            keeper._changed.set()
        assert (await ended(client, second.id)).status == how
        assert (await client.batches.retrieve(third.id)).status == "validating", "it needs a place"
        generator.gate.opened.set()
        for batch in (first, third):
            assert (await ended(client, batch.id)).status == "completed"
        assert len(generator.requests) == 2


async def test_few_batches_are_ended_at_a_time(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_batches(tokenizer, tmp_path, batches=1) as (_, keeper):
        assert keeper._running is not None
        keeper._running.cancel()
        for _ in range(9):
            keeper.store.keep_batch(stored(status="cancelling"))
        n_begun = 0
        while (batch := keeper._next()) is not None:
            keeper._working[batch.id] = keepers._Work()
            n_begun += 1
        assert n_begun == 1 + keepers.ENDINGS_MAX
