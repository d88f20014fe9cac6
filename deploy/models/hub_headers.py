"""Shows a model of the hub without its weights: the headers of its files, which hold its layers, sizes and vocabulary.

`relayline plan` and `relayline inspect` read nothing else. A header has some MB, a model hundreds of GB, and whether it
fits some machines is asked before it is downloaded. Here each file has its size on the hub, but after its header it is
a hole, so that every reader of headers takes it for the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from relayline.deploy.manifest.model import HUB_SCHEME
from relayline.deploy.models.model_source import (
    HubFile,
    check_sha256,
    explain_refusal,
    is_on_hub,
    parse_reference,
    resolve_model,
    set_up_hub,
    with_file,
)
from relayline.wire.common.errors import ModelFileError, RelaylineError, UsageError
from relayline.wire.common.units import bytes_text
from relayline.wire.model_files.gguf_header import HEADER_BYTES_MAX, MAGIC, GgufFile, read_header

FIRST_BYTES = 1 << 20  # of a file; doubled until its header is whole. A vocabulary takes some MB
TRIES = 5  # of one piece, where the network breaks


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """A model whose header can be read."""

    path: Path
    download_bytes: int = 0  # what `up` would download; 0: nothing, the model is here

    @property
    def note(self) -> str:
        """Return what a user has to know of it; empty for a model that is here."""
        if not self.download_bytes:
            return ""
        return f"only the header was read from the hub; `up` downloads {bytes_text(self.download_bytes)}"


@contextlib.contextmanager
def model_or_headers(reference: str, sha256: str = "") -> Iterator[Shown]:
    """Give the path of a model's only or first file: itself where it is here, else its headers, until the end of the
    with block.

    sha256: of that file, in hex, checked if given; for headers it is compared with the one that the hub promises.
    Raises as `resolve_model`.
    """
    if not is_on_hub(reference):
        yield Shown(resolve_model(reference, sha256))
        return
    check_sha256(sha256)
    model = with_file(parse_reference(reference))
    if (kept := _kept(model)) is not None:
        yield Shown(resolve_model(str(kept), sha256))
        return
    with tempfile.TemporaryDirectory(prefix="relayline-header-") as folder:
        shown = _headers(model, Path(folder), sha256.lower())
        with _named(f"{HUB_SCHEME}{model.repo}", folder):
            yield shown


@contextlib.contextmanager
def _named(repository: str, folder: str) -> Iterator[None]:
    """Have refusals of a file in a folder name the repository, where the user can find it."""
    try:
        yield
    except RelaylineError as error:
        error.message = error.message.replace(folder, repository)
        error.args = (error.message, *error.args[1:])
        raise


def _kept(model: HubFile) -> Path | None:
    """Return the first file of a model in the hub's cache; None unless all of them are there."""
    set_up_hub()
    import huggingface_hub  # here, because it is slow to import and most models are files

    try:
        found = [
            huggingface_hub.try_to_load_from_cache(model.repo, file, revision=model.revision or None)
            for file in model.shards()
        ]
    except Exception as error:  # of the hub's client, for a name that cannot be one
        explain_refusal(model, model.file, model.revision, error)
    return Path(found[0]) if all(isinstance(each, str) for each in found) else None


def _headers(model: HubFile, folder: Path, sha256: str) -> Shown:
    files = model.shards()
    if sha256 and len(files) > 1:
        raise UsageError(f"{model.file} is one of {len(files)} shards; a sha256 can be given for a single file only")
    paths, n_bytes, revision = [], 0, model.revision
    for file in files:
        path = folder / file.rpartition("/")[2]
        try:
            size_bytes, revision = _header(model, file, revision, sha256, path)
        except (ModelFileError, UsageError):
            raise
        except Exception as error:  # of the hub's client, of HTTP, of the system
            explain_refusal(model, file, revision, error)
        paths.append(path)
        n_bytes += size_bytes
    return Shown(paths[0], n_bytes)


def _header(model: HubFile, file: str, revision: str, sha256: str, path: Path) -> tuple[int, str]:
    """Write the header of one file to a path. Returns the file's size, and the commit it is of: a branch may move
    before the next shard is asked for.

    Raises ModelFileError for what is no model, or another one, and the errors of huggingface_hub.
    """
    from huggingface_hub import file_download
    from huggingface_hub.utils import build_hf_headers

    where = f"{HUB_SCHEME}{model.repo}/{file}"
    url, headers = file_download.hf_hub_url(model.repo, file, revision=revision or None), build_hf_headers()
    facts = file_download.get_hf_file_metadata(url, headers=headers, retry_on_errors=True)
    if facts.size == 0:
        raise ModelFileError(f"{where}: the file is empty")
    if facts.size is None:
        raise ModelFileError(f"{where}: the hub does not say how large it is; `relayline pull` downloads it")
    if sha256 and facts.etag != sha256:
        raise ModelFileError(f"{where}: its sha256 is {facts.etag}, not {sha256}; it is another file")
    if urlsplit(facts.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub, not for those who store its files
    with path.open("xb") as out:
        n_read = 0
        while True:
            n_wanted = min(max(2 * n_read, FIRST_BYTES), facts.size, HEADER_BYTES_MAX)
            out.seek(n_read)
            out.write(_bytes_of(facts.location, headers, n_read, n_wanted))
            out.truncate(facts.size)
            out.flush()
            n_read = n_wanted
            if _is_whole(path, n_read, facts.size, where):
                return facts.size, facts.commit_hash or revision


def _bytes_of(url: str, headers: Mapping[str, Any], start: int, end: int) -> bytes:
    """Return some bytes of a file; asks again where the network breaks. Raises as `_piece`."""
    from huggingface_hub.errors import HfHubHTTPError

    for _ in range(TRIES - 1):
        try:
            return _piece(url, headers, start, end)
        except HfHubHTTPError:
            raise
        except Exception:  # of the network, as the hub's client has it
            continue
    return _piece(url, headers, start, end)


def _piece(url: str, headers: Mapping[str, Any], start: int, end: int) -> bytes:
    """Return some bytes of a file. Raises the errors of huggingface_hub and of the network."""
    from huggingface_hub import constants
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

    asked = {**headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    # After a break inside the with block it would begin a second one, which no with block can do.
    with http_stream_backoff(
        "GET", url, headers=asked, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, retry_on_exceptions=()
    ) as response:
        hf_raise_for_status(response)
        n_before = 0 if response.status_code == 206 else start  # a server that knows no ranges sends all from the start
        found = bytearray()
        for piece in response.iter_bytes():
            found += piece
            if len(found) >= n_before + end - start:
                break
    if len(found) < n_before + end - start:
        raise ConnectionError(f"an answer ended after {len(found)} bytes")
    return bytes(found[n_before : n_before + end - start])


def _is_whole(path: Path, n_read: int, size_bytes: int, where: str) -> bool:
    """Return whether a file's first bytes have its header. Raises ModelFileError for what is none."""
    is_all = n_read >= min(size_bytes, HEADER_BYTES_MAX)
    try:
        return _end_of(read_header(path)) <= n_read or is_all
    except ModelFileError as error:  # of the hole, too
        with path.open("rb") as file:
            is_model = file.read(len(MAGIC)) == MAGIC
        if is_model and not is_all:
            return False
        raise ModelFileError(error.message.replace(str(path), where)) from None


def _end_of(header: GgufFile) -> int:
    """Return a place in the file behind its header, or at its end."""
    if header.tensors:
        return min(tensor.offset for tensor in header.tensors)
    return max((entry.end for entry in header.entries.values()), default=0)
