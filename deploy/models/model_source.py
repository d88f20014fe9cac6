"""The source of a model: a path on this machine, or a repository of the Hugging Face hub.

On this machine it is a file, any shard of a set, a directory with one model, or a pattern that matches one model.
On the hub it is `hf://ORG/REPO/FILE.gguf[@REVISION]`, or ORG/REPO[:QUANT][@REVISION], with or without `hf://`: then the
file is chosen by its quantisation (deploy.models.hub_choice).

Files of the hub are loaded by huggingface_hub into its own cache, so HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT
have their usual meaning, and an interrupted download is resumed. Of a sharded set any shard may be named; all are
loaded.
"""

from __future__ import annotations

import dataclasses
import errno
import glob
import logging
import os
import re
from pathlib import Path
from typing import NoReturn

from relayline.coordinator.model.pipeline_file import PIPELINE_NAME
from relayline.deploy.manifest.model import HUB_SCHEME
from relayline.deploy.models.hub_choice import SHARD, chosen_file, models_among, projector_among
from relayline.deploy.models.hub_download import load_blob
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.common.file_hash import sha256_of
from relayline.wire.common.places import home

_DISK_ERRORS = frozenset(
    (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
)
MODELS_SHOWN = 8  # of a directory that holds several
SHARDS_MAX = 4_096  # as many as a sharded set may have, see coordinator.model.gguf_file
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_REFERENCE = re.compile(r"hf://([^/@]+)/([^/@]+)/([^@]+\.gguf)(?:@(.+))?")
_REPOSITORY = re.compile(rf"(?:hf://)?({_NAME}/{_NAME})(?::([A-Za-z0-9_.-]+))?(?:@([^@\s]+))?")
_RETRIES_MODULE = "_http"  # of huggingface_hub, which logs every attempt
_SHA256 = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger("relayline.up")


@dataclasses.dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository on the hub."""

    repo: str  # ORG/NAME
    file: str  # path inside the repository; empty: chosen by `quant`
    revision: str = ""  # branch, tag or commit; empty is the repository's main branch
    quant: str = ""  # the quantisation that is wanted; empty: the usual one

    def shards(self) -> list[str]:
        """Return the files that make up the model, the first shard first. Raises UsageError for an impossible set."""
        named = SHARD.fullmatch(self.file)
        if named is None:
            return [self.file]
        stem, number, count = named[1], int(named[2]), int(named[3])
        if not 1 <= number <= count <= SHARDS_MAX:
            raise UsageError(f"{self.file}: shard {number} of {count} cannot be")
        return [f"{stem}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]


def is_hub_name(text: str) -> bool:
    """Return whether a text can name a repository of the hub, as ORG/NAME[:QUANT]."""
    found = _REPOSITORY.fullmatch(text)
    return found is not None and not found[1].endswith(".gguf")


def is_on_hub(reference: str) -> bool:
    """Return whether a reference means a model of the hub, and nothing on this machine."""
    return reference.startswith(HUB_SCHEME) or (not os.path.lexists(reference) and is_hub_name(reference))


def check_here(reference: str) -> None:
    """Raise UsageError where a reference means a model on this machine, and there is none."""
    if not is_on_hub(reference):
        local_model(reference)


def is_pattern(text: str) -> bool:
    """Return whether a text is a pattern of files, as *.gguf."""
    return glob.has_magic(text)


def parse_reference(reference: str) -> HubFile:
    """Read hf://ORG/REPO/FILE.gguf[@REVISION], or [hf://]ORG/REPO[:QUANT][@REVISION]. Raises UsageError."""
    found = _REFERENCE.fullmatch(reference)
    if found is not None and not any(part in ("", ".", "..") for part in found[3].split("/")):
        return HubFile(f"{found[1]}/{found[2]}", found[3], found[4] or "")
    named = _REPOSITORY.fullmatch(reference)
    if named is None or found is not None or named[1].endswith(".gguf"):
        raise UsageError(
            f"{reference!r} is not a model on the hub; write hf://ORG/REPO/FILE.gguf, hf://ORG/REPO or hf://ORG/REPO:QUANT"
        )
    return HubFile(named[1], "", named[3] or "", named[2] or "")


def resolve_model(reference: str, sha256: str = "") -> Path:
    """Return the path of a model's only or first file, loaded from the hub if that is where it is.

    sha256: of that file, in hex, checked if given; a file once checked is not read again while it looks the same. Of a
    sharded set it would cover one shard only, so there it is refused.

    Raises UsageError (a reference that is none, nothing there, a checksum that cannot be one), ModelFileError (no
    access, no network, another content).
    """
    check_sha256(sha256)
    path = _from_hub(parse_reference(reference)) if is_on_hub(reference) else local_model(reference)
    if sha256:
        _check(path, sha256.lower())
    return path


def resolve_projector(reference: str, model: Path) -> Path:
    """Return the projector (mmproj*.gguf) of a model: from its repository, or for a local model from its directory.

    `model` is the path that `resolve_model` returned for the reference. Raises ModelFileError if there is none.
    """
    if is_on_hub(reference):
        source = parse_reference(reference)
        if not (name := projector_among(names_on_hub(source))):
            raise ModelFileError(f"{HUB_SCHEME}{source.repo}: it holds no projector (mmproj*.gguf); name one as a file")
        return _load(source, name, source.revision)
    folders = [model.parent]
    if "snapshots" in model.parts[:-2]:  # of the hub's cache: a repository may keep models in folders
        folders.append(Path(*model.parts[: model.parts.index("snapshots") + 2]))
    for folder in folders:
        if name := projector_among(path.name for path in folder.glob("*.gguf")):
            return folder / name
    raise ModelFileError(f"{model.parent}: no projector (mmproj*.gguf) next to the model; name one with --mmproj")


def projector_of(reference: str) -> str:
    """Return the name of the projector in a model's repository on the hub; empty without one, and for a path."""
    if not is_on_hub(reference):
        return ""
    return projector_among(names_on_hub(parse_reference(reference)))


def local_model(named: str) -> Path:
    """Return the only or first file of a model here: of a file, a shard, a directory or a pattern.

    Raises UsageError if there is none, or more than one.
    """
    path = Path(named)
    if path.is_dir():
        if (path / PIPELINE_NAME).is_file():
            raise UsageError(f"{path}: holds a split of a model; give the whole model, `up` keeps splits by itself")
        return _only_model(sorted(path.glob("*.gguf")), f"{path}", sorted(path.glob("*.safetensors")))
    if not path.exists() and is_pattern(named):
        return _only_model(sorted(map(Path, glob.glob(named))), named, [])
    if not path.exists():
        if named.startswith(("http://", "https://")):
            raise UsageError(f"{named}: URLs are not loaded; download the file, or name hf://ORG/REPO/FILE.gguf")
        hint = "" if path.suffix == ".gguf" else "; give a .gguf file, a directory of shards or ORG/NAME[:QUANT]"
        raise UsageError(f"{named}: no such file{hint}")
    if not path.is_file():
        raise UsageError(f"{path}: is not a file")
    shard = SHARD.fullmatch(path.name)
    if shard is None or int(shard[2]) == 1:
        return path
    return path.with_name(f"{shard[1]}-00001-of-{shard[3]}.gguf")


def _only_model(files: list[Path], where: str, others: list[Path]) -> Path:
    """Return the first file of the only model among files. Raises UsageError."""
    found = models_among([str(file) for file in files])
    if len(found) == 1:
        return Path(found[0])
    if found:
        names = ", ".join(Path(file).name for file in found[:MODELS_SHOWN])
        more = f" and {len(found) - MODELS_SHOWN} more" if len(found) > MODELS_SHOWN else ""
        raise UsageError(f"{where}: holds {len(found)} models; name one of {names}{more}")
    if others:
        raise UsageError(
            f"{where}: holds safetensors files; take a GGUF of the model, or make one with llama.cpp's "
            f"convert_hf_to_gguf.py"
        )
    raise UsageError(f"{where}: has no .gguf file of a model")


def check_sha256(sha256: str) -> None:
    """Raise UsageError for a checksum that cannot be one; an empty text is none."""
    if sha256 and not _SHA256.fullmatch(sha256.lower()):
        raise UsageError(f"sha256 {sha256!r} is not 64 hexadecimal digits")


def _check(path: Path, sha256: str) -> None:
    named = SHARD.fullmatch(path.name)
    if named is not None and int(named[3]) > 1:
        raise UsageError(f"{path.name} is one of {int(named[3])} shards; a sha256 can be given for a single file only")
    try:
        found = sha256_of(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    if found != sha256:
        raise ModelFileError(f"{path}: its sha256 is {found}, not {sha256}; it is another file, or damaged")


def with_file(model: HubFile) -> HubFile:
    """Return the model with the name of its file, chosen by its quantisation. Raises ModelFileError."""
    if model.file:
        return model
    return dataclasses.replace(model, file=chosen_file(names_on_hub(model), model.quant, f"{HUB_SCHEME}{model.repo}"))


def _from_hub(model: HubFile) -> Path:
    model = with_file(model)
    files = model.shards()
    first = _load(model, files[0], model.revision)
    # A branch may move while a large set loads; the rest comes from the commit that the first shard came from.
    commit = _commit_of(first) or model.revision
    for file in files[1:]:
        _load(model, file, commit)
    return first


class _HubLines(logging.Handler):
    """Passes on what huggingface_hub logs, but says only once that it tries again: it logs two lines an attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._is_said = False

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a record."""
        if record.module != _RETRIES_MODULE:
            log.log(record.levelno, "%s", record.getMessage())
        elif not self._is_said:
            self._is_said = True
            log.warning("the hub does not answer; trying again for up to half a minute")


def set_up_hub() -> None:
    """Prepare huggingface_hub: the place of its cache, before it is imported, and its log."""
    if not os.environ.get("XDG_CACHE_HOME"):
        # For a user without a home directory it keeps "~" as a plain name, a folder in the current directory.
        os.environ.setdefault("HF_HOME", str(home() / ".cache" / "huggingface"))
    import huggingface_hub.utils.logging  # noqa: F401  # gives its log a handler, which is replaced here

    hub_log = logging.getLogger("huggingface_hub")
    if not any(isinstance(handler, _HubLines) for handler in hub_log.handlers):
        hub_log.handlers[:] = [_HubLines()]
        hub_log.propagate = False


def names_on_hub(model: HubFile) -> list[str]:
    """Return the files of a repository; those that are here already where the hub cannot be asked.

    Raises ModelFileError.
    """
    set_up_hub()
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return list(huggingface_hub.HfApi().list_repo_files(model.repo, revision=model.revision or None))
    except Exception as error:  # of the hub's client, of HTTP, of the system
        is_answer = isinstance(error, errors.HfHubHTTPError | errors.HFValidationError)
        if is_answer or (isinstance(error, OSError) and error.errno in _DISK_ERRORS):
            explain_refusal(model, "", model.revision, error)
        if kept := _kept_names(model):
            return kept
        raise ModelFileError(
            f"{HUB_SCHEME}{model.repo}: the hub cannot be reached, and none of its models is here; "
            "check the network and HF_HUB_OFFLINE"
        ) from error


def _kept_names(model: HubFile) -> list[str]:
    """Return the files of a repository that are whole in the hub's cache."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{model.repo.replace('/', '--')}"
    try:
        commit = (repository / "refs" / (model.revision or "main")).read_text().strip()
    except OSError:
        commit = model.revision
    snapshot = repository / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        return []
    return sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf") if path.exists())


def _load(model: HubFile, file: str, revision: str) -> Path:
    set_up_hub()
    import huggingface_hub  # here, because it is slow to import and most models are files

    try:
        load_blob(model.repo, file, revision)
        found = huggingface_hub.hf_hub_download(model.repo, file, revision=revision or None)
    except ModelFileError:
        raise
    except Exception as error:  # the hub's client raises its own errors, and those of HTTP, the system and its helpers
        explain_refusal(model, file, revision, error)
    return Path(str(found))


def explain_refusal(model: HubFile, file: str, revision: str, error: Exception) -> NoReturn:
    """Raise what a failure of the hub's client, of HTTP or of the system means for the user: ModelFileError, or
    UsageError for a name that cannot be one.
    """
    from huggingface_hub import errors

    where = f"{HUB_SCHEME}{model.repo}/{file}".rstrip("/")
    if isinstance(error, errors.GatedRepoError):
        text = f"{where}: its authors must grant access; ask on its page, then set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = f"{where}: there is no such repository, or it is private; check the name, or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{where}: the repository has no revision {revision!r}"
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        text = f"{where}: not in the local cache, and the hub cannot be reached; check the network and HF_HUB_OFFLINE"
    elif isinstance(error, errors.EntryNotFoundError):
        text = f"{where}: the repository has no such file"
    elif isinstance(error, errors.HFValidationError):
        raise UsageError(f"{where}: {_first_line(error)}") from error
    elif isinstance(error, OSError) and error.errno in _DISK_ERRORS:  # a lost connection is an OSError too
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        text = f"{where}: the download cannot be kept: {reason}; HF_HOME=DIRECTORY keeps downloads elsewhere"
    else:
        text = f"{where}: cannot be downloaded: {_first_line(error)}"
    raise ModelFileError(text) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _commit_of(path: Path) -> str:
    """Return the commit in a path of the hub's cache (.../snapshots/COMMIT/FILE); empty if there is none."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-2] else ""
