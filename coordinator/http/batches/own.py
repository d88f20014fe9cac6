"""Whose files and batches a request may see: those of its key, where this application keeps any."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import TypeVar

from aiohttp import web

from relayline.coordinator.batches.store import StoredBatch, StoredFile
from relayline.coordinator.http.batches.keeper import Keeper
from relayline.coordinator.http.edge.clients import KEY
from relayline.coordinator.http.edge.errors import using_disk
from relayline.coordinator.http.edge.key_file import ApiKey
from relayline.wire.common.errors import FileNotStoredError, InvalidRequestError, NotServedError
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import ServingSettings

KEEPER = web.AppKey("batch_keeper", Keeper)  # of an application that keeps files and batches
WINDOW_MAX_S = 30 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,3})(h|d)")
_UNIT_S = {"h": 3_600, "d": 86_400}

K = TypeVar("K", StoredFile, StoredBatch)


def keeper_of(request: web.Request) -> Keeper:
    """Return what keeps files and batches. Raises NotServedError where nothing does."""
    keeper: Keeper | None = request.app.get(KEEPER)
    if keeper is None:
        flag = entry_of(ServingSettings, "batch_dir").flag
        raise NotServedError(f"no files and batches are kept here; start the coordinator with {flag} DIR")
    return keeper


def owner_of(request: web.Request) -> str:
    """Return whose the files of a request are: the name of its key, of a key without one what the key is."""
    key: ApiKey | None = request.get(KEY)
    return "" if key is None else key.lasting_name


def kept(request: web.Request, every: Mapping[str, K], what: str) -> K:
    """Return the file or batch that the path names. Raises FileNotStoredError."""
    name = request.match_info["id"]
    found = every.get(name)
    if found is None or found.owner != owner_of(request):
        raise FileNotStoredError(f"no {what} {name[:100]!r} is kept here")
    return found


def window_of(text: str) -> int:
    """Return a `completion_window` in seconds. Raises InvalidRequestError."""
    match = _WINDOW.fullmatch(text)
    window_s = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < window_s <= WINDOW_MAX_S:
        raise InvalidRequestError.of_field("completion_window", "must be hours or days, as in 24h, at most 30d")
    return window_s


def disk() -> contextlib.AbstractContextManager[None]:
    """Let an error of the disk within be one line for the client."""
    return using_disk("the disk with the files of batches")
