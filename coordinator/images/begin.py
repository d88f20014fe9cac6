"""Starting the encoder of a pipeline that takes images."""

from __future__ import annotations

import asyncio
from pathlib import Path

from relayline.coordinator.images.encoder import Encoder
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.projectors import check_projector
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import UsageError


async def encoder_of(mmproj: str, file: PipelineFile, tokenizer: Tokenizer) -> Encoder | None:
    """Return the started encoder for the projector in file `mmproj`; None where that is empty.

    Raises UsageError for a projector that cannot be used.
    """
    if not mmproj:
        return None
    path = Path(mmproj)
    check_projector(path, file)
    if not tokenizer.has_text:
        raise UsageError("--mmproj: images are parts of chats, and this model has no tokenizer")
    encoder = Encoder(path, tokenizer.path, file.n_embd)
    try:
        await asyncio.to_thread(encoder.start)
    except BaseException:
        encoder.close()
        raise
    return encoder
