"""A coordinator's API that keeps its responses in a directory, over a fake generator."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.opening import opened
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.settings.table import ServingSettings
from tests.support.http_support import CREATED, MODEL, FakeGenerator, Gate, Step, tokens

COPY_TRIES_MAX = 100


def left_by_a_kill(kept: Path, copy: Path, *left_out: str) -> None:
    """Copy a directory as a kill at this moment would leave it.

    The coordinator goes on meanwhile. A file that it renames or removes under the copy makes it begin again.
    """
    for n_tries in range(1, COPY_TRIES_MAX + 1):
        try:
            shutil.copytree(kept, copy, ignore=shutil.ignore_patterns(*left_out))
        except (shutil.Error, FileNotFoundError):
            shutil.rmtree(copy)
            if n_tries == COPY_TRIES_MAX:
                raise
        else:
            return


class Speaker(FakeGenerator):
    """Says one text, from behind what was said before, and stops at a gate after some bytes."""

    def __init__(self, text: bytes = b"hello", n_free: int | None = None) -> None:
        super().__init__(self.play)
        self.text, self.n_free, self.gate = text, n_free, Gate()

    def play(self, request: GenerationRequest) -> Iterable[Step]:
        steps = [*tokens(request, self.text)]
        for at, step in enumerate(steps):
            if at == self.n_free:
                yield self.gate
            if at >= len(request.said):
                yield step


@contextlib.asynccontextmanager
async def serving_kept(
    tokenizer: Tokenizer,
    directory: Path | str,
    generator: FakeGenerator | None = None,
    *,
    keys: Path | None = None,
    model_id: str = MODEL,
    template: str = CHATML,
) -> AsyncIterator[str]:
    """Serve on a free loopback port until the block ends, as a coordinator does that is asked to; gives its URL."""
    generator = generator or FakeGenerator()
    chat = ChatTemplate(template, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    app = make_app(generator, ServedModel(model_id, CREATED, tokenizer, chat), HttpLimits())
    stopping = asyncio.Event()
    listener, kept = HttpListener(port=0, api_keys_file=keys), ServingSettings(responses_dir=str(directory))
    async with opened(app, listener, kept, generator, stopping=stopping) as (port, _):
        yield f"http://127.0.0.1:{port}"
        stopping.set()
