"""Loads a file of the hub into its cache so that an interrupted download can be resumed. huggingface_hub itself starts
again each time. Here the bytes are in `blobs/ETAG.relayline` until the file is complete. It then gets the name that
huggingface_hub looks for, and the library does the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from relayline.deploy.manifest.model import HUB_SCHEME
from relayline.deploy.models.hub_patience import Patience, is_away
from relayline.deploy.models.hub_ranges import Located, bytes_between, locate
from relayline.deploy.models.progress import progress_bar
from relayline.wire.common.errors import ModelFileError
from relayline.wire.common.units import bytes_text

EXPIRED = (400, 401, 403, 410)  # statuses of a signed address that was good, from the several kinds of stores
RESERVE_BYTES = 64 << 20  # left free besides the file, for the disk's other uses
FRUITLESS_MAX = 2  # addresses in a row that bring no byte
_SHA256 = re.compile(r"[0-9a-f]{64}")  # the hub's ETag of a large file


def load_blob(repo: str, file: str, revision: str) -> None:
    """Load a file of a repository unless it is in the cache.

    An address may expire before all is here. Then the hub is asked for another one. Shows a bar on a terminal.

    Does nothing if the hub cannot be asked for the file, or refuses it: the next caller gets the reason. Raises
    ModelFileError for other content than the hub promised and for a disk without room, and huggingface_hub's errors.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        located = locate(repo, file, revision)
    except ModelFileError:
        raise
    except Exception:  # of the hub's client, of HTTP, of the system: hf_hub_download meets it too, and is explained
        return
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
    if not located.etag or located.size_bytes is None or (blobs / located.etag).exists():
        return
    if located.size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:  # huggingface_hub does, by the hub's Xet protocol
        return
    blobs.mkdir(parents=True, exist_ok=True)
    with _partial(blobs / f"{located.etag}.relayline") as partial:
        if not (blobs / located.etag).exists():
            _check_room(blobs, located.size_bytes - _size_bytes(partial), f"{HUB_SCHEME}{repo}/{file}")
        n_fruitless = 0
        while not (blobs / located.etag).exists():  # another process may have downloaded it in the meantime
            n_before = _size_bytes(partial)
            try:
                _fill(partial, located, located.size_bytes, file)
                os.replace(partial.name, blobs / located.etag)
            except HfHubHTTPError as error:
                n_fruitless = 0 if _size_bytes(partial) > n_before else n_fruitless + 1
                if error.response.status_code not in EXPIRED or n_fruitless == FRUITLESS_MAX:
                    raise
                again = locate(repo, file, revision)
                if (again.etag, again.size_bytes) != (located.etag, located.size_bytes):
                    raise
                located = again


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[BinaryIO]:
    """Open an earlier attempt's file, at its end; waits for another process that downloads the same."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _check_room(directory: Path, missing_bytes: int, where: str) -> None:
    """Raise ModelFileError unless what is missing fits the disk: to fill it for hours would be in vain."""
    free_bytes = shutil.disk_usage(directory).free
    if missing_bytes + RESERVE_BYTES > free_bytes:
        raise ModelFileError(
            f"{where}: needs {bytes_text(missing_bytes)} more and {bytes_text(RESERVE_BYTES)} to spare, but only "
            f"{bytes_text(free_bytes)} are free in {directory}; free some there, or HF_HOME=DIRECTORY keeps downloads "
            "elsewhere, and `up --download layers` keeps none"
        )


def _fill(partial: BinaryIO, located: Located, size_bytes: int, name: str) -> None:
    """Append what is missing. Only what is a part of this file is written: a hotel's page would cost all that is here.

    Goes on after every break of the network that comes after some bytes.
    """
    from huggingface_hub.errors import HfHubHTTPError

    patience, stopped = Patience(), threading.Event()
    if _size_bytes(partial) > size_bytes:
        partial.truncate(0)
    with progress_bar(f"loading {name}") as (update, _):
        append = functools.partial(_append, partial, located, size_bytes, update)
        while (n_before := _size_bytes(partial)) < size_bytes:
            try:
                patience.ask(append, stopped, is_away)
            except HfHubHTTPError:
                raise
            except ModelFileError:  # of a store that sends whole files alone
                partial.truncate(0)
            except Exception:  # of the network, as the hub's client has it
                if _size_bytes(partial) == n_before:
                    raise
    os.fsync(partial.fileno())
    if _SHA256.fullmatch(located.etag) and _sha256_of(Path(partial.name)) != located.etag:
        os.unlink(partial.name)
        raise ModelFileError(f"{name}: damaged on the way: its sha256 is not the hub's; download it again")


def _append(partial: BinaryIO, located: Located, size_bytes: int, update: Callable[[int, int], None]) -> None:
    at = _size_bytes(partial)
    for piece in bytes_between(located, at, size_bytes):
        partial.write(piece)
        at += len(piece)
        update(at, size_bytes)


def _size_bytes(file: BinaryIO) -> int:
    file.flush()
    return os.fstat(file.fileno()).st_size


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
