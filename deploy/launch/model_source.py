"""Where a model comes from: a path on this machine, or a file of the Hugging Face hub.

`hf://ORG/REPO/FILE.gguf[@REVISION]` is loaded by huggingface_hub into its own cache, so HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE and HF_ENDPOINT mean what they mean everywhere. Of a sharded set any shard may be named; all are loaded.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import NoReturn

from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.common.file_hash import sha256_of
from relayline.wire.common.places import home

SCHEME = "hf://"
SHARDS_MAX = 4_096  # as many as a sharded set may have, see coordinator.model.gguf_file
_REFERENCE = re.compile(r"hf://([^/@]+)/([^/@]+)/([^@]+\.gguf)(?:@(.+))?")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository on the hub."""

    repo: str  # ORG/NAME
    file: str  # path inside the repository
    revision: str = ""  # branch, tag or commit; empty is the repository's main branch

    def shards(self) -> list[str]:
        """Return the files that make up the model, the first shard first. Raises UsageError for an impossible set."""
        named = _SHARD.fullmatch(self.file)
        if named is None:
            return [self.file]
        stem, number, count = named[1], int(named[2]), int(named[3])
        if not 1 <= number <= count <= SHARDS_MAX:
            raise UsageError(f"{self.file}: shard {number} of {count} cannot be")
        return [f"{stem}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]


def parse_reference(reference: str) -> HubFile:
    """Read hf://ORG/REPO/FILE.gguf[@REVISION]. Raises UsageError."""
    found = _REFERENCE.fullmatch(reference)
    if found is None or any(part in ("", ".", "..") for part in found[3].split("/")):
        raise UsageError(f"{reference!r} is no model on the hub; write hf://ORG/REPO/FILE.gguf or ...gguf@REVISION")
    return HubFile(f"{found[1]}/{found[2]}", found[3], found[4] or "")


def resolve_model(reference: str, sha256: str = "") -> Path:
    """Return the path of a model's only or first file, loaded from the hub if that is where it is.

    sha256: of that file, in hex, checked if given; a file once checked is not read again while it looks the same. Of a
    sharded set it would cover one shard only, so there it is refused.

    Raises UsageError (a reference that is none, a checksum that cannot be one), ModelFileError (nothing there, no
    access, no network, another content).
    """
    if sha256 and not _SHA256.fullmatch(sha256.lower()):
        raise UsageError(f"sha256 {sha256!r} is not 64 hexadecimal digits")
    path = _from_hub(parse_reference(reference)) if reference.startswith(SCHEME) else _here(Path(reference))
    if sha256:
        _check(path, sha256.lower())
    return path


def _here(path: Path) -> Path:
    if path.is_dir():
        raise ModelFileError(f"{path} is a directory; name the .gguf file in it, the first one of a sharded set")
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file")
    return path


def _check(path: Path, sha256: str) -> None:
    named = _SHARD.fullmatch(path.name)
    if named is not None and int(named[3]) > 1:
        raise UsageError(f"{path.name} is one of {int(named[3])} shards; a sha256 can be given for a single file only")
    try:
        found = sha256_of(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    if found != sha256:
        raise ModelFileError(
            f"{path}: its sha256 is {found}, not {sha256} as asked for; it is another file, or damaged"
        )


def _from_hub(model: HubFile) -> Path:
    files = model.shards()
    first = _load(model, files[0], model.revision)
    # A branch may move while a large set loads; the rest comes from the commit that the first shard came from.
    commit = _commit_of(first) or model.revision
    for file in files[1:]:
        _load(model, file, commit)
    return first


def _load(model: HubFile, file: str, revision: str) -> Path:
    if not os.environ.get("XDG_CACHE_HOME"):
        # It takes "~" for the home directory of a user who has none, which is one of this name where the user stands.
        os.environ.setdefault("HF_HOME", str(home() / ".cache" / "huggingface"))
    import huggingface_hub  # here, because it is slow to import and most models are files

    try:
        found = huggingface_hub.hf_hub_download(model.repo, file, revision=revision or None)
    except Exception as error:  # the hub's client raises errors of its own, of HTTP, of the system and of its helpers
        _explain(model, file, revision, error)
    return Path(str(found))


def _explain(model: HubFile, file: str, revision: str, error: Exception) -> NoReturn:
    from huggingface_hub import errors

    where = f"{SCHEME}{model.repo}/{file}"
    if isinstance(error, errors.GatedRepoError):
        text = f"{where}: access is granted by its authors only; ask on its page, then set HF_TOKEN"
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
    else:
        text = f"{where}: cannot be loaded: {_first_line(error)}"
    raise ModelFileError(text) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _commit_of(path: Path) -> str:
    """Return the commit in a path of the hub's cache (.../snapshots/COMMIT/FILE); empty when there is none."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-2] else ""
