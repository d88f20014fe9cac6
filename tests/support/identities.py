"""Credentials for tests: two CAs that do not trust each other, their processes, and one with an expired certificate."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

from relayline.deploy.launch.certificates import init_authority, issue
from relayline.wire.links.roles import Role
from relayline.wire.links.security import LinkSecurity, read_token

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
EVERYWHERE = ["127.0.0.2", "127.0.0.3"]


@dataclasses.dataclass(frozen=True)
class Identities:
    """Directories as `relayline certs issue` makes them."""

    ca: Path
    coordinator: Path  # 127.0.0.1, ::1, localhost and EVERYWHERE
    box1: Path  # the stage of that name: 127.0.0.1, 127.0.0.2, ::1, localhost
    box2: Path  # another stage: the same and 127.0.0.3
    monitor: Path
    expired: Path  # a coordinator at 127.0.0.2, over since yesterday
    early: Path  # a coordinator, valid from tomorrow on
    stranger: Path  # a coordinator of another CA


def make_identities(directory: Path) -> Identities:
    """Write everything below `directory`."""
    ca, other = directory / "ca", directory / "other"
    init_authority(ca, "ours", NOW - 30 * DAY)
    init_authority(other, "theirs", NOW)
    made = Identities(
        ca, ca / "coordinator", ca / "box1", ca / "box2", ca / "monitor", ca / "expired", ca / "early", other / "box1"
    )
    issue(ca, "head", EVERYWHERE, 90, made.coordinator, NOW, role=Role.COORDINATOR)
    issue(ca, "box1", ["127.0.0.2"], 90, made.box1, NOW, role=Role.STAGE, stage="box1")
    issue(ca, "box2", ["127.0.0.3"], 90, made.box2, NOW, role=Role.STAGE, stage="box2")
    issue(ca, "head", [], 90, made.monitor, NOW, role=Role.MONITOR)
    issue(ca, "box3", ["127.0.0.2"], 19, made.expired, NOW - 20 * DAY, role=Role.COORDINATOR)
    issue(ca, "box4", ["127.0.0.2"], 90, made.early, NOW + DAY, role=Role.COORDINATOR)
    issue(other, "box1", ["127.0.0.2"], 90, made.stranger, NOW, role=Role.COORDINATOR)
    return made


def security_of(directory: Path, token: str | None = None) -> LinkSecurity:
    """The security of a directory, unchecked; `token` replaces its join token."""
    files = (directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    file = directory / "token"
    return LinkSecurity(*files, token if token is not None else read_token(file) if file.exists() else "")
