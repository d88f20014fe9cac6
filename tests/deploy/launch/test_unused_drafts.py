"""Settings for drafts that do nothing with a model are said at the start: else somebody waits for a speed-up."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from relayline.deploy.launch.checks import warn_of_unused_drafts
from relayline.wire.settings.table import EngineSettings
from tests.support.tiny_models import make_tiny


@pytest.mark.parametrize(
    ("family", "rewind_rows", "mtp_drafts", "says"),
    [
        ("llama", 3, 0, ["--rewind-rows 3 does nothing: tiny llama has no recurrent states"]),
        ("llama", 0, 2, ["--mtp-drafts 2 does nothing: tiny llama has no prediction layers that can draft"]),
        ("mamba", 3, 0, ["--rewind-rows 3 does nothing: llama.cpp cannot take back the recurrent states of tiny"]),
        ("qwen35", 3, 0, []),
        ("qwen35:mtp", 0, 2, ["--mtp-drafts 2 does nothing without --rewind-rows N: tiny qwen35:mtp has"]),
        ("qwen35:mtp", 2, 2, []),
    ],
)
def test_what_does_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, rewind_rows: int, mtp_drafts: int, says: list[str]
) -> None:
    model = make_tiny(family, tmp_path / "model.gguf")
    with caplog.at_level(logging.WARNING, logger="relayline.up"):
        warn_of_unused_drafts(EngineSettings(rewind_rows=rewind_rows, mtp_drafts=mtp_drafts), model)
    messages = [record.getMessage() for record in caplog.records if record.name == "relayline.up"]
    assert len(messages) == len(says)
    for message, text in zip(messages, says, strict=True):
        assert text in message
