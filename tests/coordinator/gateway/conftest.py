"""Fixtures of every gateway test: a tokenizer, frequent health checks of the pipelines, and a bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from relayline.coordinator.gateway import links
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from tests.support.http_support import WAIT_S


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))


@pytest.fixture
async def quick(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Looks at pipelines often, and bounds the test."""
    monkeypatch.setattr(links, "POLL_S", 0.02)
    async with asyncio.timeout(WAIT_S):
        yield
