"""What clients send to /v1/files, /v1/batches and /v1/messages/batches."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from relayline.coordinator.batches.lines import ID_CHARS_MAX

Text = Annotated[str, Meta(max_length=512)]


class BatchBody(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Text
    endpoint: Text
    completion_window: Text
    metadata: Annotated[dict[Annotated[str, Meta(max_length=64)], Text], Meta(max_length=16)] | None = None


class MessageRequest(msgspec.Struct):
    """One request of a message batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=ID_CHARS_MAX)]
    params: msgspec.Raw


class MessageBatchBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/batches. None means absent."""

    requests: list[MessageRequest]
    completion_window: Text | None = None  # as /v1/batches has it; Anthropic's is always 24h


class FileForm(msgspec.Struct, kw_only=True):
    """POST /v1/files, as a form; its file is not read here."""

    file: bytes
    purpose: Literal["batch"]
