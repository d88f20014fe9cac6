"""Loads a file of the hub into its cache so that an interrupted download can be resumed. huggingface_hub itself starts
again each time. Here the bytes are in `blobs/ETAG.relayline` until the file is complete. It then gets the name that
huggingface_hub looks for, and the library does the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from relayline.wire.common.errors import ModelFileError

_SHA256 = re.compile(r"[0-9a-f]{64}")  # the hub's ETag of a large file


def load_blob(repo: str, file: str, revision: str) -> None:
    """Load a file of a repository unless it is in the cache.

    Shows a bar on stderr. Does nothing if the hub cannot be asked for the file, or refuses it: the next caller gets the
    reason. Raises ModelFileError for other content than the hub promised, and huggingface_hub's errors.
    """
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import build_hf_headers

    url, headers = file_download.hf_hub_url(repo, file, revision=revision or None), build_hf_headers()
    if constants.HF_HUB_OFFLINE:
        return
    try:
        facts = file_download.get_hf_file_metadata(url, headers=headers)
    except Exception:  # of the hub's client, of HTTP, of the system: hf_hub_download meets it too, and is explained
        return
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
    if not facts.etag or facts.size is None or (blobs / facts.etag).exists():
        return
    if facts.size > constants.MAX_HTTP_DOWNLOAD_SIZE:  # by the hub's Xet protocol alone, which huggingface_hub speaks
        return
    if urlsplit(facts.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub, not for those who store its files
    blobs.mkdir(parents=True, exist_ok=True)
    with _partial(blobs / f"{facts.etag}.relayline") as partial:
        if not (blobs / facts.etag).exists():  # another process may have downloaded it in the meantime
            _fill(partial, facts, headers, file)
            os.replace(partial.name, blobs / facts.etag)


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[BinaryIO]:
    """Open an earlier attempt's file, at its end; waits for another process that downloads the same."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _fill(partial: BinaryIO, facts: Any, headers: dict[str, str], name: str) -> None:
    from huggingface_hub import file_download

    n_bytes = os.fstat(partial.fileno()).st_size
    if n_bytes > facts.size:
        partial.truncate(n_bytes := 0)
    if n_bytes < facts.size:
        file_download.http_get(
            facts.location,
            partial,
            resume_size=n_bytes,
            headers=headers,
            expected_size=facts.size,
            displayed_filename=name,
        )
    partial.flush()
    os.fsync(partial.fileno())
    if _SHA256.fullmatch(facts.etag) and _sha256_of(Path(partial.name)) != facts.etag:
        os.unlink(partial.name)
        raise ModelFileError(f"{name}: damaged on the way: its sha256 is not the hub's; download it again")


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
