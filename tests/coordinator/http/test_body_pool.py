"""A body that takes too much ends one worker process and one request, nothing else. A gone client costs no work."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from relayline.coordinator.answers.syntax import HERMES
from relayline.coordinator.answers.template import ToolStyle
from relayline.coordinator.http.edge.clients import CLIENT, client_of
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.workers import body_pool
from relayline.coordinator.http.workers.body_pool import INLINE_BYTES_MAX, BodyPool, find_style
from relayline.coordinator.http.workers.fork_orders import order_frame, read_order
from relayline.coordinator.http.workers.prepared import Asked, Prepared, Route, Style, setting_of, unpacked
from relayline.coordinator.http.workers.preparing import Preparer
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing import vocabulary_files as support
from relayline.wire.common.errors import ContextLengthError, InternalError, InvalidRequestError, OverloadedError
from tests.support.http_support import WAIT_S, serving
from tests.support.polling import pause

N_TIMES = "{% for a in range(n) %}{% for b in range(n) %}{% for c in range(n) %}{% endfor %}{% endfor %}{% endfor %}hi"
ENDLESS = "{% set n = 99999 %}" + N_TIMES
# One of each kind: endless, and large, at rendering or already at compilation.
HOSTILE = {
    "endless": ENDLESS,
    "power": "{{ (10**(10**8)) % 7 }}",
    "long text": "{{ ('a' * 8000000000)|length }}",
    "wide format": "{{ '%8000000000d' % 1 }}",
    "long list": "{% set x = [0] * 1000000000 %}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "long answer": "{% for a in range(90000) %}{{ 'x' * 90000 }}{% endfor %}",
    "itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "brackets": "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ORDERS_MAX = 100_000  # more than a socket holds


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(support.write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))


@pytest.fixture(autouse=True)
def _templates_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless ones take all the time they may, each time; honest ones take a few milliseconds."""
    monkeypatch.setattr(body_pool, "TEMPLATE_CPU_S_MAX", 0.2)


def pool_of(tokenizer: Tokenizer, template: str = support.CHATML) -> BodyPool:
    return BodyPool(setting_of("m", HttpLimits(), ChatTemplate(template)), tokenizer)


@pytest.fixture
async def pool(tokenizer: Tokenizer) -> AsyncIterator[BodyPool]:
    made = pool_of(tokenizer)
    yield made
    made.close()


async def completed(pool: BodyPool, body: Any, *, ctx_tokens: int = 512, client: str = "a") -> Prepared:
    raw = body if isinstance(body, bytes) else json.dumps({**body, "user": "x" * INLINE_BYTES_MAX}).encode()
    answer = await pool.ask(client, Asked("completions", ctx_tokens), raw)
    return msgspec.msgpack.decode(answer, type=Prepared)


class Full(asyncio.Transport):
    """A pipe without room."""

    def __init__(self, worker: asyncio.Protocol) -> None:
        self._worker = worker

    def writelines(self, _parts: Any) -> None:
        self._worker.pause_writing()


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_hostile_template_costs_its_chats_and_nothing_else(tokenizer: Tokenizer, template: str) -> None:
    async with serving(tokenizer, template=template) as served, aiohttp.ClientSession(served.url) as session:
        async with session.post("/v1/chat/completions", json=CHAT) as reply:
            assert reply.status == 400
            error = (await reply.json())["error"]
        assert error["param"] == "messages"
        assert "\n" not in error["message"]
        async with session.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}) as reply:
            assert reply.status == 200


async def test_a_template_that_a_request_makes_endless_ends(tokenizer: Tokenizer) -> None:
    pool = pool_of(tokenizer, N_TIMES)
    for n, is_refused in ((2, False), (99_999, True), (2, False)):
        raw = json.dumps({**CHAT, "chat_template_kwargs": {"n": n}}).encode()
        asking = pool.ask("a", Asked("chat", 512), raw)
        if is_refused:
            with pytest.raises(InvalidRequestError, match="template takes too much time or memory") as caught:
                await asking
            assert caught.value.param == "messages"
        else:
            prepared = msgspec.msgpack.decode(await asking, type=Prepared)
            assert unpacked(prepared.prompts[0]) == tuple(tokenizer.encode("hi"))
    pool.close()


def test_a_style_is_found_in_a_process_that_may_die_of_it(tokenizer: Tokenizer) -> None:
    fine = find_style(setting_of("m", HttpLimits(), ChatTemplate(support.CHATML)), tokenizer.path)
    assert fine.fault == ""
    endless = find_style(setting_of("m", HttpLimits(), ChatTemplate(ENDLESS)), tokenizer.path)
    assert "too much time or memory" in endless.fault
    broken = find_style(setting_of("m", HttpLimits(), ChatTemplate("{% if %}")), tokenizer.path)
    assert "does not compile" in broken.fault


@pytest.mark.parametrize("route", ["chat", "template", "tokenize"])
def test_a_template_with_a_fault_is_not_run_again(tokenizer: Tokenizer, route: Route) -> None:
    setting = setting_of("m", HttpLimits(), ChatTemplate(support.CHATML))
    setting.style = Style.of(ToolStyle(HERMES), "this template takes too long")
    raw = json.dumps({"messages": CHAT["messages"]}).encode()
    with pytest.raises(InvalidRequestError, match="this template takes too long") as caught:
        Preparer(setting, tokenizer).answer(Asked(route, 512), raw, lambda _: None)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "body",
    [
        # From Python 3.14 on, C code goes as deep as its stack has room.
        b'{"prompt":"x","unknown":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}",
        b'{"prompt":"x","prediction":[' + b"{}," * 5_000_000 + b"{}]}",
        b'{"prompt":[' + b'"",' * 5_000_000 + b'""]}',
        b'{"prompt":"x","stop":[' + b'"",' * 5_000_000 + b'""]}',
    ],
    ids=["deep", "objects", "prompts", "stops"],
)
async def test_bodies_of_many_values_are_refused_and_the_next_is_read(pool: BodyPool, body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        await completed(pool, body)
    assert unpacked((await completed(pool, {"prompt": [104]})).prompts[0]) == (104,)


async def test_a_text_that_cannot_fit_is_refused_by_its_size(pool: BodyPool, tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextLengthError, match="length is 512 tokens"):
        await completed(pool, {"prompt": "x" * (512 * tokenizer.longest_piece_bytes + 1)})
    with pytest.raises(ContextLengthError, match="resulted in 513 tokens"):
        await completed(pool, {"prompt": [1] * 513})


async def test_a_long_body_goes_to_its_worker_in_pieces(pool: BodyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of megabytes holds up all streams for milliseconds."""
    sizes: list[int] = []
    send = body_pool._Worker.send

    def noted(worker: Any, *parts: bytes | memoryview) -> None:
        sizes.append(sum(map(len, parts)))
        send(worker, *parts)

    monkeypatch.setattr(body_pool._Worker, "send", noted)
    n_bytes = 20 * body_pool.PIECE_BYTES + 1
    text = {"prompt": "h" * 400, "user": "x" * n_bytes}
    assert unpacked((await completed(pool, json.dumps(text).encode())).prompts[0]) == (104,) * 400
    assert sum(sizes) > n_bytes
    assert max(sizes) < 2 * body_pool.PIECE_BYTES


async def test_a_worker_that_dies_before_it_has_all_of_a_body_is_told() -> None:
    worker = body_pool._Worker(0)
    worker.connection_made(Full(worker))
    talking = asyncio.create_task(worker.talk(b"", b"x" * (3 * body_pool.PIECE_BYTES)))
    await asyncio.sleep(0)
    assert not talking.done()
    worker.connection_lost(None)
    with pytest.raises(body_pool._WorkerDiedError):
        await talking


async def test_a_short_body_that_takes_long_is_handled_with_the_long_ones(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_pool, "QUICK_CPU_S_MAX", 1e-6)  # less than any body takes
    pool = pool_of(tokenizer)
    assert unpacked((await completed(pool, {"prompt": "h" * 400})).prompts[0]) == (104,) * 400
    pool.close()


async def test_a_body_that_a_busy_host_does_not_read_in_time_is_no_mistake_of_its_client(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(tokenizer)
    monkeypatch.setattr(body_pool, "WALL_S_MAX", 0.0)
    with pytest.raises(OverloadedError, match="too busy to read the body"):
        await completed(pool, {"prompt": "h" * 400})
    pool.close()


async def test_workers_stop_when_nobody_waits_for_them(tokenizer: Tokenizer) -> None:
    """Two requests of one client: the second begins when the first is given up, not when that would have ended."""
    pool = pool_of(tokenizer, N_TIMES)
    pool._quick = pool._long  # no other worker could have done it
    raw = json.dumps({**CHAT, "chat_template_kwargs": {"n": 99_999}}).encode()
    first = asyncio.create_task(pool.ask("a", Asked("chat", 512), raw))
    second = asyncio.create_task(completed(pool, {"prompt": [104]}))
    third = asyncio.create_task(completed(pool, {"prompt": [105]}))
    await asyncio.sleep(0)
    assert pool._long._turns._line._n_working == {"a": 1}
    third.cancel()
    await asyncio.sleep(0)
    assert not second.done()
    first.cancel()
    assert unpacked((await asyncio.wait_for(second, WAIT_S)).prompts[0]) == (104,)
    assert first.cancelled() or await asyncio.gather(first, return_exceptions=True)
    assert not pool._long._turns._waiting
    pool.close()


async def test_one_clients_long_requests_leave_the_others_a_worker(tokenizer: Tokenizer) -> None:
    pool = pool_of(tokenizer, N_TIMES)
    pool._quick = pool._long
    raw = json.dumps({**CHAT, "chat_template_kwargs": {"n": 99_999}}).encode()
    crowd = [asyncio.create_task(pool.ask("a", Asked("chat", 512), raw)) for _ in range(8)]
    found = await asyncio.wait_for(completed(pool, {"prompt": [104]}, client="b"), WAIT_S)
    assert unpacked(found.prompts[0]) == (104,)
    assert sum(task.done() for task in crowd) < len(crowd)
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    pool.close()


async def worker_of(workers: body_pool._Workers) -> body_pool._Worker:
    """Let them have one idle worker, and return it."""
    if not workers._idle:
        workers._idle.append(await workers._new())
    return workers._idle[0]


@pytest.mark.parametrize("is_noticed", [True, False], ids=["while idle", "as it is asked"])
async def test_a_fork_server_that_was_killed_with_all_workers_costs_no_request(
    pool: BodyPool, is_noticed: bool
) -> None:
    kinds = (pool._quick, pool._long, pool._grammars)
    idle = [await worker_of(workers) for workers in kinds]
    asked = await completed(pool, {"prompt": [104], "guided_regex": "[0-9]"})
    process = body_pool.fork_server._process
    assert process is not None
    process.kill()
    process.wait()
    if is_noticed:
        async with asyncio.timeout(WAIT_S):
            while not all(worker.is_lost for worker in idle):
                await pause()
    for _ in range(2):
        assert unpacked((await completed(pool, {"prompt": [104]})).prompts[0]) == (104,)
    long = {"prompt": [104], "metadata": "x" * body_pool.QUICK_BYTES_MAX}
    assert unpacked((await completed(pool, long)).prompts[0]) == (104,)
    assert await pool.ask("a", Asked("grammar", 512), asked.grammar_task)


def test_a_worker_whose_server_ended_before_it_began_ends_too() -> None:
    gone = "import os; from relayline.coordinator.http.workers.body_worker import end_with_parent; "
    for parent, code in (("os.getppid()", 0), ("-1", 1)):
        done = subprocess.run([sys.executable, "-c", f"{gone}end_with_parent({parent})"], check=False, timeout=120)
        assert done.returncode == code


async def test_a_fork_server_that_hangs_is_replaced_at_once(pool: BodyPool) -> None:
    await completed(pool, {"prompt": [104]})
    process = body_pool.fork_server._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    for number in range(ORDERS_MAX):
        body_pool.fork_server.end(-1 - number)  # of no worker
        if process.returncode is not None:
            break
    assert process.returncode == -signal.SIGKILL
    assert unpacked((await completed(pool, {"prompt": [104]})).prompts[0]) == (104,)


async def test_a_worker_that_never_begins_is_tried_once_more_and_no_oftener(
    pool: BodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_asked = 0

    async def dead(self: body_pool._Worker, asked: bytes, raw: bytes) -> tuple[bytes, bytes]:
        nonlocal n_asked
        n_asked += 1
        raise body_pool._WorkerDiedError(None)

    monkeypatch.setattr(body_pool._Worker, "talk", dead)
    long = {"prompt": [104], "metadata": "x" * body_pool.QUICK_BYTES_MAX}
    with pytest.raises(InternalError, match="does not start"):
        await completed(pool, long)
    assert n_asked == 2


async def test_the_fork_server_needs_no_sockets_of_packets(pool: BodyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    body_pool.fork_server.close()
    monkeypatch.delattr(socket, "SOCK_SEQPACKET")  # macOS has them not between processes of one host
    found = await completed(pool, {"prompt": [104]})
    assert unpacked(found.prompts[0]) == (104,)


def test_an_order_arrives_whole_or_not_at_all() -> None:
    ours, its = socket.socketpair()
    with its:
        frames = [order_frame({"number": number}) for number in range(3)]
        ours.sendall(b"".join(frames)[:-1])
        ours.close()
        assert [read_order(its) for _ in range(3)] == [({"number": 0}, []), ({"number": 1}, []), None]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
    ],
)
def test_clients_are_distinguished_by_key_or_by_address(one: str, other: str, is_same: bool) -> None:
    requests = [make_mocked_request("POST", "/").clone(remote=address) for address in (one, other)]
    assert (client_of(requests[0]) == client_of(requests[1])) == is_same
    for request, key in zip(requests, ("a", "b"), strict=True):
        request[CLIENT] = key
    assert client_of(requests[0]) != client_of(requests[1])


@pytest.mark.parametrize("is_quick", [True, False])
async def test_the_smallest_bodies_are_read_at_once_where_that_is_cheap(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_quick: bool
) -> None:
    monkeypatch.setattr(body_pool, "INLINE_START_S_MAX", WAIT_S if is_quick else 0)
    pool = pool_of(tokenizer)
    n_forks = 0
    fork = body_pool.fork_server.fork

    def counted(path: Any) -> Any:
        nonlocal n_forks
        n_forks += 1
        return fork(path)

    monkeypatch.setattr(body_pool.fork_server, "fork", counted)
    asked = Asked("completions", 512)
    found = [await pool.ask("a", asked, b'{"prompt":"hello"}'), await pool.ask("a", asked, b'{"prompt":"<|bos|>"}')]
    prompts = [unpacked(msgspec.msgpack.decode(each, type=Prepared).prompts[0]) for each in found]
    assert prompts == [tuple(tokenizer.encode("hello")), (support.BOS,)]
    assert n_forks == (0 if is_quick else 1)
    await pool.ask("a", Asked("chat", 512), json.dumps(CHAT).encode())
    assert n_forks == 1
    pool.close()
