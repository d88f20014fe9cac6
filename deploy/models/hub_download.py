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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from relayline.wire.common.errors import ModelFileError

EXPIRED = (400, 401, 403, 410)  # statuses of a signed address that was good, from the several kinds of stores
FRUITLESS_MAX = 2  # addresses in a row that bring no byte
_SHA256 = re.compile(r"[0-9a-f]{64}")  # the hub's ETag of a large file


def load_blob(repo: str, file: str, revision: str) -> None:
    """Load a file of a repository unless it is in the cache.

    An address may expire before all is here. Then the hub is asked for another one. Shows a bar on stderr.

    Does nothing if the hub cannot be asked for the file, or refuses it: the next caller gets the reason. Raises
    ModelFileError for other content than the hub promised, and huggingface_hub's errors.
    """
    from huggingface_hub import constants, file_download
    from huggingface_hub.errors import HfHubHTTPError
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
    blobs.mkdir(parents=True, exist_ok=True)
    with _partial(blobs / f"{facts.etag}.relayline") as partial:
        n_fruitless = 0
        while not (blobs / facts.etag).exists():  # another process may have downloaded it in the meantime
            n_before = _size_bytes(partial)
            try:
                _fill(partial, facts, headers_at(facts.location, url, headers), file)
                os.replace(partial.name, blobs / facts.etag)
            except HfHubHTTPError as error:
                n_fruitless = 0 if _size_bytes(partial) > n_before else n_fruitless + 1
                if error.response.status_code not in EXPIRED or n_fruitless == FRUITLESS_MAX:
                    raise
                again = file_download.get_hf_file_metadata(url, headers=headers)
                if (again.etag, again.size) != (facts.etag, facts.size):
                    raise
                facts = again


def headers_at(location: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Return a request's headers for the address at which the hub says that a file is.

    The token is for the hub, not for those who store its files. `url`: where the hub was asked.
    """
    from huggingface_hub import constants

    known = {_origin(each) for each in (url, constants.ENDPOINT, constants.HUGGINGFACE_CO_URL_HOME)}
    is_hub = _origin(location) in known
    return {name: value for name, value in headers.items() if is_hub or name.lower() != "authorization"}


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or {"http": 80, "https": 443}.get(parts.scheme)


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[BinaryIO]:
    """Open an earlier attempt's file, at its end; waits for another process that downloads the same."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _fill(partial: BinaryIO, facts: Any, headers: dict[str, str], name: str) -> None:
    from huggingface_hub import file_download

    n_bytes = _size_bytes(partial)
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


def _size_bytes(file: BinaryIO) -> int:
    file.flush()
    return os.fstat(file.fileno()).st_size


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
