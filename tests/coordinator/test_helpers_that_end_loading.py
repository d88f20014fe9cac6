"""A helper process that is killed while it loads its model may load it next time; one that ends itself never will."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from relayline.coordinator.drafting import link as link_module
from relayline.coordinator.drafting.link import DraftLink
from relayline.coordinator.media import encoder as encoder_module
from relayline.coordinator.media.encoder import Encoder
from relayline.wire.common.child_command import code_command
from relayline.wire.common.errors import StartError, UsageError


async def start_encoder() -> None:
    Encoder(Path("vision.gguf"), Path("model.gguf"), 8, 16).start()


async def start_drafts() -> None:
    await DraftLink(Path("small.gguf"), Path("model.gguf"), 512, 1, 0).start()


@pytest.mark.parametrize("start", [start_drafts, start_encoder])
@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", StartError, "was killed, or took too long"),
        ("os.abort()", UsageError, "loading it ended the process"),
    ],
)
async def test_the_error_says_whether_to_try_again(
    start: Callable[[], Awaitable[None]], end: str, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (link_module, encoder_module):
        monkeypatch.setattr(module, "module_command", lambda *_: code_command(f"import os, signal; {end}"))
    with pytest.raises(kind, match=rf"^--(draft-model small|mmproj vision)\.gguf: .*{words}"):
        await start()
