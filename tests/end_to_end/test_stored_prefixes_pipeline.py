"""More chats than lanes: prefixes that real stages stored are restored, and no token changes."""

from __future__ import annotations

import asyncio

import pytest

from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.steps.lane_states import LaneStates
from tests.end_to_end.test_prefix_lanes import LAYOUTS, replays, rows_of
from tests.support.fleet import (
    Artifacts,
    artifacts_fixture,
    assert_greedy,
    fleet,
    prompt_of,
    request,
    tokens_of,
    whole_fixture,
)

FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them
N_CHATS, N_TOKENS, N_PROMPT = 4, 6, 60


@pytest.fixture(name="long", params=[False, True], ids=["short", "long"])
def long_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With long lanes, sessions wait before the queue until theirs are filled in pieces."""
    if request.param:
        monkeypatch.setitem(LaneStates.__init__.__kwdefaults__, "long_bytes", 0)  # type: ignore[misc]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_the_second_round_of_more_chats_than_lanes_reads_only_new_text(
    kv_layout: str, artifacts: Artifacts, whole: ReferenceModel
) -> None:
    histories = [prompt_of(1 + chat, N_PROMPT) for chat in range(N_CHATS)]
    stages = artifacts([1, 3])
    async with fleet(stages, n_lanes=2, prefix_lanes=None, kv_layout=kv_layout, tier_bytes=64 << 20) as running:
        for round_ in range(2):
            for chat, history in enumerate(histories):
                before = await rows_of(running)
                tokens = await tokens_of(running.pipeline.open(request(history, N_TOKENS)))
                await running.until_free()
                assert_greedy(whole, history, tokens)
                n_read = N_PROMPT if round_ == 0 else 1 + 3
                n_rows = [now - then for now, then in zip(await rows_of(running), before, strict=True)]
                assert n_rows == [n_read + N_TOKENS - 1] * 3, f"round {round_}, chat {chat}"
                histories[chat] = (*history, *tokens, *prompt_of(20 + chat, 3))
        assert replays(running) == 0
        description = await running.pipeline.describe()
    described = description["stages"]
    assert isinstance(described, list)
    assert {stage["tier"]["misses"] for stage in described} == {0}
    assert {stage["tier"]["hits"] for stage in described} <= {3, 4}, "one may have been in a kept lane"
    assert all(stage["tier"]["memory_bytes"] > 0 for stage in described)


async def test_long_lanes_are_filled_beside_a_running_stream(
    artifacts: Artifacts, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats come back, and copy from kept lanes, while another stream decodes; all tokens are the whole model's."""
    monkeypatch.setitem(LaneStates.__init__.__kwdefaults__, "long_bytes", 0)  # type: ignore[misc]
    histories = [prompt_of(1 + chat, N_PROMPT) for chat in range(N_CHATS)]
    beside = prompt_of(40, 20)
    async with fleet(
        artifacts([2]), n_lanes=4, prefix_lanes=None, kv_layout="per-lane", tier_bytes=64 << 20
    ) as running:
        other = asyncio.create_task(tokens_of(running.pipeline.open(request(beside, 200))))
        for _ in range(2):
            answers = await asyncio.gather(
                *(tokens_of(running.pipeline.open(request(history, N_TOKENS))) for history in histories)
            )
            for chat, tokens in enumerate(answers):
                assert_greedy(whole, histories[chat], tokens)
                histories[chat] = (*histories[chat], *tokens, *prompt_of(20 + chat, 3))
        assert_greedy(whole, beside, await other)
        await running.until_free()
        assert replays(running) == 0
