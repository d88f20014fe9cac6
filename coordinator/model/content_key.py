"""What identifies a model's content: a hash that is known after reading a few KiB of each tensor."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path

from relayline.coordinator.model.gguf_file import GgufModel, open_model
from relayline.coordinator.model.origin import origins_of

SAMPLE_BYTES = 4_096
HASH_CHUNK_BYTES = 1 << 20  # of one entry at a time: a vocabulary has tens of MiB


def content_key(path: Path) -> str:
    """Return the sha256 that identifies a model's content, in hex, after reading a few KiB per tensor.

    It covers all metadata, and every tensor's name, shape, type and first 4 KiB. So it is the same however the model is
    sharded, and differs between two fine-tunes of one base. Of a hollow model, whose tensors are on the hub, it covers
    the content that the hub promises instead. Raises ModelFileError.
    """
    return model_key(open_model(path))


def model_key(model: GgufModel) -> str:
    """Return the content key of an opened model."""
    digest = hashlib.sha256()
    for origin in origins_of(model):
        digest.update(f"origin {origin.etag} {origin.size_bytes}\n".encode())
    with ExitStack() as stack:
        files = [stack.enter_context(file.path.open("rb")) for file in model.files]
        for key, entry in model.entries.items():
            if not key.startswith("split."):
                digest.update((entry.end - entry.start).to_bytes(8, "little"))
                for start in range(entry.start, entry.end, HASH_CHUNK_BYTES):
                    size_bytes = min(HASH_CHUNK_BYTES, entry.end - start)
                    digest.update(os.pread(files[0].fileno(), size_bytes, start))
        for tensor in model.tensors.values():
            digest.update(f"{tensor.name} {tensor.dims} {tensor.type_id} {tensor.size_bytes}\n".encode())
            size_bytes = min(SAMPLE_BYTES, tensor.size_bytes)
            digest.update(os.pread(files[tensor.file_index].fileno(), size_bytes, tensor.offset))
    return digest.hexdigest()
