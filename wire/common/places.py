"""The directories of this user's files: caches and state by the XDG variables, or else below the home directory.

An unknown user id, in a container for instance, has no home directory. A private directory in the system's temporary
directory then takes its place, so that every command works.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from relayline.wire.common.errors import UsageError

_STATE = Path(".local", "state", "relayline")  # below a home directory
_JOINED = ".joined"


def home() -> Path:
    """Return the home directory or its replacement. Raises UsageError if there is neither."""
    try:
        found = Path.home()
    except RuntimeError:
        return _stand_in()
    is_root = found == Path("/")  # what containers make of HOME, and Python of an empty one
    return _stand_in() if is_root and not os.access(found, os.W_OK) else found


def cache_dir() -> Path:
    """Return where caches are kept: $XDG_CACHE_HOME/relayline, ~/.cache/relayline without it. Raises UsageError."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "relayline"


def moving_cache(path: Path) -> str:
    """Return what to add to an error about a path in the cache: how to keep the cache elsewhere. Empty for others."""
    is_inside = path.absolute().is_relative_to(cache_dir().absolute())
    return "; XDG_CACHE_HOME=DIRECTORY keeps the cache elsewhere" if is_inside else ""


def artifacts_dir() -> Path:
    """Return where fetched artifacts are kept: `artifacts` in the cache directory."""
    return cache_dir() / "artifacts"


def state_dir() -> Path:
    """Return where state is kept: $XDG_STATE_HOME/relayline, ~/.local/state/relayline without. Raises UsageError."""
    return Path(os.environ.get("XDG_STATE_HOME") or home() / _STATE.parent) / _STATE.name


def joined_dir() -> Path:
    """Return where this host keeps the credentials of its memberships: `.joined` in the state directory."""
    return state_dir() / _JOINED


def joined_dir_of(user: str) -> Path:
    """Return where another user keeps them; that user's XDG variables are not known. Raises UsageError."""
    return expanded(f"~{user}") / _STATE / _JOINED


def expanded(path: str) -> Path:
    """Return a path with `~` expanded. Raises UsageError for the home of a user that is not known."""
    if path == "~" or path.startswith("~/"):
        return home() / path[2:]
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: there is no such user; write the path in full") from None


def _stand_in() -> Path:
    """Return a private directory of this user. In a shared place another user may have made it: then it is refused."""
    advice = "set HOME to a directory of yours, or XDG_CACHE_HOME and XDG_STATE_HOME"
    try:
        path = Path(tempfile.gettempdir()) / f"relayline-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise UsageError(
            f"this user has no home directory and no place for temporary files ({error}); {advice}"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"this user has no home directory, and {path} may be written by others; {advice}")
    return path
