"""How long to wait for a hub that has too much to do: as long as it asks for, up to a bound.

All who read from it share one Patience. While the hub asks one of them to wait, none asks it for anything.
"""

from __future__ import annotations

import email.utils
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from relayline.wire.common.backoff import Backoff
from relayline.wire.common.errors import NotReadyError

RETRIES = 5  # of one request, as the hub's client has it
FIRST_S, MAX_S = 1.0, 8.0  # between them where the hub asks for no time: half a minute in all
ASKED_S_MAX = 300.0  # the hub counts requests in windows of this length
WISH_S_MAX = 1e9  # no longer one is told
_ASKING = (429, 503)  # statuses whose Retry-After counts
_PASSING = (408, 429)  # statuses that say: later, besides those of 500 on
_AWAY = {"TimeoutException", "NetworkError", "RemoteProtocolError"}  # of httpx or httpx2: the hub's client has either
_WINDOW = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")  # of RateLimit: nothing is left, and when it begins anew

T = TypeVar("T")
log = logging.getLogger("relayline.up")


def is_busy(error: Exception) -> bool:
    """Tell whether the hub has answered that it has too much to do, or is broken: it may say yes later."""
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError):
        return False
    return error.response.status_code in _PASSING or error.response.status_code >= 500


def is_away(error: Exception) -> bool:
    """Tell the same, or whether the network keeps the hub from answering."""
    return is_busy(error) or not _AWAY.isdisjoint(each.__name__ for each in type(error).__mro__)


def asked_s(error: Exception) -> float:
    """Return for how many seconds the hub asks to be left alone; 0.0 where it does not say."""
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError) or error.response.status_code not in _ASKING:
        return 0.0
    headers = error.response.headers
    if error.response.status_code == 429 and (window := _WINDOW.search(headers.get("RateLimit", ""))):
        return _seconds(window[1])
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return _seconds(text)
    try:  # a date, by the hub's own clock
        until, now = map(email.utils.parsedate_to_datetime, (text, headers.get("Date", "")))
        return max(0.0, (until - now).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def _seconds(digits: str) -> float:
    """Return a wish in seconds; a hub may send more digits than a number has."""
    return min(float(digits), WISH_S_MAX)


def answer_text(error: Exception) -> str:
    """Return the hub's answer in few words, with the time that it asks for; empty for an error that is no answer."""
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError):
        return ""
    text = f"the hub answers {error.response.status_code} {error.response.reason_phrase}".rstrip()
    seconds = math.ceil(asked_s(error))
    return f"{text} and asks to wait {seconds:,} s" if seconds else text


class Patience:
    """The hub's latest wish to be left alone. Of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s, self._is_said = 0.0, False
        self.why = ""
        """The answer with that wish."""

    def left_s(self) -> float:
        """Return for how long the hub is to be left alone."""
        return max(0.0, self._until_s - time.monotonic())

    def heed(self, error: Exception, tell: Callable[[str], None] = lambda text: None) -> float:
        """Note a wish and return its seconds, at most ASKED_S_MAX; 0.0 for an error without one.

        `tell` gets a line about the first of several wishes at once.
        """
        wait_s = min(asked_s(error), ASKED_S_MAX)
        if wait_s:
            with self._lock:
                is_first = not self.left_s()
                self._until_s = max(self._until_s, time.monotonic() + wait_s)
                self.why = answer_text(error)
                if is_first:
                    tell(self.why)
        return wait_s

    def wait(self, stopped: threading.Event) -> None:
        """Wait until the hub may be asked. Raises NotReadyError once `stopped` is set."""
        while not stopped.is_set() and (left_s := self.left_s()):
            stopped.wait(left_s)
        if stopped.is_set():
            raise NotReadyError("reading from the hub has ended")

    def ask(self, request: Callable[[], T], stopped: threading.Event, is_passing: Callable[[Exception], bool]) -> T:
        """Return what a request brings; makes it again after errors that pass, with a line in the log.

        Raises its last error, and the first one that asks for more than ASKED_S_MAX.
        """
        backoff, n_left = Backoff(FIRST_S, MAX_S), RETRIES
        while True:
            self.wait(stopped)
            try:
                return request()
            except Exception as error:  # of the hub's client, of HTTP, of the system
                if not n_left or not is_passing(error) or asked_s(error) > ASKED_S_MAX:
                    raise
                n_left -= 1
                if not self.heed(error, lambda text: log.warning("%s; trying again then", text)):
                    self._say_once()
                    stopped.wait(backoff.next_s())

    def _say_once(self) -> None:
        with self._lock:
            if not self._is_said:
                log.warning("the hub does not answer; trying again for up to half a minute")
            self._is_said = True
