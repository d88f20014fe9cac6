"""Grammars are compiled off the decode thread: only a session that needs one waits, and its frames stay in order."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from relayline.coordinator.text.grammar_worker import Bytes
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.sampling.constraint import Constraint, begin
from relayline.stage.sampling.grammars import Grammars, Holds
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.step import StepExecutor
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import CTX, FakeEngine, control, rows_frame

LAST = Flag.PREFILL | Flag.WANTS_SAMPLE
GRAMMAR = pb.SessionOptions(grammar="slow")


class World:
    """Grammars that are ready when a test says so."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[Any]] = {}
        self.pushed: list[QueuedFrame] = []
        self.holds = Holds(self._begin, self.pushed.extend)

    def _begin(self, grammar: str, said: Sequence[int]) -> Future[Any]:
        return self.futures.setdefault(grammar, Future())

    async def ready(self, grammar: str = "slow") -> None:
        self.futures[grammar].set_result(None)
        await asyncio.sleep(0)


@pytest.fixture
def world() -> World:
    return World()


async def test_only_frames_that_need_a_grammar_wait_for_it(world: World) -> None:
    opening, start = control(1, Flag.OPEN, options=GRAMMAR), rows_frame(1, 0, 4, Flag.PREFILL)
    other = [control(2, Flag.OPEN), rows_frame(2, 0, 4, LAST), rows_frame(2, 4, 1, Flag.WANTS_SAMPLE)]
    last, trim = rows_frame(1, 4, 2, LAST), control(1, Flag.TRIM, 5)
    assert world.holds.sift([opening, start, last, *other, trim]) == [opening, start, *other]
    assert world.pushed == []
    await world.ready()
    assert world.pushed == [last, trim]
    assert not world.holds
    row = rows_frame(1, 6, 1, Flag.WANTS_SAMPLE)
    assert world.holds.sift([row]) == [row]


async def test_a_grammar_that_is_ready_holds_nothing(world: World) -> None:
    frames = [control(1, Flag.OPEN, options=GRAMMAR), rows_frame(1, 0, 2, LAST)]
    world.holds.sift([frames[0]])
    await world.ready()
    assert world.holds.sift(frames) == frames


async def test_a_copy_of_a_waiting_session_waits_too(world: World) -> None:
    """Choices of one prompt copy it from the first, whose last rows are not computed yet."""
    last = rows_frame(1, 0, 2, LAST)
    copy, row, close = control(2, Flag.COPY_PREFIX, 1, argument=1), rows_frame(2, 1, 1, LAST), control(2, Flag.CLOSE)
    opening = control(2, Flag.OPEN)
    assert world.holds.sift([control(1, Flag.OPEN, options=GRAMMAR), last, opening])[-1] is opening
    assert world.holds.sift([copy, row, close]) == []
    await world.ready()
    assert world.pushed == [last, copy, row, close]


async def test_a_close_comes_behind_held_frames_and_a_route_takes_all_along(world: World) -> None:
    last, close = rows_frame(1, 0, 2, LAST), control(1, Flag.CLOSE)
    world.holds.sift([control(1, Flag.OPEN, options=GRAMMAR), last])
    assert world.holds.sift([close]) == []
    world.holds.drop_route(last.route_id)
    await world.ready()
    assert world.pushed == []


async def test_a_second_open_comes_behind_the_waiting_frames(world: World) -> None:
    last, close, again = rows_frame(1, 0, 2, LAST), control(1, Flag.CLOSE), control(1, Flag.OPEN, options=GRAMMAR)
    world.holds.sift([control(1, Flag.OPEN, options=GRAMMAR), last, close])
    assert world.holds.sift([again]) == []
    await world.ready()
    assert world.pushed == [last, close, again]


async def test_a_grammar_that_is_kept_keeps_no_frames_that_waited_for_it(world: World) -> None:
    """They hold their envelope, and its route with all links of an epoch that may have ended."""
    last = rows_frame(1, 0, 2, LAST)
    waited = weakref.ref(last.payload)
    world.holds.sift([control(1, Flag.OPEN, options=GRAMMAR), last])
    await world.ready()
    assert world.pushed == [last]
    world.pushed.clear()
    del last
    gc.collect()
    assert waited() is None


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def make(vocabulary: LLTokenizer, grammar: str, **options: Any) -> LLMatcher:
        found.append(threading.current_thread().name)
        return LLMatcher(vocabulary, grammar, **options)

    monkeypatch.setattr("relayline.stage.sampling.grammars.LLMatcher", make)
    return found


def test_each_grammar_is_compiled_once_in_a_separate_thread(vocabulary: LLTokenizer, made: list[str]) -> None:
    grammars = Grammars()
    one = grammars.ready(vocabulary, 'start: "a"').result()
    assert grammars.ready(vocabulary, 'start: "a"').result() is one
    assert [name.startswith("grammar") for name in made] == [True]
    copies = [one.deep_copy(), one.deep_copy()]
    copies[0].consume_token(ord("a"))
    assert copies[0].is_accepting()
    assert not copies[1].is_accepting()


def test_so_many_are_kept_ready(vocabulary: LLTokenizer, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.stage.sampling.grammars.READY_MAX", 2)
    grammars = Grammars()
    for text in "abca":
        grammars.ready(vocabulary, f'start: "{text}"').result()
    assert len(made) == 4
    assert len(grammars._ready) == 2


def test_an_engine_that_ends_takes_its_grammars_along(vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them keeps the vocabulary of its engine in memory: of one that sleeps, or whose layers have moved."""
    grammars = Grammars()
    for module in ("sampling.constraint", "steps.sessions"):
        monkeypatch.setattr(f"relayline.stage.{module}.grammars", grammars)
    others = LLTokenizer(TokenizerWrapper(Bytes()))
    executor = StepExecutor(FakeEngine(is_last=True), LaneTable(4, CTX), 1, None, vocabulary=vocabulary)
    for each in (vocabulary, others):
        begin(each, "start: /a*/").result()
        begin(each, "start: /a*/", [97]).result()
    assert (len(grammars._ready), len(grammars._reading)) == (2, 2)
    executor.close()
    assert [*{known for known, *_ in (*grammars._ready, *grammars._reading)}] == [id(others)]


class Reader:
    """A matcher that records which thread has read how many tokens."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        self.log = log

    def deep_copy(self) -> Reader:
        return Reader(self.log)

    def consume_tokens(self, tokens: list[int]) -> None:
        self.log.append((threading.current_thread().name.partition("_")[0], len(tokens)))

    def consume_token(self, token: int) -> None:
        pass

    def is_error(self) -> bool:
        return False


def test_earlier_tokens_are_read_off_the_decode_thread(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss every session is opened again with all its tokens: thousands of them take a tenth of a second."""
    read: list[tuple[str, int]] = []
    monkeypatch.setattr("relayline.stage.sampling.grammars.LLMatcher", lambda *_, **options: Reader(read))
    monkeypatch.setattr("relayline.stage.sampling.constraint.grammars", Grammars())
    said = [97] * 5_000
    begin(vocabulary, "start: /a*/", said).result()
    constraint = Constraint(vocabulary, "start: /a*/", said)
    assert read == [("grammar", 5_000), ("MainThread", 0)]
    constraint._go_to(5_010)  # the first sample fixes the session's position
    constraint.said(97)
    assert constraint._restarted() is not None
    assert read[2:] == [("MainThread", 1)], "what came since"
    constraint._go_to(4_010)
    assert read[3:] == [("MainThread", 4_000)], "before its earlier tokens: from the beginning"


async def test_the_grammar_maker_gets_the_earlier_tokens() -> None:
    begun: list[tuple[str, list[int]]] = []

    def begin(grammar: str, said: Sequence[int]) -> None:
        begun.append((grammar, list(said)))

    holds = Holds(begin, lambda frames: None)
    holds.sift([control(1, Flag.OPEN, options=pb.SessionOptions(grammar="x", said=[5, 6]))])
    assert begun == [("x", [5, 6])]
