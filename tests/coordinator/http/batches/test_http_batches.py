"""OpenAI's files and batches with OpenAI's own client: a batch's life, its bounds, owners, restarts and deaths."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from relayline.coordinator.batches.store import BatchStore, StoredBatch, StoredFile, new_id
from relayline.coordinator.http.batches import keeper as keepers
from relayline.coordinator.http.batches.handlers import BatchHandlers
from relayline.coordinator.http.edge.inside import INSIDE
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.sse import ClientGoneError
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.tenants import Level
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import UsageError
from relayline.wire.common.phase import Phase
from relayline.wire.telemetry import names
from tests.support.batch_world import Held, begun, ended, lines_of, request_lines, running, serving_batches, unread
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator, serving
from tests.support.openai_client import openai_client
from tests.support.polling import pause
from tests.support.spans import Kept, attributes_of

KEYS = "alice: alice-key-0123456789\nbob: bob-key-012345678901 models=other\n"


async def test_a_batch_is_answered_and_its_failures_are_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = request_lines("a", "b", "c") + request_lines("bad", max_tokens="many")
    async with serving_batches(tokenizer, tmp_path) as (url, keeper), openai_client(url) as client:
        batch = await begun(client, text, metadata={"night": "1"})
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"night": "1"})
        assert batch.expires_at == batch.created_at + 86_400
        done = await ended(client, batch.id)
        assert (done.status, done.errors) == ("completed", None)
        assert done.request_counts.model_dump() == {"total": 4, "completed": 3, "failed": 1}
        assert done.in_progress_at <= done.finalizing_at <= done.completed_at
        answers = await lines_of(client, done.output_file_id)
        assert {name: line["response"]["body"]["choices"][0]["text"] for name, line in answers.items()} == (
            dict.fromkeys("abc", "hello")
        )
        errors = await lines_of(client, done.error_file_id)
        assert (list(errors), errors["bad"]["response"]["status_code"]) == (["bad"], 400)
        output = await client.files.retrieve(done.output_file_id)
        assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        listed = [file.id async for file in client.files.list(limit=2)]
        assert listed[:2] in ([done.error_file_id, done.output_file_id], [done.output_file_id, done.error_file_id])
        assert listed[2:] == [batch.input_file_id]
        assert [each.id async for each in client.batches.list()] == [batch.id]
        assert (await client.files.delete(done.output_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(done.output_file_id)
        assert keeper.figures() == {
            "running": 0, "waiting": 0, "ended": 1, "requests_waiting": 0, "requests_done": 0, "requests_failed": 0,
            "files": 2, "file_bytes": len(text) + (await client.files.retrieve(done.error_file_id)).bytes,
        }  # fmt: skip


async def test_a_batch_is_answered_where_temporary_files_have_a_long_name(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / ("job-" * 30)
    far.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    async with serving_batches(tokenizer, tmp_path / "kept") as (url, _), openai_client(url) as client:
        batch = await begun(client, request_lines("a", "b"))
        assert (await ended(client, batch.id)).request_counts.completed == 2
    assert not list(far.iterdir())


async def test_each_request_of_a_batch_can_be_found_among_the_traces(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept = Kept()
    observer = Observer(kept.telemetry)
    async with serving_batches(tokenizer, tmp_path, observer=observer) as (url, _), openai_client(url) as client:
        await client.completions.create(model=MODEL, prompt="a")
        done = await ended(client, (await begun(client, request_lines("a", "b"))).id)
        answers = await lines_of(client, done.output_file_id)
    spans = [attributes_of(span) for span in kept.spans("POST /v1/completions")]
    batches = {span[names.HTTP_RESPONSE_ID]: span.get(names.ATTR_REQUEST_BATCH) for span in spans}
    assert {line["response"]["request_id"]: done.id for line in answers.values()}.items() <= batches.items()
    assert sorted(map(str, batches.values())) == ["None", done.id, done.id]
    named = {span.get(names.ATTR_REQUEST_BATCH): span.get(names.ATTR_API_KEY_NAME) for span in spans}
    assert named == {None: None, done.id: "(batch)"}


async def test_requests_of_a_batch_run_below_all_others_and_leave_a_lane(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = Held()
    async with serving_batches(tokenizer, tmp_path, generator) as (url, _), openai_client(url) as client:
        batch = await begun(client, request_lines(*"abcdef"))
        await running(client, batch.id)
        async with asyncio.timeout(WAIT_S):
            while not generator.requests:
                await pause()
        tenant = generator.requests[0].tenant
        assert (tenant.name, tenant.level, tenant.streams_max) == ("(batch)", Level.BATCH, 1), "of two lanes"
        generator.gate.opened.set()
        assert (await ended(client, batch.id)).request_counts.completed == 6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (request_lines("a", "b") + b"{\n", (3, "it is no JSON")),
        (request_lines("a") * 2, (2, "its custom_id 'a' is that of line 1 too")),
        (request_lines("a", url="/v1/embeddings"), (1, "its url is /v1/embeddings; the batch is of /v1/completions")),
        (b"\n", (None, "the file has no requests")),
        (b"null", (1, "it is null; it must be a JSON object")),
        (request_lines(*map(str, range(9))), (None, "has more than 8 requests")),
    ],
)
async def test_a_bad_file_fails_its_batch_before_the_first_request(
    tokenizer: Tokenizer, tmp_path: Path, text: bytes, says: tuple[int | None, str]
) -> None:
    generator = FakeGenerator()
    async with (
        serving_batches(tokenizer, tmp_path, generator, batch_requests=8) as (url, _),
        openai_client(url) as client,
    ):
        done = await ended(client, (await begun(client, text)).id)
        assert (done.status, done.output_file_id, generator.requests) == ("failed", None, [])
        (problem,) = done.errors.data
        assert (problem.code, problem.line) == ("invalid_line", says[0])
        assert says[1] in problem.message


async def test_a_restarted_coordinator_goes_on_and_asks_nothing_twice(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = Held(n_free=3)
    async with serving_batches(tokenizer, tmp_path, first) as (url, _), openai_client(url) as client:
        batch = await begun(client, request_lines(*"abcdef"))
        await running(client, batch.id, n_done=3)
    second = FakeGenerator()
    async with serving_batches(tokenizer, tmp_path, second) as (url, _), openai_client(url) as client:
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed, len(second.requests)) == ("completed", 6, 3)
        assert sorted(await lines_of(client, done.output_file_id)) == list("abcdef")


async def test_counts_of_a_batch_do_not_go_back_at_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_batches(tokenizer, tmp_path, Held(n_free=3)) as (url, _), openai_client(url) as client:
        batch = await begun(client, request_lines(*"abcdef"))
        await running(client, batch.id, n_done=3)
    loading = FakeGenerator()
    loading.ready = False  # so no process has looked at the batch again
    async with serving_batches(tokenizer, tmp_path, loading) as (url, keeper), openai_client(url) as client:
        found = await client.batches.retrieve(batch.id)
        assert found.request_counts.model_dump() == {"total": 6, "completed": 3, "failed": 0}
        assert (keeper.figures()["requests_done"], keeper.figures()["requests_waiting"]) == (3, 3)
        assert loading.requests == []


async def test_a_batch_wakes_a_pipeline_that_sleeps(tokenizer: Tokenizer, tmp_path: Path) -> None:
    class Asleep(FakeGenerator):
        def check_ready(self) -> None:
            self.ready = True

    generator = Asleep()
    generator.ready, generator.otherwise = False, Phase.SLEEPING
    async with serving_batches(tokenizer, tmp_path, generator) as (url, _), openai_client(url) as client:
        assert (await ended(client, (await begun(client, request_lines("a"))).id)).status == "completed"


async def test_a_process_that_dies_is_started_again(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "DEATH_PAUSE_S", 0.0)
    started = list[asyncio.subprocess.Process]()
    start = asyncio.create_subprocess_exec

    async def noted(*command: Any, **more: Any) -> asyncio.subprocess.Process:
        started.append(await start(*command, **more))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    generator = Held(n_free=2)
    async with serving_batches(tokenizer, tmp_path, generator) as (url, _), openai_client(url) as client:
        batch = await begun(client, request_lines(*"abcd"))
        await running(client, batch.id, n_done=2)
        os.kill(started[0].pid, signal.SIGKILL)
        generator.gate.opened.set()
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed, len(started)) == ("completed", 4, 2)
        assert sorted(await lines_of(client, done.output_file_id)) == list("abcd")


async def test_a_cancelled_batch_keeps_what_it_has(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = Held(n_free=2)
    async with (
        serving_batches(tokenizer, tmp_path, generator, batches=1) as (url, _),
        openai_client(url) as client,
    ):
        batch, waiting = await begun(client, request_lines(*"abcdef")), await begun(client, request_lines("z"))
        await running(client, batch.id, n_done=2)
        with pytest.raises(openai.BadRequestError, match="still reads this file"):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        assert (await client.batches.cancel(waiting.id)).status == "cancelling"
        done = await ended(client, batch.id)
        assert (done.status, sorted(await lines_of(client, done.output_file_id))) == ("cancelled", ["a", "b"])
        assert done.cancelling_at <= done.cancelled_at
        other = await ended(client, waiting.id)
        assert (other.status, other.output_file_id) == ("cancelled", None)
        with pytest.raises(openai.ConflictError, match="this batch is cancelled"):
            await client.batches.cancel(batch.id)
        for stream in generator.streams:
            async with asyncio.timeout(WAIT_S):
                await stream.closed.wait()


async def test_what_is_not_done_in_its_window_gets_an_error_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = Held(n_free=1)
    async with serving_batches(tokenizer, tmp_path, generator) as (url, _), openai_client(url) as client:
        batch = await begun(client, request_lines(*"abc"))
        await running(client, batch.id, n_done=1)
    store = BatchStore(tmp_path)
    store.keep_batch(_expiring(store.batches[batch.id]))
    store.close()
    async with serving_batches(tokenizer, tmp_path, FakeGenerator()) as (url, _), openai_client(url) as client:
        done = await ended(client, batch.id)
        assert (done.status, sorted(await lines_of(client, done.output_file_id))) == ("expired", ["a"])
        errors = await lines_of(client, done.error_file_id)
        assert {name: line["error"]["code"] for name, line in errors.items()} == dict.fromkeys("bc", "batch_expired")


def _expiring(batch: StoredBatch) -> StoredBatch:
    batch.expires_at = batch.created_at
    return batch


async def test_files_and_batches_are_their_keys_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    generator = FakeGenerator()
    async with (
        serving_batches(tokenizer, tmp_path / "kept", generator, keys=keys) as (url, _),
        openai_client(url, "alice-key-0123456789") as alice,
        openai_client(url, "bob-key-012345678901") as bob,
    ):
        batch = await begun(alice, request_lines("a", model=MODEL))
        done = await ended(alice, batch.id)
        assert done.request_counts.completed == 1
        assert generator.requests[0].tenant.name == "(batch) alice"
        usage = {each["name"]: each for each in (await alice.get("/usage", cast_to=dict[str, Any]))["data"]}
        assert (usage["alice"]["requests"], usage["alice"]["completion_tokens"] > 0) == (1, True)
        for asked in (
            bob.files.retrieve(batch.input_file_id), bob.files.content(done.output_file_id),
            bob.files.delete(batch.input_file_id), bob.batches.retrieve(batch.id), bob.batches.cancel(batch.id),
            bob.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                await asked
        assert [file.id async for file in bob.files.list()] == []
        assert [each.id async for each in bob.batches.list()] == []
        theirs = await ended(bob, (await begun(bob, request_lines("b", model=MODEL))).id)
        errors = await lines_of(bob, theirs.error_file_id)
        assert errors["b"]["response"]["status_code"] == 404, "a batch may use the models of its key alone"


async def test_nobody_gets_in_as_a_batch_from_outside(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    headers = {INSIDE: "guessed", keepers.BATCH_HEADER: "batch_1"}
    async with (
        serving_batches(tokenizer, tmp_path / "kept", keys=keys) as (url, _),
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/completions", json={"prompt": "x"}) as response,
    ):
        assert response.status == 401


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"endpoint": "/v1/audio"}, "endpoint: must be one of /v1/chat/completions"),
        ({"completion_window": "24"}, "completion_window: must be hours or days"),
        ({"completion_window": "31d"}, "at most 30d"),
        ({"metadata": {str(at): "" for at in range(17)}}, "length <= 16"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    async with serving_batches(tokenizer, tmp_path) as (url, _), openai_client(url) as client:
        with pytest.raises(openai.BadRequestError) as found:
            await begun(client, request_lines("a"), **more)
        assert says in found.value.message
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b"", None, "the body is empty"),
        (b"{}", "input_file_id", "input_file_id: required field is missing"),
        (b'{"input_file_id":5}', "input_file_id", "input_file_id: expected str, got int"),
        (b'{"input_file_id":"\xff"}', None, "the body is not UTF-8"),
        (b'{"x":' + b"[" * 15_000, None, "nested too deeply"),  # deeper than Python 3.13 reads
    ],
)
async def test_a_body_that_makes_no_batch_is_the_clients_mistake(
    tokenizer: Tokenizer, tmp_path: Path, body: bytes, param: str | None, says: str
) -> None:
    async with (
        serving_batches(tokenizer, tmp_path) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/batches", data=body) as response,
    ):
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param)
        assert says in error["message"]


async def test_uploads_have_bounds_and_leave_nothing_behind(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = {"batch_file_bytes": 4_096, "batch_files": 2, "batch_disk_bytes": 5_000}
    async with serving_batches(tokenizer, tmp_path, **settings) as (url, keeper), openai_client(url) as client:
        with pytest.raises(openai.APIStatusError) as found:
            await client.files.create(file=("in", b"x" * 4_097), purpose="batch")
        assert found.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose: must be batch"):
            await client.files.create(file=("in", b"x"), purpose="fine-tune")
        form = "multipart/form-data"
        wrong = [
            (b"x", "text/plain"),
            (b"--b\r\n\r\n", f"{form}; boundary=b"),
            (b"--b--\r\n", f"{form}; boundary=b"),
            (b'--b\r\nContent-Disposition: form-data; name="\x0f"\r\n\r\n\r\n--b--\r\n', f"{form}; boundary=b"),
            (b"--b\r\n" + b"x" * 10_000 + b"\r\n\r\n\r\n--b--\r\n", f"{form}; boundary=b"),
            (b"", form),
        ]
        for body, kind in wrong:
            async with aiohttp.ClientSession() as session:
                answer = await session.post(f"{url}/v1/files", data=body, headers={"Content-Type": kind})
                assert answer.status == 400, await answer.text()
        assert list((tmp_path / "files").iterdir()) == []
        kept = await client.files.create(
            file=("../é.jsonl", b"x" * 4_000), purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3_600},
        )  # fmt: skip
        assert (kept.bytes, kept.filename, kept.expires_at) == (4_000, "../é.jsonl", kept.created_at + 3_600)
        assert (await client.files.content(kept.id)).content == b"x" * 4_000
        with pytest.raises(openai.APIStatusError) as found:
            await client.files.create(file=("in", b"x" * 2_000), purpose="batch")
        assert found.value.status_code == 413, "no more than the disk space that is left"
        await client.files.create(file=("in", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="2 files are kept, as many as may"):
            await client.files.create(file=("in", b"x"), purpose="batch")
        assert keeper.store.n_bytes == 4_001


async def test_without_a_directory_the_routes_say_how_to_get_them(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served, openai_client(served.url) as client:
        for asked in (client.files.create(file=("in", b"x"), purpose="batch"), client.batches.retrieve("batch_1")):
            with pytest.raises(openai.APIStatusError) as found:
                await asked
            assert found.value.status_code == 501
            assert "--batch-dir DIR" in found.value.message


def test_a_damaged_file_is_left_out_with_a_warning_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = BatchStore(tmp_path)
    files = [
        StoredFile(id=new_id("file-"), owner="", filename="in", purpose="batch", n_bytes=1, created_at=at)
        for at in range(2)
    ]
    for file in files:
        store.path_of(file.id).write_bytes(b"x")
        store.keep_file(file)
    store.close()
    bad = tmp_path / "files" / f"{files[0].id}.json"
    bad.write_bytes(b'{"id": "\xff"}')
    store = BatchStore(tmp_path)
    assert [*store.files] == [files[1].id]
    assert bad.exists()
    assert store.path_of(files[0].id).exists()
    store.close()
    assert f"1 batch or file cannot be read and is left out, the first is {bad}: " in caplog.text
    batch = tmp_path / "batches" / f"{new_id('batch_')}.json"
    output = store.path_of(new_id("file-"))
    output.write_bytes(b"its answers")
    for damaged in (b"{", b'{"id": "batch_1"}'):
        batch.write_bytes(damaged)
        BatchStore(tmp_path).close()
        assert batch.read_bytes() == damaged
        assert output.exists(), "it may be of that batch"
    assert "2 batches or files cannot be read and are left out" in caplog.text
    batch.unlink()
    BatchStore(tmp_path).close()
    assert not output.exists()


def test_a_torn_upload_goes_and_a_directory_has_one_owner(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    with pytest.raises(UsageError, match="holds the batches of another coordinator"):
        BatchStore(tmp_path)
    store.path_of(new_id("file-")).write_bytes(b"half")
    store.close()
    store = BatchStore(tmp_path)
    assert (list((tmp_path / "files").iterdir()), store.files) == ([], {})
    store.close()
    with pytest.raises(UsageError, match="cannot hold batches"):
        BatchStore(tmp_path / "lock")


async def test_a_client_that_stops_reading_a_file_is_cut_off(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send, cut = BatchHandlers._send, asyncio.get_running_loop().create_future()

    async def sent(self: BatchHandlers, *given: Any) -> None:
        try:
            await send(self, *given)
        except BaseException as error:
            cut.set_result(error)
            raise

    monkeypatch.setattr(BatchHandlers, "_send", sent)
    async with (
        serving_batches(tokenizer, tmp_path, limits=HttpLimits(write_timeout_s=0.2)) as (url, _),
        openai_client(url) as client,
    ):
        file = await client.files.create(file=("in", b"x" * 20_000_000), purpose="batch")
        async with unread(url, f"/v1/files/{file.id}/content"):
            assert isinstance(await asyncio.wait_for(cut, WAIT_S), ClientGoneError)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING], "it is no failure of ours"
