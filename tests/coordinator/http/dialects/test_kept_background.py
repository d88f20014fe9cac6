"""Background responses with a directory: the next coordinator goes on with them, and clients see one answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from relayline.coordinator.http.edge.token_rate import TokenRate
from relayline.coordinator.http.responses import resuming
from relayline.coordinator.http.responses.orders import Order, OrderFiles, Sent
from relayline.coordinator.http.responses.waiting import Waiting
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.observe.usage import Spent, UsageByKey
from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import OverloadedError, RateLimitError
from tests.support.http_support import MODEL, WAIT_S, FakeStream, tokens
from tests.support.kept_responses import Speaker, left_by_a_kill, serving_kept
from tests.support.openai_client import leave, openai_client
from tests.support.polling import pause

KEYS = "alice: alice-key-0123456789 streams=3\nbob: bob-key-012345678901\n"
ALICE, BOB = "alice-key-0123456789", "bob-key-012345678901"


@dataclasses.dataclass
class Suspect:
    """As much of `Waiting` as its turn is made of."""

    at: int
    n_starts: int


def full(_handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.asynccontextmanager
async def killed(
    tokenizer: Tokenizer, directory: Path, n_free: int = 2, *, keys: Path | None = None, **body: Any
) -> AsyncIterator[tuple[str, list[Any]]]:
    """A response that a coordinator has begun, with the events that its client has seen, and the directory as it was
    then: what a kill leaves.
    """
    first = Speaker(n_free=n_free)
    seen: list[Any] = []
    async with (
        serving_kept(tokenizer, directory.with_suffix(".first"), first, keys=keys) as url,
        openai_client(url, ALICE if keys else "none") as client,
    ):
        begun = await client.responses.create(model=MODEL, input="hi", background=True, **body)
        if body.get("stream"):
            async for event in begun:
                seen.append(event)
                if getattr(event, "delta", "") == "e":
                    break
            await leave(begun)
            response_id = seen[0].response.id
        else:
            response_id = begun.id
        async with asyncio.timeout(WAIT_S):
            await first.gate.reached.wait()
            left_by_a_kill(directory.with_suffix(".first"), directory)
            while len(OrderFiles(directory / "unfinished").said(response_id)) < n_free:  # the rest is being written
                shutil.rmtree(directory)
                await pause()
                left_by_a_kill(directory.with_suffix(".first"), directory)
        yield response_id, seen


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            await pause()
    return found


async def test_it_goes_on_behind_its_last_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    async with killed(tokenizer, kept, temperature=0.7, metadata={"a": "b"}) as (id, _):
        pass
    second = Speaker()
    async with serving_kept(tokenizer, kept, second) as url, openai_client(url) as client:
        whole = await ended(client, id)
        assert (whole.status, whole.output_text, whole.metadata) == ("completed", "hello", {"a": "b"})
        assert whole.usage.output_tokens == 6
        assert [request.said for request in second.requests] == [tuple(b"he")]
    assert [*(kept / "unfinished").iterdir()] == []
    async with serving_kept(tokenizer, kept) as url, openai_client(url) as client:
        assert await client.responses.retrieve(id) == whole


async def test_tokens_behind_a_stop_string_change_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept, first, second = tmp_path / "kept", Speaker(n_free=0), Speaker()
    async with serving_kept(tokenizer, kept, first) as url, openai_client(url) as client:
        stop = {"stop": "ll"}
        begun = await client.responses.create(model=MODEL, input="hi", background=True, extra_body=stop)
    OrderFiles(kept / "unfinished").add(begun.id, [*tokens(first.requests[0], b"hello")])  # as of one step of guesses
    async with serving_kept(tokenizer, kept, second) as url, openai_client(url) as client:
        whole = await ended(client, begun.id)
    assert (whole.status, whole.output_text, whole.usage.output_tokens) == ("completed", "he", 4)
    assert second.requests == []


async def test_the_seed_that_it_was_given_stays(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first, second = Speaker(n_free=0), Speaker()
    async with serving_kept(tokenizer, kept, first) as url, openai_client(url) as client:
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
    async with serving_kept(tokenizer, kept, second) as url, openai_client(url) as client:
        await ended(client, begun.id)
    assert first.requests[0].sampling == second.requests[0].sampling
    assert first.requests[0].prompt_tokens == second.requests[0].prompt_tokens


async def test_a_stream_is_taken_up_with_the_same_events(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with killed(tokenizer, tmp_path / "kept", stream=True) as (id, seen):
        pass
    second = Speaker(n_free=4)
    second.ready = False
    async with serving_kept(tokenizer, tmp_path / "kept", second) as url, openai_client(url) as client:
        assert (await client.responses.retrieve(id)).status == "in_progress"
        last = seen[-1].sequence_number
        stream = await client.responses.retrieve(id, stream=True, starting_after=last)  # before it is asked for again
        second.ready = True
        second.gate.opened.set()
        rest = [event async for event in stream]
        assert [event.sequence_number for event in rest] == [*range(last + 1, last + 1 + len(rest))]
        assert rest[-1].type == "response.completed"
        assert rest[-1].response.output_text == "hello"
        again = [event async for event in await client.responses.retrieve(id, stream=True)]
        assert again == [*seen, *rest]
    async with serving_kept(tokenizer, tmp_path / "kept") as url, openai_client(url) as client:
        assert [event async for event in await client.responses.retrieve(id, stream=True)] == again


async def test_the_end_in_order_leaves_it_for_the_next_start(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Speaker(n_free=2)
    caplog.set_level("INFO")
    failures: list[str] = []
    answered = Observer.answered

    def noted(observer: Observer, record: RequestRecord, now_ns: int) -> None:
        if record.is_detached:
            failures.append(record.error_text)
        answered(observer, record, now_ns)

    monkeypatch.setattr(Observer, "answered", noted)
    async with serving_kept(tokenizer, tmp_path, first) as url, openai_client(url) as client:
        begun = [await client.responses.create(model=MODEL, input="hi", background=True) for _ in range(2)]
        async with asyncio.timeout(WAIT_S):
            await first.gate.reached.wait()
    assert "2 background responses have not ended, and go on after the next start" in caplog.text
    assert failures == ["the coordinator has ended, and the next one goes on with it"] * 2
    async with serving_kept(tokenizer, tmp_path, Speaker()) as url, openai_client(url) as client:
        assert [(await ended(client, each.id)).output_text for each in begun] == ["hello", "hello"]


async def test_a_cancelled_one_stays_cancelled(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, second = Speaker(n_free=2), Speaker()
    async with serving_kept(tokenizer, tmp_path / "kept", first) as url, openai_client(url) as client:
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        deleted = await client.responses.create(model=MODEL, input="hi", background=True)
        async with asyncio.timeout(WAIT_S):
            await first.gate.reached.wait()
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        await client.responses.delete(deleted.id)
        left_by_a_kill(tmp_path / "kept", tmp_path / "then")
    async with serving_kept(tokenizer, tmp_path / "then", second) as url, openai_client(url) as client:
        found = await client.responses.retrieve(begun.id)
        assert (found.status, found.output_text) == ("cancelled", "he")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(deleted.id)
    assert second.requests == []


async def test_one_that_is_cancelled_on_a_full_disk_does_not_go_on(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Speaker(n_free=2), Speaker()
    async with serving_kept(tokenizer, tmp_path, first) as url, openai_client(url) as client:
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        async with asyncio.timeout(WAIT_S):
            await first.gate.reached.wait()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            assert (await client.responses.cancel(begun.id)).status == "cancelled"
    async with serving_kept(tokenizer, tmp_path, second) as url, openai_client(url) as client:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)
    assert second.requests == []


async def test_one_that_waits_can_be_cancelled(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with killed(tokenizer, tmp_path / "kept") as (id, _):
        pass
    second = Speaker()
    second.ready = False
    async with serving_kept(tokenizer, tmp_path / "kept", second) as url, openai_client(url) as client:
        assert (await client.responses.cancel(id)).status == "cancelled"
        second.ready = True
    async with serving_kept(tokenizer, tmp_path / "kept", second) as url, openai_client(url) as client:
        assert (await client.responses.retrieve(id)).status == "cancelled"
    assert second.requests == []


async def test_it_stays_its_key_s_and_ends_with_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    async with killed(tokenizer, tmp_path / "kept", keys=keys) as (id, _):
        left_by_a_kill(tmp_path / "kept", tmp_path / "later")
    second = Speaker()
    async with (
        serving_kept(tokenizer, tmp_path / "kept", second, keys=keys) as url,
        openai_client(url, ALICE) as alice,
        openai_client(url, BOB) as bob,
    ):
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(id)
        assert (await ended(alice, id)).output_text == "hello"
    (request,) = second.requests
    assert (request.tenant.name, request.tenant.streams_max) == ("alice", 3)
    keys.write_text(KEYS.replace("alice:", "carol:").replace(ALICE, "carol-key-0123456789"))
    async with serving_kept(tokenizer, tmp_path / "later", second, keys=keys):
        async with asyncio.timeout(WAIT_S):
            while [*(tmp_path / "later" / "unfinished").iterdir()]:
                await pause()
    assert len(second.requests) == 1


async def test_no_token_is_counted_twice_for_its_key(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[int] = []
    counted: list[Spent] = []
    monkeypatch.setattr(TokenRate, "spend", lambda _rate, n_tokens, _now_ns: spent.append(n_tokens))
    monkeypatch.setattr(UsageByKey, "add", lambda _usage, _name, each: counted.append(each))
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {ALICE} tokens-per-minute=1000\n")
    keys.chmod(0o600)
    first = Speaker(n_free=2)
    async with serving_kept(tokenizer, tmp_path / "kept", first, keys=keys) as url, openai_client(url, ALICE) as alice:
        begun = await alice.responses.create(model=MODEL, input="hi", background=True)
        async with asyncio.timeout(WAIT_S):
            await first.gate.reached.wait()
    n_prompt = len(first.requests[0].prompt_tokens)
    assert (spent, counted) == ([n_prompt], [])
    second = Speaker()
    async with serving_kept(tokenizer, tmp_path / "kept", second, keys=keys) as url, openai_client(url, ALICE) as alice:
        usage = (await ended(alice, begun.id)).usage
    assert (usage.input_tokens, usage.output_tokens) == (n_prompt, 6)
    assert spent[1:] == [n_prompt, 6 - len(second.requests[0].said)]
    assert counted == [Spent(n_prompt, 0, 6)]


async def test_a_key_over_its_bound_gives_the_disk_no_work(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_over(*_: object) -> None:
        raise RateLimitError("Rate limit reached", 1)

    written: list[object] = []
    monkeypatch.setattr(TokenRate, "check", is_over)
    monkeypatch.setattr(OrderFiles, "begin", lambda _files, order: written.append(order))
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {ALICE} tokens-per-minute=1000\n")
    keys.chmod(0o600)
    async with (
        serving_kept(tokenizer, tmp_path / "kept", Speaker(), keys=keys) as url,
        openai_client(url, ALICE) as alice,
    ):
        with pytest.raises(openai.RateLimitError):
            await alice.responses.create(model=MODEL, input="hi", background=True)
    assert written == []


async def test_a_full_line_of_one_key_holds_up_no_other(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Speaker):
        """The line of the key that asks first stays full."""

        first = ""

        def open(self, request: GenerationRequest, record: RequestRecord | None = None) -> FakeStream:
            self.first = self.first or request.tenant.name
            if request.tenant.name == self.first:
                raise OverloadedError("its line is full", retry_after_s=3)
            return super().open(request, record)

    monkeypatch.setattr(resuming, "LOOK_S", 0.01)
    keys, kept, second = tmp_path / "keys", tmp_path / "kept", Full()
    keys.write_text(KEYS)
    keys.chmod(0o600)
    begun: dict[str, str] = {}
    async with serving_kept(tokenizer, kept, Speaker(n_free=0), keys=keys) as url:
        for key in (ALICE, BOB):
            async with openai_client(url, key) as client:
                begun[key] = (await client.responses.create(model=MODEL, input="hi", background=True)).id
    async with (
        serving_kept(tokenizer, kept, second, keys=keys) as url,
        openai_client(url, ALICE) as alice,
        openai_client(url, BOB) as bob,
    ):
        async with asyncio.timeout(WAIT_S):
            while not second.requests:
                await pause()
        client, key = (bob, BOB) if second.first == "alice" else (alice, ALICE)
        assert (await ended(client, begun[key])).output_text == "hello"


async def test_a_full_line_is_waited_for_and_another_model_is_not(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "LOOK_S", 0.01)
    async with killed(tokenizer, tmp_path / "kept") as (id, _):
        left_by_a_kill(tmp_path / "kept", tmp_path / "other")
    second = Speaker()
    second.refusals = [OverloadedError("all lanes are taken", retry_after_s=3)]
    async with serving_kept(tokenizer, tmp_path / "kept", second) as url, openai_client(url) as client:
        assert (await ended(client, id)).output_text == "hello"
    async with serving_kept(tokenizer, tmp_path / "other", model_id="other") as url, openai_client(url) as client:
        found = await ended(client, id)
        assert found.status == "failed"
        assert "other" in found.error.message


async def test_one_that_ends_the_coordinator_is_not_tried_for_ever(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    async with killed(tokenizer, kept) as (id, _):
        pass
    n_starts = 1
    while True:
        at, second = kept.with_suffix(f".{n_starts}"), Speaker(n_free=2)
        async with serving_kept(tokenizer, kept, second) as url, openai_client(url) as client:
            async with asyncio.timeout(WAIT_S):
                while not second.gate.reached.is_set():
                    found = await client.responses.retrieve(id)
                    if found.status == "failed":
                        break
                    await pause()
            if found.status == "failed":
                break
            n_starts += 1
            left_by_a_kill(kept, at)
        kept = at
    assert n_starts == resuming.STARTS_MAX
    assert found.error.message.startswith(f"the coordinator has ended {resuming.STARTS_MAX} times while it ran")


async def test_what_has_been_tried_before_comes_one_by_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, second = Speaker(n_free=0), Speaker(n_free=0)
    async with serving_kept(tokenizer, tmp_path, first) as url, openai_client(url) as client:
        begun = [await client.responses.create(model=MODEL, input="hi", background=True) for _ in range(3)]
        async with asyncio.timeout(WAIT_S):
            await first.gate.reached.wait()
    for each in begun[:2]:
        (tmp_path / "unfinished" / f"{each.id}.starts").write_bytes(b".")
    async with serving_kept(tokenizer, tmp_path, second) as url, openai_client(url) as client:
        async with asyncio.timeout(WAIT_S):
            while len(second.requests) < 2:
                await pause()
            await second.gate.reached.wait()
        assert len(second.requests) == 2, "the one without a mark, and the first with one"
        second.gate.opened.set()
        for each in begun:
            assert (await ended(client, each.id)).output_text == "hello"


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_only_the_one_that_crashes_the_coordinator_fails(n: int) -> None:
    """All are long: whatever was tried before the crash runs in it."""
    for culprit in range(n):
        starts, tried, n_crashes = [1] * n, set[int](), 0
        while starts[culprit] < resuming.STARTS_MAX - 1:
            for each in resuming.in_turn([cast(Waiting, Suspect(at, starts[at])) for at in range(n)]):
                at = cast(Suspect, each).at
                starts[at] += 1
                tried.add(at)
                if at == culprit:
                    break
            n_crashes += 1
            assert n_crashes < 2 or len(tried) == n, "by the third start all have run again"
        assert all(starts[at] < starts[culprit] for at in range(n) if at != culprit), (culprit, starts)


async def test_when_the_reason_of_crashes_is_found_the_others_go_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, second = Speaker(n_free=0), Speaker()
    async with serving_kept(tokenizer, tmp_path, first) as url, openai_client(url) as client:
        begun = [await client.responses.create(model=MODEL, input="hi", background=True) for _ in range(2)]
    for each in begun:
        (tmp_path / "unfinished" / f"{each.id}.starts").write_bytes(b"." * (resuming.STARTS_MAX - 1))
    async with serving_kept(tokenizer, tmp_path, second) as url, openai_client(url) as client:
        found = [await ended(client, each.id) for each in begun]
    assert sorted(each.status for each in found) == ["completed", "failed"]


async def test_a_full_disk_refuses_what_cannot_be_promised(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Speaker()
    async with serving_kept(tokenizer, tmp_path, generator) as url, openai_client(url) as client:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(openai.APIStatusError, match="cannot be used now: No space left") as found:
                await client.responses.create(model=MODEL, input="hi", background=True)
        assert found.value.status_code == 507
        assert generator.requests == []
        generator.refusals = [OverloadedError("all lanes are taken", retry_after_s=3)]
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model=MODEL, input="hi", background=True)
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        assert (await ended(client, begun.id)).output_text == "hello"
    assert [*(tmp_path / "unfinished").iterdir()] == []


async def test_what_is_large_on_the_disk_holds_up_no_token(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long request is written, and another that waits is read, while one is said."""
    kept = tmp_path / "kept"
    async with killed(tokenizer, kept) as (id, _):
        pass
    going_on, writing, reading = threading.Event(), threading.Event(), threading.Event()
    begin, read = OrderFiles.begin, OrderFiles.read

    def long_begin(files: OrderFiles, order: Order) -> None:
        if order.sent is not None and b"long" in order.sent.raw:
            writing.set()
            going_on.wait(2 * WAIT_S)
        begin(files, order)

    def long_read(files: OrderFiles, id: str) -> tuple[Sent, list[TokenEvent]]:
        reading.set()
        going_on.wait(2 * WAIT_S)
        return read(files, id)

    monkeypatch.setattr(OrderFiles, "begin", long_begin)
    monkeypatch.setattr(OrderFiles, "read", long_read)
    second = Speaker(n_free=0)
    async with serving_kept(tokenizer, kept, second) as url, openai_client(url) as client:
        try:
            async with asyncio.timeout(WAIT_S):
                begun = await client.responses.create(model=MODEL, input="hi", background=True)
                long = asyncio.create_task(client.responses.create(model=MODEL, input="long", background=True))
                await asyncio.to_thread(writing.wait)
                await asyncio.to_thread(reading.wait)
                second.gate.opened.set()
                assert (await ended(client, begun.id)).output_text == "hello"
                assert not long.done()
        finally:
            going_on.set()
        assert (await ended(client, (await long).id)).output_text == "hello"
        assert (await ended(client, id)).output_text == "hello"


async def test_a_cancelled_one_that_would_go_on_after_a_restart_says_so(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    first, second = Speaker(n_free=2), Speaker()
    async with serving_kept(tokenizer, tmp_path, first) as url, openai_client(url) as client:
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        async with asyncio.timeout(WAIT_S):
            await first.gate.reached.wait()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            patched.setattr(Path, "unlink", read_only)
            with pytest.raises(openai.APIStatusError, match="cannot be used now: Read-only"):
                await client.responses.cancel(begun.id)
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
    async with serving_kept(tokenizer, tmp_path, second) as url, openai_client(url):
        pass
    assert second.requests == []
