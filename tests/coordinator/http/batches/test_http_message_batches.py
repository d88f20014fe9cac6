"""Anthropic's message batches: their life, results, ends, owners, bounds and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from relayline.coordinator.batches.lines import LINE_BYTES_MAX
from relayline.coordinator.batches.store import BatchStore
from relayline.coordinator.http.batches import keeper as keepers
from relayline.coordinator.http.batches import message_input
from relayline.coordinator.http.batches.bodies import MessageBatchBody
from relayline.coordinator.http.batches.keeper import Keeper
from relayline.coordinator.http.batches.message_handlers import MessageBatchHandlers, _blocks
from relayline.coordinator.http.batches.message_input import lines_of
from relayline.coordinator.http.batches.shapes import message_page
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.sse import ClientGoneError
from relayline.coordinator.http.requests.bodies import decode_body
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError
from tests.support.batch_world import Held, begun, ended, request_lines, serving_batches, unread
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator, Gate, serving
from tests.support.openai_client import openai_client
from tests.support.polling import pause

PATH = "/v1/messages/batches"
ALICE, BOB = "alice-key-0123456789", "bob-key-012345678901"


def requests(*names: str, **params: Any) -> list[dict[str, Any]]:
    asked = {"model": MODEL, "max_tokens": 8} | params
    return [{"custom_id": name, "params": asked | {"messages": [{"role": "user", "content": name}]}} for name in names]


class Client:
    """A client of one server, as raw JSON."""

    def __init__(self, session: aiohttp.ClientSession, url: str, keeper: Keeper | None = None) -> None:
        self.session, self.url, self.keeper = session, url, keeper

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        sent = {"json": body} if body is not None else {}
        async with self.session.request(method, f"{PATH}{path}", **sent, **more) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def begin(self, asked: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        status, found = await self.ask("POST", "", {"requests": asked} | more)
        assert status == 200, found
        return dict(found)

    async def get(self, batch_id: str) -> dict[str, Any]:
        status, found = await self.ask("GET", f"/{batch_id}")
        assert status == 200
        return dict(found)

    async def ended(self, batch_id: str) -> dict[str, Any]:
        async with asyncio.timeout(3 * WAIT_S):
            while (found := await self.get(batch_id))["processing_status"] != "ended":
                assert found["results_url"] is None
                await pause()
        return found

    async def until_answered(self, batch_id: str, n_answered: int) -> None:
        assert self.keeper is not None
        async with asyncio.timeout(3 * WAIT_S):
            while self.keeper.store.batches[batch_id].n_answered < n_answered:
                await pause()

    async def results(self, batch: dict[str, Any]) -> dict[str, Any]:
        async with self.session.get(batch["results_url"]) as answer:
            assert (answer.status, answer.content_type) == (200, "application/x-jsonl")
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
        found = {line["custom_id"]: line["result"] for line in lines}
        assert len(found) == len(lines), "each request once"
        return found


@contextlib.asynccontextmanager
async def serving_client(tokenizer: Tokenizer, *given: Any, **more: Any) -> AsyncIterator[Client]:
    async with serving_batches(tokenizer, *given, **more) as (url, keeper), aiohttp.ClientSession(url) as session:
        yield Client(session, url, keeper)


def counts(**more: int) -> dict[str, int]:
    return {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0} | more


def types(results: dict[str, Any]) -> dict[str, str]:
    return {name: result["type"] for name, result in results.items()}


async def test_a_message_batch_is_answered(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_client(tokenizer, tmp_path) as client:
        made = await client.begin([*requests("a", "b"), *requests("bad", max_tokens="many")])
        assert made["id"].startswith("msgbatch_")
        times = {name: made[name] for name in ("created_at", "expires_at")}
        assert all(time.endswith("Z") and len(time) == 20 for time in times.values()), times
        assert made == times | {
            "id": made["id"], "type": "message_batch", "processing_status": "in_progress",
            "request_counts": counts(processing=3), "ended_at": None, "cancel_initiated_at": None, "archived_at": None,
            "results_url": None,
        }  # fmt: skip
        done = await client.ended(made["id"])
        assert done["request_counts"] == counts(succeeded=2, errored=1)
        assert done["results_url"] == f"{PATH}/{made['id']}/results"
        assert done["ended_at"] >= made["created_at"]
        results = await client.results(done)
        assert types(results) == {"a": "succeeded", "b": "succeeded", "bad": "errored"}
        message = results["a"]["message"]
        assert (message["type"], message["content"][0]["text"]) == ("message", "hello")
        error = results["bad"]["error"]
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert (await client.ask("GET", ""))[1] == {
            "data": [done], "has_more": False, "first_id": done["id"], "last_id": done["id"],
        }  # fmt: skip
        status, found = await client.ask("POST", f"/{done['id']}/cancel")
        assert (status, found["error"]["type"]) == (400, "invalid_request_error")
        assert client.keeper is not None
        assert {file.purpose for file in client.keeper.store.files.values()} == {"batch_output"}, "its input is gone"
        assert await client.ask("DELETE", f"/{done['id']}") == (
            200,
            {"id": done["id"], "type": "message_batch_deleted"},
        )
        assert list((tmp_path / "files").iterdir()) == []
        status, found = await client.ask("GET", f"/{done['id']}")
        assert (status, found["type"], found["error"]["type"]) == (404, "error", "not_found_error")


async def test_requests_of_a_cancelled_message_batch_are_named(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finishing, finish = Gate(), keepers.Keeper._finish

    async def held(*given: Any) -> None:
        await finishing.pass_through()
        await finish(*given)

    monkeypatch.setattr(keepers.Keeper, "_finish", held)
    generator = Held(n_free=2)
    async with serving_client(tokenizer, tmp_path, generator, batches=1) as client:
        made, waiting = await client.begin(requests(*"abcdef")), await client.begin(requests("z"))
        await client.until_answered(made["id"], 2)
        for refused in (("DELETE", ""), ("GET", "/results")):
            status, found = await client.ask(refused[0], f"/{made['id']}{refused[1]}")
            assert (status, "has not ended" in found["error"]["message"]) == (400, True)
        for each in (made, waiting):
            status, found = await client.ask("POST", f"/{each['id']}/cancel")
            assert (status, found["processing_status"]) == (200, "canceling")
            assert found["cancel_initiated_at"] >= found["created_at"]
        await finishing.reached.wait()
        assert await client.ask("POST", f"/{made['id']}/cancel") == (200, await client.get(made["id"])), "again"
        finishing.opened.set()
        done = await client.ended(made["id"])
        assert done["request_counts"] == counts(succeeded=2, canceled=4)
        expected = dict.fromkeys("ab", "succeeded") | dict.fromkeys("cdef", "canceled")
        assert types(await client.results(done)) == expected
        other = await client.ended(waiting["id"])
        assert other["request_counts"] == counts(canceled=1)
        assert await client.results(other) == {"z": {"type": "canceled"}}
        for stream in generator.streams:
            async with asyncio.timeout(WAIT_S):
                await stream.closed.wait()


@pytest.mark.parametrize("expires", [False, True])
async def test_a_message_batch_outlives_a_restart(tokenizer: Tokenizer, tmp_path: Path, expires: bool) -> None:
    async with serving_client(tokenizer, tmp_path, Held(n_free=2)) as client:
        made = await client.begin(requests(*"abcd"), completion_window="2d")
        await client.until_answered(made["id"], 2)
    if expires:
        store = BatchStore(tmp_path)
        batch = store.batches[made["id"]]
        assert batch.expires_at == batch.created_at + 2 * 86_400
        batch.expires_at = batch.created_at
        store.keep_batch(batch)
        store.close()
    second = FakeGenerator()
    async with serving_client(tokenizer, tmp_path, second) as client:
        done = await client.ended(made["id"])
        rest = "expired" if expires else "succeeded"
        assert types(await client.results(done)) == dict.fromkeys("ab", "succeeded") | dict.fromkeys("cd", rest)
        assert done["request_counts"] == (counts(succeeded=2, expired=2) if expires else counts(succeeded=4))
        assert len(second.requests) == (0 if expires else 2), "nothing is asked twice"


async def test_a_cancel_that_a_restart_cuts_is_finished(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_client(tokenizer, tmp_path, Held(n_free=1)) as client:
        made = await client.begin(requests(*"abc"))
        await client.until_answered(made["id"], 1)
    store = BatchStore(tmp_path)
    batch = store.batches[made["id"]]
    batch.status = "cancelling"
    store.keep_batch(batch)
    store.work_paths(batch)[1].write_bytes(
        json.dumps({"custom_id": "b", "response": None, "error": {"code": "batch_cancelled", "message": ""}}).encode()
        + b'\n{"custom_id": "c", "resp'
    )
    store.close()
    second = FakeGenerator()
    async with serving_client(tokenizer, tmp_path, second) as client:
        done = await client.ended(made["id"])
        assert types(await client.results(done)) == {"a": "succeeded", "b": "canceled", "c": "canceled"}
        assert (done["request_counts"], second.requests) == (counts(succeeded=1, canceled=2), [])


async def test_a_message_batch_that_fails_has_results_too(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failed(*_: Any) -> str:
        return "failed"

    monkeypatch.setattr(keepers.Keeper, "_asked", failed)
    async with serving_client(tokenizer, tmp_path) as client:
        done = await client.ended((await client.begin(requests("a", "b")))["id"])
        assert done["request_counts"] == counts(errored=2)
        error = (await client.results(done))["a"]["error"]["error"]
        assert error == {"type": "api_error", "message": "This request was not executed: its batch has failed."}
        assert client.keeper is not None
        store = client.keeper.store
        store.delete_file(store.batches[done["id"]].error_id)  # as a client of /v1/files may
        status, found = await client.ask("GET", f"/{done['id']}/results")
        assert (status, "were deleted" in found["error"]["message"]) == (404, True)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "the body is empty"),
        (b'{"requests": [', 400, "not valid JSON"),
        (b"{}", 400, "requests: required field is missing"),
        (b'{"requests": []}', 400, "requests: must be 1 to 3, and are 0"),
        (json.dumps({"requests": requests(*"abcd")}).encode(), 400, "must be 1 to 3, and are 4"),
        (json.dumps({"requests": requests(*"aba")}).encode(), 400, "requests[2].custom_id: is that of requests[0] too"),
        (b'{"requests": [{"custom_id": "", "params": {}}]}', 400, "custom_id"),
        (b'{"requests": [{"custom_id": "a", "params": []}]}', 400, "requests[0].params: must be an object"),
        (b'{"requests": [{"custom_id": "a", "params": {"stream": true}}]}', 400, "requests[0].params.stream: must be"),
        (b'{"requests": [{"custom_id": "a"}]}', 400, "params"),
        (json.dumps({"requests": requests("a"), "completion_window": "31d"}).encode(), 400, "completion_window: must"),
        (b" " * 8_000, 413, "larger than"),
        (b'{"requests":[%b]}' % b",".join(b'{"custom_id":"%d","params":{}}' % at for at in range(140)), 400, "140"),
    ],
)
async def test_a_body_with_a_mistake_makes_no_batch(
    tokenizer: Tokenizer, tmp_path: Path, body: bytes, status: int, says: str
) -> None:
    settings = {"batch_requests": 3, "batch_file_bytes": 7_000}
    async with serving_client(tokenizer, tmp_path, **settings) as client:
        found_status, found = await client.ask("POST", "", data=body)
        assert (found_status, found["type"], says in found["error"]["message"]) == (status, "error", True), found
        assert [list((tmp_path / part).iterdir()) for part in ("files", "batches", "work")] == [[], [], []]


async def test_lines_have_bounds_that_bodies_do_not_have(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = {"batch_file_bytes": 400}
    async with serving_client(tokenizer, tmp_path, **settings) as client:
        body = b'{"requests":[%b]}' % b",".join(b'{"custom_id":"%d","params":{}}' % at for at in range(9))
        assert len(body) < 400
        status, found = await client.ask("POST", "", data=body)
        assert (status, found["error"]["message"]) == (400, "requests: have more than 400 bytes together")
        status, found = await client.ask("POST", "", data=b"x", headers={"Content-Encoding": "gzip"})
        assert (status, found["type"]) == (415, "error")
        assert list((tmp_path / "files").iterdir()) == []
    text = b'{"requests":[{"custom_id":"a","params":{"x":"%b"}}]}' % (b"x" * LINE_BYTES_MAX)
    with pytest.raises(InvalidRequestError, match=r"requests\[0\].params: has more than 16 MiB"):
        list(lines_of(decode_body(text, MessageBatchBody), 9))


async def test_a_body_may_be_written_over_many_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving_client(tokenizer, tmp_path) as client:
        body = json.dumps({"requests": requests("a\nb", "é")}, indent=2).encode()
        status, made = await client.ask("POST", "", data=body)
        assert status == 200
        assert types(await client.results(await client.ended(made["id"]))) == {"a\nb": "succeeded", "é": "succeeded"}


async def test_there_is_a_place_for_a_message_batch_or_nothing_of_it_is_kept(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with serving_client(tokenizer, tmp_path, Held(), batch_files=2) as client:
        made = await client.begin(requests("a"))
        async with openai_client(client.url) as openai:
            await openai.files.create(file=("in", b"x"), purpose="batch")
        status, found = await client.ask("POST", "", {"requests": requests("b")})
        assert (status, "2 files are kept" in found["error"]["message"]) == (400, True)
        assert len(list((tmp_path / "files").glob("*.json"))) == 2
        assert (await client.ask("POST", f"/{made['id']}/cancel"))[0] == 200


async def test_message_batches_and_openais_are_listed_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with (
        serving_client(tokenizer, tmp_path) as client,
        openai_client(client.url) as openai,
    ):
        made = [(await client.begin(requests("a")))["id"] for _ in range(3)][::-1]
        theirs = await ended(openai, (await begun(openai, request_lines("a"))).id)
        assert [each.id async for each in openai.batches.list()] == [theirs.id]
        assert (await client.ask("GET", f"/{theirs.id}"))[0] == 404
        async with client.session.get(f"/v1/batches/{made[0]}") as answer:
            assert answer.status == 404
        for batch_id in made:
            await client.ended(batch_id)
        for query, expected, has_more in (
            ("", made, False),
            ("?limit=2", made[:2], True),
            (f"?after_id={made[0]}&limit=1", made[1:2], True),
            (f"?after_id={made[1]}", made[2:], False),
            (f"?before_id={made[2]}&limit=1", made[1:2], True),
            (f"?before_id={made[2]}", made[:2], False),
            (f"?after_id={made[2]}", [], False),
        ):
            status, found = await client.ask("GET", query)
            assert status == 200
            assert ([each["id"] for each in found["data"]], found["has_more"]) == (expected, has_more), query
        assert (await client.ask("GET", "?limit=0"))[0] == 400


def test_a_page_of_nothing() -> None:
    assert message_page([], None, "x", 5) == {"data": [], "has_more": False, "first_id": None, "last_id": None}


async def test_message_batches_are_their_keys_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {ALICE}\nbob: {BOB} models=other\n")
    keys.chmod(0o600)
    generator = FakeGenerator()
    async with (
        serving_batches(tokenizer, tmp_path / "kept", generator, keys=keys) as (url, keeper),
        aiohttp.ClientSession(url, headers={"X-Api-Key": ALICE}) as hers,
        aiohttp.ClientSession(url, headers={"X-Api-Key": BOB}) as his,
        aiohttp.ClientSession(url) as nobodys,
    ):
        alice, bob = Client(hers, url, keeper), Client(his, url, keeper)
        done = await alice.ended((await alice.begin(requests("a")))["id"])
        assert done["request_counts"] == counts(succeeded=1)
        assert generator.requests[0].tenant.name == "(batch) alice"
        for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            assert (await bob.ask(method, f"/{done['id']}{path}"))[0] == 404
        assert (await bob.ask("GET", ""))[1]["data"] == []
        theirs = await bob.ended((await bob.begin(requests("b")))["id"])
        result = (await bob.results(theirs))["b"]
        assert result["error"]["error"]["type"] == "not_found_error", "it may use the models of its key alone"
        status, found = await Client(nobodys, url).ask("GET", "")
        assert (status, found["error"]["type"]) == (401, "authentication_error")


async def test_without_a_directory_there_are_no_message_batches(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served, aiohttp.ClientSession(served.url) as session:
        status, found = await Client(session, served.url).ask("POST", "", {"requests": requests("a")})
        assert (status, found["type"], "--batch-dir DIR" in found["error"]["message"]) == (501, "error", True)


async def test_a_client_that_stops_reading_results_is_cut_off(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    results, cut = MessageBatchHandlers.results, asyncio.get_running_loop().create_future()

    async def watched(self: MessageBatchHandlers, request: web.Request) -> web.StreamResponse:
        try:
            return await results(self, request)
        except BaseException as error:
            cut.set_result(error)
            raise

    monkeypatch.setattr(MessageBatchHandlers, "results", watched)
    async with serving_client(tokenizer, tmp_path, limits=HttpLimits(write_timeout_s=0.2)) as client:
        batch = await client.ended((await client.begin(requests("a")))["id"])
        assert client.keeper is not None
        store = client.keeper.store
        path = store.path_of(store.batches[batch["id"]].output_id)
        path.write_bytes(path.read_bytes() * 40_000)
        async with unread(client.url, batch["results_url"]):
            assert isinstance(await asyncio.wait_for(cut, WAIT_S), ClientGoneError)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING], "it is no failure of ours"


async def test_a_batch_that_is_deleted_meanwhile_cuts_no_results(tmp_path: Path) -> None:
    paths = [tmp_path / "answers", tmp_path / "errors"]
    line = json.dumps({"custom_id": "a", "response": {"status_code": 200, "body": {"text": "x" * 1_000}}}) + "\n"
    for path in paths:
        path.write_text(line * 400)
    blocks = _blocks(paths)
    first = next(blocks)
    for path in paths:
        path.unlink()
    assert b"".join((first, *blocks)).count(b"\n") == 800


def test_a_body_that_is_gone_is_not_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator was killed meanwhile, and the next one has taken the torn file away."""
    path = tmp_path / "file-1"
    path.write_bytes(json.dumps({"requests": requests("a")}).encode())

    def decode(raw: bytes, kind: type[MessageBatchBody]) -> MessageBatchBody:
        path.unlink()
        return decode_body(raw, kind)

    monkeypatch.setattr(message_input, "decode_body", decode)
    assert message_input._read(message_input.Order(str(path), 10, 1 << 20)).disk_problem
    assert not path.exists()
