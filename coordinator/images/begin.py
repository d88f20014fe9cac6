"""Starting the encoder of a pipeline that takes images."""

from __future__ import annotations

import asyncio
from pathlib import Path

from relayline.coordinator.images.encoder import Encoder
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.projectors import PROJECTORS, check_projector
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import UsageError
from relayline.wire.settings.table import ServingSettings


async def encoder_of(serving: ServingSettings, file: PipelineFile, tokenizer: Tokenizer) -> Encoder | None:
    """Return the started encoder for the projector that the settings name; None where they name none.

    Raises UsageError for a projector that cannot be used.
    """
    if not serving.mmproj:
        return None
    path = Path(serving.mmproj)
    max_tokens = serving.image_max_tokens or PROJECTORS[check_projector(path, file)].max_tokens
    if not tokenizer.has_text:
        raise UsageError("--mmproj: images are parts of chats, and this model has no tokenizer")
    encoder = Encoder(path, tokenizer.path, file.n_embd, max_tokens)
    try:
        await asyncio.to_thread(encoder.start)
    except BaseException:
        encoder.close()
        raise
    return encoder
