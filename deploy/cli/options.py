"""Command-line values and options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from relayline.deploy.machine.cores import Cores, read_cores
from relayline.wire.common import bounds
from relayline.wire.common.errors import UsageError
from relayline.wire.common.kv_layout import KV_LAYOUTS, LONG_LANE_TOKENS
from relayline.wire.envelopes.envelope import DTYPE_BY_NAME
from relayline.wire.links.roles import Role
from relayline.wire.links.security import LinkSecurity, address_of, load_security
from relayline.wire.telemetry.config import LEVEL_NAMES, Level, TelemetryConfig

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Address(click.ParamType[tuple[str, int]]):
    """HOST:PORT; a bracketed host for IPv6. Converts to (host, port)."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Split and check one address."""
        if isinstance(value, tuple):
            return value
        host, colon, port = str(value).rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65_535:
            self.fail(f"{value!r} is not HOST:PORT", param, ctx)
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host and not host.startswith(("unix:", "unix-abstract:")):
            self.fail(f"{value!r} is not HOST:PORT; an IPv6 host goes into brackets, as in [::1]:8080", param, ctx)
        return host, int(port)


class FloatRange(click.FloatRange):
    """click's, without "nan", which no comparison finds out of range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read and check one number."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class AddressList(click.ParamType[tuple[str, ...]]):
    """Comma-separated HOST:PORT addresses. Converts to a tuple of "host:port" strings."""

    name = "host:port,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Check every address."""
        if isinstance(value, tuple):
            return value
        parts = [Address().convert(part.strip(), param, ctx) for part in str(value).split(",")]
        return tuple(address_of(host, port) for host, port in parts)


class CoreList(click.ParamType[Cores]):
    """Cores such as 0-3,8. Converts to their numbers, in order."""

    name = "cores"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Cores:
        """Read one list."""
        if isinstance(value, tuple):
            return value
        try:
            return read_cores(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class DraftTokens(click.ParamType[int]):
    """auto, off or a number of tokens. Converts to `ScheduleConfig.draft`; `said` is the way back."""

    name = "auto|off|n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read and check one value."""
        from relayline.coordinator.schedule.draft_flights import DRAFT_AUTO

        if isinstance(value, int):
            return value  # a manifest's, which has checked it, or converted already
        known = {"auto": DRAFT_AUTO, "off": 0} | {str(n): n for n in range(bounds.DRAFT_TOKENS_MAX + 1)}
        if value not in known:
            self.fail(f"{value!r} is not auto, off or a number from 1 to {bounds.DRAFT_TOKENS_MAX}", param, ctx)
        return known[value]

    @staticmethod
    def said(n_tokens: int) -> str | int:
        """Return what manifests call a converted value; as text it is what --draft takes."""
        from relayline.coordinator.schedule.draft_flights import DRAFT_AUTO

        return {DRAFT_AUTO: "auto", 0: "off"}.get(n_tokens, n_tokens)


WIRE_NAMES = tuple(DTYPE_BY_NAME)


def _apply(*options: Decorator) -> Decorator:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


log_options = _apply(
    click.option("--log-json", is_flag=True, help="Log one JSON object per line."),
    click.option("--verbose", is_flag=True, help="Log more."),
)

policy_option = click.option(
    "--policy",
    type=click.Choice(("auto", "drain", "single")),
    default="auto",
    show_default=True,
    help="auto: groups and padding from the cost curves; drain: batch what is queued; single: no batching.",
)

kv_layout_option = click.option(
    "--kv-layout",
    type=click.Choice(KV_LAYOUTS),
    default="auto",
    show_default=True,
    help="Cells of the KV cache: shared by all lanes, or each lane's own (quicker on CPUs for long streams); auto: "
    f"each lane's own with --gpu-layers 0 from --ctx {LONG_LANE_TOKENS} on.",
)

slice_options = _apply(
    click.option("--ctx", type=int, default=2048, show_default=True, help="Tokens per stream, prompt and answer."),
    click.option("--lanes", type=int, default=32, show_default=True, help="Streams that may run at once."),
    click.option("--gpu-layers", type=int, default=0, show_default=True, help="Layers on the GPU; -1 for all."),
    click.option("--max-rows", type=int, default=512, show_default=True, help="Rows of one native step."),
    click.option("--kv-type", default="f16", show_default=True, help="Element type of the KV cache."),
    kv_layout_option,
)

engine_options = _apply(
    slice_options,
    click.option(
        "--prefill-rows",
        type=int,
        default=128,
        show_default=True,
        help="Prefill rows beside decoders with --policy drain.",
    ),
    click.option("--no-calibrate", is_flag=True, help="Learn the cost curve from real steps only."),
)

security_options = _apply(
    click.option("--tls", "tls_dir", type=click.Path(path_type=Path), default=None,
                 help="This process's directory from `relayline certs issue`; links are mutual TLS."),
    click.option("--insecure", is_flag=True, help="Allow plaintext links beyond this machine; anyone can read them."),
    click.option("--token-file", type=click.Path(path_type=Path), default=None,
                 help="File with the join token [default: RELAYLINE_TOKEN, or `token` in the --tls directory]."),
)  # fmt: skip

http_security_options = _apply(
    click.option("--http-cert", type=click.Path(path_type=Path), default=None,
                 help="Certificate (PEM) with which the HTTP API is HTTPS; renewed files are taken up by themselves."),
    click.option("--http-key", type=click.Path(path_type=Path), default=None, help="Private key of --http-cert (PEM)."),
    click.option("--api-keys", type=click.Path(path_type=Path), default=None,
                 help="File with one API key (or NAME: KEY) a line; read again on SIGHUP [default: no key is needed]."),
    click.option("--protect-metrics", is_flag=True, help="Demand an API key for /metrics too."),
    click.option("--allow-host", "allow_hosts", multiple=True, metavar="NAME",
                 help="Also answer web pages of this host, and clients that call the server so; may be repeated "
                 "[default: without --api-keys only loopback names on loopback, and no pages of other hosts]."),
    click.option("--jaeger-url", default="", metavar="URL",
                 help="Where traces are looked at, as http://HOST:16686; the page at / links requests to it."),
    click.option("--connections-per-address", type=click.IntRange(0, 1_000_000), default=512, show_default=True,
                 help="HTTP connections from one address beyond this machine, such as a proxy's; 0 for any number."),
)  # fmt: skip

chat_template_option = click.option(
    "--chat-template", type=click.Path(path_type=Path), default=None,
    help="File with a Jinja template for chats [default: the model's own].",
)  # fmt: skip


def security_from(given: dict[str, Any], role: Role) -> LinkSecurity:
    """Turn the flags of `security_options` (and a `token`, where a command has one) into checked link security of a
    process of this role, and of this `name` if one is given.

    Call it after the logs are set up: it may warn. Raises UsageError.
    """
    return load_security(
        given["tls_dir"],
        token=given.get("token") or "",
        token_file=given["token_file"],
        insecure=given["insecure"],
        role=role,
        name=(given.get("name") or "") if role is Role.STAGE else "",
    )


def http_tls_from(given: dict[str, Any]) -> tuple[Path, Path] | None:
    """Return certificate and key of the HTTP API, None for plain HTTP. Raises UsageError for one without the other."""
    cert, key = given["http_cert"], given["http_key"]
    if (cert is None) != (key is None):
        raise UsageError("--http-cert and --http-key go together; give both or none")
    return (cert, key) if cert is not None else None


telemetry_options = _apply(
    click.option("--trace-level", type=click.Choice(LEVEL_NAMES), default="summary", show_default=True,
                 help="off; summary: a trace per request; batches: and a span per native batched decode; "
                 "frames: and what every frame waited for."),
    click.option("--otlp-endpoint", default="", metavar="URL",
                 help="Collector for traces, as http://HOST:4317 (gRPC) or http://HOST:4318 (HTTP) "
                 "[default: OTEL_EXPORTER_OTLP_ENDPOINT; with neither, nothing is exported]."),
    click.option("--trace-sample", type=FloatRange(0, 1), default=1.0, show_default=True,
                 help="Share of requests to trace; the coordinator decides, stages follow."),
)  # fmt: skip


content_option = click.option(
    "--trace-content", is_flag=True, help="Also record prompts and answers in traces, for whoever can read those."
)


def check_draft(given: dict[str, Any]) -> None:
    """Raise UsageError where drafts are asked for by number and none would be made."""
    by_hand = given["groups"] or given["group_rows"]
    if given["draft"] > 0 and given["policy"] != "auto" and not by_hand:
        raise UsageError(f"--draft {given['draft']} needs --policy auto: with {given['policy']} nothing is drafted")


def check_engine(given: dict[str, Any]) -> None:
    """Raise UsageError for a flag of `engine_options` that no stage would take, before anything is done with others."""
    from relayline.stage.config import StageConfig

    StageConfig(
        artifact=Path(),
        ctx_tokens=given["ctx"],
        n_lanes=given["lanes"],
        n_threads=given.get("threads", 0),
        gpu_layers=given["gpu_layers"],
        max_rows=given["max_rows"],
        prefill_rows=given["prefill_rows"],
        kv_type=given["kv_type"],
        kv_layout=given["kv_layout"],
        policy=given["policy"],
        telemetry=telemetry_config(given),
    )


def is_given(name: str) -> bool:
    """Return whether the running command's parameter has a value from the command line or the environment."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)


def telemetry_config(given: dict[str, Any], *, content: bool = False) -> TelemetryConfig:
    """Turn the flags of `telemetry_options` into configuration. Raises UsageError."""
    return TelemetryConfig(
        level=Level.named(given["trace_level"]),
        otlp_endpoint=given["otlp_endpoint"],
        sampler_ratio=given["trace_sample"],
        content=content,
    )


pipeline_options = _apply(
    click.option("--wire", type=click.Choice(WIRE_NAMES), default="f16", show_default=True, help="Rows on the wire."),
    click.option("--prefill-chunk", type=click.IntRange(0, 2048), default=0,
                 help="Largest number of prompt rows per frame [default: chosen]."),
    click.option("--itl-stretch", type=FloatRange(1, 1000), default=2.0, show_default=True,
                 help="How many times longer running streams may wait between tokens while prompts are read; more "
                 "brings first tokens sooner."),
    click.option("--draft", type=DraftTokens(), default="auto", show_default=True, metavar="auto|off|N",
                 help="Tokens drafted ahead of a stream from what its own text repeats, and verified in one step: "
                 f"auto: as many as pays; off; or always up to N, at most {bounds.DRAFT_TOKENS_MAX}."),
    click.option("--prefix-lanes", type=click.IntRange(0, 4096), default=None,
                 help="Lanes that may keep what ended streams computed; prompts that begin alike, such as the "
                 "next turn of a chat, are read from there on. Running streams are always copied from, unless this "
                 "is 0 [default: half of all with --kv-layout per-lane, else none]."),
    click.option("--queue", type=click.IntRange(0, 100_000), default=256, show_default=True,
                 help="Requests that may wait for a lane."),
    click.option("--lost-wait", type=FloatRange(0, 3_600), default=15.0, show_default=True, metavar="SECONDS",
                 help="How long after the loss of a stage new requests wait for their first token; then they get 503."),
    click.option("--groups", type=click.IntRange(0, 4096), default=0, help="Decode groups by hand [default: chosen]."),
    click.option("--group-rows", type=click.IntRange(0, 2048), default=0, help="Rows per group by hand."),
    click.option("--no-share", is_flag=True, help="Never decode identical deterministic requests once for all."),
    click.option("--model-id", default="", help="Model name in the API [default: the model's own]."),
)  # fmt: skip

# Hidden: a supervisor holds the other end of this process's stdin, so that no child outlives it however it ends.
supervised_option = click.option("--exit-with-stdin", is_flag=True, hidden=True)
