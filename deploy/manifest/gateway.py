"""The manifest of a gateway: several pipelines, and replicas of them, behind one address.

`gateway.schema.json` in this folder is its published JSON Schema.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from relayline.deploy.manifest.load import manifest_bytes, parse_kind
from relayline.deploy.manifest.model import STAGES_MAX, HttpTls, Manifest, ManifestFile, Metadata
from relayline.deploy.manifest.scalars import DnsLabel, FilePath, Host, Part, Port
from relayline.deploy.manifest.stage import Stage
from relayline.wire.common.errors import UsageError
from relayline.wire.common.files import write_again

KIND = "Gateway"
PIPELINES_MAX = 64
NAME_CHARS_MAX = 30  # of a pipeline: behind the gateway's own it names what `up` starts
_PATHS = frozenset({"manifest", "keyFile", "caFile", "certFile", "apiKeysFile"})
Url = Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$", max_length=1_000)]


class Place(Part):
    """The address of a pipeline that runs elsewhere, and its credentials."""

    url: Url | None = None
    """Address of a pipeline that runs elsewhere, as http://10.0.0.7:8080."""
    key_file: FilePath | None = None
    """File with an API key of it, where it demands one."""
    ca_file: FilePath | None = None
    """Certificates (PEM) by which its https is checked, besides the system's."""

    def _check_url(self, *, needed: bool, without: str) -> None:
        if needed and self.url is None:
            raise ValueError(f"give either {without} or `url` (of a pipeline that runs elsewhere)")
        if self.url is None and (self.key_file or self.ca_file):
            raise ValueError("keyFile and caFile go with `url`; what `up` starts needs none")


class Replica(Place):
    """The same model again: on other stages, or running elsewhere."""

    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=STAGES_MAX)] | None = None
    """Its stages, in place of those of the manifest."""

    @model_validator(mode="after")
    def _one_source(self) -> Replica:
        if self.stages is not None and self.url is not None:
            raise ValueError("give either `stages` or `url`, not both")
        self._check_url(needed=self.stages is None, without="`stages`")
        return self


class PipelineEntry(Place):
    """One pipeline: a manifest that `up` starts, or one that runs elsewhere."""

    name: Annotated[DnsLabel, Field(max_length=NAME_CHARS_MAX)]
    """By which routes, logs and metrics call it."""
    manifest: FilePath | None = None
    """A manifest of kind Pipeline. `up` starts it for the gateway alone, at its own port on loopback."""
    replicas: Annotated[tuple[Replica, ...], Field(max_length=PIPELINES_MAX)] = ()
    """More of the same, called NAME-2, NAME-3 and so on."""

    @model_validator(mode="after")
    def _one_source(self) -> PipelineEntry:
        if self.manifest is not None and self.url is not None:
            raise ValueError("give either `manifest` or `url`, not both")
        self._check_url(needed=self.manifest is None, without="`manifest`")
        if self.manifest is None and any(replica.stages for replica in self.replicas):
            raise ValueError("replicas with `stages` need `manifest`, which says what runs on them")
        return self


class GatewayHttp(Part):
    """Where clients connect."""

    host: Host = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: Port = 8_080
    """Port to listen on; 0 lets the system choose."""
    tls: HttpTls | None = None
    """Makes the API HTTPS."""


class GatewaySpec(Part):
    """The pipelines behind the address."""

    pipelines: Annotated[tuple[PipelineEntry, ...], Field(min_length=1, max_length=PIPELINES_MAX)]
    """The pipelines. Those that serve the same model share its requests; the first one's is used without `model`."""
    http: GatewayHttp = GatewayHttp()
    """The API's address."""
    awake_max: Annotated[int, Field(ge=0, le=PIPELINES_MAX)] = 0
    """How many pipelines may be awake at once, replicas included; others are put to sleep. 0: all."""
    api_keys_file: FilePath | None = None
    """File with one API key per line; with it, requests need `Authorization: Bearer KEY`."""
    allow_hosts: Annotated[tuple[Host, ...], Field(max_length=64)] = ()
    """Hosts whose web pages may use the API, and names under which it may be called."""

    @model_validator(mode="after")
    def _names_differ(self) -> GatewaySpec:
        names = [name for entry in self.pipelines for name, _ in _places(entry)]
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise ValueError(f"two pipelines are named {twice!r}; replicas of NAME are NAME-2, NAME-3 and so on")
        if len(names) > PIPELINES_MAX:
            raise ValueError(f"{len(names)} pipelines with their replicas; a gateway has {PIPELINES_MAX} at most")
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One pipeline behind a gateway, replicas resolved."""

    name: str
    place: Place
    manifest: Path | None
    """For pipelines that `up` starts; None for others."""
    stages: tuple[Stage, ...] | None = None
    """In place of the manifest's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Behind:
    """One pipeline behind a gateway."""

    member: Member
    manifest: Manifest | None
    """As it is started, named like its process; None for a pipeline that runs elsewhere."""

    @property
    def name(self) -> str:
        """Its name behind the gateway."""
        return self.member.name

    def prepared(self, change: Callable[[Manifest], Manifest]) -> Behind:
        """Return the same with its manifest changed, if it has one."""
        return self if self.manifest is None else dataclasses.replace(self, manifest=change(self.manifest))


class GatewayManifest(ManifestFile):
    """Several pipelines behind one address."""

    model_config = ConfigDict(title="relayline gateway manifest")

    api_version: Literal["relayline.dev/v1alpha1"]
    """Version of this format."""
    kind: Literal["Gateway"]
    """Always Gateway."""
    metadata: Metadata
    """Name and labels."""
    spec: GatewaySpec
    """The gateway itself."""

    @property
    def name(self) -> str:
        """The gateway's name."""
        return self.metadata.name

    @property
    def n_awake_beside(self) -> int | None:
        """How many others are awake at once beside a pipeline, at most; None: all."""
        return self.spec.awake_max - 1 if self.spec.awake_max else None

    def members(self) -> tuple[Member, ...]:
        """Return every pipeline, replicas after their originals."""
        return tuple(
            Member(
                name,
                place,
                self.resolve(entry.manifest) if entry.manifest is not None and place.url is None else None,
                place.stages if isinstance(place, Replica) else None,
            )
            for entry in self.spec.pipelines
            for name, place in _places(entry)
        )


def _places(entry: PipelineEntry) -> Iterator[tuple[str, Place]]:
    yield entry.name, entry
    for number, replica in enumerate(entry.replicas, 2):
        yield f"{entry.name}-{number}", replica


def load_gateway(path: Path) -> GatewayManifest:
    """Read a gateway's manifest. Raises UsageError, OSError if it cannot be read."""
    return parse_kind(manifest_bytes(path), str(path), GatewayManifest, KIND).with_directory(path.absolute().parent)


def write_gateway(manifest: GatewayManifest, path: Path) -> None:
    """Write a gateway's manifest with every path in full, so that it can be read from there. Raises OSError."""
    data = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = data["spec"]
    parts = [spec, spec.get("http", {}).get("tls", {}), *spec["pipelines"]]
    parts += [replica for entry in spec["pipelines"] for replica in entry.get("replicas", ())]
    for part in parts:
        for key in _PATHS & part.keys():
            part[key] = str(manifest.resolve(part[key]))
    write_again(path, json.dumps(data, indent=2).encode() + b"\n")


def is_gateway(path: Path) -> bool:
    """Return whether a file is a gateway's manifest, as far as it can be read."""
    from relayline.deploy.manifest.text import TextError, read_document

    try:
        value: Any = read_document(manifest_bytes(path)).value
    except (OSError, TextError, UsageError):
        return False  # reading it as a pipeline's manifest reports the mistake
    return isinstance(value, dict) and value.get("kind") == KIND
