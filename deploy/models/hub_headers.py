"""Shows a model of the hub without its weights: the headers of its files, which hold its layers, sizes and vocabulary.

`relayline plan` and `relayline inspect` read nothing else. A header has some MB, a model hundreds of GB, and whether it
fits some machines is asked before it is downloaded. Here each file has its size on the hub, but after its header it is
a hole, so that every reader of headers takes it for the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from relayline.coordinator.model.origin import Origin
from relayline.deploy.manifest.model import HUB_SCHEME
from relayline.deploy.models.hub_client import explain_refusal, is_refusal, set_up_hub
from relayline.deploy.models.hub_files import with_file
from relayline.deploy.models.hub_patience import Patience, is_away, is_busy
from relayline.deploy.models.hub_ranges import TRIES, Located, bytes_between, locate
from relayline.deploy.models.hub_reference import HubFile, parse_reference
from relayline.deploy.models.model_source import check_sha256, is_on_hub, resolve_model
from relayline.wire.common.errors import ModelFileError, RelaylineError, UsageError
from relayline.wire.common.scratch import scratch_directory
from relayline.wire.common.units import bytes_text
from relayline.wire.model_files.gguf_header import HEADER_BYTES_MAX, MAGIC, GgufFile, read_header

HEADERS_AT_ONCE = 8  # of a sharded set; each takes two requests, and a set may have a hundred
FIRST_BYTES = 1 << 20  # of a file; doubled until its header is whole. A vocabulary takes some MB


Writing: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
"""Explains errors of the disk in its with block."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """A model whose header can be read."""

    path: Path
    download_bytes: int = 0  # what `up` would download; 0: nothing, the model is here
    is_by_layers: bool = False  # each stage downloads its own

    @property
    def note(self) -> str:
        """Return what a user has to know of it; empty for a model that is here."""
        if not self.download_bytes:
            return ""
        who = "all stages together download" if self.is_by_layers else "`up` downloads"
        return f"only the header was read from the hub; {who} {bytes_text(self.download_bytes)}"


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
    if (kept := kept_whole(model)) is not None:
        yield Shown(resolve_model(str(kept), sha256))
        return
    with contextlib.ExitStack() as stack:
        with _in_temporary():
            folder = stack.enter_context(scratch_directory("relayline-header-"))
        first, origins = read_headers(model, folder, sha256.lower(), _in_temporary)
        with _named(f"{HUB_SCHEME}{model.repo}", str(folder)):
            yield Shown(first, sum(origin.size_bytes for origin in origins))


@contextlib.contextmanager
def _in_temporary() -> Iterator[None]:
    """Raise ModelFileError where the temporary directory cannot be written."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        raise ModelFileError(
            f"headers of a model cannot be kept for the time of this command: {text}; "
            "TMPDIR=DIRECTORY puts them elsewhere"
        ) from error


@contextlib.contextmanager
def _named(repository: str, folder: str) -> Iterator[None]:
    """Have refusals of a file in a folder name the repository, where the user can find it."""
    try:
        yield
    except RelaylineError as error:
        error.message = error.message.replace(folder, repository)
        error.args = (error.message, *error.args[1:])
        raise


def kept_whole(model: HubFile) -> Path | None:
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


def read_headers(
    model: HubFile, folder: Path, sha256: str, writing: Writing, located: Located | None = None
) -> tuple[Path, tuple[Origin, ...]]:
    """Write the headers of a model's files into a folder; returns the first file and where the others' bytes are.

    sha256: of the only file, in hex, compared with the one that the hub promises if given. `writing`: explains errors
    of the folder's disk. `located`: where the first file is, if that is known. Raises as `resolve_model`.
    """
    files = model.shards()
    if sha256 and len(files) > 1:
        raise UsageError(f"{model.file} is one of {len(files)} shards; a sha256 can be given for a single file only")

    reader = _Reader(model, sha256, writing)

    def read(file: str, revision: str, located: Located | None = None) -> Origin:
        try:
            return reader.header(file, located or reader.locate(file, revision), _path_of(folder, file))
        except (ModelFileError, UsageError):
            raise
        except Exception as error:  # of the hub's client, of HTTP, of the system
            explain_refusal(model, file, revision, error)

    first = read(files[0], model.revision, located)
    with ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:  # of one commit, since a branch may move in the meantime
        reading = [pool.submit(read, file, first.commit) for file in files[1:]]
        try:
            others = [each.result() for each in reading]
        finally:
            reader.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
    return _path_of(folder, files[0]), (first, *others)


def _path_of(folder: Path, file: str) -> Path:
    return folder / file.rpartition("/")[2]


class _Reader:
    """Reads headers of one model's files, of any thread."""

    def __init__(self, model: HubFile, sha256: str, writing: Writing) -> None:
        """`sha256`: of the only file, compared if given."""
        self._model, self._sha256, self._writing = model, sha256, writing
        self._patience = Patience()
        self.stopped = threading.Event()
        """Ends what waits for the hub, once set."""

    def locate(self, file: str, revision: str) -> Located:
        """Ask the hub for a file, for half a minute where it does not answer, and as long as it asks for."""
        return self._patience.ask(lambda: locate(self._model.repo, file, revision), self.stopped, is_away)

    def header(self, file: str, located: Located, path: Path) -> Origin:
        """Write the header of one file to a path; returns where its other bytes are.

        Raises ModelFileError for what is no model, or another one, and the errors of huggingface_hub.
        """
        where = f"{HUB_SCHEME}{self._model.repo}/{file}"
        if located.size_bytes == 0:
            raise ModelFileError(f"{where}: the file is empty")
        if (size_bytes := located.size_bytes) is None:
            raise ModelFileError(f"{where}: the hub does not say how large it is; `relayline pull` downloads it")
        if self._sha256 and located.etag != self._sha256:
            raise ModelFileError(f"{where}: its sha256 is {located.etag}, not {self._sha256}; it is another file")
        n_read = 0
        while True:
            n_wanted = min(max(2 * n_read, FIRST_BYTES), size_bytes, HEADER_BYTES_MAX)
            data, located = self._bytes_of(file, located, (n_read, n_wanted))
            with self._writing(), path.open("r+b" if n_read else "xb") as out:
                out.seek(n_read)
                out.write(data)
                out.truncate(size_bytes)
            n_read = n_wanted
            if _is_whole(path, n_read, size_bytes, where):
                return Origin(self._model.repo, file, located.commit, located.etag, size_bytes)

    def _bytes_of(self, file: str, located: Located, part: tuple[int, int]) -> tuple[bytes, Located]:
        """Return some bytes of a file, and where the next ones are.

        Asks again where the network breaks, and once more at the hub where an address has expired. Raises as
        `bytes_between`.
        """
        from huggingface_hub.errors import HfHubHTTPError

        n_tries, is_new = 0, False
        while True:
            n_tries += 1
            reading = functools.partial(_joined, located, part)
            try:
                return self._patience.ask(reading, self.stopped, is_busy), located
            except RelaylineError:
                raise
            except HfHubHTTPError as error:
                if is_new or not is_refusal(error):
                    raise
                located, is_new = self._again(file, located), True
            except Exception:  # of the network, as the hub's client has it
                if n_tries >= TRIES:
                    raise

    def _again(self, file: str, located: Located) -> Located:
        """Return where the same file is now. Raises ModelFileError where it is another one."""
        again = self.locate(file, located.commit)
        if (again.etag, again.size_bytes) != (located.etag, located.size_bytes):
            raise ModelFileError(f"{HUB_SCHEME}{self._model.repo}/{file}: has just changed on the hub; try again")
        return again


def _joined(located: Located, part: tuple[int, int]) -> bytes:
    return b"".join(bytes_between(located, *part))


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
