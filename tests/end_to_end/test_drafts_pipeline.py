"""Drafts over real stages: with any guesses a stream's text is the same as without, also after losses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.engine.connection import Connection
from relayline.coordinator.model.split import split_model
from relayline.coordinator.schedule.draft_flights import DRAFT_AUTO
from relayline.coordinator.schedule.flights import Flights, Kind
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.simulation.world import smooth
from tests.stage.sampling.test_penalties import PENALISED, plainly
from tests.support.fleet import (
    CTX,
    GREEDY,
    SHAPE,
    Artifacts,
    Fleet,
    artifacts_fixture,
    assert_seeded,
    fleet,
    logits_along,
    prompt_of,
    read,
    request,
    tokens_of,
    whole_fixture,
)
from tests.support.tiny_models import make_tiny

FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them
N_TOKENS = 40
SEEDED = SamplingParams(temperature=0.9, top_k=40, seed=11)
SAMPLINGS = (GREEDY, SEEDED, PENALISED, GREEDY)
WRONG_EVERY = (0, 5, 7, 2)  # of each stream's prediction
LAYOUTS = ("unified", "per-lane")
Predictions = Callable[..., Awaitable[list[GenerationRequest]]]
NEAR_TIE = 0.02  # deviations of the logits: attention of the two layouts differs, and that of windows from the whole's


@pytest.fixture(name="launched")
def launched_fixture(monkeypatch: pytest.MonkeyPatch) -> dict[Kind, int]:
    """How many flights of each kind have left, where all stages say that many rows cost what one does."""
    launched = dict.fromkeys(Kind, 0)
    launch = Flights.launch

    def counted(self: Flights, kind: Kind, *arguments: object, **named: object) -> None:
        launched[kind] += 1
        launch(self, kind, *arguments, **named)  # type: ignore[arg-type]

    def costs(self: Connection) -> list[StageCost]:
        return [StageCost(smooth(), smooth(), 64, is_per_lane=facts.kv_per_lane) for facts in self.facts]

    monkeypatch.setattr(Flights, "launch", counted)
    monkeypatch.setattr(Connection, "stage_costs", costs)
    monkeypatch.setattr(Connection, "keep_costs", lambda *_: None)
    return launched


def predicting(base: GenerationRequest, tokens: Sequence[int], wrong_every: int = 0) -> GenerationRequest:
    """The same request with a prediction, every so many of whose tokens are wrong."""
    changed = [
        (token + 1) % SHAPE.n_vocab if wrong_every and index % wrong_every == wrong_every - 1 else token
        for index, token in enumerate(tokens)
    ]
    return dataclasses.replace(base, prediction=tuple(changed))


async def predicted(paths: list[Path], kv_layout: str = "unified") -> list[GenerationRequest]:
    """One request of each kind, with a prediction of its answer that is more or less right."""
    base = [request(prompt_of(index, 5 + 9 * index), N_TOKENS, sampling) for index, sampling in enumerate(SAMPLINGS)]
    async with fleet(paths, kv_layout=kv_layout) as plain:
        said = await asyncio.gather(*(tokens_of(plain.pipeline.open(each)) for each in base))
    return [predicting(*each) for each in zip(base, said, WRONG_EVERY, strict=True)]


@pytest.fixture(scope="module", name="predictions")
def predictions_fixture(artifacts: Artifacts) -> Predictions:
    """`predicted` by cuts and layout of cells, each found out once."""
    found: dict[tuple[int | str, ...], list[GenerationRequest]] = {}

    async def predictions(cuts: Sequence[int], kv_layout: str = "unified") -> list[GenerationRequest]:
        if (*cuts, kv_layout) not in found:
            found[*cuts, kv_layout] = await predicted(artifacts(cuts), kv_layout)
        return found[*cuts, kv_layout]

    return predictions


def assert_right(whole: ReferenceModel, asked: Sequence[GenerationRequest], outputs: Sequence[list[int]]) -> None:
    for each, tokens in zip(asked, outputs, strict=True):
        assert len(tokens) == N_TOKENS
        if each.sampling is SEEDED:
            assert_seeded(whole, each.prompt_tokens, tokens, SEEDED)
            continue
        logits = logits_along(whole, each.prompt_tokens, tokens)
        if each.sampling is PENALISED:
            logits = np.stack([plainly(row, tokens[:at], PENALISED) for at, row in enumerate(logits)])
        behind = logits.max(axis=1) - logits[range(len(tokens)), tokens]
        assert behind.max() < NEAR_TIE * logits.std(), "a row was computed on another history"


@contextlib.asynccontextmanager
async def drafting(paths: list[Path], draft: int, **more: object) -> AsyncIterator[Fleet]:
    """A fleet that drafts; at its end some drafts were right."""
    async with fleet(paths, draft=draft, **more) as running:  # type: ignore[arg-type]
        yield running
        await running.until_free()
        figures = await running.pipeline.describe()
    assert 0 < figures["accepted_tokens"] <= figures["drafted_tokens"]  # type: ignore[operator]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("cuts", [[2], [1, 2, 3]], ids=["2 stages", "4 stages"])
@pytest.mark.parametrize("draft", [1, 4, 31])
async def test_with_drafts_equals_whole(
    draft: int, cuts: list[int], kv_layout: str, artifacts: Artifacts, predictions: Predictions, whole: ReferenceModel
) -> None:
    asked = await predictions(cuts, kv_layout)
    async with drafting(artifacts(cuts), draft, kv_layout=kv_layout) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(each)) for each in asked))
    assert_right(whole, asked, outputs)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_guesses_that_follow_in_separate_flights(
    kv_layout: str, artifacts: Artifacts, whole: ReferenceModel, launched: dict[Kind, int]
) -> None:
    """One stream alone after the other, so that three of four stages would be idle."""
    asked = await predicted(artifacts([1, 2, 3]), kv_layout)
    n_plain, launched[Kind.DECODE] = launched[Kind.DECODE], 0
    async with drafting(artifacts([1, 2, 3]), DRAFT_AUTO, kv_layout=kv_layout) as running:
        outputs = [await tokens_of(running.pipeline.open(each)) for each in asked]
    assert_right(whole, asked, outputs)
    assert launched[Kind.GUESS] >= 8
    assert n_plain >= N_TOKENS - 1
    assert launched[Kind.DECODE] < N_TOKENS * len(asked) / 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draft", [DRAFT_AUTO, 3])
@pytest.mark.parametrize("lost", [0, 2])
async def test_a_stage_that_dies_under_drafts_is_a_pause_and_no_more(
    lost: int,
    draft: int,
    artifacts: Artifacts,
    predictions: Predictions,
    whole: ReferenceModel,
    launched: dict[Kind, int],
) -> None:
    asked = await predictions([1, 3])
    async with drafting(artifacts([1, 3]), draft) as running:
        streams = [running.pipeline.open(each) for each in asked]
        said = await asyncio.gather(*(read(stream, 6) for stream in streams))
        await running.lose(lost)
        await running.start(lost)
        rest = await asyncio.gather(*map(tokens_of, streams))
    assert_right(whole, asked, [first + then for first, then in zip(said, rest, strict=True)])
    assert launched[Kind.DECODE]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("where", [0, 1, 2])
async def test_links_that_break_under_drafts(
    where: int,
    kv_layout: str,
    artifacts: Artifacts,
    predictions: Predictions,
    whole: ReferenceModel,
    launched: dict[Kind, int],
) -> None:
    """Stages hold more than the accepted tokens: guessed rows, right or wrong."""
    asked = await predictions([1, 3], kv_layout)
    async with drafting(artifacts([1, 3]), DRAFT_AUTO, kv_layout=kv_layout, proxied=True) as running:
        streams = [running.pipeline.open(each) for each in asked]
        said = await asyncio.gather(*(read(stream, 3) for stream in streams))
        await running.cut(where)
        rest = await asyncio.gather(*map(tokens_of, streams))
    assert_right(whole, asked, [first + then for first, then in zip(said, rest, strict=True)])
    assert launched[Kind.DECODE]


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_rows_of_a_drafted_stream_are_copied_correctly(
    kv_layout: str, artifacts: Artifacts, predictions: Predictions, whole: ReferenceModel
) -> None:
    """The next turn of a chat, and another stream with the same beginning while the first still runs."""
    (first, *_), paths = await predictions([2], kv_layout), artifacts([2])
    first = dataclasses.replace(
        first, prompt_tokens=prompt_of(3, 40), prediction=(*prompt_of(3, 40), *first.prediction)
    )
    async with fleet(paths, draft=4, kv_layout=kv_layout, prefix_lanes=2) as running:
        stream = running.pipeline.open(first)
        said = await read(stream, 9)
        concurrent = request((*first.prompt_tokens, *said[:5]), N_TOKENS)
        other = await tokens_of(running.pipeline.open(concurrent))
        said += await tokens_of(stream)
        later = request((*first.prompt_tokens, *said, 5, 6), N_TOKENS)
        longer = await tokens_of(running.pipeline.open(later))
        figures = await running.pipeline.describe()
    assert_right(whole, [first, concurrent, later], [said, other, longer])
    assert figures["copied_tokens"] >= 40 + 70  # type: ignore[operator]


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_nothing_is_drafted_where_a_window_may_lose_earlier_rows(kv_layout: str, tmp_path: Path) -> None:
    """In a cache that all lanes share; with per-lane cells a lane can always be rewound."""
    model = make_tiny("gemma3:pattern", tmp_path / "model.gguf", n_layers=6, vocab=SHAPE.n_vocab)
    pipeline = split_model(model, tmp_path / "out", cuts=(2, 4))
    paths = [tmp_path / "out" / stage.file for stage in pipeline.stages]
    base = [request(prompt_of(index, 20 + 30 * index), N_TOKENS) for index in range(4)]
    async with fleet(paths, kv_layout=kv_layout, file=pipeline) as plain:
        said = await asyncio.gather(*(tokens_of(plain.pipeline.open(each)) for each in base))
    asked = [predicting(*each) for each in zip(base, said, WRONG_EVERY, strict=True)]
    async with fleet(paths, kv_layout=kv_layout, file=pipeline, draft=5) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(each)) for each in asked))
        figures = await running.pipeline.describe()
    assert (figures["drafted_tokens"] == 0) == (kv_layout == "unified")
    with ReferenceModel(model, CTX, 1) as whole:
        for each, tokens in zip(asked, outputs, strict=True):
            logits = logits_along(whole, each.prompt_tokens, tokens)
            behind = logits.max(axis=1) - logits[range(len(tokens)), tokens]
            assert behind.max() < NEAR_TIE * logits.std(), "a lane lacks something"
