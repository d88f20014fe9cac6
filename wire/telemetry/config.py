"""The telemetry settings of a process. Does not import OpenTelemetry, so that every command may import it."""

from __future__ import annotations

import dataclasses
import enum
import urllib.parse

from relayline.wire.common.errors import UsageError
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


class Level(enum.IntEnum):
    """How much is traced; a higher level includes the lower ones."""

    OFF = 0
    SUMMARY = 1
    BATCHES = 2
    FRAMES = 3

    @classmethod
    def named(cls, name: str) -> Level:
        """Return the level of a lower-case name. Raises UsageError."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise UsageError(f"trace level {name!r} is unknown; choose one of {', '.join(LEVEL_NAMES)}") from None

    @classmethod
    def from_wire(cls, level: int) -> Level | None:
        """Return the level of a pb.TelemetryLevel; None for UNSPECIFIED and for levels of a newer peer."""
        return cls(level - 1) if 1 <= level <= len(cls) else None

    def to_wire(self) -> pb.TelemetryLevel:
        """Return this level as messages have it."""
        level: pb.TelemetryLevel = getattr(pb, f"TELEMETRY_LEVEL_{self.name}")
        return level

    def __str__(self) -> str:
        return self.name.lower()


LEVEL_NAMES = tuple(str(level) for level in Level)


@dataclasses.dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """The telemetry settings at the start of a process."""

    level: Level = Level.SUMMARY
    """How much is traced; may be changed later."""
    otlp_endpoint: str = ""
    """Collector, as http://HOST:PORT or https://HOST:PORT; empty leaves it to OTEL_EXPORTER_OTLP_(TRACES_)ENDPOINT,
    and with neither nothing is exported. Port 4318 or a path means OTLP over HTTP unless OTEL_* says otherwise."""
    sampler_ratio: float = 1.0
    """Share of requests that are traced, decided where the request enters unless its caller decided already. 1.0
    leaves it to OTEL_TRACES_SAMPLER."""
    content: bool = False
    """Also record prompts and outputs. Off: telemetry contains none of their text."""

    def __post_init__(self) -> None:
        """Raise UsageError for the first value out of range."""
        if not 0.0 <= self.sampler_ratio <= 1.0:
            raise UsageError(f"--trace-sample {self.sampler_ratio} is outside 0..1")
        if self.otlp_endpoint:
            url = urllib.parse.urlsplit(self.otlp_endpoint)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise UsageError(
                    f"--otlp-endpoint {self.otlp_endpoint!r} is not a collector's address; "
                    "give http://HOST:4317 for OTLP over gRPC or http://HOST:4318 over HTTP"
                )
