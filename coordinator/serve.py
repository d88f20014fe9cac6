"""The coordinator process: one pipeline behind one HTTP address."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.chat import ChatTemplate
from coordinator.http.app import make_app
from coordinator.http.limits import HttpLimits
from coordinator.http.server import start_http
from coordinator.pipeline import Pipeline, PipelineConfig
from coordinator.pipeline_file import check_artifact, load_pipeline
from coordinator.tokenizer import Tokenizer
from wire.errors import UsageError
from wire.process import run

log = logging.getLogger("relayline.coordinator")


@dataclasses.dataclass(frozen=True, slots=True)
class ServeConfig:
    """One coordinator process."""

    pipeline_dir: Path
    """Directory with pipeline.json and tokenizer.gguf; the stages' artifacts need not be here."""
    pipeline: PipelineConfig
    """Stage addresses and how to drive them."""
    host: str = "127.0.0.1"
    """Address of the HTTP API."""
    port: int = 8080
    """Port of the HTTP API; 0 lets the system choose."""
    model_id: str = ""
    """Name clients use in requests; empty takes the model's own name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """What the ready line tells."""

    url: str
    model_id: str
    n_stages: int
    n_lanes: int
    ctx_tokens: int


def run_coordinator(config: ServeConfig, on_ready: Callable[[Ready], None]) -> None:
    """Serve until SIGINT or SIGTERM, then drain. Raises RelaylineError if the start fails."""

    async def main(stopping: asyncio.Event) -> None:
        await _serve(config, stopping, on_ready)

    run(main)


async def _serve(config: ServeConfig, stopping: asyncio.Event, on_ready: Callable[[Ready], None]) -> None:
    file = load_pipeline(config.pipeline_dir, stages_here=False)
    if len(config.pipeline.addresses) != len(file.stages):
        raise UsageError(
            f"the pipeline in {config.pipeline_dir} has {len(file.stages)} stages, "
            f"but {len(config.pipeline.addresses)} addresses were given"
        )
    check_artifact(config.pipeline_dir / file.tokenizer.file, file.tokenizer)
    tokenizer = Tokenizer.load(config.pipeline_dir / file.tokenizer.file)
    pipeline = Pipeline(config.pipeline, file, tokenizer.is_end)
    model_id = config.model_id or file.model_name
    limits = HttpLimits()
    chat = ChatTemplate(tokenizer.chat_template, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    app = make_app(pipeline, tokenizer, chat, model_id, int(time.time()), limits)
    # The API answers while the stages still load: /health says 503 until they are ready.
    runner, port = await start_http(app, config.host, config.port)
    serving = asyncio.create_task(pipeline.run(stopping))
    try:
        ready = asyncio.create_task(pipeline.ready.wait())
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not serving.done():
            url = f"http://{config.host}:{port}"
            on_ready(Ready(url, model_id, len(file.stages), pipeline.n_lanes, pipeline.ctx_tokens))
        await serving
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(serving, return_exceptions=True)
        await runner.cleanup()
