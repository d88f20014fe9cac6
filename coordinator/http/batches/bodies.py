"""What clients send to /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(max_length=512)]


class BatchBody(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Text
    endpoint: Text
    completion_window: Text
    metadata: Annotated[dict[Annotated[str, Meta(max_length=64)], Text], Meta(max_length=16)] | None = None


class FileForm(msgspec.Struct, kw_only=True):
    """POST /v1/files, as a form; its file is not read here."""

    file: bytes
    purpose: Literal["batch"]
