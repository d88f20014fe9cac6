"""The coordinator process: one pipeline behind one HTTP address."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from relayline.coordinator.engine.pipeline import Pipeline, PipelineConfig
from relayline.coordinator.engine.stage_curves import CurveTelling, OnCurves
from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.api_keys import protect_http
from relayline.coordinator.http.app import FACTS, TEMPLATE_FAULT, make_app
from relayline.coordinator.http.limits import HttpLimits
from relayline.coordinator.http.server import server_tls, start_http
from relayline.coordinator.images.begin import encoder_of
from relayline.coordinator.joining.config import JoinConfig, PoolState
from relayline.coordinator.joining.mover import CutModel, ExplainMove, LayerMover, ReadShape, rebalancer_of
from relayline.coordinator.joining.port import OnMember, make_roster, serve_joining
from relayline.coordinator.model.pipeline_file import PipelineFile, check_artifact, load_pipeline
from relayline.coordinator.observe.telemetry_start import observed
from relayline.coordinator.text.chat_choice import chat_template_of
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import UsageError
from relayline.wire.common.process import run, settle
from relayline.wire.links.security import address_of, check_connects
from relayline.wire.telemetry.config import TelemetryConfig

log = logging.getLogger("relayline.coordinator")


@dataclasses.dataclass(frozen=True, slots=True)
class ServeConfig:
    """One coordinator process."""

    pipeline_dir: Path
    """Directory with pipeline.json and tokenizer.gguf; the stages' artifacts need not be here."""
    pipeline: PipelineConfig
    """Stage addresses and scheduling. A pipeline without a given name is named after its model."""
    host: str = "127.0.0.1"
    """Address of the HTTP API."""
    port: int = 8080
    """Port of the HTTP API; 0 lets the system choose."""
    api_keys_file: Path | None = None
    """File with the keys that the HTTP API demands, see coordinator.http.api_keys; None demands none."""
    http_tls: tuple[Path, Path] | None = None
    """Certificate (with intermediates) and private key of the HTTP API, PEM; None serves it in the clear."""
    allow_hosts: tuple[str, ...] = ()
    """Host names under which web pages may reach the HTTP API, besides loopback, see coordinator.http.web_pages."""
    cors: tuple[str, ...] = ()
    """Origins whose web pages may read the HTTP API, see coordinator.http.cors."""
    chat_template_file: Path | None = None
    """Jinja template for chats; None takes the model's own."""
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)
    """How much is traced here, and where to."""
    push_level: bool = False
    """Whether stages that connect are set to the trace level given here, rather than left at their own."""
    cut_model: CutModel | None = None
    """Splits the model again where layers are to move; None: this process has no model file."""
    read_shape: ReadShape | None = None
    """Returns the sizes of that model, by which layers are given to others; None: this process has no model file."""
    on_moved: Callable[[PoolState], None] | None = None
    """Gets the holders and their layers whenever they have changed, on a separate thread."""
    on_curves: OnCurves | None = None
    """Gets the stages' step costs with their layers, once all serve; on a separate thread."""
    planned: dict[str, Any] | None = None
    """Which stage got which layers and why, as in GET /v1/pipeline; None: unknown."""
    explain_move: ExplainMove | None = None
    """Returns that again once layers have moved; on a separate thread."""
    join: JoinConfig | None = None
    """Let stages join by themselves; `pipeline.addresses` is empty then, and the artifacts must be in pipeline_dir."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """The facts of the ready line."""

    url: str
    model_id: str
    n_stages: int
    n_lanes: int
    ctx_tokens: int
    has_chat: bool = True
    """Whether the model has a chat template."""


@dataclasses.dataclass(frozen=True, slots=True)
class Joinable:
    """Emitted once stages may join; requests are refused until all of them have."""

    join_address: str  # host:port
    url: str
    names: tuple[str, ...]  # of the stages that are waited for, in layer order
    enrol_address: str = ""  # host:port where hosts get their certificates; empty: nowhere


def run_coordinator(
    config: ServeConfig,
    on_ready: Callable[[Ready], None],
    on_joinable: Callable[[Joinable], None] = lambda joinable: None,
    on_member: OnMember = lambda place: None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain.

    `on_member` hears every change of a joining stage's state. Raises RelaylineError if the start fails.
    """

    async def main(stopping: asyncio.Event) -> None:
        await _serve(config, stopping, on_ready, on_joinable, on_member)

    run(main)


def _check_count(config: ServeConfig, file: PipelineFile) -> None:
    n_given = len(config.join.holders if config.join is not None else config.pipeline.addresses)
    what = "names" if config.join is not None else "addresses"
    if n_given != len(file.stages):
        raise UsageError(
            f"the pipeline in {config.pipeline_dir} has {len(file.stages)} stages, but {n_given} {what} were given"
        )


async def _serve(
    config: ServeConfig,
    stopping: asyncio.Event,
    on_ready: Callable[[Ready], None],
    on_joinable: Callable[[Joinable], None],
    on_member: OnMember,
) -> None:
    check_connects(config.pipeline.addresses, config.pipeline.security, "the coordinator")
    file = load_pipeline(config.pipeline_dir, stages_here=config.join is not None)
    _check_count(config, file)
    check_artifact(config.pipeline_dir / file.tokenizer.file, file.tokenizer)
    tokenizer = Tokenizer.load(config.pipeline_dir / file.tokenizer.file)
    joined = make_roster(config.join, on_member) if config.join is not None else None
    model_id = config.pipeline.serving.model_id or file.model_name
    limits = _limits(config)
    chat = chat_template_of(tokenizer, config.chat_template_file)
    context = server_tls(config.http_tls)
    async with contextlib.AsyncExitStack() as stack:
        pushed_level = config.telemetry.level if config.push_level else None
        named = _named(config, file)
        observer = await stack.enter_async_context(
            observed(config.telemetry, file.model_name, pushed_level, named.name)
        )
        pipeline = Pipeline(named, file, tokenizer.is_end, joined, observer)
        pipeline.planned = config.planned
        control = TelemetryControl(observer, lambda: pipeline.stages)
        mover = _mover_of(config, pipeline)
        stack.push_async_callback(mover.close)
        encoder = await encoder_of(config.pipeline.serving, file, tokenizer)
        app = make_app(pipeline, tokenizer, chat, model_id, int(time.time()), limits, control, mover, encoder)
        app[FACTS]["jaeger_url"] = _checked_url(config.pipeline.serving.jaeger_url)
        if app[TEMPLATE_FAULT]:
            if config.chat_template_file is not None:
                raise UsageError(f"chat template {config.chat_template_file}: {app[TEMPLATE_FAULT]}")
            log.warning("%s", app[TEMPLATE_FAULT])
        stack.enter_context(
            protect_http(
                app,
                config.host,
                config.api_keys_file,
                protect_metrics=config.pipeline.serving.protect_metrics,
                is_tls=context is not None,
                allow_hosts=config.allow_hosts,
                cors=config.cors,
            )
        )
        # The API answers while the stages still load: /health says 503 until they are ready.
        runner, port = await start_http(app, config.host, config.port, context=context)
        url = f"{'http' if context is None else 'https'}://{address_of(config.host, port)}"
        stack.push_async_callback(runner.cleanup)
        if config.join is not None and joined is not None:
            security = config.pipeline.security
            joining = serve_joining(config.join, config.pipeline_dir, file, joined, security, mover.attach)
            address, enrol_address = await stack.enter_async_context(joining)
            app[FACTS] |= {"join": address, "enrol": enrol_address}
            names = tuple(config.join.stages[at].name for at in config.join.holders)
            on_joinable(Joinable(address, url, names, enrol_address))
        await _drive(
            pipeline,
            stopping,
            lambda: on_ready(
                Ready(url, model_id, len(file.stages), pipeline.n_lanes, pipeline.ctx_tokens, chat.source is not None)
            ),
            CurveTelling(pipeline, config.on_curves),
        )


def _mover_of(config: ServeConfig, pipeline: Pipeline) -> LayerMover:
    """Return what moves layers. Raises UsageError where they are to move by themselves and cannot."""
    return LayerMover(
        pipeline,
        config.cut_model,
        rebalancer=rebalancer_of(config.pipeline.serving, can_move=bool(config.join and config.cut_model)),
        read_shape=config.read_shape,
        takeover_s=config.pipeline.serving.takeover_s,
        known=config.join.known if config.join is not None else None,
        on_moved=config.on_moved or (lambda state: None),
        explain_move=config.explain_move or (lambda state: None),
    )


def _checked_url(url: str) -> str:
    """Return the address where traces are shown, without a trailing slash. Raises UsageError if it is not the address
    of a page.
    """
    try:
        parts = urlsplit(url)
        is_page = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_page = False
    if url and not is_page:
        raise UsageError(f"--jaeger-url {url!r} is not an address like http://HOST:16686")
    return url.rstrip("/")


def _limits(config: ServeConfig) -> HttpLimits:
    """Return the bounds of the HTTP side: every client that may queue may also be connected."""
    limits, serving = HttpLimits(), config.pipeline.serving
    return dataclasses.replace(
        limits,
        connections_max=limits.connections_max + serving.queue,
        connections_per_address_max=serving.connections_per_address,
        pooling=serving.pooling,
        strict_max_tokens=serving.strict_max_tokens,
        model_aliases=tuple(filter(None, map(str.strip, serving.served_model_name.split(",")))),
        any_model_name=serving.any_model_name,
    )


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
