"""The progress of a stage's load, which runs in a thread, and the way to cancel it. Tens of gigabytes are hashed, read
and repacked before a stage serves. Waiting callers see the progress, and a shutdown does not wait for the load.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from relayline.wire.common.use import Use

log = logging.getLogger("relayline.stage")

LOG_EVERY_S = 5.0  # of one piece of work; what takes less is not worth a line
TELL_EVERY_S = 0.5  # for other observers

CHECKING, WEIGHTS, MEASURING = "checking the artifact", "loading weights", "measuring steps"

Tell = Callable[[str, float], None]  # the activity, and its finished share


class LoadStoppedError(Exception):
    """A load that stopped because its process is ending. It is none of the errors that users see."""


class Load:
    """One load; it calls `at` again and again. `stop` may be called from any thread, all other methods from one."""

    def __init__(self, tell: Tell = lambda work, share: None, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock_s = tell, clock_s
        self._stopped = threading.Event()
        self._work = ""
        self._logged_s = self._reported_s = clock_s()

    def stop(self) -> None:
        """Let the load end at its next `at`."""
        self._stopped.set()

    @property
    def is_stopped(self) -> bool:
        """Whether it is to end."""
        return self._stopped.is_set()

    def at(self, work: str, share: float) -> None:
        """Report progress (0 to 1) of a piece of work. Raises LoadStoppedError if loading has been stopped."""
        if self._stopped.is_set():
            raise LoadStoppedError(work)
        now_s = self._clock_s()
        if work != self._work:
            self._work, self._logged_s = work, now_s
        if now_s - self._reported_s >= TELL_EVERY_S:
            self._reported_s = now_s
            self._tell(work, share)
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log.info(work, extra={"fields": {"done": f"{share:.0%}"}})

    def pause(self, seconds: float) -> None:
        """Wait for something else, or until the load is stopped."""
        self._stopped.wait(seconds)

    def goes_on(self, work: str, share: float) -> bool:
        """The same where nothing can be raised, as in a call from native code; False if loading has been stopped."""
        try:
            self.at(work, share)
        except LoadStoppedError:
            return False
        return True


def use_files(*paths: Path) -> Use:
    """Return the use of files that are loaded from here on; it keeps others from removing them until it is closed."""
    return Use(paths)
