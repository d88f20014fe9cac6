"""The default port of a stage."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.joining.config import engine_message
from relayline.stage.joining import config
from relayline.stage.joining import usual_port as module
from relayline.stage.joining.config import JoinConfig
from relayline.stage.joining.usual_port import usual_port
from relayline.wire.links.security import LinkSecurity
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.settings.table import EngineSettings


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


@pytest.mark.parametrize(
    ("own", "ordered", "expected"),
    [
        ({}, 0, 50_123),
        ({}, 7_000, 7_000),
        ({"port": 6_000}, 7_000, 6_000),
        ({"host": "192.0.2.7"}, 7_000, 0),  # the order's port is of the address that the manifest names
    ],
    ids=["usual", "ordered", "own", "own host"],
)
def test_a_joined_stage_takes_the_port_that_was_named_or_the_usual_one(
    own: dict[str, Any], ordered: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "usual_port", lambda host: {"192.0.2.1": 50_123}[host])
    joining = JoinConfig("192.0.2.9:1", "box1", Path(), security=LinkSecurity(insecure=True), **own)
    order = pb.JoinResponse(listen_port=ordered, engine=engine_message(EngineSettings()))
    assert joining.ordered(order, Path("a.gguf"), (), "192.0.2.1").port == expected
