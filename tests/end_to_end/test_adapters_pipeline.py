"""Requests with different LoRA adapters over real stages, against the unsplit model with the same adapters."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.tiny_adapters import adapter_of, make_adapter
from relayline.deploy.testing.tiny_slices import write_whole
from relayline.wire.common.errors import HandshakeError
from relayline.wire.model_files.adapters import Adapter
from tests.support.fleet import (
    CTX,
    SHAPE,
    Artifacts,
    answers_over_losses,
    artifacts_fixture,
    assert_greedy,
    fleet,
    prompt_of,
    request,
    tokens_of,
)

FIXTURES = (artifacts_fixture,)  # pytest finds them in the modules that name them
SCALE = 0.6
N_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class World:
    """The unsplit model with each choice of adapters."""

    adapters: tuple[Adapter, ...]
    wholes: tuple[ReferenceModel, ...]


@pytest.fixture(scope="module", name="world")
def world_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("whole")
    model = write_whole(directory / "whole.gguf", SHAPE)
    paths = [make_adapter(model, directory / f"{seed}.gguf", seed=seed) for seed in (1, 2)]
    used: list[list[tuple[Path, float]]] = [[], [(paths[0], SCALE)], [(paths[1], 1.0)]]
    wholes = tuple(ReferenceModel(model, CTX, 1, adapters=each) for each in used)
    yield World((adapter_of(paths[0], "first", SCALE), adapter_of(paths[1], "second")), wholes)
    for whole in wholes:
        whole.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
async def test_streams_with_different_adapters_run_at_once(artifacts: Artifacts, world: World, kv_layout: str) -> None:
    prompts = [prompt_of(seed, 20 + seed) for seed in range(9)]
    async with fleet(artifacts([1, 3]), adapters=world.adapters, kv_layout=kv_layout, n_lanes=9) as running:
        streams = [
            running.pipeline.open(dataclasses.replace(request(prompt, N_TOKENS), adapter=at % 3))
            for at, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*map(tokens_of, streams))
        await running.until_free()
    for at, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        assert_greedy(world.wholes[at % 3], prompt, tokens)
        with pytest.raises(AssertionError, match="behind"):
            assert_greedy(world.wholes[(at + 1) % 3], prompt, tokens)


@pytest.mark.parametrize("draft", [0, 4])
async def test_one_prompt_with_each_adapter_shares_no_cells(artifacts: Artifacts, world: World, draft: int) -> None:
    """Kept lanes, running streams and the tier all hold cells of the prompt, of other adapters."""
    prompt = prompt_of(5, 90)
    async with fleet(
        artifacts([2]), adapters=world.adapters, prefix_lanes=2, tier_bytes=1 << 20, n_lanes=4, draft=draft
    ) as running:
        for _ in range(2):
            for adapter in (0, 1, 2):
                stream = running.pipeline.open(dataclasses.replace(request(prompt, N_TOKENS), adapter=adapter))
                assert_greedy(world.wholes[adapter], prompt, await tokens_of(stream))
        assert running.pipeline.conductor.prefixes.tier.figures()["stored"] > 0


async def test_answers_go_on_with_their_adapters_after_a_loss(artifacts: Artifacts, world: World) -> None:
    prompts = [prompt_of(seed, 30) for seed in range(3)]
    async with fleet(artifacts([2]), adapters=world.adapters, n_lanes=4) as running:
        answers = await answers_over_losses(running, prompts, N_TOKENS, adapters=(0, 1, 2))
    for at, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        assert_greedy(world.wholes[at], prompt, tokens)


async def test_a_stage_with_other_adapters_is_refused_in_one_line(
    artifacts: Artifacts, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.coordinator.engine.pipeline_config.choice_keys", lambda adapters: ("", "another"))
    with pytest.raises(
        HandshakeError, match=r"has other LoRA adapters than the coordinator; give both the same --lora"
    ):
        async with fleet(artifacts([2]), adapters=world.adapters):
            raise AssertionError("it is never ready")
