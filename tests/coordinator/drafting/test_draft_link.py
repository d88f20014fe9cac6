"""The process that drafts: models that it refuses, what it answers, and when it is given up."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from relayline.coordinator.drafting import link as link_module
from relayline.coordinator.drafting.draft_model import DraftModel, DraftSettings, check_drafts
from relayline.coordinator.drafting.link import DraftLink
from relayline.coordinator.drafting.messages import SIZE, Begin, Guessed, Took
from relayline.coordinator.drafting.streams import Row
from relayline.coordinator.text.llama_errors import LlamaErrors
from relayline.deploy.testing.processes import TIMEOUT_S
from relayline.deploy.testing.reference import ReferenceModel
from relayline.wire.common.bounds import DRAFT_RESTARTS_MAX
from relayline.wire.common.child_command import code_command, is_passing
from relayline.wire.common.errors import StartError, UsageError
from tests.support.polling import pause
from tests.support.tiny_models import make_tiny

SETTINGS = DraftSettings(n_cells=512, n_threads=1, gpu_layers=0)


@pytest.fixture(scope="module", name="model")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "model.gguf", tokenizer=True)


@contextlib.asynccontextmanager
async def linked(draft: Path, model: Path) -> AsyncIterator[tuple[DraftLink, list[Guessed]]]:
    link, heard = DraftLink(draft, model, 512, 1, 0), list[Guessed]()
    link.on_guessed = heard.extend
    await link.start()
    running = asyncio.create_task(link.run())
    try:
        yield link, heard
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await link.close()


async def until_heard(heard: list[Guessed], position: int) -> Guessed:
    async with asyncio.timeout(TIMEOUT_S):
        while not heard or heard[-1].position != position or heard[-1].follows:
            await pause()
    return heard[-1]


async def test_guesses_are_what_the_model_says_itself(model: Path) -> None:
    prompt = list(range(40, 80))
    with ReferenceModel(model, 512, 1) as whole:
        text = list(prompt)
        for _ in range(4):
            whole.drop_from(0, 0)
            text.append(int(whole.read(text, 0)[-1].argmax()))
    async with linked(model, model) as (link, heard):
        link.send([Begin(1, prompt)])
        first = await until_heard(heard, len(prompt))
        assert first.tokens
        assert first.tokens[:4] == text[len(prompt) :][: len(first.tokens)]
        assert all(0 < each <= 1 for each in first.probabilities)
        wrong = (first.tokens[0] + 1) % 200
        link.send([Took(1, len(prompt), [wrong])])
        await until_heard(heard, len(prompt) + 1)


def test_models_of_another_kind_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "nameless.gguf")
    with pytest.raises(UsageError, match=r"nameless.gguf: .*same vocabulary"):
        check_drafts(other, model)
    hybrid = make_tiny("mamba", tmp_path / "states.gguf", tokenizer=True)
    with pytest.raises(UsageError, match="recurrent states"):
        check_drafts(hybrid, model)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(UsageError, match=r"broken\.gguf: "):
        check_drafts(broken, model)
    check_drafts(model, model)


async def test_a_model_that_does_not_load_is_one_line(model: Path, tmp_path: Path) -> None:
    hybrid = make_tiny("mamba", tmp_path / "states.gguf", tokenizer=True)
    with pytest.raises(UsageError, match=r"^--draft-model .*recurrent states"):
        async with linked(hybrid, model):
            pass


def said_by(code: str) -> Callable[..., list[str]]:
    """Return what starts this code in place of the process; `pipe` is its end of the socket."""
    head = "import os, socket, sys\nwith socket.socket(fileno=int(sys.argv[1])) as pipe:\n    "
    return lambda module, *arguments: code_command(head + code, *arguments)


MEMORY = (
    "from relayline.coordinator.drafting.messages import Refused, framed; pipe.sendall(framed([Refused('x', True)]))"
)


@pytest.mark.parametrize(
    ("code", "kind", "why"),
    [
        ("raise ValueError('a bug')", UsageError, "loading it ended the process"),
        ("os.kill(os.getpid(), 9)", StartError, "was killed"),
        (MEMORY, StartError, "^--draft-model x$"),
    ],
)
async def test_one_that_ends_while_it_loads_says_whether_another_may_load(
    model: Path, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[Exception], why: str
) -> None:
    """Its pipe closes before Python has ended: the exit code is its own, not that of being killed for it."""
    monkeypatch.setattr(link_module, "module_command", said_by(code))
    with pytest.raises(kind, match=why):
        await DraftLink(model, model, 512, 1, 0).start()


async def test_one_that_the_system_does_not_start_may_start_later(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "module_command", lambda *_: ["/nowhere/python"])
    with pytest.raises(StartError, match="cannot be started"):
        await DraftLink(model, model, 512, 1, 0).start()


def test_an_error_of_memory_may_pass() -> None:
    errors = LlamaErrors()
    for line in (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 99 MiB on device 0: cudaMalloc failed: out of memory",
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
    ):
        errors.take(4, line.encode())
        found = errors.error("x.gguf")
        assert isinstance(found, StartError)
        assert is_passing(found)
        assert found.message == f"x.gguf: {line}"
    errors.take(4, b"invalid magic characters: 'abcd'")
    assert isinstance(errors.error("x.gguf"), UsageError)
    assert is_passing(OSError(errno.ENOMEM, "no memory"))
    assert not is_passing(FileNotFoundError(errno.ENOENT, "none"))


def test_rows_without_cells_are_refused_and_nothing_is_lost(model: Path) -> None:
    drafts = DraftModel(model, model, SETTINGS)
    rows = [Row(0, at, 40 + at % 50, at == 255) for at in range(256)]
    first = drafts.decode(rows)
    assert first is not None
    assert len(first) == 1
    more = [Row(1, at, 40 + at % 50, at == 255) for at in range(256)]
    assert drafts.decode(more) == first
    assert drafts.decode([Row(2, 0, 40, True)]) is None
    drafts.drop(0, 0)
    assert drafts.decode([Row(2, 0, 40, True)]) is not None


async def test_a_process_that_keeps_dying_is_given_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "DRAFT_RESTART_PAUSE_S", 0.0)
    link, lost, back = DraftLink(model, model, 512, 1, 0), list[int](), list[int]()
    link.on_lost = lambda: lost.append(1)

    def on_back() -> None:
        back.append(1)
        assert link._process is not None
        link._process.kill()

    link.on_back = on_back
    await link.start()
    assert link._process is not None
    link._process.kill()
    async with asyncio.timeout(TIMEOUT_S):
        await link.run()
    assert (len(lost), len(back)) == (DRAFT_RESTARTS_MAX + 1, DRAFT_RESTARTS_MAX)
    link.send([Begin(1, [1])])  # goes nowhere
    await link.close()


async def test_one_that_rests_ends_and_is_started_again_without_counting_as_a_death(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(model, model) as (link, heard):
        back, process = asyncio.Event(), link._process
        link.on_back = back.set
        assert process is not None
        async with asyncio.timeout(TIMEOUT_S):
            await link.rest(is_asleep=True)
            while process.poll() is None or link._process is not None:
                await pause()
            assert not back.is_set()
            await link.rest(is_asleep=False)
            await back.wait()
        link.send([Begin(1, [40, 41])])
        await until_heard(heard, 2)
    assert "ended" not in caplog.text


async def test_one_that_rests_while_it_loads_is_started_once_that_is_over(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(model, model) as (link, heard), asyncio.timeout(TIMEOUT_S):
        real, loads = link_module.module_command, list[str]()

        def endless(module: str, *arguments: str) -> list[str]:
            loads.append(module)
            return said_by("pipe.recv(1)")(module, *arguments)

        monkeypatch.setattr(link_module, "module_command", endless)
        first = link._process
        await link.rest(is_asleep=True)
        while link._process is not None:
            await pause()
        await link.rest(is_asleep=False)
        while link._writer is None:
            await pause()
        loading = link._process
        assert loading is not None
        assert loading is not first
        await link.rest(is_asleep=True)
        while loading.poll() is None or link._process is not None:
            await pause()
        for _ in range(20):
            await pause()
        assert len(loads) == 1, "nothing loads while the pipeline sleeps"
        monkeypatch.setattr(link_module, "module_command", real)
        await link.rest(is_asleep=False)
        while link._writer is None:
            await pause()
        link.send([Begin(1, [40, 41])])
        await until_heard(heard, 2)
    assert "the process that drafts" not in caplog.text


@pytest.mark.parametrize("said", [b"\xc1", b"\x91\x91\xa3odd", b"\x01"], ids=["no msgpack", "no message", "no list"])
async def test_one_that_says_what_cannot_be_read_is_started_again(
    model: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(link_module, "DRAFT_RESTART_PAUSE_S", 0.0)
    async with linked(model, model) as (link, heard):
        back = asyncio.Event()
        link.on_back = back.set
        assert link._reader is not None
        link._reader.feed_data(SIZE.pack(len(said)) + said)
        async with asyncio.timeout(TIMEOUT_S):
            await back.wait()
        link.send([Begin(1, [40, 41])])
        await until_heard(heard, 2)


async def test_a_bug_in_taking_guesses_does_not_end_them_in_silence(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "DRAFT_RESTART_PAUSE_S", 0.0)
    async with linked(model, model) as (link, heard):
        back = asyncio.Event()
        link.on_back = back.set

        def fail_once(_: object) -> None:
            link.on_guessed = heard.extend
            raise KeyError("a bug")

        link.on_guessed = fail_once
        link.send([Begin(1, [40, 41])])
        async with asyncio.timeout(TIMEOUT_S):
            await back.wait()
        link.send([Begin(1, [40, 41])])
        await until_heard(heard, 2)
    assert "taking the guesses" in caplog.text


async def test_one_that_reads_nothing_is_started_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "DRAFT_RESTART_PAUSE_S", 0.0)
    monkeypatch.setattr(link_module, "DRAFT_BACKLOG_BYTES_MAX", 1_000)
    async with linked(model, model) as (link, _):
        lost = asyncio.Event()
        link.on_lost = lost.set
        for _ in range(2_000):  # more than the socket takes before its other end runs
            link.send([Begin(1, [300] * 1000)])
        async with asyncio.timeout(TIMEOUT_S):
            await lost.wait()
