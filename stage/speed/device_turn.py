"""Stages that compute on one device measure their steps in turns: each would count the other's work as its own.

All stages of a pipeline load at the same time. On processors a step's own processor time shows that it was disturbed.
On a GPU only the clock tells, and a curve of two stages at once made plans leave out a stream of eight.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from relayline.stage.engine.loading import MEASURING, Load
from relayline.stage.engine.native import NativeEngine
from relayline.stage.speed.calibrate import cached_curves, curves_of
from relayline.stage.speed.curves import Curves
from relayline.wire.common import places
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.stage")

WAIT_MAX_S = 60.0  # for all others on the device; one measurement takes BUDGET_S of `stage.speed.calibrate` at most
LOOK_EVERY_S = 0.05


def first_curves(engine: NativeEngine, place: pb.Place, load: Load | None) -> Curves:
    """Return the curves of an engine that was just loaded; unless they are to be measured, they know of no time.

    Raises LoadStoppedError.
    """
    return measured_alone(engine, place, load) if engine.config.settings.calibrate else curves_of(engine)


def measured_alone(engine: NativeEngine, place: pb.Place, load: Load | None) -> Curves:
    """Return the engine's curves, measured while no other stage measures on its devices. Raises LoadStoppedError."""
    with alone_on([device.id for device in place.devices], load) as is_alone:
        if not is_alone:
            log.warning("other stages measure on this device at the same time: the cost of steps may be wrong")
        return cached_curves(engine, load=load)


@contextlib.contextmanager
def alone_on(
    device_ids: Sequence[str],
    load: Load | None = None,
    wait_max_s: float = WAIT_MAX_S,
    directory: Path | None = None,
) -> Iterator[bool]:
    """Keep other stages of this user from measuring on these devices; yields whether none does.

    `device_ids` are unique in the host, see `stage.engine.place`; without any there is nothing to share. After
    `wait_max_s`, or if no file can be locked, the caller continues all the same. Raises LoadStoppedError if `load` is
    stopped while others have the devices.
    """
    until_s = time.monotonic() + wait_max_s
    with contextlib.ExitStack() as held:
        found = True
        for device_id in sorted(set(device_ids)):  # in the same order everywhere, so there is no deadlock
            found &= _locked(held, _path(directory, device_id), load or Load(), until_s)
        yield found


def _locked(held: contextlib.ExitStack, path: Path, load: Load, until_s: float) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(path.open("ab"))
    except OSError:
        return False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back when the file is closed, or its process dies
        except BlockingIOError:
            load.at(MEASURING, 0.0)
            if time.monotonic() >= until_s:
                return False
            load.pause(LOOK_EVERY_S)
        except OSError:
            return False
        else:
            return True


def _path(directory: Path | None, device_id: str) -> Path:
    name = hashlib.sha256(os.fsencode(device_id)).hexdigest()[:16]
    return (directory or places.cache_dir() / "devices") / f"{name}.lock"
