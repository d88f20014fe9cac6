"""Checks in a separate process whether stages can follow a grammar.

llguidance recurses once per rule, without a bound, and a schema of 44 bytes (`multipleOf`) may take it 45 s and
gigabytes to begin with. Clients write grammars. So each is tried in a process that may run out of stack, memory or
time, and is restarted for the next one. The last stage can start every accepted grammar within that time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import select
import signal
import subprocess
import threading

from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import OverloadedError

ANSWER_TIMEOUT_S = 30.0  # of the clock; the worker's own limit is of processor time
_CAUSES: dict[int, str] = {
    signal.SIGPROF: "it takes too long to begin with",
    signal.SIGSEGV: "its rules refer to each other too deeply",
    signal.SIGABRT: "it takes too much memory",
}


class GrammarChecker:
    """A worker process that is started when one is needed. Any thread; one grammar at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def check(self, text: str, *, is_gbnf: bool = False) -> tuple[str, str]:
        """Return (the grammar as stages read it, what speaks against it or ""). `is_gbnf`: or Lark, found out.

        Raises OverloadedError if the host is too busy for an answer in time.
        """
        asked = json.dumps({"text": text, "is_gbnf": is_gbnf}).encode() + b"\n"
        with self._lock:
            while True:
                is_fresh = self._worker is None
                answer = self._ask(asked)
                if answer:
                    result = json.loads(answer)
                    return result["grammar"], result["fault"]
                cause = self._end()
                if is_fresh:  # else it may have died of what earlier grammars left in its memory
                    return "", cause

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._end()

    def _ask(self, asked: bytes) -> bytes:
        """Return the worker's answer, nothing if it has died of the question."""
        if self._worker is None:
            command = module_command("relayline.coordinator.text.grammar_worker")
            self._worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        try:
            self._worker.stdin.write(asked)
            self._worker.stdin.flush()
        except BrokenPipeError:
            return b""
        answered = select.poll()  # not `select`, which takes no file of a process that has 1,024 of them open
        answered.register(self._worker.stdout, select.POLLIN)
        if not answered.poll(ANSWER_TIMEOUT_S * 1_000):
            self._end()
            raise OverloadedError("this host is too busy to check the grammar in time; try again")
        return self._worker.stdout.readline()

    def _end(self) -> str:
        """End the worker, if there is one; return why it may have died."""
        worker, self._worker = self._worker, None
        if worker is None:
            return ""
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(1)
        worker.kill()
        worker.stdout.close()
        return _CAUSES.get(-worker.wait(), "it is too complex")


checker = GrammarChecker()  # of this process
atexit.register(checker.close)
