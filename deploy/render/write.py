"""Writes rendered files to disk: each appears complete or not at all, and no foreign file is replaced.

A directory remembers its rendered files, with hashes. A file that is not remembered, or was edited since, belongs to
the user: then nothing is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from relayline.wire.common.errors import UsageError
from relayline.wire.common.files import write_file

RECORD_FILE = ".relayline-render"
RECORD_BYTES_MAX = 1 << 20
_READABLE = 0o644


def write_files(directory: Path, files: Mapping[str, str], *, force: bool = False) -> list[Path]:
    """Write the files into `directory` (made if missing) and remove those of an earlier render that are no longer made.

    Returns the written paths. With `force` other files of the same names are replaced too. Raises UsageError, before
    anything is changed, for files that are not this command's own; OSError if the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    known = _read_record(directory)
    foreign = [name for name in files if not force and _is_foreign(directory / name, known.get(name, set()))]
    if foreign:
        raise UsageError(
            f"{directory / foreign[0]} was not made by this command or was edited since; "
            "remove it, choose another --output, or give --force"
        )
    made = {name: {_digest(text.encode())} for name, text in files.items()}
    # Until all are in place the record names old and new content, so that a cut leaves no file that looks edited.
    _write_record(directory, {name: known.get(name, set()) | made.get(name, set()) for name in known | made})
    for name, text in files.items():
        _replace(directory / name, text)
    for name in known.keys() - made.keys():
        path = directory / name
        if not _is_foreign(path, known[name]):
            path.unlink(missing_ok=True)
    _write_record(directory, made)
    return [directory / name for name in files]


def _is_foreign(path: Path, digests: set[str]) -> bool:
    """Return whether something is at `path` that is none of the known contents."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return True
    return path.exists() and _digest(path.read_bytes()) not in digests


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_record(directory: Path) -> dict[str, set[str]]:
    """Return the known digests by file name; a damaged line is forgotten, which makes its file foreign."""
    try:
        data = (directory / RECORD_FILE).read_bytes()[:RECORD_BYTES_MAX]
    except FileNotFoundError:
        return {}
    known: dict[str, set[str]] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        digest, _, name = line.partition("  ")
        parts = Path(name).parts
        if len(digest) == 64 and parts and not Path(name).is_absolute() and ".." not in parts:
            known.setdefault(name, set()).add(digest)
    return known


def _write_record(directory: Path, digests: Mapping[str, set[str]]) -> None:
    lines = [f"{digest}  {name}\n" for name in sorted(digests) for digest in sorted(digests[name])]
    _replace(directory / RECORD_FILE, "".join(lines))


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode(), _READABLE)
