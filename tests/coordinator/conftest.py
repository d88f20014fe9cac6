"""The vocabulary of nearly all tests of a coordinator. A module that needs another one has its own fixture."""

from __future__ import annotations

import pytest

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary of bytes with a chat template (ChatML). Prompts get no begin-of-sequence token."""
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))
