"""Goal: with --api-keys no client without a key gets past health and metrics, and no key is ever shown.

Method: the real application on a loopback port with a fake generator; OpenAI's own client for the shape of the refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.api_keys import ApiKeys, protect_http
from relayline.coordinator.http.edge.key_file import KEYS_MAX, parse_keys
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.sessions.tenants import Tenant
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML, write_tokenizer
from relayline.wire.common.errors import UsageError
from tests.coordinator.observe.test_metrics import DESCRIBED
from tests.support.http_support import CREATED, MODEL, WAIT_S, FakeGenerator
from tests.support.openai_client import openai_client

ALICE, BOB, CAROL = "alice-key-0123456789", "bob-key-0123456789ab", "carol-key-0123456789"
FILE = f"# keys of the team\nalice: {ALICE}\n\n{BOB}\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("vocab") / "tokenizer.gguf"))
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


class Described(FakeGenerator):
    """A generator that /metrics can be asked about."""

    async def describe(self, since_ns: int | None = None) -> dict[str, object]:
        return DESCRIBED


class Lines(logging.Handler):
    """The log lines of relayline.http, to be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put_nowait(record.getMessage())

    async def next(self) -> str:
        async with asyncio.timeout(WAIT_S):
            return await self.lines.get()


@contextlib.asynccontextmanager
async def serving(tokenizer: Tokenizer, path: Path | None, *, protect_metrics: bool = False) -> AsyncIterator[str]:
    chat = ChatTemplate(CHATML, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    app = make_app(Described(), ServedModel(MODEL, CREATED, tokenizer, chat))
    with protect_http(app, HttpListener(api_keys_file=path, protect_metrics=protect_metrics)):
        runner, port = await start_http(app, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


async def status(url: str, key: str | None = None, *, header: str | None = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if header is not None:
        headers = {"Authorization": header}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        await response.read()
        return response.status


def test_a_key_file_holds_names_keys_and_comments():
    keys = parse_keys(FILE, Path("keys"))
    assert list(keys) == ["alice", "line 4"]
    assert ALICE not in repr(keys)
    assert keys["alice"].tenant == Tenant("alice")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "keys holds no API key; write one per line"),
        ("# nothing\n", "keys holds no API key; write one per line"),
        ("\nshort\n", "keys:2: a key is 16 to 512 printable ASCII characters, no spaces; "),
        ("with spaces in the middle\n", "keys:1: a key is 16 to 512"),
        (f"{'ü' * 20}\n", "keys:1: a key is 16 to 512"),
        (f": {ALICE}\n", "keys:1: the name before the colon is empty"),
        (f"a: {ALICE}\na: {BOB}\n", "keys:2: another key has this name"),
        ("\n".join(f"{number:020}" for number in range(KEYS_MAX + 1)), f"keys holds more than {KEYS_MAX} API keys"),
    ],
)
def test_a_file_that_is_none(text: str, says: str):
    with pytest.raises(UsageError) as caught:
        parse_keys(text, Path("keys"))
    assert caught.value.message.startswith(says)
    assert ALICE not in caught.value.message


def test_a_file_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(UsageError, match="does not exist"):
        ApiKeys(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is not text"):
        ApiKeys(tmp_path / "binary")


def test_a_file_that_all_can_read_is_warned_about(file: Path, caplog: pytest.LogCaptureFixture):
    file.chmod(0o644)
    ApiKeys(file)
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} can be read by every user of this machine; run: chmod 600 {file}"
    ]


async def test_everything_but_health_and_metrics_needs_a_key(tokenizer: Tokenizer, file: Path):
    async with serving(tokenizer, file) as url:
        for path in ("/health", "/v1/health", "/live", "/metrics"):
            assert await status(url + path) == 200, path
        for path in ("/v1/models", "/v1/pipeline", "/tokenize", "/v1/chat/completions", "/nowhere", "/metrics/"):
            assert await status(url + path) == 401, path
            assert await status(url + path, CAROL) == 401, path
        assert await status(f"{url}/v1/models", ALICE) == 200
        assert await status(f"{url}/v1/models", BOB) == 200
        assert await status(f"{url}/nowhere", BOB) == 404


async def test_each_client_reads_in_its_own_form_that_it_needs_a_key(tokenizer: Tokenizer, file: Path):
    async with serving(tokenizer, file) as url, aiohttp.ClientSession(url) as session:

        async def refusal(path: str) -> Any:
            async with session.post(path, json={}) as response:
                assert response.status == 401
                return await response.json()

        text = (await refusal("/v1/completions"))["error"]["message"]
        assert "no API key" in text
        assert await refusal("/api/chat") == {"error": text}
        assert (await refusal("/v1/messages"))["error"] == {"type": "authentication_error", "message": text}


async def test_refused_requests_push_no_other_out_of_view(tokenizer: Tokenizer, file: Path):
    async with serving(tokenizer, file) as url, aiohttp.ClientSession() as session:
        for key, expected in ((ALICE, 400), (CAROL, 401)):
            headers = {"Authorization": f"Bearer {key}", "x-request-id": f"of-{key}"}
            async with session.post(f"{url}/v1/completions", headers=headers, json={}) as response:
                assert response.status == expected
                assert response.headers["x-request-id"] == f"of-{key}"
        assert await status(f"{url}/v1/traces/of-{ALICE}", ALICE) == 200
        assert await status(f"{url}/v1/traces/of-{CAROL}", ALICE) == 404


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}",
     f"Bearer alice: {ALICE}", f"Bearer {ALICE}ü"],
)  # fmt: skip
async def test_headers_that_are_no_key(header: str, tokenizer: Tokenizer, file: Path):
    async with serving(tokenizer, file) as url:
        assert await status(f"{url}/v1/models", header=header) == 401
        assert await status(f"{url}/v1/models", header=f"bearer   {ALICE} ") == 200  # the scheme's case does not matter


async def test_the_refusal_is_openais(tokenizer: Tokenizer, file: Path):
    async with serving(tokenizer, file) as url:
        async with openai_client(url, CAROL) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.type == "invalid_request_error"
        assert caught.value.response.headers["www-authenticate"] == 'Bearer realm="relayline"'
        assert caught.value.response.headers["x-request-id"]
        assert CAROL not in caught.value.response.text
        async with openai_client(url, ALICE) as client:
            assert [model.id async for model in await client.models.list()] == [MODEL]


async def test_metrics_can_be_closed_too(tokenizer: Tokenizer, file: Path):
    async with serving(tokenizer, file, protect_metrics=True) as url:
        assert await status(f"{url}/metrics") == 401
        assert await status(f"{url}/metrics", BOB) == 200
        assert await status(f"{url}/health") == 200
    with pytest.raises(UsageError, match="--protect-metrics needs --api-keys FILE"):
        async with serving(tokenizer, None, protect_metrics=True):
            pass


async def test_hangup_reads_the_file_again(tokenizer: Tokenizer, file: Path, caplog: pytest.LogCaptureFixture):
    http, logged = logging.getLogger("relayline.http"), Lines()
    before = signal.getsignal(signal.SIGHUP)  # under `nohup` it is ignored
    async with serving(tokenizer, file) as url:
        http.addHandler(logged)
        with caplog.at_level(logging.INFO, "relayline.http"):
            for text, says, alice, carol in (
                (f"carol: {CAROL}\n", "API keys were read again; known keys: carol", 401, 200),
                ("nothing\n", f"keeping the old API keys: {file}:1: a key is 16 to 512", 401, 200),
                (FILE, "API keys were read again; known keys: alice, line 4", 200, 401),
            ):
                await asyncio.to_thread(file.write_text, text)
                os.kill(os.getpid(), signal.SIGHUP)
                assert (await logged.next()).startswith(says)
                assert await status(f"{url}/v1/models", ALICE) == alice
                assert await status(f"{url}/v1/models", CAROL) == carol
        http.removeHandler(logged)
        assert not any(key in caplog.text for key in (ALICE, BOB, CAROL))
    assert signal.getsignal(signal.SIGHUP) is before


async def test_a_closed_terminal_ends_the_command_in_order(
    tokenizer: Tokenizer, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    there, ended = [True], asyncio.Event()
    monkeypatch.setattr("relayline.coordinator.http.edge.api_keys.may_hang_up", lambda: True)
    monkeypatch.setattr("relayline.coordinator.http.edge.api_keys.has_terminal", lambda: there[0])
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with caplog.at_level(logging.INFO, "relayline.http"):
        async with serving(tokenizer, file):
            there[0] = False
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(WAIT_S):
                await ended.wait()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert "read again" not in caplog.text


async def test_an_open_api_beyond_this_machine_is_warned_about(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture):
    chat = ChatTemplate(CHATML, bos_text="", eos_text="")
    app = make_app(FakeGenerator(), ServedModel(MODEL, CREATED, tokenizer, chat))
    for host, n_lines in (("127.0.0.1", 0), ("0.0.0.0", 1)):
        with protect_http(app, HttpListener(host)):
            assert len(caplog.records) == n_lines
    assert caplog.records[0].getMessage() == (
        "the API on 0.0.0.0 is open to everyone who reaches it; --api-keys FILE closes it"
    )


async def test_without_a_key_no_body_is_asked_for_or_awaited(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(FILE)
    async with serving(tokenizer, path) as url, asyncio.timeout(WAIT_S):
        for more in ("", "Expect: 100-continue\r\n", "Content-Encoding: gzip\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n{more}\r\n"
            writer.write(head.encode())
            answer = await reader.read()  # to the end of the connection
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"connection: close" in answer.lower()
            writer.close()
