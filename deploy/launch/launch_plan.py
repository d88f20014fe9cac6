"""The processes that one `relayline up` starts here, and the commands that it asks for elsewhere. Plain data, no
decisions.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class LocalStage:
    """A stage that this supervisor starts."""

    name: str
    arguments: tuple[str, ...]
    """Arguments of `relayline stage`, without --join, which is known only once the coordinator listens."""


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteStage:
    """A stage that is started by hand on another host."""

    name: str
    host: str
    arguments: tuple[str, ...]
    """Arguments of `relayline stage` there, without --join."""
    bring: tuple[Path, ...] = ()
    """The files of this machine to copy there first: its TLS material, the token file."""
    is_relayed: bool = False
    """Whether nobody can connect to it."""


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything a supervisor needs to know."""

    name: str
    manifest: Path
    """The manifest as the user named it, absolute."""
    serve_arguments: tuple[str, ...]
    """Arguments of `relayline serve`, without --http and --join-listen."""
    http: tuple[str, int]
    """Host and port of the API; port 0 lets the system choose."""
    join: tuple[str, int]
    """Host and port where stages join; port 0 lets the system choose."""
    advertised_host: str
    """Name under which other hosts reach the coordinator."""
    stages: tuple[LocalStage | RemoteStage, ...]
    """In layer order."""
    authority: Path | None = None
    """Directory of the CA that signs for hosts that join; None where they are given their credentials by hand."""
    enrol: tuple[str, int] = ("", 0)
    """Host and port where hosts get their certificates, with an authority."""
    is_announced: bool = False
    """Whether the local network is told of the pipeline."""
    needs_key: bool = False
    """Whether clients have to show an API key."""
    certificate: Path | None = None
    """The file of the certificate that the API shows; None: no HTTPS."""

    @property
    def local(self) -> tuple[LocalStage, ...]:
        """The stages that are started here, in layer order."""
        return tuple(stage for stage in self.stages if isinstance(stage, LocalStage))

    @property
    def remote(self) -> tuple[RemoteStage, ...]:
        """The stages of other hosts, in layer order."""
        return tuple(stage for stage in self.stages if isinstance(stage, RemoteStage))
