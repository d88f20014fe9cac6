"""Command-line values and options that several commands share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.interrupts import SUPERVISED
from relayline.deploy.cli.paths import DirectoryToRead, FileToRead
from relayline.deploy.cli.sections import OF_CLIENTS
from relayline.deploy.cli.sections import Sectioned as Sectioned
from relayline.deploy.cli.setting_flags import Decorator, setting_options
from relayline.deploy.machine.cores import Cores, read_cores
from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import printable, whole_number
from relayline.wire.links.roles import Role
from relayline.wire.links.security import LinkSecurity, address_of, load_security
from relayline.wire.settings.setting import entries, entry_of, from_parameters
from relayline.wire.settings.table import DEVICE_SETTINGS, EngineSettings, ServingSettings, TelemetrySettings
from relayline.wire.telemetry.config import Level, TelemetryConfig

if TYPE_CHECKING:
    from relayline.coordinator.http.edge.listener import HttpListener


# Of the file or directory that a command writes; one name everywhere, and --out as some commands had it in 0.1.0.
OUTPUT = ("--output", "-o", "--out")
_SHOWN_CHARS = 40  # of a number that is refused


class Address(click.ParamType[tuple[str, int]]):
    """HOST:PORT; a bracketed host for IPv6. Converts to (host, port)."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Split and check one address."""
        if isinstance(value, tuple):
            return value
        host, colon, port = str(value).rpartition(":")
        number = whole_number(port, 5)
        if not colon or not host or number is None or number > 65_535:
            self.fail(f"{value!r} is not HOST:PORT, such as 127.0.0.1:8080", param, ctx)
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host and not host.startswith(("unix:", "unix-abstract:")):
            self.fail(f"{value!r} is not HOST:PORT; write an IPv6 host in brackets, as in [::1]:8080", param, ctx)
        return host, number


class Line(click.ParamType[str]):
    """One line of text that can be printed, and sent to other processes; also none. `kind`: its word in the help."""

    def __init__(self, kind: str = "text") -> None:
        self.name = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check one text."""
        if not str(value).isprintable():
            self.fail("it has characters that cannot be printed", param, ctx)  # it may be a secret
        return str(value)


class Name(Line):
    """A text that is not empty: most often that is a variable of a shell that is not set."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check one text."""
        if not str(value).strip():
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


class _Bounded:
    """Has a number of click's show its bounds as settings do: in the help once, and in the line that refuses one."""

    min: Any
    max: Any
    min_open: bool

    @property
    def _bounds(self) -> str:
        return "..".join("" if bound is None else f"{bound:.10g}" for bound in (self.min, self.max))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the bounds, such as 1..64, or N where there are none."""
        return "N" if self.min is None and self.max is None else self._bounds

    def _describe_range(self) -> str:
        return ""  # which click would show behind the help's text again

    def check(self, number: float, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> None:
        """Raise click's error for a number out of bounds. `value`: as it was given, perhaps with many digits."""
        given = printable(str(value), _SHOWN_CHARS)
        if self.min_open and number == self.min:
            raise click.BadParameter(f"{given} is not above {self.min:.10g}", ctx, param)
        if (self.min is not None and number < self.min) or (self.max is not None and number > self.max):
            raise click.BadParameter(f"{given} is outside {self._bounds}", ctx, param)


class FloatRange(_Bounded, click.FloatRange):
    """A number with bounds. Takes no "nan", which no comparison finds out of range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read and check one number."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        self.check(number, value, param, ctx)
        return number


class IntRange(_Bounded, click.IntRange):
    """A whole number with bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read and check one number."""
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        self.check(number, value, param, ctx)
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

threads_option = setting_options(EngineSettings, only=("n_threads",))
# What `calibrate` measures: the shape of the steps, not how they are chosen.
SLICE = ("ctx_tokens", "n_lanes", "gpu_layers", *DEVICE_SETTINGS, "max_rows", "kv_type", "kv_layout", "window_cells")
slice_options = setting_options(EngineSettings, only=SLICE)
engine_options = setting_options(EngineSettings, but=("n_threads",))
# `up` chooses these by the model and the machines; the table has what a stage takes that is started by hand.
CHOSEN = {"ctx_tokens": "by memory", "n_lanes": "by memory", "gpu_layers": "as many as fit, where there is a GPU"}
engine_options_of_up = setting_options(EngineSettings, but=("n_threads",), shown=CHOSEN)

security_options = _apply(
    click.option("--tls", "tls_dir", type=DirectoryToRead(), default=None,
                 help="This process's directory from `relayline certs issue`. Makes links mutual TLS."),
    click.option("--insecure", is_flag=True, help="Allow plaintext links beyond this machine; anyone can read them."),
    click.option("--token-file", type=FileToRead(may_be_pipe=True), default=None,
                 help="File with the join token [default: RELAYLINE_TOKEN, or `token` in the --tls directory]."),
)  # fmt: skip

http_security_options = _apply(
    click.option("--http-cert", type=FileToRead(), default=None,
                 help="Certificate (PEM); makes the HTTP API HTTPS. A renewed file is read without a restart."),
    click.option("--http-key", type=FileToRead(), default=None, help="Private key of --http-cert (PEM)."),
    click.option("--api-keys", type=FileToRead(), default=None,
                 help="File with one API key per line, or NAME: KEY OPTIONS, as in share=2; read again on SIGHUP "
                 "[default: no keys]."),
    click.option("--allow-host", "allow_hosts", type=Line("name"), multiple=True,
                 help="Also answer web pages of this host, and requests to the server under this name; may be repeated "
                 "[default without --api-keys: no pages of other hosts, and on loopback only loopback names]."),
    setting_options(ServingSettings, only=OF_CLIENTS),
)  # fmt: skip

chat_template_option = click.option(
    "--chat-template", type=FileToRead(), default=None,
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


def with_http_flags(listener: HttpListener, given: dict[str, Any], *, has_address: bool) -> HttpListener:
    """Return where clients connect, with what the flags of `http_security_options` change of it.

    `has_address`: --http counts too. Raises UsageError.
    """
    serving = from_parameters(ServingSettings, given)
    from relayline.coordinator.http.edge.cors import read_origins

    changes: dict[str, Any] = {}
    if has_address:
        changes["host"], changes["port"] = given["http"]
    if (tls := http_tls_from(given)) is not None:
        changes["tls"] = tls
    if given["api_keys"] is not None:
        changes["api_keys_file"] = given["api_keys"]
    if given["allow_hosts"]:
        changes["allow_hosts"] = tuple(given["allow_hosts"])
    cors = read_origins(serving.cors)
    return dataclasses.replace(listener, protect_metrics=serving.protect_metrics, cors=cors, **changes)


telemetry_options = setting_options(TelemetrySettings, but=("content",))
content_option = setting_options(TelemetrySettings, only=("content",))
pipeline_options = setting_options(ServingSettings, but=OF_CLIENTS)


def check_draft(serving: ServingSettings, policy: str) -> None:
    """Raise UsageError where drafts are asked for by number and none would be made, or no grants because of them."""
    grants = entry_of(ServingSettings, "grant_steps").flag
    if serving.draft > 0 and serving.grant_steps:
        flag = entry_of(ServingSettings, "draft").flag
        both = f"{flag} {serving.draft} and {grants} {serving.grant_steps}"
        raise UsageError(f"{both} exclude each other: streams with drafts get no grants; turn one of them off")
    if serving.draft_model and (serving.draft_tokens == 0 or policy == "drain"):
        flags = [
            entry_of(ServingSettings, "draft").flag + " off",
            grants,
            entry_of(EngineSettings, "policy").flag + " drain",
        ]
        flag = entry_of(ServingSettings, "draft_model").flag
        raise UsageError(f"{flag} needs drafts: {', '.join(flags[:2])} and {flags[2]} turn them off")
    by_hand = serving.groups or serving.group_rows
    if serving.draft > 0 and policy != "auto" and not by_hand:
        flag = entry_of(ServingSettings, "draft").flag
        needed = entry_of(EngineSettings, "policy").flag
        raise UsageError(f"{flag} {serving.draft} needs {needed} auto: with {policy} there are no drafts")


def parse_cuts(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Turn 8,16 into layer numbers."""
    if text is None:
        return None
    parts = text.split(",")
    found = tuple(each for part in parts if (each := whole_number(part.strip(), 9)) is not None)
    if len(found) < len(parts):
        raise click.BadParameter(f"{text!r} is not a list of layer numbers such as 8,16")
    return found


def is_given(name: str) -> bool:
    """Return whether the running command's parameter has a value from the command line or the environment."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)


def given_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the stage settings that come from the command line or the environment, by name."""
    every = (entry for table in (EngineSettings, TelemetrySettings) for entry in entries(table))
    named = (entry for entry in every if entry.parameter in given and is_given(entry.parameter))
    return {entry.name: entry.of_parameter(given[entry.parameter]) for entry in named}


def telemetry_config(given: dict[str, Any]) -> TelemetryConfig:
    """Turn the flags of `telemetry_options` into configuration. Raises UsageError."""
    settings = from_parameters(TelemetrySettings, given)
    return TelemetryConfig(
        level=Level.named(settings.level),
        otlp_endpoint=settings.otlp_endpoint,
        sampler_ratio=settings.sampler_ratio,
        content=settings.content,
    )


# Hidden: a supervisor holds the other end of this process's stdin, so that no child outlives it however it ends.
supervised_option = click.option(SUPERVISED, is_flag=True, hidden=True)
