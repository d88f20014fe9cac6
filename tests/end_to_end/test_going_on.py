"""Links break while all stages live on: streams resume from the stages' caches, and no token changes."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from relayline.coordinator.sessions import suspects
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import Session
from relayline.coordinator.sessions.streams import SessionStream
from relayline.coordinator.sessions.suspects import Suspects
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.sampling.mirostat import Mirostat
from relayline.wire.common.thoughts import ThoughtMarks
from tests.stage.sampling.test_penalties import PENALISED, assert_penalised
from tests.support.fleet import (
    GREEDY,
    Artifacts,
    Fleet,
    artifacts_fixture,
    assert_greedy,
    assert_seeded,
    fleet,
    prompt_of,
    read,
    request,
    tokens_of,
    whole_fixture,
)

FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them
SEEDED = SamplingParams(temperature=0.9, seed=12)


async def rows_of(running: Fleet) -> list[int]:
    """The number of rows that each stage has computed."""
    stages = (await running.pipeline.describe())["stages"]
    assert isinstance(stages, list)
    return [stage["rows"] for stage in stages]


async def cut(running: Fleet, where: int) -> None:
    """Break the connections through one proxy, and wait until the pipeline is ready again."""
    await running.cut(where)
    async with asyncio.timeout(60):
        await running.pipeline.ready.wait()


async def read_over_losses(running: Fleet, stream: SessionStream) -> list[int]:
    """Return a stream's tokens; links are cut twice in the middle of them."""
    said = await read(stream, 7)
    for where in (1, 2):
        await cut(running, where)
        said += await read(stream, 6)
    return said + await tokens_of(stream)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
@pytest.mark.parametrize("mode", ["auto", "drain"])
@pytest.mark.parametrize("where", [0, 1, 2])
async def test_broken_links_alone_cause_no_replay(
    kv_layout: str, mode: str, where: int, artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompts = [prompt_of(seed, 60 + seed) for seed in range(4)]
    sampling = [GREEDY, SEEDED, PENALISED, GREEDY]
    async with fleet(artifacts([1, 3]), kv_layout=kv_layout, mode=mode, proxied=True) as running:
        streams = [running.pipeline.open(request(p, 40, s)) for p, s in zip(prompts, sampling, strict=True)]
        said = await asyncio.gather(*(read(stream, 5) for stream in streams))
        for _ in range(2):
            await cut(running, where)
            more = await asyncio.gather(*(read(stream, 6) for stream in streams))
            said = [before + after for before, after in zip(said, more, strict=True)]
        rest = await asyncio.gather(*map(tokens_of, streams))
        n_rows = await rows_of(running)
        await running.until_free()
        assert running.pipeline.epoch >= 3
    outputs = [before + after for before, after in zip(said, rest, strict=True)]
    for prompt, tokens, how in zip(prompts, outputs, sampling, strict=True):
        assert len(tokens) == 40
        if how is PENALISED:
            assert_penalised(whole, prompt, tokens)
        elif how is SEEDED:
            assert_seeded(whole, prompt, tokens, how)
        else:
            assert_greedy(whole, prompt, tokens)
    # Each loss costs a stream the last row, and the rows that a later stage had not computed yet.
    assert max(n_rows) <= sum(len(prompt) + 39 for prompt in prompts) + 2 * len(prompts) * 2


async def test_answers_go_on_behind_what_was_said_before(artifacts: Artifacts, whole: ReferenceModel) -> None:
    """As a response does whose coordinator has ended: another pipeline gets its first tokens with the request."""
    sampling = [GREEDY, SEEDED, PENALISED]
    prompts = [prompt_of(80 + at, 20 + at) for at in range(len(sampling))]
    requests = [request(prompt, 20, how) for prompt, how in zip(prompts, sampling, strict=True)]
    async with fleet(artifacts([1, 3]), prefix_lanes=0) as running:
        said = await asyncio.gather(*(read(running.pipeline.open(each), 7) for each in requests))
    again = [dataclasses.replace(each, said=tuple(tokens)) for each, tokens in zip(requests, said, strict=True)]
    async with fleet(artifacts([1, 3]), prefix_lanes=0) as running:
        rest = await asyncio.gather(*(tokens_of(running.pipeline.open(each)) for each in again))
    outputs = [before + after for before, after in zip(said, rest, strict=True)]
    assert [len(tokens) for tokens in outputs] == [20] * 3
    assert_greedy(whole, prompts[0], outputs[0])
    assert_seeded(whole, prompts[1], outputs[1], SEEDED)
    assert_penalised(whole, prompts[2], outputs[2])


@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
async def test_thoughts_end_once_over_losses(kv_layout: str, artifacts: Artifacts, whole: ReferenceModel) -> None:
    """Links break before, among and behind the last words. Of the second answer the thoughts begin late."""
    (late_prompt, opened), words, end = (prompt_of(90, 20), prompt_of(91, 20)), (7, 8), (150, 151)
    whole.drop_from(0, 0)
    begin = tuple(whole.greedy(late_prompt, 3))
    numbers = {"thought_tokens_max": 10.0}
    sampling = [
        SamplingParams(0.0, thought_marks=ThoughtMarks((152,), end, words), numbers=tuple(sorted(each.items())))
        for each in ({**numbers, "thoughts_begun_at": float(len(opened))}, numbers)
    ]
    sampling[1] = dataclasses.replace(sampling[1], thought_marks=ThoughtMarks(begin, end, words))
    async with fleet(artifacts([1, 3]), kv_layout=kv_layout, proxied=True) as running:
        streams = [
            running.pipeline.open(request(prompt, 40, how))
            for prompt, how in zip((opened, late_prompt), sampling, strict=True)
        ]
        said = [await read_over_losses(running, stream) for stream in streams]
        again = dataclasses.replace(request(opened, 40, sampling[0]), said=tuple(said[0][:12]))
        rest = await tokens_of(running.pipeline.open(again))
    for prompt, tokens, n_before in ((opened, said[0], 10), (late_prompt, said[1], 13)):
        behind = n_before + len(words) + len(end)
        assert tuple(tokens[n_before:behind]) == (*words, *end)
        assert_greedy(whole, prompt, tokens[:n_before])
        assert_greedy(whole, (*prompt, *tokens[:behind]), tokens[behind:])
        assert len(tokens) == 40
    assert said[0][:12] + rest == said[0], "as after a restart of the coordinator"


@pytest.mark.parametrize("version", [1, 2])
async def test_mirostat_goes_on_where_it_was(
    version: int, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stage keeps its state: the coordinator sends back the last sample's."""
    begun, reported, begin, said_by = list[float | None](), list[float](), Mirostat.__init__, Mirostat.said

    def note_begin(self: Mirostat, *settings: Any) -> None:
        begun.append(settings[-1])
        begin(self, *settings)

    def note_said(self: Mirostat, *picked: Any) -> None:
        said_by(self, *picked)
        reported.append(self.mu)

    monkeypatch.setattr(Mirostat, "__init__", note_begin)
    monkeypatch.setattr(Mirostat, "said", note_said)
    numbers = (("mirostat", float(version)), ("mirostat_eta", 0.8), ("mirostat_tau", 3.0))
    wanted = request(prompt_of(70, 30), 30, SamplingParams(temperature=1.0, seed=9, numbers=numbers))
    async with fleet(artifacts([1, 3]), proxied=True, prefix_lanes=0) as running:
        stream = running.pipeline.open(wanted)
        said = await read_over_losses(running, stream)
    assert len(said) == 30
    assert begun[0] is None
    assert len(begun) == 3
    assert set(begun[1:]) <= set(reported), "some sample's report"


async def test_adaptive_p_goes_on_where_it_was(artifacts: Artifacts) -> None:
    """The same tokens as without a loss, each of which depends on the state."""
    numbers = (("adaptive_decay", 0.7), ("adaptive_target", 0.2))
    wanted = request(prompt_of(71, 30), 30, SamplingParams(temperature=1.5, seed=9, numbers=numbers))
    async with fleet(artifacts([1, 3]), proxied=True, prefix_lanes=0) as running:
        whole = await tokens_of(running.pipeline.open(wanted))
        stream = running.pipeline.open(wanted)
        said = await read_over_losses(running, stream)
    assert said == whole


async def test_a_prompt_that_was_being_read_is_read_on(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(80 + index, 200) for index in range(2)]
    async with fleet(artifacts([1, 3]), mode="fixed", proxied=True) as running:
        streams = [running.pipeline.open(request(prompt, 10)) for prompt in prompts]
        async with asyncio.timeout(60):
            while min(await rows_of(running)) < 100:
                pass
        await cut(running, 1)
        outputs = await asyncio.gather(*map(tokens_of, streams))
        n_rows = await rows_of(running)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    assert n_rows[-1] < 2 * (200 + 9) + 100, "rows in the last stage's cache are not read again"


async def test_streams_that_left_or_ended_meanwhile_hold_no_lane(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(90 + index, 40) for index in range(3)]
    async with fleet(artifacts([2]), n_lanes=3, proxied=True, prefix_lanes=None) as running:
        streams = [running.pipeline.open(request(prompt, 60)) for prompt in prompts]
        said = await asyncio.gather(*(read(stream, 5) for stream in streams))
        await running.cut(0)
        await streams[0].aclose()
        late = prompt_of(99, 40)
        output = await tokens_of(running.pipeline.open(request(late, 10)))
        rest = await asyncio.gather(*map(tokens_of, streams[1:]))
        await running.until_free()
        async with asyncio.timeout(60):
            while max(await running.lanes_kept()) > 1:
                pass
    assert_greedy(whole, late, output)
    for prompt, before, after in zip(prompts[1:], said[1:], rest, strict=True):
        assert_greedy(whole, prompt, before + after)


async def test_abandoned_lanes_are_closed_although_no_stream_goes_on(artifacts: Artifacts) -> None:
    """Lanes of the last epoch are closed when the next begins, also if no stream continues."""
    async with fleet(artifacts([2]), n_lanes=3, proxied=True, prefix_lanes=None) as running:
        stream = running.pipeline.open(request(prompt_of(90, 40), 60))
        await read(stream, 5)
        await running.cut(0)
        await stream.aclose()
        async with asyncio.timeout(60):
            await running.pipeline.ready.wait()
            while any(await running.lanes_kept()):
                pass
        await running.until_free()


async def test_a_stage_that_starts_again_holds_nothing_and_all_is_read_again(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    """Also by streams with lanes in the other stages: these start from the beginning with it."""
    prompts = [prompt_of(70 + index, 50) for index in range(3)]
    async with fleet(artifacts([1, 3]), prefix_lanes=None) as running:
        streams = [running.pipeline.open(request(prompt, 40)) for prompt in prompts]
        said = await asyncio.gather(*(read(stream, 5) for stream in streams))
        await running.lose(1)
        await running.start(1)
        rest = await asyncio.gather(*map(tokens_of, streams))
        n_rows = await rows_of(running)
    for prompt, before, after in zip(prompts, said, rest, strict=True):
        assert_greedy(whole, prompt, before + after)
    assert n_rows[0] >= sum(len(prompt) + 39 for prompt in prompts) + 3 * 50


def test_a_stream_accused_twice_without_a_token_is_replayed_in_full() -> None:
    first, second = (
        Session(number, GenerationRequest(str(number), (1,), 9, GREEDY), lambda _: False) for number in (1, 2)
    )
    counted = Suspects()
    counted.accuse([first, second])
    assert counted.trusted([first, second]) == [first, second]
    counted.cleared(second)
    counted.accuse([first, second])
    assert counted.trusted([first, second]) == [second]


async def test_a_long_prompt_over_a_bad_link_is_read_in_as_many_epochs_as_it_takes(
    artifacts: Artifacts, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More losses before its first token than any request survives that gets no further, and no row is read twice."""
    monkeypatch.setattr(suspects, "FURTHER_ROWS", 16)
    prompt, cut_in = prompt_of(7, 240), set[int]()
    async with fleet(artifacts([1, 3]), mode="groups", proxied=True) as running:
        passed = running.pipeline.conductor.suspects.passed

        def cut_at_once(session_id: int, n_rows: int) -> list[Session]:
            if len(cut_in) < suspects.LOSSES_MAX + 1 and running.pipeline.epoch not in cut_in:
                cut_in.add(running.pipeline.epoch)
                running.proxies[1].cut()
            return passed(session_id, n_rows)

        monkeypatch.setattr(running.pipeline.conductor.suspects, "passed", cut_at_once)
        output = await tokens_of(running.pipeline.open(request(prompt, 10)))
        n_rows = await rows_of(running)
    assert len(cut_in) == suspects.LOSSES_MAX + 1
    assert_greedy(whole, prompt, output)
    assert max(n_rows) < 2 * len(prompt)
