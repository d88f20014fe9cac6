"""Models of the hub whose weights no machine has whole: `download: layers`.

The headers of a model's files are kept in `CACHE/headers/ORG--NAME/COMMIT`, each with a note of its origin. They take
some MB of disk, since the rest of each file is a hole. The model is planned, measured and split by them. When a stage
fetches its layers, the coordinator reads exactly these from the hub and passes them on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from relayline.coordinator.joining.config import OpenUnread
from relayline.coordinator.model.artifact_bytes import artifact_bytes, unread_name
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.origin import origin_of, origins_of, store_origin
from relayline.coordinator.model.pipeline_file import PipelineFile, StageFile
from relayline.coordinator.model.split import planned_stage
from relayline.deploy.manifest.model import HUB_SCHEME
from relayline.deploy.models.hub_client import explain_refusal, is_refusal
from relayline.deploy.models.hub_files import commit_note, headers_dir, headers_place, noted_commit, with_file
from relayline.deploy.models.hub_headers import kept_whole, read_headers
from relayline.deploy.models.hub_patience import Patience, is_away
from relayline.deploy.models.hub_ranges import HubWeights, Located, locate
from relayline.deploy.models.hub_reference import HubFile, parse_reference
from relayline.deploy.models.model_source import check_sha256, is_on_hub, resolve_model
from relayline.wire.common.errors import ArtifactError, ModelFileError, UsageError
from relayline.wire.common.files import write_again
from relayline.wire.common.places import moving_cache
from relayline.wire.common.scratch import scratch_directory

log = logging.getLogger("relayline.up")

NO_COMMIT = "unknown"  # of a hub that names none


def hollow_model(reference: str, sha256: str = "", *, is_found: bool = False) -> Path:
    """Return the path of a hub model's only or first file, with nothing but its header unless the hub's cache has all.

    sha256: of that file, in hex, compared with the one that the hub promises if given. `is_found`: this start has asked
    the hub already, so its headers are here and none is asked for. Raises as `resolve_model`, and UsageError for a
    model on this machine.
    """
    if not is_on_hub(reference):
        raise UsageError(f"{reference}: is here already; `download: layers` is for models of the hub")
    check_sha256(sha256)
    model = with_file(parse_reference(reference), is_found=is_found)
    if (kept := kept_whole(model)) is not None:
        return resolve_model(str(kept), sha256)
    place = headers_place(model.repo)
    commit, located = (noted_commit(model), None) if is_found else ("", None)
    if not commit:
        commit, located = _asked(model)
    directory = place / commit / PurePosixPath(model.file).parent
    if not directory.resolve().is_relative_to(place.resolve()):
        raise ModelFileError(f"{HUB_SCHEME}{model.repo}/{model.file}: leads out of its repository")
    first = directory / PurePosixPath(model.shards()[0]).name
    if not _is_here(first):
        _load(model, directory, sha256.lower(), located)
    origins = origins_of(open_model(first))
    if sha256 and [origin.etag for origin in origins] != [sha256.lower()]:
        raise ModelFileError(f"{HUB_SCHEME}{model.repo}/{model.file}: its sha256 is not {sha256}; it is another file")
    return first


def opener(model: Path | None) -> OpenUnread | None:
    """Return what reads artifacts of a hollow model from the hub; None for a model that is here, or for none.

    Raises ModelFileError.
    """
    if model is None or origin_of(model) is None:
        return None
    patience = Patience()  # one for all stages: the hub counts the requests of all

    def open_unread(
        file: PipelineFile, stage: StageFile, offset: int, end: int, stopped: threading.Event
    ) -> Iterator[bytes | memoryview]:
        opened = open_model(model)
        artifact, origins = planned_stage(opened, file.cuts, stage.index), origins_of(opened)
        if not origins or unread_name(artifact, origins) != stage.sha256:
            raise ArtifactError(f"{model}: is not the model of this split; start the pipeline again")
        yield from artifact_bytes(artifact, HubWeights(origins, stopped, patience), offset, end)

    return open_unread


def _asked(model: HubFile) -> tuple[str, Located | None]:
    """Return the commit that a model's revision means, and where the first file is: on the hub, or where it cannot be
    asked, the last time.

    Raises ModelFileError.
    """
    from huggingface_hub.errors import HFValidationError

    file, known = model.shards()[0], noted_commit(model)
    try:
        asked = functools.partial(locate, model.repo, file, model.revision)
        located = asked() if known else Patience().ask(asked, threading.Event(), is_away)
    except Exception as error:  # of the hub's client, of HTTP, of the system
        if known and not (is_refusal(error) or isinstance(error, HFValidationError)):
            log.info("%s%s: the hub does not answer; its headers of the last time are good", HUB_SCHEME, model.repo)
            return known, None
        explain_refusal(model, file, model.revision, error)
    commit = located.commit or NO_COMMIT
    with _writing():
        write_again(commit_note(model), commit.encode())
    return commit, located


def _is_here(first: Path) -> bool:
    try:
        return bool(origins_of(open_model(first)))
    except ModelFileError:
        return False


def _load(model: HubFile, directory: Path, sha256: str, located: Located | None) -> None:
    """Put the headers of a model into a directory, the first file last; `located`: where that one is, if known."""
    with contextlib.ExitStack() as stack:
        with _writing():
            directory.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch_directory(".partial-", directory))
        _, origins = read_headers(model, folder, sha256, _writing, located)
        if not all(origin.etag for origin in origins):
            text = "the hub does not say which content it has; leave out `download: layers`"
            raise ModelFileError(f"{HUB_SCHEME}{model.repo}/{model.file}: {text}")
        with _writing():
            for origin in reversed(origins):
                path = directory / PurePosixPath(origin.file).name
                store_origin(path, origin)
                (folder / path.name).replace(path)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Raise ModelFileError where the cache cannot be written."""
    try:
        yield
    except OSError as error:
        text = f"{headers_dir()}: headers of models cannot be kept: {error.strerror}{moving_cache(headers_dir())}"
        raise ModelFileError(text) from error
