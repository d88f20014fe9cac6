"""The default port of a stage."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from relayline.stage.joining import usual_port as module
from relayline.stage.joining.usual_port import usual_port


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    usual_port.cache_clear()
    yield
    usual_port.cache_clear()


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> str:
    """Loopback, as if it were the address of another host."""
    monkeypatch.setattr(module, "is_loopback", lambda _: False)
    return "127.0.0.1"


def test_it_is_the_first_free_one_where_manifests_count(away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((away, 0))
        taken.listen()
        first = taken.getsockname()[1]
        monkeypatch.setattr(module, "STAGE_PORT", first)
        monkeypatch.setattr(module, "TRIED_MAX", 1)
        assert usual_port(away) == 0, "then the system chooses"
        usual_port.cache_clear()
        monkeypatch.setattr(module, "TRIED_MAX", 64)
        found = usual_port(away)
        assert first < found < first + 64
    assert usual_port(away) == found, "its own server holds it from now on, so it is not looked for again"


def test_on_loopback_the_system_chooses() -> None:
    assert usual_port("127.0.0.1") == usual_port("localhost") == 0
