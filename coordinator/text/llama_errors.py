"""The error lines of llama.cpp's log, for child processes of the coordinator that load models."""

from __future__ import annotations

import re

from llama_cpp import llama_cpp as llama

from relayline.wire.common.errors import RelaylineError, StartError, UsageError

_ERROR = 4  # level of ggml's log
_LINES_MAX = 8
# As ggml, llama.cpp and the drivers of GPUs put it:
_OF_MEMORY = re.compile("(failed|unable) to (allocate|reserve memory)|out of memory|insufficient memory|Malloc failed")


class LlamaErrors:
    """Takes the log over: it would go to stderr. The log is one for the whole process, and the newest object has it."""

    def __init__(self) -> None:
        global _newest
        self._lines: list[str] = []
        _newest = self
        llama.llama_log_set(on_log, None)

    def take(self, level: int, text: bytes) -> None:
        """Take one message of the log."""
        if level == _ERROR and len(self._lines) < _LINES_MAX:
            self._lines.append(text.decode("utf-8", errors="replace").strip())

    def error(self, problem: str) -> RelaylineError:
        """Return the error of something that could not be loaded: `problem` with the reason.

        A StartError where memory was missing, which others may free, and else a UsageError.
        """
        is_memory = any(_OF_MEMORY.search(line) for line in self._lines)
        return (StartError if is_memory else UsageError)(f"{problem}: {self.reason()}")

    def reason(self) -> str:
        """Return the first line since the last call: it is the cause of the others."""
        reason = self._lines[0] if self._lines else "it gave no reason"
        self._lines.clear()
        return reason[:500]


_newest: LlamaErrors | None = None


# One for the whole process, and as long as that: llama.cpp holds a bare pointer, and calls it at every later load.
@llama.llama_log_callback  # type: ignore[untyped-decorator]
def on_log(level: int, text: bytes, _user_data: object) -> None:
    """Give a message to the newest object; llama.cpp's other libraries have logs of their own that want it."""
    if _newest is not None:
        _newest.take(level, text)
