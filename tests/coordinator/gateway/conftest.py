"""Fixtures of every gateway test: frequent health checks of the pipelines, and patience."""

from __future__ import annotations

import pytest

from relayline.coordinator.gateway import links
from tests.support.http_support import WAIT_S


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at pipelines often, and waits for what they say as long as it takes."""
    monkeypatch.setattr(links, "POLL_S", 0.02)
    monkeypatch.setattr(links, "POLL_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(links, "CONNECT_TIMEOUT_S", WAIT_S)
