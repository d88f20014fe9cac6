"""A supervised process and its supervisor: its ready line, and its end with the supervisor's."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any


def announce(event: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the ready line on stdout."""
    print(json.dumps(event) if as_json else text, flush=True)


def watch_stdin() -> None:
    """End this process, gracefully, when the supervisor's end of stdin closes."""

    def wait() -> None:
        # os.read, not sys.stdin: a thread inside a buffered read would hold its lock at interpreter shutdown.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="supervisor", daemon=True).start()
