"""The coordinator process: one pipeline behind one HTTP address."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from relayline.coordinator.config import Callbacks, Joinable, Ready, ServeConfig
from relayline.coordinator.engine.draft_seam import drafting
from relayline.coordinator.engine.pipeline import Pipeline, PipelineConfig
from relayline.coordinator.engine.stage_curves import CurveTelling
from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.app import FACTS, TEMPLATE_FAULT, make_app
from relayline.coordinator.http.edge.limits import HttpLimits, limits_of
from relayline.coordinator.http.edge.server import server_tls
from relayline.coordinator.http.opening import opened
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.joining.port import enrol_address_of, make_inviter, make_roster, serve_joining
from relayline.coordinator.media.begin import encoder_of
from relayline.coordinator.model.pipeline_file import PipelineFile, check_artifact, load_pipeline
from relayline.coordinator.observe.telemetry_start import observed
from relayline.coordinator.steering import steering_of
from relayline.coordinator.text.chat_choice import chat_template_of
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import UsageError
from relayline.wire.common.process import run, settle
from relayline.wire.links.security import check_connects

log = logging.getLogger("relayline.coordinator")


def run_coordinator(config: ServeConfig, callbacks: Callbacks) -> None:
    """Serve until SIGINT or SIGTERM, then drain. Raises RelaylineError if the start fails."""

    async def main(stopping: asyncio.Event) -> None:
        await _serve(config, stopping, callbacks)

    run(main)


async def _serve(config: ServeConfig, stopping: asyncio.Event, callbacks: Callbacks) -> None:
    check_connects(config.pipeline.addresses, config.pipeline.security)
    allow_invites = config.pipeline.serving.allow_invites and config.http.api_keys_file is not None
    file, tokenizer = _read_split(config)
    roster = make_roster(config.join, callbacks.on_member) if config.join is not None else None
    chat = chat_template_of(tokenizer, config.chat_template_file)
    tls = server_tls(config.http.tls)
    async with contextlib.AsyncExitStack() as stack:
        pipeline_config = _named(config, file)
        pushed_level = config.telemetry.level if config.push_level else None
        observer = await stack.enter_async_context(
            observed(config.telemetry, file.model_name, pushed_level, pipeline_config.name)
        )
        pipeline = Pipeline(
            pipeline_config, file, tokenizer.is_end, roster, observer, tokenizer.message_ends.__contains__
        )
        pipeline.planned = config.planned
        steering = steering_of(config, pipeline, roster, observer)
        stack.push_async_callback(steering.close)
        link = await stack.enter_async_context(drafting(pipeline, config.pipeline.serving, tokenizer.path))
        encoder = await encoder_of(config.pipeline.serving, file, tokenizer)
        steering.sleeper.helpers += [helper.rest for helper in (link, encoder) if helper is not None]
        model_id = config.pipeline.serving.model_id or file.model_name
        model = ServedModel(model_id, int(time.time()), tokenizer, chat, encoder)
        control = TelemetryControl(observer, lambda: pipeline.stages)
        inviter = make_inviter(config.join, roster, steering.mover.add) if allow_invites else None
        limits = _limits(config, tokenizer)
        app = make_app(pipeline, model, limits, control, steering.mover, inviter, steering.sleeper)
        app[FACTS]["jaeger_url"] = config.pipeline.serving.jaeger_url.rstrip("/")
        _check_template(app, config.chat_template_file)
        # The API answers while the stages still load: /health says 503 until they are ready.
        api = opened(app, config.http, config.pipeline.serving, pipeline, stopping=stopping, tls=tls)
        port, keeper = await stack.enter_async_context(api)
        if keeper is not None:
            pipeline.describe_batches = keeper.figures
        url = config.http.url_at(port)
        if config.join is not None and roster is not None:
            joining = serve_joining(
                config.join, config.pipeline_dir, file, roster, config.pipeline.security, steering.attach
            )
            address, enrol_address = await stack.enter_async_context(joining)
            app[FACTS] |= {"join": address, "enrol": enrol_address, "invites": inviter is not None}
            if inviter is not None:
                inviter.address = enrol_address_of(config.pipeline.security, enrol_address)
            callbacks.on_joinable(Joinable(address, url, pipeline_config.stage_names, enrol_address))

        def on_ready() -> None:
            has_chat = chat.source is not None
            ranks = tokenizer.n_labels > 0
            ready = Ready(url, model_id, len(file.stages), pipeline.n_lanes, pipeline.ctx_tokens, has_chat, ranks)
            callbacks.on_ready(ready)

        await _drive(pipeline, stopping, on_ready, CurveTelling(pipeline, config.on_curves))


def _read_split(config: ServeConfig) -> tuple[PipelineFile, Tokenizer]:
    """Return the split that is served, checked. Raises UsageError where the stages given are not as many as it has."""
    file = load_pipeline(config.pipeline_dir, stages_here=config.join is not None)
    n_given = len(config.join.holders if config.join is not None else config.pipeline.addresses)
    what = ("name was", "names were") if config.join is not None else ("address was", "addresses were")
    if n_given != len(file.stages):
        has = f"the pipeline in {config.pipeline_dir} has {len(file.stages)} stage{'s' * (len(file.stages) != 1)}"
        raise UsageError(f"{has}, but {n_given} {what[n_given != 1]} given")
    path = config.pipeline_dir / file.tokenizer.file
    check_artifact(path, file.tokenizer)
    return file, Tokenizer.load(path)


def _limits(config: ServeConfig, tokenizer: Tokenizer) -> HttpLimits:
    """Return the limits of requests, and tell which sampling options of the model's file they take or not."""
    limits = limits_of(config.pipeline.serving, tokenizer.recommended)
    if limits.recommended:
        log.info("requests that name no sampling options get the model's: %s", tokenizer.recommended.text)
    if config.pipeline.serving.sampling_defaults == "model":
        for line in tokenizer.recommended.ignored:
            log.warning("%s", line)
    return limits


def _check_template(app: web.Application, given: Path | None) -> None:
    """Raise UsageError if the chat template that was given cannot be used. The model's own one is only warned of."""
    fault = app[TEMPLATE_FAULT]
    if fault and given is not None:
        raise UsageError(f"chat template {given}: {fault}")
    if fault:
        log.warning("%s", fault)


def _named(config: ServeConfig, file: PipelineFile) -> PipelineConfig:
    """Return the pipeline's configuration with the names that people know it and its stages by."""
    join = config.join
    stages = tuple(join.stages[at].name for at in join.holders) if join is not None else ()
    return dataclasses.replace(config.pipeline, name=config.pipeline.name or file.model_name, stage_names=stages)


async def _drive(
    pipeline: Pipeline, stopping: asyncio.Event, on_ready: Callable[[], None], telling: CurveTelling
) -> None:
    serving = asyncio.create_task(pipeline.run(stopping))
    try:
        ready = asyncio.create_task(pipeline.ready.wait())
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not serving.done():
            on_ready()
            telling.begin()
            settle()
        await serving
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(serving, return_exceptions=True)
        await telling.close()
