"""The hub's client, huggingface_hub: how it is set up, what it logs, and what its errors mean for a user."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Mapping
from typing import NoReturn
from urllib.parse import urlsplit

from relayline.deploy.manifest.model import HUB_SCHEME
from relayline.deploy.models.hub_patience import answer_text, asked_s, is_busy
from relayline.deploy.models.hub_reference import HubFile
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.common.places import home

DISK_ERRORS = frozenset(
    (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
)
_RETRIES_MODULE = "_http"  # of huggingface_hub, which logs every attempt
_SIGNED = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")  # with it anybody may read the file, until it expires

# What to do about errors, by a part of their text.
_NUMBER = re.compile(r"^\[Errno -?\d+\] ")
_ADVICE = (
    ("CERTIFICATE_VERIFY_FAILED", "SSL_CERT_FILE names the certificates of a proxy that opens TLS"),
    ("socksio", "`pip install socksio`, or unset ALL_PROXY"),
    ("proxy URL", "check HTTPS_PROXY and ALL_PROXY"),
    ("'ascii' codec", "check HF_TOKEN"),
)

log = logging.getLogger("relayline.up")


def set_up_hub() -> None:
    """Prepare huggingface_hub: the place of its cache, before it is imported, and its log.

    Raises UsageError for an HF_ENDPOINT that is no URL.
    """
    if (endpoint := os.environ.get("HF_ENDPOINT", "")) and not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"HF_ENDPOINT={endpoint} is no URL; write HF_ENDPOINT=https://{endpoint}")
    if not os.environ.get("XDG_CACHE_HOME"):
        # For a user without a home directory it keeps "~" as a plain name, a folder in the current directory.
        os.environ.setdefault("HF_HOME", str(home() / ".cache" / "huggingface"))
    import huggingface_hub.utils.logging  # noqa: F401  # gives its log a handler, which is replaced here

    for client in ("httpx", "httpx2"):  # a line for each request would hide what is said besides
        logging.getLogger(client).setLevel(logging.WARNING)
    hub_log = logging.getLogger("huggingface_hub")
    if not any(isinstance(handler, _HubLines) for handler in hub_log.handlers):
        hub_log.handlers[:] = [_HubLines()]
        hub_log.propagate = False


class _HubLines(logging.Handler):
    """Passes on what huggingface_hub logs, but says only once that it tries again: it logs two lines an attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._is_said = False

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a record."""
        if record.module != _RETRIES_MODULE:
            log.log(record.levelno, "%s", _unsigned(record.getMessage()))
        elif not self._is_said:
            self._is_said = True
            log.warning("the hub does not answer; trying again for up to half a minute")


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


def explain_refusal(model: HubFile, file: str, revision: str, error: Exception) -> NoReturn:
    """Raise what a failure of the hub's client, of HTTP or of the system means for the user: ModelFileError, or
    UsageError for a name that cannot be one.
    """
    from huggingface_hub import errors

    if isinstance(error, ModelFileError):
        raise error
    where = f"{HUB_SCHEME}{model.repo}/{file}".rstrip("/")
    if isinstance(error, errors.GatedRepoError):
        text = f"{where}: its authors must grant access; ask on its page, then set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = f"{where}: there is no such repository, or it is private; check the name, or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{where}: the repository has no revision {revision!r}"
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        text = f"{where}: not in the local cache, and {unreached(error)}"
    elif isinstance(error, errors.EntryNotFoundError):
        text = f"{where}: the repository has no such file"
    elif isinstance(error, errors.HFValidationError):
        raise UsageError(f"{where}: {first_line(error)}") from error
    elif isinstance(error, OSError) and error.errno in DISK_ERRORS:  # a lost connection is an OSError too
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        text = f"{where}: the download cannot be kept: {reason}; HF_HOME=DIRECTORY keeps downloads elsewhere"
        text += ", and `up --download layers` keeps none" if error.errno == errno.ENOSPC else ""
    elif asked_s(error):
        text = f"{where}: cannot be downloaded: {answer_text(error)}; try again then"
    else:
        text = f"{where}: cannot be downloaded: {_why(error)}"
    raise ModelFileError(text) from error


def is_refusal(error: Exception) -> bool:
    """Tell whether the hub has answered and says no. If it has too much to do, or is broken, it may say yes later."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and not is_busy(error)


def unreached(error: Exception) -> str:
    """Return that the hub cannot be reached, why, and what to do."""
    why = _why(error)
    return f"the hub cannot be reached: {why}{'' if '; ' in why else '; check the network'}"


def _why(error: Exception) -> str:
    """Return the reason of an error, and what to do where that is known: a proxy, certificate or token may be wrong."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    if any(isinstance(each, OfflineModeIsEnabled) for each in chain):
        return "HF_HUB_OFFLINE is set; unset it"
    for each in chain:
        advice = next((f"; {advice}" for part, advice in _ADVICE if part in str(each)), "")
        if advice:
            return f"{first_line(each)}{advice}"
        if isinstance(each, FileNotFoundError) and each.filename is None:  # as Python reports missing certificates
            for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
                if (path := os.environ.get(name)) and not os.path.exists(path):
                    return f"{name}={path}: {each.strerror}; name one that is there"
    # the client's own error says only that no file is here
    return first_line(next((each for each in chain if not isinstance(each, LocalEntryNotFoundError)), error))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that says something, else its kind; no address with a signature, and no
    number of the system's error.
    """
    lines = (_NUMBER.sub("", line.strip()) for line in _unsigned(str(error)).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def _unsigned(text: str) -> str:
    return _SIGNED.sub(r"\1", text)
