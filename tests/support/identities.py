"""Certificates for tests: two CAs that do not know each other, hosts of theirs, one of them expired."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

from relayline.deploy.launch.certificates import init_authority, issue
from relayline.wire.links.security import LinkSecurity, read_token

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@dataclasses.dataclass(frozen=True)
class Identities:
    """Directories as `relayline certs issue` makes them."""

    ca: Path
    box1: Path  # 127.0.0.1, 127.0.0.2, ::1, localhost
    box2: Path  # the same and 127.0.0.3
    expired: Path  # 127.0.0.2, over since yesterday
    early: Path  # valid from tomorrow on
    stranger: Path  # box1 of another CA


def make_identities(directory: Path) -> Identities:
    """Write everything below `directory`."""
    ca, other = directory / "ca", directory / "other"
    init_authority(ca, "ours", NOW - 30 * DAY)
    init_authority(other, "theirs", NOW)
    made = Identities(ca, ca / "box1", ca / "box2", ca / "expired", ca / "early", other / "box1")
    issue(ca, "box1", ["127.0.0.2"], 90, made.box1, NOW)
    issue(ca, "box2", ["127.0.0.3"], 90, made.box2, NOW)
    issue(ca, "box3", ["127.0.0.2"], 19, made.expired, NOW - 20 * DAY)
    issue(ca, "box4", ["127.0.0.2"], 90, made.early, NOW + DAY)
    issue(other, "box1", ["127.0.0.2"], 90, made.stranger, NOW)
    return made


def security_of(directory: Path, token: str | None = None) -> LinkSecurity:
    """The security of a directory, unchecked; `token` replaces the one in it."""
    files = (directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    return LinkSecurity(*files, read_token(directory / "token") if token is None else token)
