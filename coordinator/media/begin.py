"""Starting the encoder of a pipeline that takes images, audio or videos."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.media.video_script import Sampling
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.projectors import check_projector, has_axes
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import UsageError
from relayline.wire.model_files.gguf_header import read_header
from relayline.wire.settings.table import ServingSettings

log = logging.getLogger("relayline.coordinator")


async def encoder_of(serving: ServingSettings, file: PipelineFile, tokenizer: Tokenizer) -> Encoder | None:
    """Return the started encoder for the projector that the settings name; None where they name none.

    Raises UsageError for a projector that cannot be used, StartError where its process does not start and may the next
    time.
    """
    if not serving.mmproj:
        return None
    path = Path(serving.mmproj)
    found = check_projector(path, file, axes=has_axes(read_header(tokenizer.path)))
    if found.left_out:
        log.warning("%s: its images are served, and its audio is not: %s", path, found.left_out)
    if not tokenizer.has_text:
        raise UsageError("--mmproj: images and audio are parts of chats, and this model has no tokenizer")
    max_tokens = serving.image_max_tokens or found.max_tokens
    sampling = Sampling(serving.video_fps, serving.video_max_frames)
    encoder = Encoder(path, tokenizer.path, file.media_width, max_tokens, sampling)
    try:
        await asyncio.to_thread(encoder.start)
    except BaseException:
        encoder.close()
        raise
    return encoder
