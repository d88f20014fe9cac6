"""Fixtures of every gateway test: a tokenizer, frequent health checks of the pipelines, and patience."""

from __future__ import annotations

import pytest

from relayline.coordinator.gateway import links
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from tests.support.http_support import WAIT_S


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at pipelines often, and waits for what they say as long as it takes."""
    monkeypatch.setattr(links, "POLL_S", 0.02)
    monkeypatch.setattr(links, "POLL_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(links, "CONNECT_TIMEOUT_S", WAIT_S)
