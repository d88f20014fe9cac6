"""Ties the process of a draft model to a pipeline: its guesses are events, and what it is told are instructions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from relayline.coordinator.drafting.link import DraftLink
from relayline.coordinator.drafting.messages import Guessed
from relayline.coordinator.engine.pipeline import Pipeline
from relayline.wire.common.usable_cores import usable_cores
from relayline.wire.settings.table import ServingSettings


@contextlib.asynccontextmanager
async def drafting(pipeline: Pipeline, serving: ServingSettings, vocabulary: Path) -> AsyncIterator[DraftLink | None]:
    """Let the draft model that the settings name, if any, draft for a pipeline while the context is entered.

    Yields its process, None without one.
    `vocabulary`: a GGUF file with that of the served model. Raises UsageError for a model that cannot draft for it,
    StartError where its process does not start and may the next time.
    """
    if not serving.draft_model or not serving.draft_tokens:
        yield None
        return
    n_threads = serving.draft_threads or max(1, len(usable_cores()) // 2)
    link = DraftLink(
        Path(serving.draft_model), vocabulary, serving.draft_ctx_tokens, n_threads, serving.draft_gpu_layers
    )
    _tie(pipeline, link)
    try:
        await link.start()
        running = asyncio.create_task(link.run())
        try:
            yield link
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await link.close()


def _tie(pipeline: Pipeline, link: DraftLink) -> None:
    drafted = pipeline.conductor.drafted

    def on_guessed(guesses: Sequence[Guessed]) -> None:
        if drafted.guessed(guesses, time.monotonic_ns()):
            pipeline.dispatch()

    def on_lost() -> None:
        drafted.lost()
        pipeline.dispatch()

    def on_back() -> None:
        drafted.back()
        pipeline.dispatch()

    pipeline.tell_drafter = link.send
    link.on_guessed, link.on_lost, link.on_back = on_guessed, on_lost, on_back
